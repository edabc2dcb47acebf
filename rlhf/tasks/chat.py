"""Dialogues as prompts: a chat model learns, and is compared with, what the assistant said last."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from datasets import Dataset

from rlhf.config.task import PREFERENCE_COLUMNS
from rlhf.core.errors import UserError

if TYPE_CHECKING:
    from rlhf.tasks.source import Stored


Turn = dict[str, str]  # role and content


@dataclass(kw_only=True, slots=True)
class ChatSource:
    """Dialogues in the column `messages`, lists of {role, content} that end with the assistant's turn."""

    dialogues: Stored
    pairs: Stored | None
    validation_split: str  # what the dialogues call the split `validation`
    turn: str  # with {role} and {content}
    reply: str

    def prompts(self, split: str) -> Dataset:
        """The split as texts `query`, all turns but the last and `reply`, and `reference_response`.

        Raises UserError where a dialogue does not end with the assistant's turn, after another.
        """
        stored = self.validation_split if split == "validation" else split
        rows = self.dialogues.load(stored, ["messages"], texts=False)
        return rows.map(self._texts, with_indices=True, remove_columns=rows.column_names)

    def preferences(self, split: str) -> Dataset:
        """The split of the pairs that were named: texts `prompt`, `chosen` and `rejected`."""
        if self.pairs is None:
            raise UserError(
                "task.preferences_path must name a folder of preference pairs for task=chat (No Robots has "
                "none), got null; set task.preferences_path=<folder>"
            )
        return self.pairs.load(split, PREFERENCE_COLUMNS)

    def _texts(self, row: dict[str, Any], index: int) -> dict[str, str]:
        try:
            *before, last = [(turn["role"], turn["content"]) for turn in row["messages"]]
            whole = bool(before) and last[0] == "assistant"
        except (TypeError, KeyError, ValueError):
            whole = False
        if not whole:
            raise UserError(
                f"{self.dialogues.key} must hold dialogues in its column messages (lists of role and content "
                f"that end with a turn of the assistant, after another), got {self.dialogues.place} with "
                f"something else in row {index}; mend or leave out that row"
            )
        written = (self.turn.replace("{role}", role).replace("{content}", text) for role, text in before)
        return {"query": "".join(written) + self.reply, "reference_response": last[1]}
