"""Completions that a data set holds, answered as if they were sampled."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf.batch import Prompts, Rollouts
from rlhf.generators.generator import Generator, Sampling, finished
from rlhf.tasks.completions import encode_completions


class DatasetGenerator(Generator):
    """Returns the completions that came with the prompts, EOS added."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer

    def submit(self, prompts: Prompts, sampling: Sampling) -> Future[Rollouts]:
        """Tokenize the stored completions."""
        assert prompts.completions is not None, "the task was not asked for completions"
        return finished(
            encode_completions(prompts, prompts.completions, self.tokenizer, sampling.response_length)
        )

    def load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """What is stored does not depend on weights."""
