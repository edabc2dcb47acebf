"""Any data set of prompts with a chosen and a rejected response."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from datasets import Dataset

from rlhf.config.task import PREFERENCE_COLUMNS

if TYPE_CHECKING:
    from rlhf.tasks.source import Stored


@dataclass(kw_only=True, slots=True)
class PreferencesSource:
    """Pairs as they are stored; their prompts are prompts data too, with the chosen ones for references."""

    pairs: Stored
    validation_split: str  # what the data set calls the split `validation`

    def prompts(self, split: str) -> Dataset:
        """The split as texts `query` and `reference_response`, the prompt and the chosen response."""
        pairs = self.preferences(split).remove_columns("rejected")
        return pairs.rename_columns({"prompt": "query", "chosen": "reference_response"})

    def preferences(self, split: str) -> Dataset:
        """The split as texts `prompt`, `chosen` and `rejected`."""
        stored = self.validation_split if split == "validation" else split
        return self.pairs.load(stored, PREFERENCE_COLUMNS)
