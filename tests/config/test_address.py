"""Tests of addresses of Python functions: problems in the source, and problems that the import shows."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rlhf.config.address import function_problem, load_class, load_function
from rlhf.config.scorer import FunctionScorerConfig
from rlhf.core.errors import UserError

ARGUMENTS = ("prompt", "response", "reference")

SOURCE = """
import functools

NUMBER = 3
raise SystemExit("executed")


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
        *[f"own_rewards:{name}" for name in ("brief", "default", "anything", "decorated")],
        *[f"own_rewards:{name}" for name in ("instance", "partial", "redefined", "one_of_two", "waits")],
        *[f"own_rewards:{name}" for name in ("four", "keyword_only", "brief_and_right")],
        "own_rewards.py:brief",
        "below/own_rewards.py:brief",
        "math:fsum",  # not a Python file
    ],
)
def test_a_function_that_may_accept_the_arguments_has_no_problem_and_is_not_executed(here, path):
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
def test_a_wrong_address_is_reported_with_reason_and_remedy_before_the_file_is_executed(here, path):
    problem = function_problem("scorer.path", path, ARGUMENTS)
    assert problem is not None and f", got {path!r}; " in problem
    assert all(text in problem for text in PROBLEMS[path].split(" | ")), problem


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("\n\ndef brief(:\n", "SyntaxError: invalid syntax, in {file}, line 3"),
        ("def brief():\npass\n", "IndentationError: expected an indented block"),
        ("return 1\n", "'return' outside function, in {file}, line 1"),
        (
            "import os\nimport no_such_library.part\n",
            "line 2 of {file} imports 'no_such_library.part', which is not",
        ),
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


def test_an_import_of_a_file_beside_it_is_not_a_library_to_install(here):
    (here / "below" / "helpers.py").touch()
    (here / "below" / "faulty.py").write_text("import helpers\ndef brief(p, r, a): ...\n")
    problem = function_problem("scorer.path", "below/faulty.py:brief", ARGUMENTS)
    assert problem is not None and "which is beside it" in problem and "install" not in problem
    assert problem.endswith("start the command with PYTHONPATH=below")


@pytest.mark.parametrize(
    "source",
    [
        "from os.path import *\n",
        "globals()['brief'] = print\n",
        "def __getattr__(name): ...\n",
        "import sys\nsys.path.insert(0, 'lib')\nimport no_such_library\ndef brief(p, r, a): ...\n",
        "try:\n    import no_such_library\nexcept ImportError:\n    pass\ndef brief(p, r, a): ...\n",
        "if True:\n    brief = print\n",
        "for brief in (print,):\n    pass\n",
        "def set_up():\n    global brief\n    brief = print\nset_up()\n",
    ],
)
def test_names_and_imports_that_only_running_the_file_shows_are_not_reported(here, source):
    (here / "dynamic.py").write_text(source)
    assert function_problem("scorer.path", "dynamic:brief", ARGUMENTS) is None


@pytest.mark.parametrize(
    ("annotation", "batched", "right"),
    [
        ("list[str]", False, "true"),
        ("'list[str]'", False, "true"),
        ("typing.Sequence[str]", False, "true"),
        ("str", True, "false"),
    ],
)
def test_batched_must_agree_with_the_annotations(here, annotation, batched, right):
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
    assert function_problem("scorer.path", path, ARGUMENTS) is None
    with pytest.raises(UserError) as refused:
        load_function("scorer.path", path, ARGUMENTS)
    assert said.format(file=file) in str(refused.value)


def test_an_error_before_the_first_line_of_a_file_names_the_file():
    with pytest.raises(UserError, match=r"FileNotFoundError: .*, in gone.py, line 1.*; correct gone.py"):
        load_class("environment.path", "gone.py:Game")
