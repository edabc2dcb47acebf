"""Models that can be evaluated: checkpoints and final model of a run, model folders and hub names.

This module imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf.config.backend import RANKS_FILE
from rlhf.core.errors import UserError
from rlhf.core.files import digest
from rlhf.models.folder import CARD, folder_problem
from rlhf.runs.folder import RunFolder, complete_checkpoints
from rlhf.stages.final_model import adapter_problem, again, model_problem

if TYPE_CHECKING:
    from rlhf.config.root import Config


@dataclass(frozen=True, slots=True)
class Candidate:
    """A checkpoint or the final model of a run, or a model that the user names.

    Attributes:
        name: name of the folder of the checkpoint or final model; a named model: folder or hub name.
        weights: path that an engine loads.
        position: file with the update and the episode of the model; None for a named model.
        checkpoint: folder of the checkpoint; None for other models.
        shards: number of ranks that DeepSpeed sharded the weights over; 0 if the weights are not sharded.
        files: hash of sizes and times of the files of a named folder; None for other models.
    """

    name: str
    weights: Path
    position: Path | None
    checkpoint: Path | None = None
    shards: int = 0
    files: str | None = None

    @property
    def named(self) -> bool:
        """Whether the user named the model, instead of the run that trained it."""
        return self.position is None

    def counters(self) -> dict[str, int]:
        """Return the update and the episode of the model; empty for a named model."""
        if self.position is None:
            return {}
        state = json.loads(self.position.read_text())
        state = state.get("state", state)
        return {name: state[name] for name in ("update", "episode") if name in state}


def candidates(folder: RunFolder, cfg: Config, only: tuple[str, ...] = ()) -> list[Candidate]:
    """Return the models of a run, oldest first.

    Args:
        folder: the run folder.
        cfg: the config of the run.
        only: names of the models to return; empty for all.

    Raises:
        UserError: the run has no model, lacks a model named in `only`, or its final model is not complete.
    """
    found = []
    for path in complete_checkpoints(folder.path):
        shards = _number_of_shards(path)
        weights = path if shards else path / "model"
        found.append(Candidate(path.name, weights, path / "counters.json", path, shards))
    final_problem = adapter_problem if cfg.model.lora.rank else model_problem
    if folder.finished():
        weights = folder.adapter if cfg.model.lora.rank else folder.model
        found.append(Candidate(folder.model.name, weights, folder.state))
    if not found:
        raise UserError(
            f"run= must have a checkpoint or a final model to evaluate, got {folder.path} with neither; "
            "continue the run to its first checkpoint (schedule.save_every)"
        )
    names = [candidate.name for candidate in found]
    if missing := [name for name in only if name and name not in names]:
        raise UserError(
            f"only= must name what the run has ({', '.join(names)}), got {','.join(missing)}; "
            "set only=model, or leave it out"
        )
    chosen = [candidate for candidate in found if not any(only) or candidate.name in only]
    if chosen[-1].checkpoint is None and (problem := final_problem(folder)):
        others = ",".join(name for name in names if name != folder.model.name)
        raise UserError(
            f"run= must have a complete final model ({problem}), got {folder.path}; "
            + (f"set only={others}, or " if others else "")
            + again(folder)
        )
    return chosen


def _number_of_shards(checkpoint: Path) -> int:
    """Return the number of ranks that DeepSpeed sharded the weights of a checkpoint over; 0: not sharded.

    The result is also 0 if the file with the number is damaged; the evaluation then skips the checkpoint.
    """
    try:
        return int(json.loads((checkpoint / RANKS_FILE).read_bytes())["ranks"])
    except (OSError, ValueError, TypeError, KeyError):
        return 0


def named_models(models: Sequence[str]) -> list[Candidate]:
    """Return the models that the user names.

    Args:
        models: model folders or hub names.

    Raises:
        UserError: a folder does not contain a complete model.
    """
    if problems := [problem for model in models if (problem := folder_problem("models", model))]:
        raise UserError(*problems)
    return [Candidate(model, Path(model).expanduser(), None, files=files(model)) for model in models]


def files(model: str) -> str | None:
    """Return a hash of sizes and times of the files of a model, without its card; None for a hub name."""
    folder = Path(model).expanduser()
    if not folder.is_dir():
        return None
    stats = {path.name: path.stat() for path in folder.iterdir() if path.is_file() and path.name != CARD}
    return digest({name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()})
