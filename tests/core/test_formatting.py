"""Formatting of numbers, durations, paths and texts that must fit a width, scores, and intervals."""

from pathlib import Path

import numpy as np
import pytest
import torch

from rlhf.core.formatting import (
    as_score,
    bounds,
    clock,
    figure,
    fitting,
    in_float32,
    lines_of,
    mean_bounds,
    rate,
    short_path,
    shortened,
    text,
    wilson,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0.000"),
        (-3.95e-07, "0.000"),
        (-0.0004999, "0.000"),
        (-0.00051, "-0.001"),
        (0.648, "0.648"),
        (9.9996, "10.00"),
        (-47.0, "-47.00"),
        (123.45, "123.5"),
        (12345.6, "12,346"),
        (2, "2"),
        (float("nan"), "nan"),
        (float("-inf"), "-inf"),
    ],
)
def test_figures_have_few_digits_and_rounding_noise_is_zero(value, text):
    assert figure(value) == text


def test_durations_are_minutes_and_seconds_and_hours_from_one_hour_on():
    assert [clock(s) for s in (-1, 0, 59.6, 600, 3661)] == ["0:00", "0:00", "1:00", "10:00", "1:01:01"]


def test_items_that_do_not_fit_are_omitted_from_the_right():
    items = ["reward 1.460", "KL 0.644", "5,120 episodes"]
    assert fitting(items, 22) == "reward 1.460  KL 0.644"
    assert fitting(items, 21) == "reward 1.460"
    assert fitting(items, 5) == ""


def test_items_are_divided_into_lines_between_items():
    items = ["title:", "win rate 0.5", "KL 1"]
    assert lines_of(items, 25, "  ") == ["title:  win rate 0.5", "  KL 1"]
    assert lines_of(items, 26, "  ") == ["title:  win rate 0.5  KL 1"]
    assert lines_of(["longer than the width"], 5) == ["longer than the width"]


def test_texts_are_cut_between_words():
    text = "one two\nthree  four"
    assert shortened(text, 18) == "one two three four"
    assert shortened(text, 17) == "one two three ..."
    assert shortened(text, 17, end=True) == "... three four"
    assert shortened("x" * 20, 10) == "xxxxxx ..." and shortened("x" * 20, 10, end=True) == "... xxxxxx"
    assert all(len(shortened(text, width)) <= width for width in range(8, 20))


def test_control_characters_of_a_completion_are_not_printed():
    assert shortened("red\x1b[31m text\a", 80) == "red?[31m text?"


def test_paths_below_the_current_folder_are_relative(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert short_path(tmp_path / "outputs" / "run") == "outputs/run"
    assert short_path(Path("outputs")) == "outputs" and short_path(Path("/outputs")) == "/outputs"


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
