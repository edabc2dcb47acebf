"""Rollouts on disk: `save_generations` keeps every one with its scores, `generator=dataset` replays them.

    generations/000001.parquet      the rollouts of update 1, one row a response, the K of a prompt together

The folder loads with `datasets.load_dataset(<folder>)`. What a file's rows share (K, temperature, allowed
tokens) is in the metadata of its schema. A file is there whole or not at all; a run that goes on from a
checkpoint writes those after it anew.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf.batch import Batch, Rollouts
from rlhf.generators.generator import Sampling
from rlhf.scorers.scorer import Scorer, response_texts
from rlhf.state import TrainState

KEY = b"rlhf"  # of our metadata in a schema
SCRATCH = ".tmp"
TOKEN_COLUMNS = {"behaviour_logprobs": torch.float32, "token_versions": torch.int64}


class Saved(Scorer):
    """A scorer that writes down what it scored.

    Args:
        scorer: gives the scores.
        folder: of the files.
        tokenizer: the policy's, for the texts.
        sampling: how the rollouts were sampled.
        state: where the run stands.
    """

    def __init__(
        self,
        scorer: Scorer,
        folder: Path,
        tokenizer: PreTrainedTokenizerBase,
        sampling: Sampling,
        state: TrainState,
    ) -> None:
        super().__init__(scorer.config)
        self.scorer = scorer
        self.folder = folder
        self.tokenizer = tokenizer
        self.sampling = sampling
        self.state = state
        folder.mkdir(parents=True, exist_ok=True)
        for file in folder.glob(f"*{SCRATCH}"):
            file.unlink()

    def score(self, rollouts: Rollouts) -> Tensor:
        """The scores [N, K]."""
        return self.scorer.score(rollouts)

    def __call__(self, rollouts: Rollouts) -> Batch:
        """The rollouts with scores, which are on disk then."""
        batch = self.scorer(rollouts)
        write(batch, self.state.update + 1, self.folder, self.tokenizer, self.sampling)
        return batch


def write(
    batch: Batch, update: int, folder: Path, tokenizer: PreTrainedTokenizerBase, sampling: Sampling
) -> None:
    """Write the file of one update."""
    N, K, _ = batch.response_ids.shape

    def each(values: list[Any]) -> list[Any]:
        return [value for value in values for _ in range(K)]

    def cut(x: Tensor, mask: Tensor) -> list[list[Any]]:
        return [row[kept].tolist() for row, kept in zip(x, mask, strict=True)]

    mask = batch.response_mask.flatten(0, 1)
    columns: dict[str, Any] = {
        "update": [update] * (N * K),
        "version": [batch.version] * (N * K),
        "example": each(batch.index.tolist()),
        "sample": list(range(K)) * N,
        "prompt": each(batch.texts),
        "response": [text for group in response_texts(batch, tokenizer) for text in group],
        "reference": each(batch.references),
        "score": batch.scores.flatten().tolist(),
        **{f"score/{name}": part.flatten().tolist() for name, part in (batch.parts or {}).items()},
        "ended": batch.ended.flatten().tolist(),
        "prompt_ids": each(cut(batch.prompt_ids, batch.prompt_mask)),
        "response_ids": cut(batch.response_ids.flatten(0, 1), mask),
    }
    for name in TOKEN_COLUMNS:
        if (found := getattr(batch, name)) is not None:
            columns[name] = cut(found.flatten(0, 1), mask)
    shared = {
        "samples": K,
        "temperature": sampling.temperature,
        "response_length": batch.response_ids.shape[2],
    }
    table = pyarrow.table(columns).replace_schema_metadata({KEY: json.dumps(shared).encode()})
    file = folder / f"{update:06d}.parquet"
    scratch = file.with_name(f"{file.name}{SCRATCH}")
    pyarrow.parquet.write_table(table, scratch)
    scratch.replace(file)


def files(folder: Path) -> list[Path]:
    """The files of a folder by update, from 1 to where one is missing."""
    found: list[Path] = []
    while (file := folder / f"{len(found) + 1:06d}.parquet").is_file():
        found.append(file)
    return found


def shared_settings(file: Path) -> dict[str, Any]:
    """What the rows of a file share: samples (K), temperature, response_length.

    Raises:
        ValueError: `save_generations` did not write it.
    """
    found = (pyarrow.parquet.read_schema(file).metadata or {}).get(KEY)
    if found is None:
        raise ValueError(f"{file} was not written by save_generations")
    settings: dict[str, Any] = json.loads(found)
    return settings


def read(file: Path, pad_id: int) -> Rollouts:
    """The rollouts of a file, their scores as labels [N, K]."""
    settings = shared_settings(file)
    K, T = settings["samples"], settings["response_length"]
    rows = pyarrow.parquet.read_table(file).to_pydict()
    N = len(rows["example"]) // K

    def grouped(x: Tensor) -> Tensor:
        return x.view(N, K, *x.shape[1:])

    def padded(values: list[list[Any]], width: int, fill: float, dtype: torch.dtype, left: bool) -> Tensor:
        x = torch.full((len(values), width), fill, dtype=dtype)
        for row, value in zip(x, values, strict=True):
            place = slice(width - len(value), width) if left else slice(0, len(value))
            row[place] = torch.tensor(value, dtype=dtype)
        return x

    prompts = rows["prompt_ids"][::K]
    widest = max(map(len, prompts))
    starts = torch.tensor([widest - len(ids) for ids in prompts])
    lengths = torch.tensor([len(ids) for ids in rows["response_ids"]])
    by_token: dict[str, Any] = {
        name: grouped(padded(rows[name], T, 0, dtype, left=False))
        for name, dtype in TOKEN_COLUMNS.items()
        if name in rows
    }
    return Rollouts(
        index=torch.tensor(rows["example"][::K]),
        texts=rows["prompt"][::K],
        references=rows["reference"][::K],
        prompt_ids=padded(prompts, widest, pad_id, torch.int64, left=True),
        prompt_mask=torch.arange(widest) >= starts[:, None],
        labels=grouped(torch.tensor(rows["score"], dtype=torch.float32)),
        response_ids=grouped(padded(rows["response_ids"], T, pad_id, torch.int64, left=False)),
        response_mask=grouped(torch.arange(T) < lengths[:, None]),
        ended=grouped(torch.tensor(rows["ended"])),
        version=rows["version"][0],
        **by_token,
    )
