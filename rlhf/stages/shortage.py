"""The error of a run whose GPU has too little memory: for what, and which settings need less."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from rlhf.assembly.budgets import training_budget
from rlhf.core.errors import OutOfMemory, RunError
from rlhf.memory.advice import smaller_settings
from rlhf.models.fetching import first_line

if TYPE_CHECKING:
    from types import TracebackType

    from rlhf.config.root import Config
    from rlhf.runs.folder import RunFolder

TRAINING, SCORING, SAMPLING = "training", "computing log-probs or scores", "sampling"
PHASES = {  # beginning of the name of a module -> what the module does
    "rlhf.engines": TRAINING,
    "rlhf.models.inference": SCORING,
    "rlhf.generators": SAMPLING,
}
UNNAMED = "model.gradient_checkpointing=true"  # not part of the name of a run, so the run resumes with it


@contextmanager
def explain_full_gpu(cfg: Config, folder: RunFolder | None = None) -> Iterator[None]:
    """Raise RunError with settings that need less memory, if the block or a process of it has too little.

    Args:
        cfg: the config of the run.
        folder: the folder of the run; None: nothing is trained, so there is no checkpoint to resume from.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        phase = phase_of(error.__traceback__)
        said = f"a GPU has too little memory for {phase} ({first_line(error)})"
        raise RunError(f"{said}; {remedies(cfg, folder, phase)}") from error
    except OutOfMemory as error:
        phase = SAMPLING if error.process == "generator" else SCORING
        raise RunError(f"{error}; {remedies(cfg, folder, phase, annotator=True)}") from error


def remedies(cfg: Config, folder: RunFolder | None, phase: str, annotator: bool = False) -> str:
    """Return settings that need less memory and the last checkpoint, as the end of an error message.

    Args:
        cfg: the config of the run.
        folder: the folder of the run, or None, as in `explain_full_gpu`.
        phase: what needs too much memory, a value of `PHASES`.
        annotator: whether the run may have an annotator, which also needs memory.
    """
    useless = set() if annotator else {"generator.annotate=false"}
    if phase != TRAINING:
        useless.add(UNNAMED)
    settings = [
        *smaller_forward(cfg, phase),
        *(each for each in smaller_settings(cfg) if each not in useless),
    ]
    text = f"set {', or '.join(settings)}" if settings else "choose a smaller model"
    if folder is None:
        return text
    last = folder.last_checkpoint()
    if last is None:
        return f"{text}; no checkpoint was written yet"
    resumes = f"; with {UNNAMED} it resumes from {last}" if UNNAMED in settings else ""
    return f"{text}; the last checkpoint is {last}{resumes}"


def phase_of(frames: TracebackType | None) -> str:
    """Return what a run did when an error was raised, from the modules of the traceback."""
    modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(frames)]
    found = [what for name in modules for start, what in PHASES.items() if name.startswith(start)]
    return found[-1] if found else "the models"


def smaller_forward(cfg: Config, phase: str) -> list[str]:
    """Return the setting that halves the forward passes of a phase; nothing if they cannot be smaller."""
    group = cfg.algo.samples_per_prompt
    if phase == SAMPLING:
        section, key, size = "generator", "batch_size", getattr(cfg.generator, "batch_size", 1)
        if not cfg.generator.samples:
            section, size = "eval", cfg.eval.batch_size
        group = 1
    else:
        limits = training_budget(cfg)
        section, key, size = "backend", "micro_batch", limits.sequences
        if limits.tokens is not None:
            key, size, group = "tokens", limits.tokens, 1
    half = size // 2 // group * group
    return [f"{section}.{key}={half}"] if half else []
