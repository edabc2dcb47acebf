"""Addresses of Python functions: the import shows what is wrong with them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rlhf.config.scorers import FunctionScorerConfig
from rlhf.core.errors import UserError
from rlhf.usercode.address import function_problem, load_class, load_function

SOURCE = """
import functools
NUMBER = 3
def brief(prompt: str, response: str, reference: str) -> float: ...
def two(prompt, text): ...
def other(prompt, answer, messages): ...
def four(prompt, response, reference, answer): ...
def keyword_only(prompt, response, *, reference): ...
def default(prompt, response, reference="", scale=2.0, *, log=False, **others): ...
def anything(*texts): ...
class Cls:
    def __call__(self, prompt, response, reference): ...
async def waits(prompt, response, reference): ...
def redefined(prompt): ...
def redefined(prompt, response, reference): ...
instance = Cls()
partial = functools.partial(four, answer="")
short = lambda p, r: 0.0
brief_and_right = lambda response, answer: 0.0
"""


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """Return the working directory, which contains own_rewards.py and below/own_rewards.py."""
    (tmp_path / "below").mkdir()
    for folder in (tmp_path, tmp_path / "below"):
        (folder / "own_rewards.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    for name in ("own_rewards", "typed"):
        monkeypatch.delitem(sys.modules, name, raising=False)  # of another test
    monkeypatch.setattr("sys.path", [entry for entry in sys.path if entry])  # as in a console script
    return tmp_path


def problem(path: str) -> str | None:
    return function_problem("scorer.path", path, ("prompt", "response", "reference"))


ACCEPTED = "brief default anything instance partial redefined waits four keyword_only brief_and_right"


@pytest.mark.parametrize("path", [f"own_rewards:{name}" for name in ACCEPTED.split()])
def test_a_function_that_may_accept_the_arguments_has_no_problem(here, path):
    assert problem(path) is None


@pytest.mark.parametrize("path", ["own_rewards.py:brief", "below/own_rewards.py:brief"])
def test_a_file_has_an_address(here, path):
    assert problem(path) is None


PROBLEMS = {  # address: reason, and the setting of the remedy if it has one
    "own_rewards:breif": "only brief, two, | own_rewards:brief",
    "own_rewards:zzz": "there is no zzz in it | own_rewards:brief",
    "own_rewards:two": "two takes (prompt, text): too many positional arguments",
    "own_rewards:other": "other takes (prompt, answer, messages): without a parameter response, messages ",
    "own_rewards:short": "short takes (p, r): too many",
    "own_rewards:Cls": "Cls is a class | own_rewards:brief",
    "own_rewards:NUMBER": "NUMBER is of type int",
    "own_rewards.brief": "<module>:<function> | own_rewards:brief",
    "own_rewards.py": "<module>:<function> | own_rewards.py:brief",
    "own_rewards": "<module>:<function> | own_rewards:brief",
    "own_rewards:brief()": "<module>:<function> | own_rewards:brief",
    "below/own_rewards.py::brief": "<module>:<function> | below/own_rewards.py:brief",
    "below/own_rewards:brief": "<module>:<function> | below/own_rewards.py:brief",
    "own_reward:brief": "no module 'own_reward' | own_rewards:brief",
    "below/own_reward.py:brief": "no file 'below/own_reward.py' here | below/own_rewards.py:brief",
    "below:brief": "'below' is a folder",
    "own_rewards.ipynb:brief": "no module 'own_rewards.ipynb' | own_rewards:brief",
    "json:nothing": "there is no nothing in it",
    "nowhere": "<module>:<function> | my_module:my_function",
}


@pytest.mark.parametrize("path", PROBLEMS)
def test_a_wrong_address_is_reported_with_reason_and_remedy(here, path):
    found = problem(path)
    reason, _, other = PROBLEMS[path].partition(" | ")
    assert found is not None and f", got {path!r}; " in found and reason in found, found
    assert f"scorer.path={other}" in found if other else "; " in found


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("\n\ndef brief(:\n", "SyntaxError: invalid syntax, in {file}, line 3"),
        ("def brief():\npass\n", "IndentationError: expected an indented block"),
        ("return 1\n", "'return' outside function, in {file}, line 1"),
        ("import os\nimport no_such_library.part\n", "No module named 'no_such_library', in {file}, line 2"),
        ("from no_such_library import x\n", "; install no_such_library, or correct {file}"),
        ("x = '\udcff'\n", "in {file}, line 1"),  # not UTF-8
        (
            "def brief(p, r, a): ...\nraise ValueError('no licence')\n",
            "ValueError: no licence, in {file}, line 2",
        ),
        ("import sys\nsys.exit(3)\nbrief = print\n", "raised SystemExit: 3, in {file}, line 2"),
        ("import json\njson.loads('{')\nbrief = print\n", "in {file}, line 2"),
        ("brief = [print][0:0]\n", "(brief is of type list)"),
        ("brief = [int][0]\n", "(brief is a class)"),
        ("", "there is no brief in it"),
        ("from os import *\n", "there is no brief in it"),
    ],
)
def test_a_file_that_cannot_be_imported_is_reported_with_its_line(here, source, said):
    file = here / "faulty.py"
    file.write_bytes(source.encode(errors="surrogateescape"))
    for path in ("faulty:brief", f"{file}:brief"):
        found = problem(path)
        assert found is not None and said.format(file=file) in found and "importlib" not in found, found


def test_a_file_may_import_a_file_beside_it_and_a_module_needs_the_path(here):
    (here / "below" / "beside_it.py").touch()
    (here / "below" / "faulty.py").write_text("import beside_it\ndef brief(p, r, a): ...\n")
    assert str(problem("below.faulty:brief")).endswith(f"PYTHONPATH={here / 'below'}")
    assert problem("below/faulty.py:brief") is None


def test_a_module_is_imported_once_and_a_file_that_failed_again(here):
    (here / "counted.py").write_text("open('seen', 'a').write('x')\ndef brief(p, r, a): ...\n")
    assert [problem("counted.py:brief") for _ in range(3)] == [None] * 3
    assert (here / "seen").read_text() == "x"
    for text, right in (
        ("1 / 0", False),
        ("def breif(p, r, a): ...", False),
        ("def brief(p, r, a): ...", True),
    ):
        (here / "corrected.py").write_text(f"{text}  # {len(text)}\n")
        assert (problem("corrected.py:brief") is None) == right


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
    (found,) = FunctionScorerConfig(path="typed:f", batched=batched).problems("scorer")
    assert found.endswith(f"; set scorer.batched={right}")
    assert not list(FunctionScorerConfig(path="typed:f", batched=not batched).problems("scorer"))


def test_loading_raises_what_the_check_reports(here):
    with pytest.raises(UserError) as refused:
        load_function("scorer.path", "own_rewards:two", ("prompt", "response", "reference"))
    assert refused.value.problems == (problem("own_rewards:two"),)
    with pytest.raises(UserError, match="no file 'gone.py' here"):
        load_class("environment.path", "gone.py:Game")
