"""Sections of the tasks that belong to an environment: `calculator`, `guess_number`, `environment`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rlhf.config.schema import entry, number, option
from rlhf.config.task import EmbeddedTaskConfig, TaskConfig


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


@option("task", "environment", part="rlhf.tasks.first_messages:FirstMessages")
@dataclass(kw_only=True, slots=True)
class EnvironmentTaskConfig(TaskConfig):
    """The first messages of the environment: the texts that `reset` returns for seeds."""

    reads_path: ClassVar[bool] = False
    has_answers: ClassVar[bool] = False

    name: str = "environment"
    data_seed: int = entry(0, means="seed of the seeds; the run's own seed does not change the data")
    train_size: int = number(1024, least=1, means="first messages to ask for")
    validation_size: int = number(256, least=1, means="first messages to ask for")
    test_size: int = number(256, least=1, means="first messages to ask for")

    @property
    def dialogues(self) -> bool:
        """Whether the prompts are dialogues: a first message is a message of the user."""
        return True
