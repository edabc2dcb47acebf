"""Generators that return stored completions: the completions of the task, or the saved rollouts of a run."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf.core.batch import Rollouts
from rlhf.core.encoding import encode_completions, pad_prompts
from rlhf.core.errors import RunError, UserError
from rlhf.core.rollout_format import files, shared, vocabulary
from rlhf.generators.generator import Generator, finished

if TYPE_CHECKING:
    from rlhf.config.generator import DatasetConfig
    from rlhf.core.batch import Prompts, Sampling
    from rlhf.generators.generator import GeneratorContext

_DTYPES = {
    "response_ids": torch.int64,
    "behaviour_logprobs": torch.float32,
    "token_versions": torch.int64,
    "environment_mask": torch.bool,
    "rewards": torch.float64,
}
_EPISODE = "episode/"  # before the names of the figures of episodes


def build(config: DatasetConfig, context: GeneratorContext) -> Generator:
    """Return a generator of the saved rollouts in `config.path`; if null, of the task's completions."""
    if config.path is None:
        return DatasetGenerator(context.tokenizer)
    return ReplayGenerator(Path(config.path).expanduser(), context.tokenizer)


class DatasetGenerator(Generator):
    """A generator that returns the completions that the task stores with its prompts, with EOS appended."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer

    def submit(self, prompts: Prompts, sampling: Sampling) -> Future[Rollouts]:
        """Return a finished future with the stored completions as token ids."""
        assert prompts.completions is not None, "the task was not asked for completions"
        return finished(
            encode_completions(prompts, prompts.completions, self.tokenizer, sampling.response_length)
        )

    def load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Do nothing: stored completions do not depend on weights."""


class ReplayGenerator(Generator):
    """A generator that returns the saved rollouts of a run by update, with their versions and log-probs.

    Args:
        folder: the folder of rollouts that a run with `save_generations` wrote.
        tokenizer: the policy's tokenizer.

    Raises:
        UserError: the rollouts contain token ids of another tokenizer.
    """

    def __init__(self, folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        self.files = files(folder)
        self.pad_id = tokenizer.pad_token_id
        self.tokens = torch.tensor(sorted(set(tokenizer.get_vocab().values())))
        if shared(self.files[0]).vocabulary != vocabulary(tokenizer.get_vocab()):
            raise UserError(
                "generator.path must name rollouts in the tokens of the policy's tokenizer (token ids depend "
                f"on the tokenizer), got {folder}; set model.policy or model.tokenizer as in the run that "
                "saved them"
            )

    def submit(self, prompts: Prompts, sampling: Sampling) -> Future[Rollouts]:
        """Return a finished future with the saved rollouts of the update `sampling.request` (from 0).

        Raises:
            RunError: a response contains an id that no token has, whose log-prob would be -inf.
        """
        file = self.files[sampling.request]
        rollouts = read(file, self.pad_id)
        if not torch.isin(rollouts.response_ids[rollouts.response_mask], self.tokens).all():
            raise RunError(
                f"{file} has responses with ids that no token has, which are not trained on; sample again "
                "with this version, or set generator.path=<another folder>"
            )
        return finished(rollouts)

    def load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Do nothing: stored completions do not depend on weights."""


def read(file: Path, pad_id: int) -> Rollouts:
    """Return the rollouts in `file`; the saved scores become `labels` [N, K]."""
    common = shared(file)
    N, K, T = common.prompts, common.samples, common.response_length
    rows = pyarrow.parquet.read_table(file).to_pydict()
    lengths = torch.tensor([len(ids) for ids in rows["response_ids"]]).view(N, K, 1)

    def grouped(column: str) -> Tensor:
        x = torch.full((N * K, T), pad_id if column == "response_ids" else 0, dtype=_DTYPES[column])
        for row, values in zip(x, rows[column], strict=True):
            row[: len(values)] = torch.tensor(values, dtype=x.dtype)
        return x.view(N, K, T)

    prompt_ids, prompt_mask = pad_prompts(rows["prompt_ids"][::K], pad_id)
    by_token: dict[str, Any] = {column: grouped(column) for column in _DTYPES if column in rows}
    real = torch.arange(T) < lengths
    messages = by_token.get("environment_mask", torch.zeros_like(real))
    episode = {
        name.removeprefix(_EPISODE): torch.tensor(values, dtype=torch.float32).view(N, K)
        for name, values in rows.items()
        if name.startswith(_EPISODE)
    }
    return Rollouts(
        index=torch.tensor(rows["example"][::K]),
        texts=rows["prompt"][::K],
        references=rows["reference"][::K],
        prompt_ids=prompt_ids,
        prompt_mask=prompt_mask,
        labels=torch.tensor(rows["score"], dtype=torch.float32).view(N, K),
        response_mask=real & ~messages,
        episode=episode or None,
        ended=torch.tensor(rows["ended"]).view(N, K),
        version=rows["version"][0],
        **by_token,
    )
