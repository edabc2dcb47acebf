"""Output of libraries that is not shown, and the error of a GPU with too little memory."""

from __future__ import annotations

import os
import traceback
from typing import TYPE_CHECKING

import datasets
import torch
import transformers

from rlhf.assembly.models import build_device, training_budget
from rlhf.core.errors import OutOfMemory, RunError
from rlhf.memory.plan import adjustable, halved, smaller_settings
from rlhf.models.folder import first_line
from rlhf.processes.ranks import Ranks
from rlhf.terminal.console import console
from rlhf.words.identity import not_in_name

if TYPE_CHECKING:
    from rlhf.config.root import Config
    from rlhf.runs.folder import RunFolder


# Output of libraries and of ranks that the terminal should not show.


def quieten_libraries() -> None:
    """Turn off progress bars and warnings of libraries.

    The warnings of libraries during loading are not needed, because this project checks loaded models and
    data.
    """
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    datasets.disable_progress_bars()


def joined(cfg: Config, ranks: Ranks | None = None) -> Ranks:
    """Return the ranks of a command, by default those that the launcher started.

    Progress bars and warnings of libraries, and all output of ranks other than 0, are turned off.
    """
    ranks = ranks or Ranks.join(build_device(cfg), cfg.backend.timeout_s)
    console.quiet = not ranks.first
    # transformers imports DeepSpeed to save a model; without this variable DeepSpeed prints what it detects.
    os.environ.setdefault("DS_ACCELERATOR", ranks.device.type)
    quieten_libraries()
    return ranks


# The error of a run whose GPU has too little memory: for what, and which settings need less.


_SCORES = "scores"  # of scorers that are models; the other phases are those of the memory plan
_PHASES = {  # beginning of the name of a module -> phase; the first that is in a traceback counts
    "rlhf.scorers": _SCORES,
    "rlhf.models.placement": "log-probs and scores",
    "rlhf.generators": "sampling",
    "rlhf.engines": "training",
}


def full_gpu(cfg: Config, folder: RunFolder | None, error: Exception) -> RunError | None:
    """Explain that a GPU of this process, or of another process of the run, has too little memory.

    Args:
        cfg: the config of the run.
        folder: the folder of the run; None: nothing is trained, so there is no checkpoint to resume from.
        error: any error.
    """
    if isinstance(error, torch.OutOfMemoryError):
        modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
        found = (phase for start, phase in _PHASES.items() if any(name.startswith(start) for name in modules))
        phase = next(found, "the models")
        said = f"a GPU has too little memory for {phase} ({first_line(error)})"
    elif isinstance(error, OutOfMemory):
        phase = "sampling" if error.process == "generator" else "log-probs and scores"
        said = str(error)
    else:
        return None
    return RunError(f"{said}; {_remedies(cfg, folder, phase)}")


def _remedies(cfg: Config, folder: RunFolder | None, phase: str) -> str:
    """Return settings that need less memory and the last checkpoint, as the end of an error message."""
    useless = set() if phase == "training" else {"model.gradient_checkpointing=true"}
    if folder is None:
        useless.add("model.lora.rank=16")
    settings = [*_smaller_forwards(cfg, phase), *smaller_settings(cfg)]
    settings = [each for each in settings if each not in useless]
    text = f"set {', or '.join(settings)}" if settings else "choose a smaller model"
    if folder is None:
        return text
    last = folder.last_checkpoint()
    if last is None:
        return f"{text}; no checkpoint was written yet"
    same = [each for each in settings if each.partition("=")[0] in not_in_name()]  # the same run folder
    resumes = f", from which the same command resumes with {' or '.join(same)}" if same else ""
    return f"{text}; the last checkpoint is {last}{resumes}"


def _smaller_forwards(cfg: Config, phase: str) -> list[str]:
    """Return settings that halve the forward passes of a phase, without those that cannot be smaller."""
    keys = ["scorer.batch_size", "gold.batch_size"] if phase == _SCORES else [adjustable(cfg, phase)]
    tokens = training_budget(cfg).tokens
    if keys == ["backend.micro_batch"] and tokens is not None:
        return [f"backend.tokens={tokens // 2}"]
    halves = {key: halved(cfg, key, cfg.algo.samples_per_prompt) for key in keys if key is not None}
    return [f"{key}={half}" for key, half in halves.items() if half]
