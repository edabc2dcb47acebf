"""The counters of a run, and the updates at which periodic actions are due."""

from dataclasses import replace

import pytest

from rlhf.core.state import SupervisedState, TrainState
from tests.tiny_models import tiny_rollouts


def due(every, updates=10, at_end=False):
    state = TrainState(num_updates=updates)
    found = []
    for state.update in range(1, updates + 1):
        if state.due(every, at_end):
            found.append(state.update)
    return found


@pytest.mark.parametrize(
    "every, expected",
    [
        (3, [3, 6, 9]),
        (0.25, [3, 5, 8, 10]),
        (0.2, [2, 4, 6, 8, 10]),
        (1, list(range(1, 11))),
        (0.01, list(range(1, 11))),
        (0, []),
    ],
)
def test_due_every_n_updates_or_every_fraction_of_the_run(every, expected):
    assert due(every) == expected


def test_due_at_the_last_update_if_at_end_is_set():
    assert due(4, at_end=True) == [4, 8, 10]
    assert due(0, at_end=True) == []


def test_a_loaded_state_is_the_saved_state_with_the_length_of_the_new_run():
    state, longer = (SupervisedState(num_updates=count, data_size=8) for count in (4, 9))
    state.advance(tiny_rollouts())
    longer.load_state_dict(state.state_dict())
    assert longer == replace(state, num_updates=9)


def test_an_online_run_counts_episodes_version_and_lag():
    state = TrainState(num_updates=2)
    rollouts = tiny_rollouts(prompts=4, samples=2)
    state.advance(rollouts)  # sampled by version 0, trained at version 0
    state.advance(rollouts)  # sampled by version 0, trained at version 1
    assert state.position() == {"update": 2, "version": 2, "episode": 16, "lag": 1}
    assert state.done


def test_a_supervised_run_counts_epochs_and_examples():
    state = SupervisedState(num_updates=4, data_size=8)
    state.advance(tiny_rollouts(prompts=4, samples=1))
    assert state.position() == {"update": 1, "epoch": 0.5, "examples": 4}
