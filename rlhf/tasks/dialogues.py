"""Whether a task has dialogues: from its section and the first row of local data. No torch is imported."""

from __future__ import annotations

from rlhf.config.task import ChatConfig, LocalConfig, TaskConfig
from rlhf.core.errors import UserError
from rlhf.tasks.local_files import LocalFiles


def has_dialogues(task: TaskConfig) -> bool | None:
    """Return whether the prompts of a task are known to be dialogues before any data set is loaded.

    Args:
        task: config section of the task.

    Returns:
        None if local data cannot be read.
    """
    if isinstance(task, LocalConfig) and task.path is not None:
        try:
            return bool(LocalFiles(task).conversational)
        except UserError:
            return None  # the checks of the data report it
    return isinstance(task, ChatConfig) and task.turn is None
