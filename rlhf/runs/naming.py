"""The folder of a run: a new one, or the existing folder of a run with the same settings.

This module imports no torch.
"""

from __future__ import annotations

import glob
import os
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf.config.identity import digest, run_name
from rlhf.core.files import component

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from rlhf.config.root import Config


def folder_of(cfg: Config | DictConfig) -> Path:
    """Return `<output_dir>/<run name>`, or the folder of the same run under another name.

    An earlier version of this project may have started the run, with another label for the model. The name
    of such a folder ends with the same digest of all settings.
    """
    output, name = Path(cfg.output_dir), run_name(cfg)
    if os.path.isdir(output) and not (output / name).exists():
        for found in sorted(output.glob(f"{glob.escape(component(cfg.task.name))}-*-{digest(cfg)}")):
            if (found / "config.yaml").is_file():
                return found
    return output / name


def earlier_name(folder: Path, cfg: Config) -> str | None:
    """Return a note if the folder of a run has a name that an earlier version gave; None: it has not."""
    if folder.name != run_name(cfg) and folder.name.endswith(f"-{digest(cfg)}") and folder.is_dir():
        return f"the run continues in {folder}, the name of this run in an earlier version"
    return None
