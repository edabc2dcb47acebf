import torch

from rlhf.core.batch import microbatches, trim
from tests.tiny_models import tiny_rollouts


def test_the_longest_come_first_each_trimmed_to_its_own():
    batch = tiny_rollouts(prompts=6, samples=2)
    lengths = batch.prompt_mask.sum(1) + batch.response_mask.sum(-1).amax(1)
    parts = list(microbatches(batch, 4))
    seen = torch.cat([rows for rows, _, _ in parts])
    assert sorted(seen.tolist()) == list(range(6))
    assert lengths[seen].tolist() == sorted(lengths.tolist(), reverse=True)
    for rows, micro, _ in parts:
        assert micro.prompt_mask.shape[1] == max(2, int(batch.prompt_mask[rows].sum(1).max()))
        assert micro.response_mask.shape[2] == int(batch.response_mask[rows].sum(-1).max())


def test_two_columns_of_prompts_and_one_of_responses_stay():
    batch = tiny_rollouts()
    batch.prompt_mask[:, :-1] = False
    batch.response_mask[..., 1:] = False
    short = trim(batch)
    assert short.prompt_ids.shape[1] == 2 and short.response_ids.shape[2] == 1
    batch.response_mask[:] = False
    assert trim(batch).response_ids.shape[2] == 1
