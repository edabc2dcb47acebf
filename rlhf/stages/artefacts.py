"""Artefacts: folders that are complete or absent, made by one process, and skipped once they are finished.

The stages before a run (`rlhf.stages.prerequisites`) and the stages of `rlhf.pipeline` (`rlhf.stages.chain`)
are lists of artefacts, in the order in which they are made. This module imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf.core import confidence
from rlhf.core.files import whole
from rlhf.loggers.display import EVALUATION_METRICS, shown
from rlhf.runs.folder import COMPLETE, RunFolder
from rlhf.runs.lock import made_by_one
from rlhf.stages.final_model import final_model

# Metrics that the summary of the stages shows.
_FIGURES = ("eval/win_rate", "eval/accuracy", "eval/gold_score", "eval/kl", "eval/loss")


@dataclass(frozen=True, slots=True, kw_only=True)
class Artefact:
    """A model, a data set or an evaluation, and how to make it.

    Attributes:
        name: name for messages.
        folder: where the artefact is written.
        done: returns whether the artefact is finished. Raises UserError if it is damaged.
        make: makes the artefact; resumes if an earlier call was interrupted.
        figures: returns the results of the finished artefact as text.
    """

    name: str
    folder: Path
    done: Callable[[], bool]
    make: Callable[[], object]
    figures: Callable[[], str]


def trained(name: str, folder: RunFolder, make: Callable[[], object]) -> Artefact:
    """Return the final model of the run in `folder`, which `make` carries out."""
    return Artefact(
        name=name,
        folder=folder.path,
        done=lambda: folder.finished() is not None and final_model(folder).is_dir(),
        make=make,
        figures=lambda: result_text((folder.finished() or {"result": {}})["result"]),
    )


def result_text(figures: dict[str, Any]) -> str:
    """Return the main metrics of an evaluation as text."""
    present = [name for name in _FIGURES if name in shown(figures)]
    return ", ".join(f"{EVALUATION_METRICS[name]} {confidence.text(figures, name)}" for name in present)


def made_once(folder: Path, write: Callable[[Path], object]) -> Path:
    """Return `folder`; if it does not exist, make it first, or wait for another process that makes it.

    Args:
        folder: the folder; it is either complete or absent.
        write: function that writes the content into the folder in its argument.
    """
    if not (folder / COMPLETE).exists():
        with made_by_one(folder):
            if not (folder / COMPLETE).exists():
                with whole(folder) as scratch:
                    write(scratch)
                    (scratch / COMPLETE).touch()
    return folder
