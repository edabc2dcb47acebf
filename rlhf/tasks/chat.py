"""The task `chat`: the last turn of a dialogue is the reference, the earlier turns are the prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from datasets import Dataset

from rlhf.core.errors import UserError
from rlhf.tasks.records import NOTHING, Wanted
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

    @property
    def conversational(self) -> bool:
        """Whether the prompts are lists of messages: `task.turn` does not format the messages as text."""
        return self.config.turn is None

    def prompts(self, split: str, wanted: Wanted = NOTHING) -> Dataset:
        """Return the split with the columns `messages` or `query`, and `reference_response`, the last turn.

        The messages are all turns except the last. If `task.turn` is set, the prompts are texts instead: each
        turn in the format `task.turn`, then `task.reply`.

        Raises:
            UserError: a dialogue has only one turn, or does not end with a turn of the assistant.
        """
        stored = self.config.validation_split if split == "validation" else split
        rows = self.dialogues.load(stored, ["messages"], texts=False, wanted=wanted)
        return rows.map(self._example, with_indices=True, remove_columns=["messages"])

    def preferences(self, split: str, wanted: Wanted = NOTHING) -> Dataset:
        """Return the split of the pairs: `prompt` (text or messages), `chosen` and `rejected` (texts).

        Raises:
            UserError: the config names no pairs, or the pairs cannot be loaded.
        """
        return load_pairs(self.pairs, split, "chat", "No Robots has none", wanted)

    def _example(self, row: dict[str, Any], index: int) -> dict[str, Any]:
        try:
            *before, last = [{name: turn[name] for name in ("role", "content")} for turn in row["messages"]]
            whole = bool(before) and last["role"] == "assistant"
        except (TypeError, KeyError, ValueError):
            whole = False
        if not whole:
            place = row.get("place") or f"row {index + 1} of {self.dialogues.place}"
            raise UserError(
                f"{self.dialogues.key} must have dialogues in its column messages (lists of role and content "
                f"that end with a turn of the assistant, after another), got {place} with another form; "
                "correct or remove that row"
            )
        turn, reply = self.config.turn, self.config.reply
        if turn is None or reply is None:
            return {"messages": before, "reference_response": last["content"]}
        texts = (
            turn.replace("{role}", each["role"]).replace("{content}", each["content"]) for each in before
        )
        return {"query": "".join(texts) + reply, "reference_response": last["content"]}
