"""Tests of figures about judges against other libraries: scikit-learn, statsmodels, and definitions."""

import json

import numpy as np
import pytest

from rlhf.core.statistics import bradley_terry, length_controlled
from rlhf.scorers.judge import share_of
from tests import needs
from tests.golden.test_golden import GOLDEN

pytestmark = pytest.mark.skipif(not GOLDEN.is_dir(), reason=needs.GOLDEN)
POINTS = {"A": 1.0, "B": 0.0, "tie": 0.5}


def cases(function: str) -> list[dict]:
    found = json.loads((GOLDEN / "judges.json").read_text())["cases"] if GOLDEN.is_dir() else []
    return [case for case in found if case["function"] == function]


@pytest.mark.parametrize("case", cases("length_controlled"), ids=lambda case: case["name"])
def test_the_win_rate_at_equal_lengths_is_that_of_a_logistic_regression(case):
    given, expected = (case[name] for name in ("inputs", "expected"))
    found = length_controlled("rate", np.array(given["points"]), np.array(given["longer"]))
    assert found["rate"] == pytest.approx(expected["rate"], abs=1e-6)
    assert found["eval/length_effect"] == pytest.approx(expected["length_effect"], abs=1e-6)
    bounds = found["rate_low"], found["rate_high"]
    assert bounds == pytest.approx((expected["low"], expected["high"]), abs=1e-6)


@pytest.mark.parametrize("case", cases("two_orders"), ids=lambda case: case["name"])
def test_two_verdicts_score_a_pair(case):
    points = [[POINTS[answer] for answer in pair] for pair in case["inputs"]["answers"]]
    assert [share_of(*pair) for pair in points] == case["expected"]["first"]


@pytest.mark.parametrize("case", cases("two_orders_logprobs"), ids=lambda case: case["name"])
def test_two_probabilities_score_a_pair(case):
    found = [share_of(*pair, soft=True) for pair in case["inputs"]["p_A"]]
    assert found == pytest.approx(case["expected"]["first"], abs=1e-9)


@pytest.mark.parametrize("case", cases("bradley_terry"), ids=lambda case: case["name"])
def test_strengths_are_those_of_bradley_terry(case):
    found = bradley_terry(np.array(case["inputs"]["wins"]), case["inputs"]["precision"])
    assert found == pytest.approx(np.array(case["expected"]["strengths"]), abs=case["tolerance"])
