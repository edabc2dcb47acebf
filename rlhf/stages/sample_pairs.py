"""Preference pairs: two samples of a policy for each prompt, ordered by gold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from datasets import Dataset, DatasetDict
from rich.progress import track

from rlhf.assembly.device import build_device
from rlhf.assembly.models import build_tokenizer
from rlhf.config.algo import Data
from rlhf.config.task import EmbeddedTaskConfig
from rlhf.core.batch import Sampling
from rlhf.core.console import console
from rlhf.processes.ranks import Ranks
from rlhf.scorers.scorer import response_texts

if TYPE_CHECKING:
    from rlhf.config.root import Config
    from rlhf.core.batch import Prompts, Rollouts


CHUNK = 256  # prompts a request


def sample_pairs(cfg: Config) -> DatasetDict:
    """Sample pairs on the training prompts and the held-out prompts of `cfg.task`; columns prompt, chosen,
    rejected.

    Pairs whose gold scores are equal say nothing and are left out.
    """
    from rlhf.assembly.data import build_task
    from rlhf.assembly.generator import build_sampler

    device = build_device(cfg)
    tokenizer = build_tokenizer(cfg)
    generator = build_sampler(cfg, tokenizer, device, seed=cfg.stages.seed)
    gold = cfg.gold.build(cfg, tokenizer, Ranks(device))
    assert gold is not None, "an embedded task has a judge"
    task = build_task(cfg, tokenizer, data=Data.prompts, prompts_per_update=min(CHUNK, cfg.stages.pairs))

    def requests() -> Iterator[tuple[str, Prompts]]:
        batches = task.prompts(0)
        for _ in range(-(-cfg.stages.pairs // task.prompts_per_update)):
            yield "train", next(batches)
        assert isinstance(cfg.task, EmbeddedTaskConfig)
        held_out = task.held_out(min(2 * cfg.eval.prompts, cfg.task.validation_size))  # some are tied
        for rows in torch.arange(len(held_out)).split(CHUNK):
            yield "validation", held_out.select(rows)

    columns: dict[str, dict[str, list[str]]] = {}
    found = list(requests())
    for request, (split, prompts) in enumerate(track(found, "sampling pairs", console=console)):
        sampling = Sampling(
            samples=2,
            temperature=cfg.stages.pairs_temperature,
            response_length=cfg.generator.response_length,
            purpose="pairs",
            request=request,
        )
        rollouts = generator.submit(prompts, sampling).result()
        add_pairs(
            columns.setdefault(split, {"prompt": [], "chosen": [], "rejected": []}),
            rollouts,
            gold.score(rollouts),
            response_texts(rollouts, tokenizer),
        )
    return DatasetDict({split: Dataset.from_dict(rows) for split, rows in columns.items()})


def add_pairs(
    columns: dict[str, list[str]], rollouts: Rollouts, scores: torch.Tensor, texts: list[list[str]]
) -> None:
    """Append the pairs of `rollouts` (K = 2) that are not tied."""
    for prompt, (first, second), (a, b) in zip(rollouts.texts, texts, scores.tolist(), strict=True):
        if a != b:
            columns["prompt"].append(prompt)
            columns["chosen"].append(first if a > b else second)
            columns["rejected"].append(second if a > b else first)
