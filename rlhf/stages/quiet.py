"""Output of libraries and of ranks that the terminal should not show."""

from __future__ import annotations

import os

import datasets
import transformers

from rlhf.core.console import console
from rlhf.processes.ranks import Ranks


def quieten_libraries() -> None:
    """Turn off progress bars and warnings of libraries.

    The warnings of libraries during loading are not needed, because this project checks loaded models and
    data.
    """
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    datasets.disable_progress_bars()


def quieten(ranks: Ranks) -> None:
    """Turn off progress bars and warnings of libraries, and all output of ranks other than 0."""
    console.quiet = not ranks.first
    # transformers imports DeepSpeed to save a model; without this variable DeepSpeed prints what it detects.
    os.environ.setdefault("DS_ACCELERATOR", ranks.device.type)
    quieten_libraries()
