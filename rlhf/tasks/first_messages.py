"""The task `environment`: prompts that the environment of a run returns from `reset`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from datasets import Dataset

from rlhf.core.errors import RunError, UserError
from rlhf.core.seeding import derive
from rlhf.environments.episodes import FIRST_MESSAGE, first_messages
from rlhf.tasks.records import NOTHING, RECORD, Wanted
from rlhf.tasks.source import as_messages

if TYPE_CHECKING:
    from rlhf.config.games import EnvironmentTaskConfig
    from rlhf.environments.environment import EnvironmentFactory


class FirstMessages:
    """A source of first messages, as messages of the user. The record of a row has its text and `seed`.

    Attributes:
        factory: makes the environments; set after the construction, because a task knows only its section.
    """

    conversational = True
    factory: EnvironmentFactory

    def __init__(self, config: EnvironmentTaskConfig) -> None:
        self.config = config

    def prompts(self, split: str, wanted: Wanted = NOTHING) -> Dataset:
        """Return the split with the columns `messages` and `reference_response`, which is empty.

        Raises:
            UserError: the environment fails, or `reset` returns no text.
        """
        size = getattr(self.config, f"{split}_size")
        seeds = [derive(self.config.data_seed, "first message", split, i) % 2**31 for i in range(size)]
        try:
            texts = first_messages(self.factory, seeds)
        except RunError as error:
            raise UserError(str(error)) from None
        if unfit := [text for text in texts if not isinstance(text, str) or not text.strip()]:
            raise UserError(
                f"environment must return a text from reset for task=environment (it is the prompt), got "
                f"{unfit[0]!r} from {self.factory.address}; return the first message"
            )
        made = [{"seed": seed, FIRST_MESSAGE: text} for seed, text in zip(seeds, texts, strict=True)]
        rows = {"query": texts, "reference_response": [""] * size, RECORD: [*map(wanted.record, made)]}
        return as_messages(Dataset.from_dict(rows))

    def preferences(self, split: str, wanted: Wanted = NOTHING) -> Dataset:
        """Raise an error: an environment has no pairs."""
        raise NotImplementedError("validated: no pairs are read with an environment")
