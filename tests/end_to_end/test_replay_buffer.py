"""Runs with a replay buffer (`schedule.replay`): equal results after a resume, lag and age of the samples."""

import pytest

from tests.end_to_end.conftest import rows

RUN = [
    *("schedule.total_episodes=80", "schedule.replay=3", "schedule.minibatches=2", "schedule.max_lag=1"),
    *("generator.worker=false", "schedule.save_every=1", "schedule.eval_every=2"),
]
ALGORITHMS = ["dpo", "ppo"]


def trained(folder):
    return [row for row in rows(folder) if "lr" in row]


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_lag_and_age_are_those_of_the_prompts_that_were_trained_on(finished, algo):
    found = trained(finished(*RUN, f"algo={algo}"))
    assert [row["episode"] for row in found] == [16 * (t + 1) for t in range(5)], "one new batch per update"
    for t, row in enumerate(found):
        newest, oldest = min(t, 1), t - max(0, t - 3)  # version max(0, t - 1) sampled batch t
        assert newest <= row["replay/age"] <= row["lag"] <= oldest
        assert newest <= row["mismatch/token_lag"] <= oldest
    assert found[-1]["replay/age"] > 1 and found[-1]["lag"] > 1, "earlier prompts were drawn"


def test_the_first_update_with_replay_equals_the_first_update_without(finished):
    without = [word for word in RUN if not word.startswith("schedule.replay")]
    one, other = (trained(finished(*words, "algo=dpo")) for words in (RUN, without))
    shared = one[0].keys() & other[0].keys()
    assert one[0].keys() - shared == {"replay/age", "mismatch/token_lag"} and other[0].keys() == shared
    assert {name: one[0][name] for name in shared} == other[0]
    assert one[-1] != other[-1]
