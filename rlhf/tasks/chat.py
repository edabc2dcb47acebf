"""The task `chat`: the last turn of a dialogue is the reference, the earlier turns are the prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from datasets import Dataset

from rlhf.core.errors import UserError
from rlhf.tasks.source import load_pairs, pairs_of, prompts_of

if TYPE_CHECKING:
    from rlhf.config.task import ChatConfig


class ChatSource:
    """A source of dialogues: lists of {role, content} in the column `messages`, the last by the assistant.

    Args:
        config: config section of the task.
    """

    def __init__(self, config: ChatConfig) -> None:
        self.config = config
        self.dialogues = prompts_of(config, config.prompts_name)
        self.pairs = pairs_of(config, config.preferences_name)

    def prompts(self, split: str) -> Dataset:
        """Return the split with the text columns `query` and `reference_response`.

        A query consists of all turns except the last (format `task.turn`), then `task.reply`.

        Raises:
            UserError: a dialogue has only one turn, or does not end with a turn of the assistant.
        """
        stored = self.config.validation_split if split == "validation" else split
        rows = self.dialogues.load(stored, ["messages"], texts=False)
        return rows.map(self._texts, with_indices=True, remove_columns=rows.column_names)

    def preferences(self, split: str) -> Dataset:
        """Return the split of the pairs with the text columns `prompt`, `chosen` and `rejected`.

        Raises:
            UserError: the config names no pairs, or the pairs cannot be loaded.
        """
        return load_pairs(self.pairs, split, "chat", "No Robots has none")

    def _texts(self, row: dict[str, Any], index: int) -> dict[str, str]:
        try:
            *before, last = [(turn["role"], turn["content"]) for turn in row["messages"]]
            whole = bool(before) and last[0] == "assistant"
        except (TypeError, KeyError, ValueError):
            whole = False
        if not whole:
            raise UserError(
                f"{self.dialogues.key} must have dialogues in its column messages (lists of role and content "
                f"that end with a turn of the assistant, after another), got {self.dialogues.place} with "
                f"another form in row {index}; correct or remove that row"
            )
        written = (
            self.config.turn.replace("{role}", role).replace("{content}", text) for role, text in before
        )
        return {"query": "".join(written) + self.config.reply, "reference_response": last[1]}
