"""Settings of the tasks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from omegaconf import MISSING

from rlhf.schema import Section, option

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from rlhf.config import Config
    from rlhf.tasks.source import Source


@dataclass(kw_only=True, slots=True)
class TaskConfig(Section):
    """What every task has. `path` replaces the hub data set by local files of the same columns."""

    embedded: ClassVar[bool] = False  # its data and models are made here, from a seed

    name: str = MISSING
    path: str | None = None  # a folder of prompts data: <split>.jsonl / .parquet files, or datasets.save_to_disk
    preferences_path: str | None = None  # the same for prompt/chosen/rejected
    max_prompt_tokens: int = 512  # longer prompts are left out, and counted

    def source(self) -> Source:
        """Make what loads this task's data."""
        raise NotImplementedError


@dataclass(kw_only=True, slots=True)
class EmbeddedTaskConfig(TaskConfig):
    """A task that is generated from a seed."""

    embedded: ClassVar[bool] = True

    data_seed: int = 0  # of the data; the run's own seed leaves them alone
    train_size: int = MISSING
    validation_size: int = 512
    test_size: int = 512

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """Make the tokenizer of this task's vocabulary."""
        raise NotImplementedError
