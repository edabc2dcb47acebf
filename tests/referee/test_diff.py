"""Differences of runs: none between repetitions, and the first quantity that a setting changes."""

import pytest

from rlhf.referee.bundle import updates_of
from rlhf.referee.file import BatchFile
from rlhf.referee.replay import bundles_of, differences, load, report

pytestmark = pytest.mark.run


def first(trained, tmp_path, *words):
    """Return the first update and the first quantity in which a run differs from the run without `words`."""
    update, files = bundles_of([trained(), trained(*words)], tmp_path)
    return update, differences(*map(load, files))[0].term


def test_runs_differ_first_in_what_a_setting_changes(trained, recorded, tmp_path, capsys):
    assert bundles_of([trained(), trained(again=1)], tmp_path) == (None, [])
    assert report(differences(load(recorded()), load(recorded())), False) == 0
    assert "same bits" in capsys.readouterr().out
    # in the first step the policy is still the reference, apart from rounding
    update, name = first(trained, tmp_path, "algo.kl_coef=0.2")
    assert update == 1 and name in ("step 1: logprob_grads", "step 2: logprob_grads")
    assert first(trained, tmp_path, "optim.eps=1e-3") == (1, "step 2: logprobs")


def test_only_other_machines_may_round_differently(recorded, capsys):
    a = load(recorded())
    name = "step1/logprobs"
    tensors, elsewhere = {**a.tensors, name: a.tensors[name] + 1e-6}, {"machine": ["cpu", "other", 1]}
    here = differences(a, BatchFile(tensors, {**a.header, "after": "0"}))
    there = differences(a, BatchFile(tensors, {**a.header, "after": "0", **elsewhere}))
    for found in (here, there):
        assert [each.term for each in found] == ["step 1: logprobs", "weights after the update"]
    assert report(there, False) == 0 and report(here, False) == 1
    far = BatchFile({**a.tensors, name: a.tensors[name] + 1e-3}, {**a.header, **elsewhere})
    assert report(differences(a, far), False) == 1
    assert "step 1: logprobs" in capsys.readouterr().out


def test_the_rows_of_updates_have_no_times(trained):
    rows = updates_of(trained())
    assert [*rows] == [1, 2] and "loss/policy" in rows[1]
    assert not [name for name in rows[1] if name.startswith(("time/", "throughput/", "memory/"))]
