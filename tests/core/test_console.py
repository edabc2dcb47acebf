"""The progress display: a live bar, plain lines at intervals, or no output."""

import pytest

from rlhf.core import console
from rlhf.core.console import progress


@pytest.fixture
def lines(monkeypatch):
    printed = []
    monkeypatch.setattr(console, "say", printed.append)
    return printed


def test_plain_progress_is_a_line_at_intervals_and_at_the_end(lines, monkeypatch):
    seconds = iter([0.0, 1.0, 5.0, 6.0])
    monkeypatch.setattr(console.time, "monotonic", lambda: next(seconds))
    with progress("scoring pairs", 4000, "plain") as advance:
        for _ in range(4):
            advance(1000)
    assert lines == [f"scoring pairs  {done} of 4,000" for done in ("1,000", "3,000", "4,000")]


def test_progress_that_is_off_or_live_prints_no_lines(lines, capsys):
    for mode in ("off", "live"):
        with progress("scoring pairs", 2, mode) as advance:
            advance()
    assert lines == []


def test_auto_is_plain_without_a_terminal(lines):
    with progress("scoring pairs", 1, "auto") as advance:
        advance()
    assert lines == ["scoring pairs  1 of 1"]
