"""Rules for the folders that a run writes: whether files can be created, and whether the disk has room."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from rlhf.checks.rules import doubt, training_rule
from rlhf.config.root import Config
from rlhf.core.pasting import setting
from rlhf.memory.sizes import models
from rlhf.runs.disk import mib
from rlhf.runs.writable import cannot_write, nearest, unwritable

_MODEL_BYTES = 4  # per parameter: the trained model is saved in float32
_CHECKPOINT_BYTES = 12  # per trained parameter: weights and two moments of AdamW, in float32


@training_rule
def _folders_can_be_written(cfg: Config) -> Iterator[str]:
    folders = {"output_dir": cfg.output_dir}
    if cfg.task.embedded:
        folders["cache_dir"] = cfg.cache_dir
    if cfg.logger.trackio is not None and cfg.logger.trackio.dir is not None:
        folders["logger.trackio.dir"] = cfg.logger.trackio.dir
    for key, folder in folders.items():
        if not folder.strip():
            yield f"{key} must name a folder (the run writes files there), got {folder!r}; set {key}=outputs"
        elif folder.startswith("~/"):
            yield (
                f"{key} must be a path without ~ (only a shell replaces it), got {folder}; "
                f"set {setting(key, Path(folder).expanduser())}"
            )
        elif reason := unwritable(Path(folder)):
            yield cannot_write(key, Path(folder), reason)


@doubt
def _disk_has_room(cfg: Config) -> Iterator[str]:
    trained = [model for model in models(cfg) if model.trained]
    if cfg.stand_ins or any(model.size is None for model in trained):
        return
    folder = Path(cfg.output_dir)
    free = shutil.disk_usage(nearest(folder)).free
    model = _MODEL_BYTES * trained[0].counted.parameters
    checkpoint = _CHECKPOINT_BYTES * sum(each.trainable for each in trained)
    if free < model + checkpoint:
        lost = "neither can be saved" if free < model else "checkpoints may not be saved"
        yield (
            f"output_dir has {mib(free)} of free space, and the model needs about {mib(model)}, a checkpoint "
            f"{mib(checkpoint)}: {lost}, got {folder}; free some space, or set output_dir=<folder of another "
            "disk>"
        )
