"""Tests of the command `rlhf`: dispatch to the commands, help, version, and arguments without a command."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf import __version__
from rlhf.__main__ import COMMANDS, main
from rlhf.words import help as train_help

PACKAGE = Path(__file__).parents[2] / "rlhf"


@pytest.fixture
def call(called):
    """`call(*words)` calls `rlhf` and returns its exit code, stdout and stderr."""
    return lambda *words: called(main, *words)


def test_every_module_that_is_a_command_is_a_command_of_rlhf():
    modules = {path.stem: path for path in PACKAGE.glob("[!_]*.py")}
    modules |= {path.parent.name: path for path in PACKAGE.glob("*/__main__.py")}
    commands = {name for name, path in modules.items() if '__name__ == "__main__"' in path.read_text()}
    named = set(re.findall(r"rlhf\.(\w+)", train_help.help_text([])))
    assert set(COMMANDS) == commands == named


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"]])
def test_help_has_a_line_for_every_command(call, words):
    code, out, _ = call(*words)
    assert code == 0
    assert re.findall(r"^  (\w+)  +[A-Z]", out, re.M) == list(COMMANDS)
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize("name", ["plan", "report"])
def test_the_module_of_a_command_is_run(call, name):
    code, out, _ = call(name, "--help")
    assert code == 0 and out.lower().startswith(f"usage: python -m rlhf.{name} ")


def test_the_command_itself_is_no_argument(call, monkeypatch):
    seen = []
    monkeypatch.setattr("runpy.run_module", lambda name, **_: seen.append((name, sys.argv[1:])))
    call("train", "algo=dpo", "train")
    assert seen == [("rlhf.train", ["algo=dpo", "train"])]


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (["algo=dpo", "debug=tiny"], "got algo=dpo; run: rlhf train algo=dpo debug=tiny"),
        (["-m", "seed=1,2"], "got -m; run: rlhf train -m seed=1,2"),
        (["task.path=my file.jsonl"], "run: rlhf train 'task.path=my file.jsonl'"),
        (["trian", "algo=dpo"], "got trian; run: rlhf train algo=dpo"),
        (["rlhf.plan", "algo=dpo"], "got rlhf.plan; run: rlhf plan algo=dpo"),
        (["zzz"], "got zzz; see rlhf --help"),
    ],
)
def test_arguments_without_a_command_are_refused_with_the_command_that_is_meant(call, words, remedy):
    code, out, err = call(*words)
    assert code == 2 and not out
    assert err.startswith("error: rlhf must be followed by a command (train, ") and err.strip().endswith(
        remedy
    )


def test_version_is_the_version_of_the_distribution(call):
    assert call("--version") == (0, f"rlhf {__version__}\n", "")
    assert re.match(r"\d+\.\d+", __version__)


@pytest.mark.parametrize("words", [[], ["zsh"], ["bash", "zsh"]])
def test_completion_needs_the_shell_that_has_a_script(call, words):
    code, _, err = call("--completion", *words)
    assert code == 2 and "--completion must be followed by bash, got " in err


@pytest.mark.parametrize(
    ("word", "expected"), [("", [*COMMANDS]), ("pl", ["plan"]), ("--v", ["--version"]), ("x", [])]
)
def test_the_first_word_is_completed_to_a_command_or_an_option(call, word, expected):
    assert call("--complete", word) == (0, "".join(f"{each}\n" for each in expected), "")


def test_arguments_of_the_command_itself_are_completed_and_are_no_overrides(call):
    assert call("--complete", "evaluate", "ru")[1] == "run=\n"
    assert call("--complete", "evaluate", "run=outputs/x", "schedule.max_l")[1] == "schedule.max_lag=\n"
    assert call("--complete", "report", "outp")[1] == ""


@pytest.mark.process
def test_help_and_the_names_of_commands_import_no_library(tmp_path):
    script = (
        "import json, sys\n"
        "from rlhf.__main__ import main\n"
        "for words in json.loads(sys.argv[1]):\n"
        "    sys.argv = ['rlhf', *words]\n"
        "    main()\n"
        "assert not {'hydra', 'omegaconf', 'torch'} & set(sys.modules)\n"
    )
    words = json.dumps([["--help"], ["--version"], ["--complete", "t"]])
    done = subprocess.run([sys.executable, "-c", script, words], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
