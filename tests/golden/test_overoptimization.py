"""Fits, peaks and falls of the gold score against other libraries, and stopping rules on real runs."""

import json

import numpy as np
import pytest

from rlhf.core.overoptimization import fall, fieller, fit, peak, peak_interval, stop_at
from rlhf.core.statistics import mean_interval
from tests import needs
from tests.golden.test_golden import GOLDEN

RUNS = GOLDEN.parent / "prototypes/judges/lab/rl_curves.json"
pytestmark = pytest.mark.skipif(not (GOLDEN.is_dir() and RUNS.is_file()), reason=needs.GOLDEN)


@pytest.fixture(scope="module")
def cases():
    found = {}
    for case in json.loads((GOLDEN / "judges.json").read_text())["cases"]:
        found.setdefault(case["function"], []).append((case["inputs"], case["expected"]))
    return found


def test_coefficients_and_peaks_are_those_of_scipy(cases):
    """Peaks and their intervals are the values that scipy's t test of a - ratio b does not reject."""
    for inputs, expected in cases["fit"]:
        kind = inputs["kind"]
        a, b, squared = np.array([fit(inputs["d"], gain, kind) for gain in inputs["gain"]]).T
        for found, name in ((a, "a"), (b, "b"), (squared, "r2")):
            np.testing.assert_allclose(found, expected[name], rtol=1e-6)
        np.testing.assert_allclose(mean_interval(a)[:3], expected["a_mean"], rtol=1e-6)
        np.testing.assert_allclose(mean_interval(b)[:3], expected["b_mean"], rtol=1e-6)
        ends = [peak(ratio, kind) for ratio in (a.mean() / b.mean(), *fieller(a, b))]
        np.testing.assert_allclose(ends, expected["peak"], rtol=1e-6)
        assert peak_interval(np.array([a, b]), kind)[:3] == pytest.approx(tuple(ends))
    assert len(cases["fit"]) == 2


def test_no_peak_if_the_curvature_may_be_zero_or_is_negative(cases):
    for inputs, expected in cases["fieller"]:
        assert fieller(inputs["a"], inputs["b"]) is expected["peak"] is None
    upwards = np.array([[1.0, 1.1, 0.9, 1.05], [-0.5, -0.55, -0.45, -0.5]])
    assert fieller(*upwards) is not None and peak_interval(upwards, "rl") is None, "a minimum is no peak"


def test_the_fall_begins_where_the_other_seeds_have_their_peak(cases):
    for inputs, expected in cases["fall"]:
        places, found = fall(np.array(inputs["gold"]))
        assert places == expected["places"]
        np.testing.assert_allclose(found[:3], expected["mean"], rtol=1e-6)
        assert found.centre < expected["naive"]


def test_stopping_rules_and_a_fit_on_runs_against_reward_models():
    """A limit on the KL loses less than the slope of the proxy; the first fit has its peak at 0.9."""
    runs = json.loads(RUNS.read_text())
    curves = [
        [np.array([row[name] for row in runs[run]]) for name in ("eval/kl", "eval/score", "eval/gold_score")]
        for run in ("128 pairs, lr 3e-4", "512 pairs, lr 1e-3", "512 pairs, noise 0.25, lr 1e-3")
    ]
    for rule, limit, lost in (
        ("kl", 1.2, [0.00, 0.00, 0.36]),
        ("kl", 1.73, [0.17, 0.02, 0.36]),
        ("kl", 2.2, [0.57, 0.24, 0.36]),
        ("proxy", 0.5, [0.17, 0.22, 1.54]),
        ("never", 0.0, [1.02, 0.22, 1.54]),
    ):
        limit = np.inf if rule == "never" else limit
        found = [gold.max() - gold[stop_at(rule, limit, kl, proxy)] for kl, proxy, gold in curves]
        assert found == pytest.approx(lost, abs=0.0051), (rule, limit)
    kl, _, gold = curves[0]
    a, b, squared = fit(np.sqrt(kl), gold - gold[0], "rl")
    assert (squared, peak(a / b, "rl")) == pytest.approx((0.82, 0.9), abs=0.05)
