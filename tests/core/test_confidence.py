"""Confidence intervals: Wilson for a rate, normal for a mean."""

import pytest

from rlhf.core.formatting import bounds, mean_bounds, rate, text, wilson


@pytest.mark.parametrize(  # Newcombe, Statistics in Medicine 17 (1998), table I, method 3
    ("successes", "count", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_interval_matches_published_values(successes, count, low, high):
    assert wilson(successes / count, count) == pytest.approx((low, high), abs=5e-5)


def test_interval_without_observations_is_zero_to_one():
    assert wilson(0.0, 0) == (0.0, 1.0)


def test_a_rate_has_the_bounds_of_its_own_wilson_interval_which_is_not_centred_and_ends_at_1():
    row = rate("eval/win_rate", 1.0, 256)
    assert [*row] == ["eval/win_rate", "eval/win_rate_low", "eval/win_rate_high"]
    assert [*row.values()] == pytest.approx([1.0, 0.98522, 1.0], abs=5e-6)
    assert text(row, "eval/win_rate") == "1.000 [0.985, 1.000]"
    assert bounds(rate("x", 61 / 64, 64), "x") == pytest.approx((0.87100, 0.98393), abs=5e-6)


def test_rows_of_earlier_versions_with_half_the_width_have_an_interval_too():
    assert bounds({"eval/score": 0.5, "eval/score_ci95": 0.125}, "eval/score") == (0.375, 0.625)
    assert text({"eval/score": 0.5, "eval/score_ci95": 0.125}, "eval/score") == "0.500 [0.375, 0.625]"
    assert text({"x": -15.8, "x_low": -17.694, "x_high": 1.076}, "x") == "-15.80 [-17.7, 1.08]"
    assert bounds({"eval/score": 0.5}, "eval/score") is None and text({}, "eval/score") == ""


def test_the_interval_of_a_mean_is_1_96_standard_errors_to_both_sides():
    values = [1.0, 2.0, 3.0, 4.0]  # standard deviation 1.290994, standard error 0.645497
    assert mean_bounds(values) == pytest.approx(
        (2.5 - 1.959964 * 0.645497, 2.5 + 1.959964 * 0.645497), rel=1e-5
    )
    assert mean_bounds([2.0, 2.0]) == (2.0, 2.0) and mean_bounds([1.0]) is None
