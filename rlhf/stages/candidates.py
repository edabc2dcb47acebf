"""Models that can be evaluated: checkpoints and final model of a run, model folders and hub names.

This module imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf.config.backend import RANKS_FILE, ZeroConfig
from rlhf.core.errors import UserError
from rlhf.core.files import digest
from rlhf.core.launched import world_size
from rlhf.models.folders import damage, folder_problem
from rlhf.runs.folder import RunFolder, complete_checkpoints

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
        return {name: state[name] for name in ("update", "episode")}


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
        ranks = path / RANKS_FILE
        shards = json.loads(ranks.read_text())["ranks"] if ranks.exists() else 0
        weights = path if shards else path / "model"
        found.append(Candidate(path.name, weights, path / "counters.json", path, shards))
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
    for candidate in chosen:
        whole = candidate.checkpoint is None and candidate.weights == folder.model
        if whole and (reason := damage(candidate.weights)):
            others = ",".join(name for name in names if name != candidate.name)
            raise UserError(
                f"run= must have a complete final model ({candidate.weights}: {reason}), got {folder.path}; "
                + (f"set only={others}" if others else "restore the files of the model")
            )
    return chosen


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
    """Return a hash of sizes and times of the files of a model folder; None for a hub name."""
    folder = Path(model).expanduser()
    if not folder.is_dir():
        return None
    stats = {path.name: path.stat() for path in folder.iterdir() if path.is_file()}
    return digest({name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()})


def refuse_other_ranks(due: list[Candidate], cfg: Config) -> None:
    """Raise UserError if a checkpoint is sharded over a number of ranks other than the number started."""
    stage = cfg.backend.stage if isinstance(cfg.backend, ZeroConfig) else 0
    for candidate in due:
        if stage and candidate.shards not in (0, world_size()):
            count = candidate.shards
            raise UserError(
                f"ranks must be {count} to evaluate {candidate.name} (backend={cfg.backend.name} sharded it "
                f"over {count} ranks), got {world_size()}; start torchrun --nproc-per-node {count} -m "
                "rlhf.evaluate, or add only=model"
            )
