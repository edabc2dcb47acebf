"""Sampling of preference pairs: two responses of a policy per prompt, ordered by gold score."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from datasets import Dataset, DatasetDict

from rlhf.assembly.models import build_device, build_tokenizer
from rlhf.assembly.training import build_sampler, build_scorer, build_task
from rlhf.config.algo import Data
from rlhf.core.batch import Sampling
from rlhf.core.progress import progress
from rlhf.processes.ranks import Ranks
from rlhf.scorers.scorer import response_texts

if TYPE_CHECKING:
    from rlhf.config.root import Config
    from rlhf.core.batch import Rollouts

CHUNK = 256  # prompts per request


def sample_pairs(cfg: Config) -> DatasetDict:
    """Sample pairs for training and held-out prompts, and return them as splits train and validation.

    The columns are prompt, chosen and rejected. Pairs whose gold scores tie are skipped.
    """
    device = build_device(cfg)
    tokenizer = build_tokenizer(cfg)
    generator = build_sampler(cfg, tokenizer, device, seed=cfg.stages.seed)
    gold = build_scorer(cfg, "gold", tokenizer, Ranks(device))
    assert gold is not None, "an embedded task has a judge"
    task = build_task(cfg, tokenizer, Data.prompts, min(CHUNK, cfg.stages.pairs), judge=True)

    batches, updates = task.prompts(), -(-cfg.stages.pairs // task.prompts_per_update)
    requests = [("train", next(batches)) for _ in range(updates)]
    held_out = task.held_out(2 * cfg.eval.prompts)  # twice the needed number, because tied pairs are skipped
    requests += [("validation", held_out.select(rows)) for rows in torch.arange(len(held_out)).split(CHUNK)]
    columns: dict[str, dict[str, list[str]]] = {}
    with progress("sampling pairs", len(requests), cfg.progress.value) as advance:
        for request, (split, prompts) in enumerate(requests):
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
                gold.compare(*gold.scored(rollouts)),
                response_texts(rollouts, tokenizer),
            )
            advance(1)
    return DatasetDict({split: Dataset.from_dict(rows) for split, rows in columns.items()})


def add_pairs(
    columns: dict[str, list[str]], rollouts: Rollouts, scores: torch.Tensor, texts: list[list[str]]
) -> None:
    """Append the pairs of `rollouts` (K = 2) with different scores [N, 2] to `columns`."""
    for prompt, (first, second), (a, b) in zip(rollouts.texts, texts, scores.tolist(), strict=True):
        if a != b:
            columns["prompt"].append(prompt)
            columns["chosen"].append(first if a > b else second)
            columns["rejected"].append(second if a > b else first)
