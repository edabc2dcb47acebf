"""Tests of addresses of Python functions: problems that the import shows."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rlhf.config.scorers import FunctionScorerConfig
from rlhf.core.errors import UserError
from rlhf.usercode.address import function_problem, load_class, load_function

ARGUMENTS = ("prompt", "response", "reference")

SOURCE = """
import functools

NUMBER = 3


def brief(prompt: str, response: str, reference: str) -> float:
    return 0.0


def two(prompt, text):
    return 0.0


def other(prompt, answer, messages):
    return 0.0


def four(prompt, response, reference, answer):
    return 0.0


def keyword_only(prompt, response, *, reference):
    return 0.0


def default(prompt, response, reference="", scale=2.0, *, log=False, **others):
    return 0.0


def anything(*texts):
    return 0.0


class Cls:
    def __call__(self, prompt, response, reference):
        return 0.0


async def waits(prompt, response, reference):
    return 0.0


@functools.cache
def decorated(prompt):
    return 0.0


def redefined(prompt): ...
def redefined(prompt, response, reference): ...


if NUMBER:
    def one_of_two(prompt): ...
else:
    def one_of_two(prompt, response): ...

instance = Cls()
partial = functools.partial(four, answer="")
short = lambda p, r: 0.0
brief_and_right = lambda response, answer: 0.0
"""


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """Return the working directory, which contains own_rewards.py and below/own_rewards.py."""
    (tmp_path / "own_rewards.py").write_text(SOURCE)
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "own_rewards.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "own_rewards", raising=False)  # of another test
    monkeypatch.setattr("sys.path", [entry for entry in sys.path if entry])  # as in a console script
    return tmp_path


@pytest.mark.parametrize(
    "path",
    [
        *[f"own_rewards:{name}" for name in ("brief", "default", "anything")],
        *[f"own_rewards:{name}" for name in ("instance", "partial", "redefined", "waits")],
        *[f"own_rewards:{name}" for name in ("four", "keyword_only", "brief_and_right")],
        "own_rewards.py:brief",
        "below/own_rewards.py:brief",
    ],
)
def test_a_function_that_may_accept_the_arguments_has_no_problem(here, path):
    assert function_problem("scorer.path", path, ARGUMENTS) is None


PROBLEMS = {  # address: rule, reason and remedy
    "own_rewards:breif": "must name a function of own_rewards (there is no breif in it, only brief, two, "
    "| did you mean scorer.path=own_rewards:brief?",
    "own_rewards:zzz": "there is no zzz in it | set scorer.path=own_rewards:brief",
    "own_rewards:two": "a function with a parameter response, and others with the names prompt, reference, "
    "messages or of columns of the data (two takes (prompt, text): too many positional arguments) | write "
    "def two(prompt, response, reference)",
    "own_rewards:other": "(other takes (prompt, answer, messages): without a parameter response, messages ",
    "own_rewards:short": "(short takes (p, r): too many",
    "own_rewards:Cls": "must name a function (Cls is a class) | set scorer.path=own_rewards:brief",
    "own_rewards:NUMBER": "must name a function (NUMBER is of type int)",
    "own_rewards.brief": "must be <module>:<function> | did you mean scorer.path=own_rewards:brief?",
    "own_rewards.py": "must be <module>:<function> | did you mean scorer.path=own_rewards.py:brief?",
    "own_rewards": "must be <module>:<function> | did you mean scorer.path=own_rewards:brief?",
    "own_rewards:brief()": "did you mean scorer.path=own_rewards:brief?",
    "below/own_rewards.py::brief": "did you mean scorer.path=below/own_rewards.py:brief?",
    "below/own_rewards:brief": "did you mean scorer.path=below/own_rewards.py:brief?",
    "own_reward:brief": "(no module 'own_reward') | did you mean scorer.path=own_rewards:brief?",
    "below/own_reward.py:brief": "(no file 'below/own_reward.py' here) | path=below/own_rewards.py:brief?",
    "below:brief": "('below' is a folder)",
    "own_rewards.ipynb:brief": "(no module 'own_rewards.ipynb') | did you mean scorer.path=own_rewards:",
    "json:nothing": "there is no nothing in it",
    "nowhere": "set scorer.path=my_module:my_function",
}


@pytest.mark.parametrize("path", PROBLEMS)
def test_a_wrong_address_is_reported_with_reason_and_remedy(here, path):
    problem = function_problem("scorer.path", path, ARGUMENTS)
    assert problem is not None and f", got {path!r}; " in problem
    assert all(text in problem for text in PROBLEMS[path].split(" | ")), problem


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("\n\ndef brief(:\n", "SyntaxError: invalid syntax, in {file}, line 3"),
        ("def brief():\npass\n", "IndentationError: expected an indented block"),
        ("return 1\n", "'return' outside function, in {file}, line 1"),
        ("import os\nimport no_such_library.part\n", "No module named 'no_such_library', in {file}, line 2"),
        ("from no_such_library import x\n", "; install no_such_library, or correct {file}"),
        ("x = '\udcff'\n", "in {file}, line 1"),  # not UTF-8
        ("", "there is no brief in it"),
    ],
)
def test_a_file_that_cannot_be_imported_is_reported_with_its_line(here, source, said):
    file = here / "faulty.py"
    file.write_bytes(source.encode(errors="surrogateescape"))
    for path in ("faulty:brief", f"{file}:brief"):
        problem = function_problem("scorer.path", path, ARGUMENTS)
        assert problem is not None and said.format(file=file) in problem and "importlib" not in problem, (
            problem
        )


def test_a_file_may_import_a_file_beside_it_and_a_module_needs_the_path(here):
    (here / "below" / "beside_it.py").touch()
    (here / "below" / "faulty.py").write_text("import beside_it\ndef brief(p, r, a): ...\n")
    problem = function_problem("scorer.path", "below.faulty:brief", ARGUMENTS)
    assert problem is not None and problem.endswith(f"start the command with PYTHONPATH={here / 'below'}")
    assert function_problem("scorer.path", "below/faulty.py:brief", ARGUMENTS) is None


def test_a_module_is_imported_once_and_a_file_that_failed_again(here):
    (here / "counted.py").write_text("open('seen', 'a').write('x')\ndef brief(p, r, a): ...\n")
    for _ in range(3):
        assert function_problem("scorer.path", "counted.py:brief", ARGUMENTS) is None
    assert (here / "seen").read_text() == "x"
    (here / "corrected.py").write_text("1 / 0\n")
    assert function_problem("scorer.path", "corrected.py:brief", ARGUMENTS)
    (here / "corrected.py").write_text("def breif(p, r, a): ...\n")
    assert function_problem("scorer.path", "corrected.py:brief", ARGUMENTS)
    (here / "corrected.py").write_text("def brief(prompt, r, a): ...  # corrected\n")
    assert function_problem("scorer.path", "corrected.py:brief", ARGUMENTS) is None


@pytest.mark.parametrize(
    ("annotation", "batched", "right"),
    [
        ("list[str]", False, "true"),
        ("'list[str]'", False, "true"),
        ("typing.Sequence[str]", False, "true"),
        ("str", True, "false"),
    ],
)
def test_batched_must_agree_with_the_annotations(here, monkeypatch, annotation, batched, right):
    monkeypatch.delitem(sys.modules, "typed", raising=False)
    (here / "typed.py").write_text(f"import typing\ndef f(p, responses: {annotation}, r): ...\n")
    found = list(FunctionScorerConfig(path="typed:f", batched=batched).problems("scorer"))
    assert len(found) == 1 and found[0].endswith(f"; set scorer.batched={right}")
    assert not list(FunctionScorerConfig(path="typed:f", batched=not batched).problems("scorer"))


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (
            "def brief(p, r, a): ...\nraise ValueError('no licence')\n",
            "raised ValueError: no licence, in {file}, line 2",
        ),
        ("import sys\nsys.exit(3)\nbrief = print\n", "raised SystemExit: 3, in {file}, line 2"),
        ("import json\njson.loads('{')\nbrief = print\n", "in {file}, line 2"),
        ("brief = [print][0:0]\n", "(brief is of type list)"),
        ("brief = [int][0]\n", "(brief is a class)"),
        ("from os import *\n", "there is no brief in it"),
    ],
)
def test_what_only_the_import_shows_is_a_user_error(here, source, said):
    file = here / "imported.py"
    file.write_text(source)
    path = f"{file}:brief"
    with pytest.raises(UserError) as refused:
        load_function("scorer.path", path, ARGUMENTS)
    assert said.format(file=file) in str(refused.value)


def test_a_file_that_does_not_exist_is_named():
    with pytest.raises(UserError, match="no file 'gone.py' here"):
        load_class("environment.path", "gone.py:Game")
