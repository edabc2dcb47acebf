"""Sections of the tasks with an embedded environment: `task=calculator` and `task=guess_number`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rlhf.config.schema import option
from rlhf.config.task import EmbeddedTaskConfig


@dataclass(kw_only=True, slots=True)
class GameConfig(EmbeddedTaskConfig):
    """A task of generated dialogues with an environment."""

    reads_path: ClassVar[bool] = False

    train_size: int = 4096
    max_prompt_tokens: int = 32

    @property
    def dialogues(self) -> bool:
        """Whether the prompts are dialogues: they are messages of the user."""
        return True


@option("task", "calculator", part="rlhf.tasks.games:CalculatorSource")
@dataclass(kw_only=True, slots=True)
class CalculatorTaskConfig(GameConfig):
    """Generated sums for a calculator; the SFT responses are those of pupils, of whom few use it."""

    vocabulary_size: ClassVar[int] = 66

    name: str = "calculator"


@option("task", "guess_number", part="rlhf.tasks.games:GuessNumberSource")
@dataclass(kw_only=True, slots=True)
class GuessNumberTaskConfig(GameConfig):
    """Numbers to guess in four guesses; the SFT responses ignore half of the answers."""

    vocabulary_size: ClassVar[int] = 27
    has_answers: ClassVar[bool] = False

    name: str = "guess_number"
