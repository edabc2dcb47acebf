"""Layout of a run's folder: paths, config, progress, complete checkpoints.

    <output_dir>/<run name>/
        config.yaml  environment.json  metrics.jsonl  completions.jsonl  train.log
        groups.jsonl            when each prompt was sampled and trained, with lengths and versions
        evaluations.jsonl       results of rlhf.evaluate, with completions in evaluations/
        trainer_state.json      counters; if finished also {"finished": true, "result": {metric: value}};
                                {"stopped": <reason>} if a hook stopped the run
        checkpoint-<update>/    complete only if it contains the file COMPLETE; history/: a copy of all rows
        model/                  the final model, Hugging Face format
        adapter/                the adapter of the final model, PEFT format (with model.lora)
        generations/            all rollouts (with save_generations)

This module imports no torch, so that the command of a finished run ends quickly.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from rlhf.config.schema import schema_of, sections, values
from rlhf.config.yaml_file import as_document, read_document
from rlhf.core.errors import UserError
from rlhf.core.files import delete_command, write_atomically, write_json
from rlhf.runs.environment import environment, is_texts

if TYPE_CHECKING:
    from rlhf.config.root import Config

COMPLETE = "COMPLETE"  # the marker file of a complete checkpoint
_CHECKPOINT = re.compile(r"checkpoint-(0|[1-9][0-9]*)")  # name of a checkpoint, with its update


@dataclass(frozen=True, slots=True)
class RunFolder:
    """A run folder: the paths of its files, and methods to read and write them."""

    path: Path

    @property
    def config(self) -> Path:
        """The file of the resolved config."""
        return self.path / "config.yaml"

    @property
    def environment(self) -> Path:
        """The file of the environment record: versions, hardware, command line."""
        return self.path / "environment.json"

    @property
    def metrics(self) -> Path:
        """The file of metrics: one row per update and one per evaluation."""
        return self.path / "metrics.jsonl"

    @property
    def completions(self) -> Path:
        """The file of the completions of evaluations."""
        return self.path / "completions.jsonl"

    @property
    def groups(self) -> Path:
        """The file of the times, lengths and versions of each group of samples of a prompt."""
        return self.path / "groups.jsonl"

    @property
    def evaluations(self) -> Path:
        """The file of `rlhf.evaluate`: one row per evaluated checkpoint or model."""
        return self.path / "evaluations.jsonl"

    @property
    def log(self) -> Path:
        """The log file, with the messages that were printed in the terminal."""
        return self.path / "train.log"

    @property
    def state(self) -> Path:
        """The file of the run's progress and result."""
        return self.path / "trainer_state.json"

    @property
    def generations(self) -> Path:
        """The folder of all rollouts, written if `save_generations` is true."""
        return self.path / "generations"

    @property
    def model(self) -> Path:
        """The folder of the final model."""
        return self.path / "model"

    @property
    def adapter(self) -> Path:
        """The folder of the final model's adapter, written if `model.lora.rank` is above 0."""
        return self.path / "adapter"

    def write_config(self, cfg: Config) -> None:
        """Write the resolved config as YAML, with the option of each section, which `load_config` needs."""
        defaults: list[Any] = ["root_schema"]
        for key, section in sections(cfg):
            if stored := schema_of(type(section)):
                group, _, option = stored.rpartition("/")
                defaults.append({f"{group}@{key}": option})
        self.path.mkdir(parents=True, exist_ok=True)
        text = OmegaConf.to_yaml(values(cfg))
        head = OmegaConf.to_yaml({"defaults": [*defaults, "_self_"]})
        write_atomically(self.config, as_document(f"{head}\n{text}"))

    def read_config(self) -> dict[str, Any]:
        """Read the resolved config as nested dicts; packages that define its options need not be installed.

        Raises:
            ValueError, OSError, YAMLError, OmegaConfBaseException: see `read_document`.
        """
        saved = OmegaConf.to_container(read_document(self.config))
        assert isinstance(saved, dict), "a mapping of keys"
        return {str(key): value for key, value in saved.items() if key != "defaults"}

    def write_environment(self, devices: list[str] | None = None, instructions: str = "") -> None:
        """Write the environment record (see `environment` for the arguments)."""
        started = self.started()
        self.path.mkdir(parents=True, exist_ok=True)
        write_json(self.environment, {"started": started, **environment(devices or [], instructions)})

    def started(self) -> str:
        """Return the time in ISO format at which the run was started first; for a new run, the time now."""
        try:
            return str(json.loads(self.environment.read_text(encoding="utf-8"))["started"])
        except (OSError, ValueError, KeyError, TypeError):
            return datetime.now().isoformat(timespec="seconds")

    def read_state(self) -> dict[str, Any] | None:
        """Read trainer_state.json; return None if the file does not exist.

        Raises:
            UserError: the file cannot be read, or does not contain what a run writes.
        """
        try:
            state = json.loads(self.state.read_text(encoding="utf-8"))
            if (problem := _state_problem(state)) is not None:
                raise ValueError(problem)
            return state
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError) as error:
            raise UserError(
                f"{self.state} must be a JSON object that a run wrote (the progress and the result), got: "
                f"{getattr(error, 'strerror', None) or error}; to resume from the last checkpoint: "
                f"{delete_command(self.state)}, then the same command; or set resume=never"
            ) from None

    def write_state(self, state: dict[str, Any]) -> None:
        """Write trainer_state.json completely or not at all."""
        self.path.mkdir(parents=True, exist_ok=True)
        write_json(self.state, state)

    def finished(self) -> dict[str, Any] | None:
        """Return the content of trainer_state.json if the run is finished, else None."""
        state = self.read_state()
        return state if state is not None and state.get("finished") is True else None

    def check_files(self) -> None:
        """Check that nothing is at the path of a file that a run writes, except a file.

        Raises:
            UserError: there is a folder, or a link without a file.
        """
        files = [self.config, self.environment, self.metrics, self.completions, self.groups]
        for path in [*files, self.log, self.state]:
            if os.path.lexists(path) and not path.is_file():
                found = "a folder" if path.is_dir() else "a link without a file"
                raise UserError(
                    f"{path} must be a file (the run writes it), got {found}; move it away: "
                    f"mv {shlex.quote(str(path))} {shlex.quote(f'{path}.old')}"
                )

    def last_checkpoint(self) -> Path | None:
        """Return the newest complete checkpoint, or None."""
        checkpoints = complete_checkpoints(self.path)
        return checkpoints[-1] if checkpoints else None


def complete_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints of a run folder, oldest first.

    Other files and folders are ignored, such as `checkpoint-3-copy`, `checkpoint-007`, or a folder without
    the marker file.
    """
    updates = {
        path: int(name[1])
        for path in folder.glob("checkpoint-*")
        if (name := _CHECKPOINT.fullmatch(path.name)) and (path / COMPLETE).is_file()
    }
    return sorted(updates, key=updates.__getitem__)


def _state_problem(state: object) -> str | None:
    """Return why a JSON value is not the content of trainer_state.json; None if it may be."""
    if not isinstance(state, dict):
        return f"it contains {json.dumps(state)[:40]}"
    if (problem := counters_problem(state)) or state.get("finished") is not True:
        return problem
    result = state.get("result")
    if not isinstance(result, dict):
        return "it is finished and has no result"
    others = [name for name, value in result.items() if not isinstance(value, int | float)]
    return f"the result {others[0]} is no number" if others else None


def counters_problem(state: Mapping[str, Any]) -> str | None:
    """Return which counter of trainer_state.json has another type than a run writes; None if none has."""
    for name in ("num_updates", "update", "version", "episode"):
        if not isinstance(state.get(name, 0), int | float):
            return f"{name} is {json.dumps(state[name])[:40]}, not a number"
    if not is_texts(state.get("lost_rows", [])):
        return f"lost_rows is {json.dumps(state['lost_rows'])[:40]}, not a list of file names"
    return None
