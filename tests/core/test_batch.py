"""Micro-batches of rollouts: their order and the trimming of padding."""

import torch

from rlhf.core.batch import microbatches, trim
from tests.tiny_models import tiny_rollouts


def test_longest_rows_come_first_and_each_micro_batch_is_trimmed():
    batch = tiny_rollouts(prompts=6, samples=2)
    lengths = batch.prompt_mask.sum(1) + batch.response_mask.sum(-1).amax(1)
    parts = list(microbatches(batch, 4))
    seen = torch.cat([rows for rows, _, _ in parts])
    assert sorted(seen.tolist()) == list(range(6))
    assert lengths[seen].tolist() == sorted(lengths.tolist(), reverse=True)
    for rows, micro, _ in parts:
        assert micro.prompt_mask.shape[1] == max(2, int(batch.prompt_mask[rows].sum(1).max()))
        assert micro.response_mask.shape[2] == int(batch.response_mask[rows].sum(-1).max())


def test_trim_keeps_at_least_two_prompt_columns_and_one_response_column():
    batch = tiny_rollouts()
    batch.prompt_mask[:, :-1] = False
    batch.response_mask[..., 1:] = False
    short = trim(batch)
    assert short.prompt_ids.shape[1] == 2 and short.response_ids.shape[2] == 1
    batch.response_mask[:] = False
    assert trim(batch).response_ids.shape[2] == 1
