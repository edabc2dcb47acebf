"""Formatting of numbers, durations, paths, and texts that must fit a width."""

from pathlib import Path

import pytest

from rlhf.core.formatting import clock, figure, fitting, lines_of, short_path, shortened


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
