"""The task `chat`: the last turn of a dialogue is the reference, the earlier turns are the prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING

from datasets import Dataset

from rlhf.tasks.columns import dialogue
from rlhf.tasks.formats import BadRow
from rlhf.tasks.records import NOTHING, Wanted
from rlhf.tasks.source import load_pairs, pairs_of, prompts_of

if TYPE_CHECKING:
    from rlhf.config.task import ChatConfig
    from rlhf.tasks.reading import Row


class ChatSource:
    """A source of dialogues: lists of messages in the column `messages`, the last by the assistant.

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
        return self.dialogues.load(stored, ["messages"], wanted, self._example)

    def preferences(self, split: str, wanted: Wanted = NOTHING) -> Dataset:
        """Return the split of the pairs: `prompt`, `chosen` and `rejected`, texts or lists of messages.

        Raises:
            UserError: the config names no pairs, or the pairs cannot be loaded.
        """
        return load_pairs(self.pairs, split, "chat", "No Robots has none", wanted)

    def _example(self, row: Row) -> Row:
        try:
            made = dialogue(row)
            whole = bool(made["reference_response"])
        except BadRow:
            whole = False
        if not whole:
            raise BadRow(
                "have dialogues in its column messages (lists of role and content that end with a turn of "
                "the assistant, after another)",
                "with another form",
            )
        turn, reply = self.config.turn, self.config.reply
        if turn is None or reply is None:
            return made
        texts = (
            turn.replace("{role}", each["role"]).replace("{content}", each["content"])
            for each in made["messages"]
        )
        return {
            "query": "".join(texts) + reply,
            "reference_response": made["reference_response"][0]["content"],
        }
