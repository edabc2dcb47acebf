"""Scores that user code returns."""

import numpy as np
import pytest
import torch

from rlhf.core.formatting import as_score, in_float32


@pytest.mark.parametrize("value", [0.1, np.float64(0.1), np.float32(0.1), torch.tensor(0.1), np.array(0.1)])
def test_a_number_of_any_type_is_the_decimal_that_it_was_made_from(value):
    assert as_score(value) == 0.1


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e39, np.float32("nan"), "1", None, [1]])
def test_what_is_no_finite_number_in_float32_is_no_score(value):
    assert as_score(value) is None


def test_exact_numbers_do_not_change():
    for value in (511 / 512, 16777217, 1 / 3, -0.05000000074505806):
        assert as_score(value) == value


@pytest.mark.parametrize("value", [-0.05000000074505806, 1 / 3, 1e-30, 3.4e38, 16777216.0, 0.0])
def test_the_shortest_decimal_is_the_same_float32(value):
    short = in_float32(value)
    assert np.float32(short) == np.float32(value) and len(repr(short)) <= len(repr(value))
