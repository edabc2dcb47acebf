"""Whether a task has dialogues: from its section and the first row of local data. No torch is imported."""

from __future__ import annotations

from rlhf.config.task import TaskConfig
from rlhf.core.errors import UserError
from rlhf.tasks.local_files import LocalFiles


def has_dialogues(task: TaskConfig) -> bool | None:
    """Return whether the prompts of a task are known to be dialogues before any data set is loaded.

    Args:
        task: config section of the task.

    Returns:
        None if only the rows of the data set show it, if local data cannot be read, or if parts differ.
    """
    if task.own_files is not None:
        try:
            return bool(LocalFiles(*task.own_files).conversational)
        except UserError:
            return None  # the checks of the data report it
    known = {has_dialogues(part) for part in task.parts.values()} or {task.dialogues}
    return None if len(known) > 1 else known.pop()


def different_forms(dialogues: str, texts: str) -> str:
    """Return the error message for a part with dialogues and a part with texts."""
    return (
        "task.parts must all have dialogues or all have texts (responses end differently), got dialogues in "
        f"{dialogues} and texts in {texts}; convert one of them, or leave it out"
    )
