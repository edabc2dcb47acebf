"""The task `preferences`: any data set of prompts with a chosen and a rejected response."""

from __future__ import annotations

from typing import TYPE_CHECKING

from datasets import Dataset

from rlhf.tasks.records import NOTHING, Wanted
from rlhf.tasks.source import load_pairs, pairs_of, prompts_of_pairs

if TYPE_CHECKING:
    from rlhf.config.task import PreferencesConfig


class PreferencesSource:
    """A source of stored preference pairs.

    The prompts of the pairs are also the prompts of the task. The chosen responses are the references.

    Args:
        config: config section of the task.
    """

    def __init__(self, config: PreferencesConfig) -> None:
        self.config = config
        self.pairs = pairs_of(config, config.preferences_name, beside_prompts=True)

    @property
    def conversational(self) -> bool:
        """Whether the prompts of the pairs are lists of messages."""
        return self.pairs is not None and self.pairs.pairs_are_dialogues("train")

    def prompts(self, split: str, wanted: Wanted = NOTHING) -> Dataset:
        """Return the split with the columns `query` or `messages`, and `reference_response` (chosen)."""
        return prompts_of_pairs(self.preferences(split, wanted))

    def preferences(self, split: str, wanted: Wanted = NOTHING) -> Dataset:
        """Return the split with the columns `prompt` (text or messages), `chosen` and `rejected`.

        Raises:
            UserError: the config names no pairs, or the pairs cannot be loaded.
        """
        stored = self.config.validation_split if split == "validation" else split
        return load_pairs(self.pairs, stored, "preferences", "it has no data set of its own", wanted)
