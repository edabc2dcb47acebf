"""Tests of the weights of preference pairs in complete runs: online, stale, offline and saved samples."""

import pytest

from rlhf.runs.folder import RunFolder
from rlhf.stages.run import run
from tests.end_to_end.conftest import UPDATES_ONLY
from tests.end_to_end.test_algorithms import SCORED, updates

COMMON = ("algo=dpo", *SCORED, *UPDATES_ONLY)


def test_the_first_update_with_importance_weights_is_that_of_plain_dpo(finished, tiny, tmp_path):
    plain = updates(finished(*COMMON))[0]
    folder = RunFolder(tmp_path / "run")
    run(tiny(*COMMON, "algo.weighting=is"), folder)
    first = updates(folder)[0]
    for name in ("loss/policy", "policy/grad_norm"):
        assert first[name] == pytest.approx(plain[name], rel=1e-4)
    for name, expected in (("mean", 1), ("truncated", 0), ("ess", 1)):
        assert first[f"weighting/{name}"] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("weighting", ["is", "wpo"])
def test_pairs_of_an_older_policy_have_unequal_weights(tiny, tmp_path, weighting):
    stale = ("schedule.max_lag=1", "schedule.minibatches=2", "generator.worker=false")
    folder = RunFolder(tmp_path / "run")
    run(tiny(*COMMON, *stale, f"algo.weighting={weighting}", "schedule.total_episodes=96"), folder)
    last = updates(folder)[-1]
    assert last["lag"] == 1 and 0 < last["weighting/ess"] < 1


def test_offline_pairs_are_weighted_by_wpo(tiny, tmp_path):
    folder = RunFolder(tmp_path / "run")
    run(tiny("algo=dpo", "generator=dataset", "algo.weighting=wpo", *UPDATES_ONLY), folder)
    assert all(0 < row["weighting/ess"] <= 1 for row in updates(folder))


def test_saved_rollouts_are_weighted_by_the_log_probs_that_they_contain(finished, tiny, tmp_path):
    saved = finished(*COMMON, "save_generations=true")
    folder = RunFolder(tmp_path / "run")
    source = ("generator=dataset", f"generator.path={saved.path}/generations")
    run(tiny(*COMMON, *source, "scorer=labels", "algo.weighting=is", "generator.temperature=0.7"), folder)
    assert updates(folder)[0]["weighting/ess"] == pytest.approx(1, abs=1e-3)
