"""The progress display, the stages of a command, and the nested phases of an update."""

import io
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from rlhf.terminal import console as module
from rlhf.terminal.console import Phases, ProgressDisplay, Stages, progress

ITEMS = ["reward 1.460", "KL 0.644", "accuracy 0.710", "5,120 episodes", "win rate 0.820 at update 24"]


@pytest.fixture
def lines(monkeypatch):
    printed = []
    monkeypatch.setattr(module, "say", lambda text, style=None: printed.append(text))
    return printed


@pytest.fixture
def seconds(monkeypatch):
    """Return a list with one number, the time in seconds that the display sees."""
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    return now


NAMES = ["SFT model", "reward model", "dpo tldr_mini"]


def screen(display: ProgressDisplay, width: int, encoding: str = "utf-8") -> list[str]:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(file=file, width=width, color_system=None)
    console.print(display)
    file.seek(0)
    return file.read().splitlines()


def shown(seconds, title="[4/4] dpo tldr_mini") -> ProgressDisplay:
    """Return a display after 16 of 40 updates of 3 seconds."""
    seconds[0] = 0.0
    display = ProgressDisplay(title, 40, "off", unit="update")
    seconds[0] = 48.0
    display.update(16, ITEMS)
    return display


@pytest.mark.parametrize("width", [60, 80, 100, 140])
def test_title_bar_count_and_time_left_are_visible_at_every_width(seconds, width):
    first, second = screen(shown(seconds), width)
    title, bar, after = first.partition("━")[0], first.count("━") + first.count("─"), first[-30:]
    assert title == "[4/4] dpo tldr_mini  " and 10 <= bar <= 30
    assert after.endswith("update 16/40  1:12 left")
    assert max(len(first), len(second)) < width
    assert second.startswith("  reward 1.460  KL 0.644  accuracy 0.710")
    assert second == "  " + "  ".join(ITEMS) or all(second.count(item) == (item in second) for item in ITEMS)


def test_the_bar_shows_the_finished_part_and_is_ascii_on_an_ascii_terminal(seconds):
    (first, _) = screen(shown(seconds), 80, "ascii")
    assert first.count("#") == 12 and first.count("-") == 18
    assert screen(shown(seconds), 80)[0].count("━") == 12


def test_a_long_title_loses_its_last_words_and_not_the_bar(seconds):
    (first, _) = screen(shown(seconds, "[1/4] grpo_with_a_long_name of another_task_name"), 60)
    assert first.startswith("[1/4]  ━━━━") and first.endswith("update 16/40  1:12 left")
    (first, *_) = screen(shown(seconds, "tldr_mini"), 34)
    assert len(first) < 34 and first.endswith("─  update 16/40  1:12 left")


def test_time_left_counts_down_between_two_updates(seconds):
    display = shown(seconds)
    seconds[0] += 10
    assert screen(display, 80)[0].endswith("1:02 left")
    seconds[0] += 1000  # longer than the 16 updates before took
    assert screen(display, 80)[0].endswith("0:24 left")


def test_a_resumed_run_estimates_the_time_left_from_its_own_updates(seconds):
    display = ProgressDisplay("dpo", 40, "off", done=20)
    assert display.left_s is None
    seconds[0] = 5.0
    display.update(30)
    assert display.left_s == 5.0


def test_a_slow_first_update_does_not_count_once_there_are_later_updates(seconds):
    display = ProgressDisplay("dpo", 10, "off")
    left = []
    for second in (60.0, 61.0, 62.0):
        seconds[0] = second
        display.update(display.done + 1)
        left.append(display.left_s)
    assert left == [540.0, 8.0, 7.0]


def test_work_before_the_first_unit_does_not_count(seconds):
    display = ProgressDisplay("dpo", 10, "off")
    seconds[0] = 60.0
    display.begin()
    seconds[0] = 61.0
    display.update(1)
    assert display.left_s == 9.0


def test_plain_progress_is_a_line_at_intervals_and_at_the_end(lines, seconds):
    with progress("scoring pairs", 4000, "plain") as advance:
        for second in (0.1, 1.0, 5.1, 6.0):
            seconds[0] = second
            advance(1000)
    assert lines == [
        "scoring pairs  1,000/4,000  0:00 left",
        "scoring pairs  3,000/4,000  0:02 left",
        "scoring pairs  4,000/4,000  0:00 left",
    ]


def test_plain_lines_have_at_most_100_columns(lines, seconds):
    display = ProgressDisplay("[4/4] dpo tldr_mini", 40, "plain", unit="update")
    seconds[0] = 48.0
    display.update(16, ITEMS)
    assert lines == [
        "[4/4] dpo tldr_mini  update 16/40  1:12 left  reward 1.460  KL 0.644  accuracy 0.710  5,120 episodes"
    ]


def test_progress_that_is_off_or_live_prints_no_lines(lines, seconds, capsys):
    for mode in ("off", "live"):
        with progress("scoring pairs", 2, mode) as advance:
            advance()
    with Stages(["SFT model", "dpo"]).enter(1), progress("scoring pairs", 2, "off") as advance:
        seconds[0] = 10.0
        advance()
    assert lines == []


@pytest.mark.parametrize("width", [60, 100])
def test_the_phase_of_the_current_update_comes_before_the_metrics_of_the_last_one(seconds, width):
    display = shown(seconds)
    display.phases = Phases()
    with display.phases("sampling", 256) as sampled:
        sampled(64)
        assert screen(display, width)[1].startswith("  sampling 64/256  reward 1.460")
        assert "update 16/40  1:12 left  sampling 64/256  reward" in display.line(100)
    assert "sampling" not in "".join(screen(display, width))


def test_a_long_update_is_a_plain_line_at_intervals_with_its_phase(lines, monkeypatch):
    monkeypatch.setattr(module, "_PHASE_EVERY_S", 0.05)
    phases, told = Phases(), threading.Event()
    monkeypatch.setattr(module, "say", lambda line: (lines.append(line), told.set()))
    display = ProgressDisplay("dpo", 10, "plain", unit="update", phases=phases)
    with phases("training", 4):
        assert told.wait(60)
    display.close()
    assert lines[0] == "dpo  update 0/10  training 0/4"


@pytest.mark.parametrize("mode", ["plain", "off"])
def test_no_line_is_printed_outside_of_phases_or_after_the_display_is_closed(lines, monkeypatch, mode):
    monkeypatch.setattr(module, "_PHASE_EVERY_S", 0.01)
    phases = Phases()
    display = ProgressDisplay("dpo", 10, mode, phases=phases)
    time.sleep(0.05)
    if mode == "plain":
        display.close()
    with phases("training", 4):
        time.sleep(0.05)
    assert lines == []


def test_updates_without_a_row_of_metrics_count(seconds):
    display = ProgressDisplay("dpo", 10, "off", unit="update")
    for second in (5.0, 6.0):
        seconds[0] = second
        display.reach(display.done + 1)
    assert display.count == "update 2/10" and display.left_s == 8.0


def test_auto_is_plain_without_a_terminal_even_with_forced_colors(lines, monkeypatch):
    monkeypatch.setattr(module.console, "is_interactive", True)  # as with FORCE_COLOR=1
    with progress("scoring pairs", 1, "auto") as advance:
        advance()
    assert lines == ["scoring pairs  1/1  0:00 left"]


def test_auto_is_plain_if_jobs_in_parallel_share_the_terminal(monkeypatch):
    terminal = SimpleNamespace(is_interactive=True, file=SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr(module, "console", terminal)
    monkeypatch.setattr(module, "job", "job 2 ")
    assert ProgressDisplay("dpo", 1, "auto").mode == "plain"


def test_the_time_of_all_stages_is_estimated_once(lines, seconds):
    with Stages(["SFT model", "preference pairs", "dpo"]).enter(1):
        display = ProgressDisplay(module.title("sft"), 10, "plain")
        for second in (1, 2, 3):
            seconds[0] = second
            display.update(second)
    assert [line for line in lines if "all" in line] == [
        "[1/3] SFT model: 0:08 left; all 3 stages: about 0:30"
    ]


def test_the_last_stage_shows_no_time_of_all_stages(lines, seconds):
    with Stages(["SFT model", "dpo"]).enter(2), progress("sampling", 2, "plain") as advance:
        seconds[0] = 10.0
        advance()
    assert lines == ["[2/2] sampling  1/2  0:10 left"]


def test_stages_print_number_folder_and_time(lines):
    made = Stages(NAMES)
    with made.run(1, Path("a")):
        assert module.prefix() == "[1/3] " and module.title("sft") == "[1/3] SFT model"
    made.skip(2, Path("b"))
    assert lines == [
        "[1/3] SFT model: a",
        "[1/3] SFT model: done in 0:00",
        "[2/3] reward model: finished, in b",
    ]
    assert module.current is None


def test_a_later_stage_is_expected_to_last_as_long_as_the_mean_of_the_stages_so_far(lines, seconds):
    made = Stages(["a", "b", "c", "d"])
    made.skip(1, Path("a"))
    for number, second, left, total in ((2, 6.0, 4.0, 30.0), (3, 20.0, 20.0, 60.0), (4, 50.0, 1.0, None)):
        with made.enter(number):
            seconds[0] = second
            assert module.current.total_s(left) == total


def test_a_run_that_is_a_stage_keeps_the_number_of_the_stage(lines):
    with Stages(["RLHF", "evaluation"]).run(1, Path("a")):
        inner = Stages(NAMES)
        inner.skip(1, Path("b"))
        with inner.enter(3):
            assert module.title("dpo tldr_mini") == "[1/2] RLHF"
            assert module.prefix() == "[1/2] " and module.current is not inner
    assert lines == ["[1/2] RLHF: a", "[1/2] RLHF: done in 0:00"]


def test_a_command_with_one_stage_has_no_numbers():
    with Stages(["dpo tldr_mini"]).enter(1):
        assert module.prefix() == "" and module.title("dpo of pythia") == "dpo of pythia"


def test_titles_of_jobs_in_parallel_begin_with_the_number_of_the_job(lines, monkeypatch):
    monkeypatch.setattr(module, "job", "job 2 ")
    made = Stages(["SFT model", "dpo tldr_mini"])
    with made.run(1, Path("a")):
        assert module.prefix() == "job 2 [1/2] " and module.title("sft") == "job 2 [1/2] SFT model"
    with made.enter(2):
        assert module.prefix() == "job 2 [2/2] "
    assert lines[0] == "job 2 [1/2] SFT model: a"
    with Stages(["dpo"]).enter(1):
        assert module.title("dpo tldr_mini") == "job 2 dpo tldr_mini"


def test_a_failed_stage_is_not_reported_as_done(lines):
    with pytest.raises(ZeroDivisionError), Stages(NAMES).run(1, Path("a")):
        raise ZeroDivisionError
    assert lines == ["[1/3] SFT model: a"] and module.current is None


def test_the_text_has_the_finished_units_of_every_phase():
    phases = Phases()
    assert phases.text() == ""
    with phases("evaluating"), phases("sampling", 1024) as sampled:
        sampled(256)
        with phases("token", 53) as token:
            token()
            token()
            assert phases.text() == "evaluating, sampling 256/1,024, token 2/53"
        assert phases.text() == "evaluating, sampling 256/1,024"
    assert phases.text() == ""


def test_an_inner_phase_of_one_unit_is_left_out():
    phases = Phases()
    with phases("training", 4), phases("micro-batch", 1):
        assert phases.text() == "training 0/4"
    with phases("training", 1), phases("micro-batch", 8):
        assert phases.text() == "training, micro-batch 0/8"


def test_a_phase_without_units_shows_its_seconds(seconds):
    phases = Phases()
    with phases("scoring"):
        assert phases.text() == "scoring"
        seconds[0] = 75.0
        assert phases.text() == "scoring 1:15"


def test_more_units_than_expected_are_not_shown():
    phases = Phases()
    with phases("log-probs", 4) as done:
        done(6)
        assert phases.text() == "log-probs 4/4"


def test_a_phase_ends_with_an_exception_that_is_raised_between_units_of_an_inner_phase():
    phases, calls = Phases(), []

    def stop():
        calls.append(phases.text())
        if len(calls) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), phases("evaluating", between=stop), phases("token", 9) as token:
        for _ in range(9):
            token()
    assert calls == ["evaluating, token 1/9", "evaluating, token 2/9"] and phases.text() == ""
