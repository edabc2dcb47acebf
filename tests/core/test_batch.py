"""Fields of a batch by their declared dimensions; micro-batches: their order and the trimming of padding."""

from dataclasses import dataclass, replace
from typing import Annotated

import pytest
import torch

from rlhf.core.batch import Batch, Budget, Rollouts, concatenated, microbatches, trim
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


def test_prompts_of_a_teacher_have_their_own_width_and_count_for_micro_batches():
    own = tiny_rollouts(prompts=4)
    wide = torch.ones(4, 30, dtype=torch.bool)
    wide[:3, :-1] = False
    batch = replace(own, teacher_ids=torch.arange(120).view(4, 30), teacher_mask=wide)
    first, second = (micro for _, micro, _ in microbatches(batch, Budget(4)))
    assert first.index[0] == 3, "the longest prompt is that of a teacher"
    assert (first.teacher_ids.shape[1], second.teacher_ids.shape[1]) == (30, 2)
    joined = concatenated([first, second], pad_id=0)
    taught = Rollouts(**{**first.as_dict(), **joined}).for_teacher()
    rows = batch.index.argsort()[joined["index"]]
    assert taught.unpadded() == [batch.teacher_ids[row][batch.teacher_mask[row]].tolist() for row in rows]
    assert own.for_teacher() is own


@dataclass(slots=True, kw_only=True)
class Episodes(Batch):
    """A batch with a second mask and figures of each episode: one line a field."""

    tool_mask: Annotated[torch.Tensor, "N K T"]
    state_rewards: Annotated[torch.Tensor, "N K T+1"]
    action_ids: Annotated[torch.Tensor, "N K T"]
    counts: Annotated[dict[str, torch.Tensor], "N K"]
    choices: Annotated[dict[str, torch.Tensor], "N K T C"]
    notes: Annotated[list[str], "N"]
    judge_s: float = 0.0


def episodes(prompts: int, length: int, version: int) -> Episodes:
    """Return episodes of 2 samples; the numbers tell the prompt, the sample and the position."""
    rollouts = trim(tiny_rollouts(prompts=prompts, seed=version))
    grid = (
        100 * torch.arange(prompts)[:, None, None] + 10 * torch.arange(2)[:, None] + torch.arange(length + 1)
    )
    mask = torch.arange(length).expand(prompts, 2, length) < length - 1
    return replace(rollouts, response_ids=grid[..., 1:], response_mask=mask, version=version).extend(
        Episodes,
        scores=torch.zeros(prompts, 2),
        tool_mask=grid[..., 1:] % 2 == 0,
        state_rewards=grid.float(),
        action_ids=grid[..., 1:],
        counts={"turns": grid[..., 0]},
        choices={"ids": grid[..., 1:, None] + torch.tensor([0, 1000])},
        notes=[f"prompt {i}" for i in range(prompts)],
        judge_s=1.5,
    )


def test_a_field_of_a_subclass_is_selected_trimmed_and_moved_by_its_declared_dimensions():
    batch, rows, columns = episodes(3, 4, 0), torch.tensor([2, 0]), torch.tensor([[1], [0], [1]])
    chosen = batch.select(rows)
    assert chosen.notes == ["prompt 2", "prompt 0"] and chosen.judge_s == 1.5
    for name in ("tool_mask", "state_rewards", "action_ids"):
        assert torch.equal(getattr(chosen, name), getattr(batch, name)[rows])
        assert torch.equal(
            getattr(batch.samples(columns), name)[:, 0], getattr(batch, name)[[0, 1, 2], [1, 0, 1]]
        )
    assert chosen.counts["turns"].tolist() == [[200, 210], [0, 10]]
    assert batch.samples(columns).counts["turns"].tolist() == [[10], [100], [210]]
    short = trim(batch)
    assert torch.equal(short.tool_mask, batch.tool_mask[..., :3])
    assert torch.equal(short.state_rewards, batch.state_rewards[..., :4])
    assert short.counts["turns"].shape == (3, 2)
    assert torch.equal(short.choices["ids"], batch.choices["ids"][:, :, :3])
    assert torch.equal(chosen.choices["ids"], batch.choices["ids"][rows])
    moved = batch.to(torch.device("meta"))
    assert {moved.action_ids.device.type, moved.counts["turns"].device.type} == {"meta"}
    assert moved.notes == batch.notes


def test_a_field_of_a_subclass_is_concatenated_and_padded_by_its_declared_dimensions():
    one, other = episodes(2, 3, version=5), episodes(1, 5, version=4)
    fields = concatenated([one, other], pad_id=9)
    assert fields["version"] == 4 and "judge_s" not in fields
    assert fields["notes"] == ["prompt 0", "prompt 1", "prompt 0"]
    assert fields["action_ids"][:, 0].tolist() == [[1, 2, 3, 9, 9], [101, 102, 103, 9, 9], [1, 2, 3, 4, 5]]
    assert fields["state_rewards"][0, 1].tolist() == [10, 11, 12, 13, 0, 0]
    assert fields["tool_mask"][0, 0].tolist() == [False, True, False, False, False]
    assert fields["counts"]["turns"].tolist() == [[0, 10], [100, 110], [0, 10]]
    assert fields["choices"]["ids"].shape == (3, 2, 5, 2)
    assert fields["choices"]["ids"][0, 1].tolist() == [[11, 1011], [12, 1012], [13, 1013], [0, 0], [0, 0]]
    assert fields["choices"]["ids"][2, 0].tolist() == [[each, 1000 + each] for each in range(1, 6)]
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        concatenated([one, other])


def test_a_figure_that_some_batches_lack_is_0_there():
    one, other = episodes(2, 3, version=5), episodes(1, 3, version=4)
    other.counts = {"wins": torch.tensor([[7, 8]])} | other.counts
    for batches, wins in (([one, other], [[0, 0], [0, 0], [7, 8]]), ([other, one], [[7, 8], [0, 0], [0, 0]])):
        counts = concatenated(batches)["counts"]
        assert counts["wins"].tolist() == wins and counts["turns"].shape == (3, 2)


def test_a_field_without_declared_dimensions_is_an_error():
    @dataclass(slots=True, kw_only=True)
    class Forgotten(Batch):
        extra: torch.Tensor

    batch = tiny_rollouts().extend(Forgotten, scores=torch.zeros(4, 2), extra=torch.zeros(4))
    with pytest.raises(AttributeError):
        batch.select(torch.tensor([0]))


def test_only_samples_are_kept_of_a_prompt_and_not_its_stored_responses():
    batch = tiny_rollouts(prompts=2).extend(Batch, scores=torch.zeros(2, 2))
    batch = replace(batch, completions=[["a", "b", "c"]] * 2, labels=torch.zeros(2, 3))
    chosen = batch.samples(torch.tensor([[1], [0]]))
    assert chosen.completions is None and chosen.labels is None
    assert torch.equal(chosen.response_ids[:, 0], batch.response_ids[[0, 1], [1, 0]])
