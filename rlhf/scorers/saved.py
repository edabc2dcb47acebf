"""A scorer that saves scored rollouts (`save_generations`); `rlhf.core.rollout_format` has the format."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf.core.rollout_format import Shared, name, vocabulary
from rlhf.core.score import in_float32
from rlhf.scorers.scorer import Scorer, flat_texts

if TYPE_CHECKING:
    from rlhf.core.batch import Batch, Rollouts, Sampling
    from rlhf.core.state import TrainState

SCRATCH = ".tmp"  # suffix of a file that is not completely written


class SavingScorer(Scorer):
    """A scorer that writes each scored rollout batch to a file.

    Incomplete files in `folder`, left behind by a crash, are removed.

    Args:
        scorer: the scorer that computes the scores.
        folder: folder of the files; each update has one file.
        tokenizer: tokenizer of the policy, which decodes the responses.
        sampling: sampling settings of the rollouts; the files contain the temperature.
        state: counters of the run, which give the number of the update.
    """

    def __init__(
        self,
        scorer: Scorer,
        folder: Path,
        tokenizer: PreTrainedTokenizerBase,
        sampling: Sampling,
        state: TrainState,
    ) -> None:
        self.config = scorer.config
        self.scorer = scorer
        self.folder = folder
        self.tokenizer = tokenizer
        self.sampling = sampling
        self.state = state
        self.vocabulary = vocabulary(tokenizer.get_vocab())
        folder.mkdir(parents=True, exist_ok=True)
        for file in folder.glob(f"*{SCRATCH}"):
            file.unlink()

    def score(self, rollouts: Rollouts) -> Tensor:
        """Return the scores [N, K] of the wrapped scorer."""
        return self.scorer.score(rollouts)

    def __call__(self, rollouts: Rollouts) -> Batch:
        """Return the rollouts with scores, after writing them to disk."""
        batch = self.scorer(rollouts)
        write(batch, self.state.update + 1, self.folder, self.tokenizer, self.sampling, self.vocabulary)
        return batch


def write(
    batch: Batch,
    update: int,
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    sampling: Sampling,
    vocabulary: str,
) -> None:
    """Write the file of one update: one row per response, grouped by prompt.

    The file is written under a temporary name, then renamed. So a file is complete or missing.

    Args:
        batch: scored rollouts.
        update: number of the update, from 1.
        folder: folder of the files.
        tokenizer: tokenizer of the policy.
        sampling: sampling settings of the rollouts; the file contains the temperature.
        vocabulary: hash of the policy's vocabulary.
    """
    N, K, T = batch.response_ids.shape

    def each(values: list[Any]) -> list[Any]:
        return [value for value in values for _ in range(K)]

    def cut(x: Tensor, mask: Tensor) -> list[list[Any]]:
        return [row[kept].tolist() for row, kept in zip(x, mask, strict=True)]

    mask = batch.real.flatten(0, 1)
    prompts, responses, references = flat_texts(batch, tokenizer)
    columns: dict[str, Any] = {
        "update": [update] * (N * K),
        "version": [batch.version] * (N * K),
        "example": each(batch.index.tolist()),
        "sample": list(range(K)) * N,
        "prompt": prompts,
        "response": responses,
        "reference": references,
        "score": batch.scores.flatten().tolist(),
        **{
            f"score/{part}": pyarrow.array(scores.flatten().tolist(), from_pandas=True)  # NaN: not judged
            for part, scores in (batch.parts or {}).items()
        },
        **{f"episode/{name}": values.flatten().tolist() for name, values in (batch.episode or {}).items()},
        "ended": batch.ended.flatten().tolist(),
        "prompt_ids": each(cut(batch.prompt_ids, batch.prompt_mask)),
        "response_ids": cut(batch.response_ids.flatten(0, 1), mask),
    }
    for column in ("behaviour_logprobs", "token_versions", "environment_mask", "rewards"):
        if (values := getattr(batch, column)) is not None:
            columns[column] = cut(values.flatten(0, 1), mask)
    columns |= {key: [*map(in_float32, columns[key])] for key in columns if "/" in key or key == "score"}
    shared = Shared(
        prompts=N,
        samples=K,
        response_length=T,
        temperature=sampling.temperature,
        vocabulary=vocabulary,
    )
    table = pyarrow.table(columns).replace_schema_metadata(shared.metadata())
    file = folder / name(update)
    scratch = file.with_name(f"{file.name}{SCRATCH}")
    pyarrow.parquet.write_table(table, scratch)
    scratch.replace(file)
