"""Confidence intervals: Wilson for a rate, normal for a mean."""

import pytest

from rlhf.core.confidence import mean_half_width, rate_half_width, wilson


@pytest.mark.parametrize(  # Newcombe, Statistics in Medicine 17 (1998), table I, method 3
    ("successes", "count", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_interval_matches_published_values(successes, count, low, high):
    assert wilson(successes / count, count) == pytest.approx((low, high), abs=5e-5)


def test_interval_of_rate_one_mirrors_interval_of_rate_zero():
    low, high = wilson(0.0, 16)
    assert wilson(1.0, 16) == pytest.approx((1 - high, 1 - low)) and low == 0.0 and high < 0.2


def test_interval_without_observations_is_zero_to_one():
    assert wilson(0.0, 0) == (0.0, 1.0)


def test_half_width_of_a_rate_is_half_of_its_wilson_interval():
    low, high = wilson(0.25, 40)
    assert rate_half_width(0.25, 40) == pytest.approx((high - low) / 2)


def test_half_width_of_a_mean_is_1_96_standard_errors():
    values = [1.0, 2.0, 3.0, 4.0]  # standard deviation 1.290994, standard error 0.645497
    assert mean_half_width(values) == pytest.approx(1.959964 * 0.645497, rel=1e-5)
    assert mean_half_width([2.0, 2.0]) == 0.0


def test_one_value_has_no_interval():
    assert mean_half_width([1.0]) is None
