"""What is stored, answered as if it were sampled: completions of a data set, or rollouts of another run."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf.batch import Prompts, Rollouts
from rlhf.errors import UserError
from rlhf.generations import files, read, shared_settings
from rlhf.generators.generator import Sampling, finished
from rlhf.metrics import Metrics
from rlhf.tasks.completions import encode_completions


class Stored:
    """What does not depend on weights."""

    def load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """What is stored stays what it is."""

    def figures(self) -> Metrics:
        """Nothing can go wrong."""
        return {}

    def close(self) -> None:
        """Nothing is held."""


class DatasetGenerator(Stored):
    """Returns the completions that came with the prompts, EOS added."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer

    def submit(self, prompts: Prompts, sampling: Sampling) -> Future[Rollouts]:
        """Tokenize the stored completions."""
        assert prompts.completions is not None, "the task was not asked for completions"
        return finished(
            encode_completions(prompts, prompts.completions, self.tokenizer, sampling.response_length)
        )


class ReplayGenerator(Stored):
    """Returns the rollouts that another run saved, in their order, with the versions and log-probs they had.

    Args:
        folder: what `save_generations` wrote.
        tokenizer: the policy's.
        temperature: of the log-probs in this run; it must be the one that the rollouts were sampled at.

    Raises:
        UserError: the rollouts were sampled at another temperature.
    """

    def __init__(self, folder: Path, tokenizer: PreTrainedTokenizerBase, temperature: float) -> None:
        self.files = files(folder)
        self.pad_id = tokenizer.pad_token_id
        sampled_at = shared_settings(self.files[0])["temperature"]
        if sampled_at != temperature:
            raise UserError(
                "generator.temperature must be the one that the rollouts were sampled at (log-probs are "
                f"those of logits / temperature), got {temperature:g} where {folder} has {sampled_at:g}; "
                f"set generator.temperature={sampled_at:g}"
            )

    def submit(self, prompts: Prompts, sampling: Sampling) -> Future[Rollouts]:
        """The rollouts of the update that `sampling.request` (from 0) belongs to.

        Raises:
            UserError: they are of another shape.
        """
        file = self.files[sampling.request]
        rollouts = read(file, self.pad_id)
        found, wanted = tuple(rollouts.response_ids.shape[:2]), (len(prompts), sampling.samples)
        if found != wanted:
            raise UserError(
                "schedule.prompts_per_update and algo.samples_per_prompt must be those of the rollouts, got "
                f"{wanted[0]} and {wanted[1]} where {file} has {found[0]} and {found[1]}; "
                f"set schedule.prompts_per_update={found[0]} algo.samples_per_prompt={found[1]}"
            )
        return finished(rollouts)
