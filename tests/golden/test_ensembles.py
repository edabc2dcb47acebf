"""The best of n by a proxy, and the scores of ensembles, against numbers by enumeration and by definition."""

import json

import numpy as np
import pytest
import torch

from rlhf.core.overoptimization import best_of, best_of_kl
from rlhf.scorers.scorer import combined
from tests import needs
from tests.golden.test_golden import GOLDEN

pytestmark = pytest.mark.skipif(not (GOLDEN / "judges.json").is_file(), reason=needs.GOLDEN)


def cases(function: str) -> list[tuple[dict, dict, float]]:
    """Return the inputs, the results and the tolerance of the cases of a function."""
    every = json.loads((GOLDEN / "judges.json").read_text())["cases"]
    found = [each for each in every if each["function"] == function]
    assert found
    return [(each["inputs"], each["expected"], each["tolerance"]) for each in found]


def test_the_best_of_n_is_the_mean_over_all_subsets_of_n_samples():
    for given, expected, tolerance in cases("best_of_n"):
        for name in ("gold", "proxy"):
            found = [best_of(n, np.array(given["proxy"]), np.array(given[name])) for n in given["n"]]
            assert found == pytest.approx(expected[name], abs=tolerance)
        assert [*map(best_of_kl, given["n"])] == pytest.approx(expected["kl"], abs=tolerance)


def test_scores_of_ensembles_are_those_of_their_definitions():
    for given, expected, tolerance in cases("ensemble"):
        members = torch.tensor(given["members"], dtype=torch.float64)
        for how in ("mean", "worst", "uncertainty"):
            found = combined(members, how, given["lam"])
            assert found.tolist() == pytest.approx(expected[how], abs=tolerance)
