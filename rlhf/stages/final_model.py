"""The final model of a finished run: whether its files are complete, and how to write them again.

Only JSON files and the headers of weights are read. This module imports no torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rlhf.core.errors import UserError
from rlhf.core.files import delete_command
from rlhf.models.folder import ADAPTER, damage
from rlhf.models.headers import DamagedFile, read_header, read_object

if TYPE_CHECKING:
    from rlhf.runs.folder import RunFolder


def final_model(folder: RunFolder) -> Path:
    """Return the folder of the final model of a finished run.

    Raises:
        UserError: the model is missing or damaged.
    """
    if (problem := model_problem(folder)) is not None:
        raise UserError(f"{folder.path} must have a complete model, got: {problem}; {again(folder)}")
    return folder.model


def model_problem(folder: RunFolder) -> str | None:
    """Return what is missing or damaged in the final model of a run; None if no file shows a defect."""
    if not folder.model.is_dir():
        return f"{folder.model} is missing"
    defect = damage(folder.model)
    return defect and f"{folder.model} is damaged: {defect}"


def adapter_problem(folder: RunFolder) -> str | None:
    """Return what is missing or damaged in the final adapter of a run; None if no file shows a defect."""
    if not folder.adapter.is_dir():
        return f"{folder.adapter} is missing"
    try:
        read_object(folder.adapter / ADAPTER)
        read_header(folder.adapter / "adapter_model.safetensors")
    except DamagedFile as defect:
        return f"{folder.adapter} is damaged: {defect}"
    return None


def again(folder: RunFolder) -> str:
    """Return how to write the final model of a finished run again."""
    last = folder.last_checkpoint()
    start = "train it again" if last is None else f"write it again from {last.name}"
    return f"to {start}: {delete_command(folder.state)}, then the same command"
