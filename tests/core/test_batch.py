"""Micro-batches of rollouts: their order and the trimming of padding."""

import pytest
import torch

from rlhf.core.batch import Batch, Budget, microbatches, trim
from tests.tiny_models import tiny_rollouts


def test_longest_rows_come_first_and_each_micro_batch_is_trimmed():
    batch = tiny_rollouts(prompts=6, samples=2)
    lengths = batch.prompt_mask.sum(1) + batch.response_mask.sum(-1).amax(1)
    parts = list(microbatches(batch, Budget(4)))
    seen = torch.cat([rows for rows, _, _ in parts])
    assert sorted(seen.tolist()) == list(range(6))
    assert lengths[seen].tolist() == sorted(lengths.tolist(), reverse=True)
    for rows, micro, _ in parts:
        assert micro.prompt_mask.shape[1] == max(2, int(batch.prompt_mask[rows].sum(1).max()))
        assert micro.response_mask.shape[2] == int(batch.response_mask[rows].sum(-1).max())


@pytest.mark.parametrize("tokens", [1, 30, 45, 1000])
@pytest.mark.parametrize("size", [1, 3])
def test_micro_batches_are_as_large_as_the_limits_allow(tokens, size):
    batch, most = tiny_rollouts(prompts=9, samples=2), 6
    found = [list(microbatches(batch, Budget(most, tokens), rank, size)) for rank in range(size)]
    assert len({len(parts) for parts in found}) == 1, "all ranks run the same number of forwards"
    parts = [part for round in zip(*found, strict=True) for part in round if part[2]]
    assert sorted(torch.cat([rows for rows, _, _ in parts]).tolist()) == list(range(9))

    def cost(rows):
        longest = batch.prompt_mask[rows].sum(1).max() + batch.response_mask[rows].sum(-1).max()
        return 2 * len(rows), 2 * len(rows) * int(longest)

    for (rows, micro, _), following in zip(parts, [*parts[1:], None], strict=True):
        sequences, used = cost(rows)
        assert len(rows) == 1 or (sequences <= most and used <= tokens)
        assert micro.prompt_mask.shape[1] + micro.response_mask.shape[2] <= max(used // sequences, 3)
        if following is not None:
            sequences, used = cost(torch.cat([rows, following[0][:1]]))
            assert sequences > most or used > tokens, "the next prompt does not fit"


def rows_of(batch, **settings) -> list[list[int]]:
    return [part.index.tolist() for part in batch.minibatches(**settings)]


def test_minibatches_of_each_epoch_contain_every_prompt_once_in_another_order():
    batch = tiny_rollouts(prompts=8).extend(Batch, scores=torch.zeros(8, 2))
    parts = rows_of(batch, count=2, epochs=3, seed=0, update=5)
    epochs = [sum(parts[2 * epoch : 2 * epoch + 2], []) for epoch in range(3)]
    assert all(sorted(epoch) == list(range(8)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_the_order_of_minibatches_depends_on_seed_and_update_and_can_be_repeated():
    batch = tiny_rollouts(prompts=8).extend(Batch, scores=torch.zeros(8, 2))
    settings = {"count": 2, "epochs": 1, "seed": 0, "update": 5}
    first = rows_of(batch, **settings)
    assert rows_of(batch, **settings) == first
    assert rows_of(batch, **{**settings, "seed": 1}) != first != rows_of(batch, **{**settings, "update": 6})


def test_trim_keeps_at_least_two_prompt_columns_and_one_response_column():
    batch = tiny_rollouts()
    batch.prompt_mask[:, :-1] = False
    batch.response_mask[..., 1:] = False
    short = trim(batch)
    assert short.prompt_ids.shape[1] == 2 and short.response_ids.shape[2] == 1
    batch.response_mask[:] = False
    assert trim(batch).response_ids.shape[2] == 1
