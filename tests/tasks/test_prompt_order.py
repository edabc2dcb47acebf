"""The order of prompts over epochs: solved prompts are left out, and a saved position continues."""

import json
from itertools import islice

import pytest
import torch

from tests.tasks.test_task import ListSource, make_task


class Scored:
    """A scored batch: two samples of each prompt with the mean score `score`."""

    def __init__(self, index, score):
        self.index = torch.tensor(index)
        self.scores = torch.tensor([[score - 0.1, score + 0.1]]).repeat(len(index), 1)


def drawn(order, batches):
    return torch.cat([batch.index for batch in islice(order, batches)]).tolist()


def ten_prompts(solved_at=0.5, size=5, pass_rate=None):
    return make_task(prompts_per_update=size).prompts(solved_at=solved_at, pass_rate=pass_rate)


def test_later_epochs_leave_out_the_prompts_that_are_solved_when_they_begin():
    order, plain = ten_prompts(), ten_prompts(None)
    first = drawn(order, 1)
    order.scored(Scored([1, 2, 3, 4, 5], 0.5))
    assert first + drawn(order, 1) == drawn(plain, 2), "the first epoch has all prompts"
    assert sorted(drawn(order, 1)) == [0, 6, 7, 8, 9]
    rest = [i for i in drawn(plain, 2) if i in (0, 6, 7, 8, 9)]
    again = make_task(prompts_per_update=5).prompts(solved_at=0.5)
    again.scored(Scored([1, 2, 3, 4, 5], 0.9))
    assert drawn(again, 3)[10:] == rest, "the remaining prompts keep their order"


def test_a_prompt_below_the_limit_is_not_solved_and_comes_back():
    order = ten_prompts(size=10)
    assert order.scored(Scored([1, 2], 0.6))["prompts/solved"].value() == 0.2
    assert order.scored(Scored([2, 3], 0.4))["prompts/solved"].value() == 0.1
    drawn(order, 1)
    assert sorted(drawn(order, 1)[:9]) == [0, 2, 3, 4, 5, 6, 7, 8, 9]


def test_if_all_prompts_are_solved_none_is_left_out():
    order = ten_prompts(size=10)
    order.scored(Scored(list(range(10)), 1.0))
    drawn(order, 1)
    assert sorted(drawn(order, 1)) == list(range(10))


def test_without_a_limit_nothing_is_solved():
    order = ten_prompts(None)
    assert order.scored(Scored([1], 1.0)) == {} and not order.solved


def test_with_a_pass_rate_the_next_epoch_begins_with_unscored_prompts_and_then_those_of_that_rate():
    task = make_task(prompts_per_update=10)
    order = task.prompts(pass_rate=0.5, solved_at=0.9)
    next(order)
    for row in range(9):
        order.scored(Scored([row], row / 8))
    random = task.order(1).tolist()
    away = {row: round(abs(row / 8 - 0.5), 1) for row in range(8)} | {9: -1}  # row 8 is solved
    assert next(order).index.tolist()[:9] == sorted([i for i in random if i != 8], key=away.__getitem__)


@pytest.mark.parametrize("pass_rate", [None, 0.5])
@pytest.mark.parametrize("after", [1, 2, 3])
def test_a_saved_position_continues_with_the_same_batches(after, pass_rate):
    def batches(order, count):
        found = []
        for number in range(count):
            index = next(order).index.tolist()
            order.scored(Scored(index[:3], 1.0 if number % 2 else 0.0))
            order.scored(Scored(index[3:], 0.4))
            found.append(index)
        return found

    whole = ten_prompts(size=4, pass_rate=pass_rate)
    batches(whole, after)
    saved = json.loads(json.dumps(whole.state_dict()))
    resumed = ten_prompts(size=4, pass_rate=pass_rate)
    resumed.load_state_dict(saved)
    assert batches(resumed, 6) == batches(whole, 6)


def test_rows_are_those_of_the_data_set_if_too_long_prompts_are_skipped():
    task = make_task(ListSource(), prompts_per_update=8, max_prompt_tokens=4)  # skips the rows 4 and 9
    order = task.prompts(solved_at=0.5)
    order.scored(Scored([5, 6], 1.0))
    assert sorted(drawn(order, 1)) == [0, 1, 2, 3, 5, 6, 7, 8]
    assert sorted(drawn(order, 1)[:6]) == [0, 1, 2, 3, 7, 8]
