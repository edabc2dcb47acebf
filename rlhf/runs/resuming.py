"""Handling of an existing run folder: resume, skip a finished run, refuse, or move the folder aside."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf.config.identity import digest, run_name
from rlhf.config.run import Resume
from rlhf.config.saved import load_config
from rlhf.core.errors import UserError
from rlhf.core.launched import is_first_rank

if TYPE_CHECKING:
    from rlhf.config.root import Config
    from rlhf.runs.folder import RunFolder

ASIDE = ".old-"  # suffix, before a number, of a folder that `resume=never` moved aside


def prepare(folder: RunFolder, cfg: Config) -> dict[str, Any] | None:
    """Prepare the folder of a run before the run starts, as `cfg.resume` requires.

    With `resume=never`, an existing run folder is moved aside.

    Returns:
        The content of trainer_state.json if the run is finished and does not have to run again, else None.

    Raises:
        UserError: `resume=must` without a complete checkpoint, or the folder belongs to a run with other
            settings.
    """
    exists = folder.path.is_dir() and any(folder.path.iterdir())
    if cfg.resume is Resume.never:
        # A job that SLURM requeued resumes its own work, so that work is not moved aside.
        if exists and is_first_rank() and int(os.environ.get("SLURM_RESTART_COUNT", "0")) == 0:
            aside = free_name(folder.path)
            folder.path.rename(aside)
            print(f"resume=never: moved the existing run {folder.path} to {aside}", file=sys.stderr)
        return None
    finished = folder.finished() if exists else None
    if finished is None and cfg.resume is Resume.must and folder.last_checkpoint() is None:
        reason = "no complete checkpoint in it" if exists else "no such folder"
        raise UserError(
            f"resume=must needs a complete checkpoint to resume from ({reason}), got {folder.path}; "
            "set resume=auto to start from the beginning if there is none"
        )
    if finished is not None:
        refuse_another_run(cfg, folder)
    return finished


def refuse_another_run(cfg: Config, folder: RunFolder) -> None:
    """Raise UserError if the folder has a checkpoint or the result of a run with other settings."""
    # The run name contains a digest of all settings.
    if folder.path.name == run_name(cfg) or not folder.config.exists():
        return
    started = folder.finished() or folder.last_checkpoint()
    if started and digest(load_config(folder.config)) != digest(cfg):
        raise UserError(
            "hydra.run.dir must not be the folder of a run with other settings (its checkpoint or result is "
            f"not valid for this run), got {folder.path}, whose config.yaml differs; set resume=never to "
            "move that run aside"
        )


def free_name(path: Path) -> Path:
    """Return `path` with the suffix `.old-<n>`, with the first number that is not in use."""
    count = 1
    while (aside := path.with_name(f"{path.name}{ASIDE}{count}")).exists():
        count += 1
    return aside
