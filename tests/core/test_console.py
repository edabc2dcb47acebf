"""Terminal output with an ASCII encoding, a closed pipe, and train.log."""

import os
import subprocess
import sys

import pytest

from rlhf.terminal import console
from rlhf.terminal.console import print_error, say_items

PROGRAM = """
import logging, sys
from rlhf.terminal.console import console, say, transcript
from rlhf.terminal.console import prepare_output, print_error
prepare_output()
log = logging.getLogger("rlhf")
log.setLevel(logging.INFO)
log.addHandler(logging.FileHandler(sys.argv[1], encoding="utf-8"))
for line in range(20000):
    say(f"line {line} \\N{HORIZONTAL ELLIPSIS}")
print("after the lines")
print_error("the end \\N{HORIZONTAL ELLIPSIS}")
"""


def start(tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **environment):
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, tmp_path / "train.log"],
        env={**os.environ, **environment},
        stdout=stdout,
        stderr=stderr,
    )


@pytest.mark.process
def test_a_closed_pipe_does_not_end_the_process_and_train_log_is_complete(tmp_path):
    process = start(tmp_path)
    assert process.stdout.readline().startswith(b"line 0")
    process.stdout.close()
    errors = process.stderr.read().decode()
    assert process.wait(60) == 0 and errors == "the end …\n"
    written = (tmp_path / "train.log").read_text(encoding="utf-8")
    assert (
        "line 19999 …" in written and written.count("the terminal output was closed; the run continues") == 1
    )


@pytest.mark.process
def test_a_closed_pipe_of_both_outputs_does_not_end_the_process(tmp_path):
    process = start(tmp_path, stderr=subprocess.STDOUT)  # as with `2>&1 | head -1`
    assert process.stdout.readline().startswith(b"line 0")
    process.stdout.close()
    assert process.wait(60) == 0 and "line 19999 …" in (tmp_path / "train.log").read_text(encoding="utf-8")


@pytest.mark.process
def test_a_full_disk_below_stdout_does_not_end_the_process(tmp_path):
    with open("/dev/full", "w") as full:
        process = start(tmp_path, stdout=full)
        assert process.communicate(timeout=60)[1].decode() == "the end …\n"
    assert process.returncode == 0
    assert "line 19999 …" in (tmp_path / "train.log").read_text(encoding="utf-8")


@pytest.mark.process
@pytest.mark.parametrize(
    "environment",
    [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}],
)
def test_characters_that_the_terminal_lacks_are_replaced(tmp_path, environment):
    out, errors = start(tmp_path, **environment).communicate(timeout=60)
    assert out.startswith(b"line 0 ?\n") and out.endswith(b"line 19999 ?\nafter the lines\n")
    assert errors == b"the end \\u2026\n"


@pytest.mark.process
def test_an_error_message_that_nobody_reads_does_not_raise():
    reader, writer = os.pipe()
    os.close(reader)
    program = (
        "from rlhf.terminal.console import print_error; print_error('error: a'); print_error('error: b')"
    )
    assert subprocess.run([sys.executable, "-c", program], stderr=writer).returncode == 0
    os.close(writer)


def test_control_characters_of_an_error_do_not_reach_the_terminal(capsys):
    print_error("error: 2 problems\n  - \x1b[31mred\r \ud800")
    assert capsys.readouterr().err == "error: 2 problems\n  - \\x1b[31mred\\r \\ud800\n"


def test_errors_are_wrapped_between_words_in_a_terminal(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "20")
    print_error("error: a-long-word of many")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    print_error("  - a/long/path/that/exceeds the line\nend")
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["error: a-long-word of many", "  -", "  a/long/path/that/exceeds", "  the line", "end"]


def test_lines_are_wrapped_in_a_terminal_but_a_long_path_stays_whole(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setattr(console, "console", console.Terminal(width=20))
    for in_file in (True, False):
        monkeypatch.setattr(console, "_IN_FILE", in_file)
        console.say("checkpoint saved: /a/long/path/of-a-checkpoint now")
    first, *others = capsys.readouterr().out.splitlines()
    assert first == "checkpoint saved: /a/long/path/of-a-checkpoint now"
    assert others == ["checkpoint saved:", "/a/long/path/of-a-checkpoint", "now"]


def test_items_are_wrapped_in_the_terminal_and_on_one_line_in_train_log(monkeypatch):
    printed, written = [], []
    monkeypatch.setattr(console, "console", console.Terminal(width=30))
    monkeypatch.setattr(console.console, "print", lambda line, **_: printed.append(line))
    monkeypatch.setattr(console.transcript, "info", written.append)
    say_items("dpo  evaluated at update 1:", ["win rate 0.5", "KL 1.0", "tokens 20.0"])
    assert printed == ["dpo  evaluated at update 1:", "  win rate 0.5  KL 1.0", "  tokens 20.0"]
    assert written == ["dpo  evaluated at update 1:  win rate 0.5  KL 1.0  tokens 20.0"]
