"""Numbers and titles of the stages of a command."""

from pathlib import Path

import pytest

from rlhf.terminal import progress
from rlhf.terminal.progress import Stages

NAMES = ["SFT model", "reward model", "dpo tldr_mini"]


@pytest.fixture
def lines(monkeypatch):
    printed = []
    monkeypatch.setattr(progress, "say", lambda text, style=None: printed.append(text))
    return printed


def test_stages_print_number_folder_and_time(lines):
    made = Stages(NAMES)
    with made.run(1, Path("a")):
        assert progress.prefix() == "[1/3] " and progress.title("sft") == "[1/3] SFT model"
    made.skip(2, Path("b"))
    assert lines == [
        "[1/3] SFT model: a",
        "[1/3] SFT model: done in 0:00",
        "[2/3] reward model: finished, in b",
    ]
    assert progress.current is None and made.outermost


def test_a_later_stage_is_expected_to_last_as_long_as_the_mean_of_the_stages_so_far(lines, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    made = Stages(["a", "b", "c", "d"])
    made.skip(1, Path("a"))
    for number, second, left, total in ((2, 6.0, 4.0, 30.0), (3, 20.0, 20.0, 60.0), (4, 50.0, 1.0, None)):
        with made.enter(number):
            now[0] = second
            assert progress.current.total_s(left) == total


def test_a_run_that_is_a_stage_keeps_the_number_of_the_stage(lines):
    with Stages(["RLHF", "evaluation"]).run(1, Path("a")):
        inner = Stages(NAMES)
        inner.skip(1, Path("b"))
        assert inner.prefix(3) == "[1/2] " and not inner.outermost
        with inner.enter(3):
            assert progress.title("dpo tldr_mini") == "[1/2] RLHF"
    assert lines == ["[1/2] RLHF: a", "[1/2] RLHF: done in 0:00"]


def test_a_command_with_one_stage_has_no_numbers():
    with Stages(["dpo tldr_mini"]).enter(1):
        assert progress.prefix() == "" and progress.title("dpo of pythia") == "dpo of pythia"


def test_titles_of_jobs_in_parallel_begin_with_the_number_of_the_job(lines, monkeypatch):
    monkeypatch.setattr(progress, "job", "job 2 ")
    made = Stages(["SFT model", "dpo tldr_mini"])
    with made.run(1, Path("a")):
        assert progress.prefix() == "job 2 [1/2] " and progress.title("sft") == "job 2 [1/2] SFT model"
    assert made.prefix(2) == "job 2 [2/2] " and lines[0] == "job 2 [1/2] SFT model: a"
    with Stages(["dpo"]).enter(1):
        assert progress.title("dpo tldr_mini") == "job 2 dpo tldr_mini"


def test_a_failed_stage_is_not_reported_as_done(lines):
    with pytest.raises(ZeroDivisionError), Stages(NAMES).run(1, Path("a")):
        raise ZeroDivisionError
    assert lines == ["[1/3] SFT model: a"] and progress.current is None
