"""A run's name and its folder: what lies where, how it gets there, and what there is to go on from.

    <output_dir>/<run name>/
        config.yaml  environment.json  metrics.jsonl  completions.jsonl  train.log
        evaluations.jsonl       with completions in evaluations/, by rlhf.evaluate
        trainer_state.json      counters, and when finished: {"finished": true, "result": {metric: value}}
        checkpoint-<update>/    complete only with the file COMPLETE
        model/                  the final model, Hugging Face format
        adapter/                with model.lora: its adapter alone, PEFT format

Imports no torch, so that a finished run answers at once.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from rlhf.config.schema import schema_of, sections
from rlhf.core.errors import UserError
from rlhf.core.files import write_atomically, write_json
from rlhf.runs.environment import environment

if TYPE_CHECKING:
    from rlhf.config.root import Config


COMPLETE = "COMPLETE"  # the marker file of a complete checkpoint


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The files of one run."""

    path: Path

    @property
    def config(self) -> Path:
        """The resolved config."""
        return self.path / "config.yaml"

    @property
    def environment(self) -> Path:
        """Versions, hardware, command line."""
        return self.path / "environment.json"

    @property
    def metrics(self) -> Path:
        """One row an update, and one an evaluation."""
        return self.path / "metrics.jsonl"

    @property
    def completions(self) -> Path:
        """Samples of the evaluations."""
        return self.path / "completions.jsonl"

    @property
    def evaluations(self) -> Path:
        """One row a checkpoint or model that `rlhf.evaluate` measured."""
        return self.path / "evaluations.jsonl"

    @property
    def log(self) -> Path:
        """What the terminal showed."""
        return self.path / "train.log"

    @property
    def state(self) -> Path:
        """Where the run stands."""
        return self.path / "trainer_state.json"

    @property
    def generations(self) -> Path:
        """Every rollout, with `save_generations`."""
        return self.path / "generations"

    @property
    def model(self) -> Path:
        """The final model."""
        return self.path / "model"

    @property
    def adapter(self) -> Path:
        """The adapter of the final model, with `model.lora`."""
        return self.path / "adapter"

    def write_config(self, cfg: Config) -> None:
        """Write the resolved config, for people and for `load_config`."""
        defaults: list[Any] = ["root_schema"]
        for key, section in sections(cfg):
            if stored := schema_of(type(section)):
                group, _, option = stored.rpartition("/")
                defaults.append({f"{group}@{key}": option})
        self.path.mkdir(parents=True, exist_ok=True)
        text = OmegaConf.to_yaml(OmegaConf.structured(cfg), resolve=True)
        write_atomically(self.config, OmegaConf.to_yaml({"defaults": [*defaults, "_self_"]}) + "\n" + text)

    def read_config(self) -> dict[str, Any]:
        """The resolved config as it is written, nested, also with options of packages that are not here.

        Raises:
            ValueError: it is no mapping.
        """
        saved = OmegaConf.to_container(OmegaConf.load(self.config))
        if not isinstance(saved, dict):
            raise ValueError(f"{self.config.name} is no mapping of keys")
        return {str(key): value for key, value in saved.items() if key != "defaults"}

    def write_environment(self, devices: list[str] | None = None) -> None:
        """Write what the run ran with; `devices` are the names of its accelerators."""
        self.path.mkdir(parents=True, exist_ok=True)
        write_json(self.environment, environment(devices or []))

    def read_state(self) -> dict[str, Any] | None:
        """Read trainer_state.json; None where there is none."""
        try:
            return dict(json.loads(self.state.read_text()))
        except FileNotFoundError:
            return None
        except ValueError as problem:
            raise UserError(
                f"{self.state} must be a JSON object (it says where the run stands), got: {problem}; "
                "delete it to go on from the last checkpoint, or set resume=never"
            ) from None

    def write_state(self, state: dict[str, Any]) -> None:
        """Write trainer_state.json, whole or not at all."""
        self.path.mkdir(parents=True, exist_ok=True)
        write_json(self.state, state)

    def finished(self) -> dict[str, Any] | None:
        """The state of a run that came to its end; None where it did not."""
        state = self.read_state()
        return state if state is not None and state.get("finished") is True else None

    def last_checkpoint(self) -> Path | None:
        """The newest complete checkpoint."""
        found = complete_checkpoints(self.path)
        return found[-1] if found else None


def complete_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints of a run folder, oldest first."""
    found = [path for path in folder.glob("checkpoint-*") if (path / COMPLETE).is_file()]
    return sorted(found, key=lambda path: int(path.name.rpartition("-")[2]))
