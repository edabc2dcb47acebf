"""Decide what to do with a run folder that exists."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf.config.identity import digest, run_name
from rlhf.config.saved import load_config
from rlhf.core.errors import UserError
from rlhf.core.launched import is_first_rank

if TYPE_CHECKING:
    from rlhf.config.root import Config
    from rlhf.runs.folder import RunFolder


ASIDE = ".old-"  # in the name of a folder that `resume=never` moved aside


def prepare(folder: RunFolder, cfg: Config) -> dict[str, Any] | None:
    """Make the folder agree with `resume`: move a run aside, insist on a checkpoint, or find it finished.

    Returns the state of a run that is finished and is to be left alone, else None.

    Raises:
        UserError: `resume=must` where there is nothing to go on from, or the folder is another run's.
    """
    resume = cfg.resume
    there = folder.path.is_dir() and any(folder.path.iterdir())
    if resume.name == "never":
        # A job that its cluster requeued goes on with its own work, which is no old run.
        if there and is_first_rank() and int(os.environ.get("SLURM_RESTART_COUNT", "0")) == 0:
            aside = free_name(folder.path)
            folder.path.rename(aside)
            print(f"resume=never: moved the run that was in {folder.path} to {aside}", file=sys.stderr)
        return None
    finished = folder.finished() if there else None
    if finished is None and resume.name == "must" and folder.last_checkpoint() is None:
        what = "no complete checkpoint in it" if there else "no such folder"
        raise UserError(
            f"resume=must needs a complete checkpoint to go on from ({what}), got {folder.path}; "
            "set resume=auto to start where there is none"
        )
    if finished is not None:
        refuse_another_run(cfg, folder)
    return finished


def refuse_another_run(cfg: Config, folder: RunFolder) -> None:
    """Raise UserError where the folder has a checkpoint or the result of a run with other settings."""
    if folder.path.name == run_name(cfg) or not folder.config.exists():  # such a name says all settings
        return
    begun = folder.finished() or folder.last_checkpoint()
    if begun and digest(load_config(folder.config)) != digest(cfg):
        raise UserError(
            "hydra.run.dir must be a folder of this run (a checkpoint would go on with other settings, or a "
            f"result be taken for theirs), got {folder.path}, whose config.yaml differs; set resume=never to "
            "move it aside"
        )


def free_name(path: Path) -> Path:
    """`path` with the first `.old-<n>` that is not taken."""
    count = 1
    while (aside := path.with_name(f"{path.name}{ASIDE}{count}")).exists():
        count += 1
    return aside
