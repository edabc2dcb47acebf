"""Reward functions that are given as objects: places, stored sources, and functions of this process only."""

import importlib.util
import linecache
import math
import re
import subprocess
import sys
import threading
from collections import Counter
from functools import lru_cache, partial

import pytest

from rlhf.config import given_functions
from rlhf.config.address import ONLY_HERE, function_problem, load_function
from rlhf.config.given_functions import GivenFunctions, literal
from rlhf.core.errors import UserError

LIMIT = 3
WORD = re.compile(r"\w+", re.IGNORECASE)
STOP = {"the", "a", "an"}
LOCK = threading.Lock()
ARGUMENTS = ("prompt", "response", "reference")


def count(text):
    return len(WORD.findall(text))


def brief(response: str, reference: str, *, limit: int = LIMIT) -> float:
    """Return a score."""
    return -abs(count(response) - limit) / math.sqrt(4)


def scaled(factor, lock=None):
    def by_factor(response):
        return factor * len(response) if lock is None else 0.0

    return by_factor


def countdown():
    def down(response, left=2):
        return 0.0 if left == 0 else 1 + down(response, left - 1)

    return down


def counting():
    calls = 0

    def number(response):
        nonlocal calls
        calls += 1
        return calls

    return number


@lru_cache
def cached(response):
    return 1.0


class Judge:
    def __call__(self, response):
        return 1.0

    def strict(response, words=("x", LIMIT)):
        tally = Counter(response.split())
        return float(sum(tally[word] for word in STOP) + len(words) + (lambda n: n + LIMIT)(0))


def waiting(response):
    return float(LOCK.locked())


def lost(response):
    return not_defined_anywhere  # noqa: F821


TWO = [lambda response: 1.0, lambda response: 2.0]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Return an empty working directory, in which no new process finds the modules of these tests."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    monkeypatch.setattr(given_functions, "is_found", lambda module: not module.startswith("tests"))
    return tmp_path


def stored(function, folder):
    """Return the function that a new process loads from the address of a stored function."""
    given = GivenFunctions(function, folder)
    assert not given.only_here
    (path,) = given.paths
    assert function_problem("scorer.path", path, ARGUMENTS) is None
    return load_function("scorer.path", path, ARGUMENTS)


def test_functions_of_modules_keep_their_place(tmp_path, monkeypatch):
    given = GivenFunctions([brief, math.sqrt], tmp_path)
    assert given.paths == [f"{__name__}:brief", "math:sqrt"] and not list(tmp_path.iterdir())
    file = tmp_path / "elsewhere.py"
    file.write_text("def score(response): return 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "elsewhere", raising=False)
    import elsewhere

    monkeypatch.setattr(given_functions, "origin_elsewhere", lambda root: None)
    assert GivenFunctions(elsewhere.score, tmp_path).paths == [f"{file}:score"]  # not on a new process's path
    monkeypatch.chdir(tmp_path)
    assert GivenFunctions(elsewhere.score, tmp_path).paths == ["elsewhere:score"]


@pytest.mark.parametrize(
    ("function", "score"),
    [
        (brief, -0.5),
        (scaled(0.5), 4.5),
        (scaled(2), 18),
        (countdown(), 2),
        (Judge.strict, 7.0),
        (lambda response: LIMIT + 1.0, 4.0),
        (TWO[0], 1.0),
        (TWO[1], 2.0),
        ([lambda response, k=k: k for k in (5, 6)][1], 6),
    ],
)
def test_the_stored_source_of_a_function_gives_its_scores(here, function, score):
    arguments = ("a b", "") if function is brief else ("a b, the ",)
    loaded = stored(function, here / "rewards")
    assert loaded is not function and loaded(*arguments) == function(*arguments) == score


@pytest.mark.process
def test_a_new_process_tells_which_modules_it_finds(here, monkeypatch):
    (here / "unseen.py").write_text("")
    monkeypatch.syspath_prepend(here)
    given_functions.origin_elsewhere.cache_clear()
    assert given_functions.origin_elsewhere("unseen") is None
    assert given_functions.origin_elsewhere("json").name == "__init__.py"


@pytest.mark.process
def test_a_new_process_calls_a_stored_function(here):
    (path,) = GivenFunctions(brief, here / "rewards").paths
    file, _, name = path.rpartition(":")
    code = f"import runpy; print(runpy.run_path({file!r})[{name!r}]('a b', ''))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "-0.5\n"


def test_the_address_depends_on_what_the_function_does_and_not_on_comments(here, monkeypatch):
    path = lambda function: GivenFunctions(function, here).paths[0]  # noqa: E731
    assert path(scaled(1)) == path(scaled(1)) != path(scaled(2))
    before = path(brief)
    monkeypatch.setitem(brief.__globals__, "WORD", re.compile("x"))
    assert path(brief) != before
    texts = ["def f(response):\n    return 1.0  # one\n", "def f(response): return 1.0\n"]
    made = []
    for number, text in enumerate(texts):
        cell = f"<cell {number}>"
        linecache.cache[cell] = (len(text), None, text.splitlines(keepends=True), cell)  # as a notebook does
        values: dict = {"__name__": "__main__"}
        exec(compile(text, cell, "exec"), values)
        made.append(path(values["f"]))
    assert made[0] == made[1]


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (waiting, "it reads LOCK, an object of type lock"),
        (scaled(1, LOCK), "it reads lock, an object of type lock"),
        (lost, "it reads not_defined_anywhere, which is not defined"),
        (counting(), "it changes a variable of the function around it"),
        (cached, "it is an object of type _lru_cache_wrapper"),
        (cached.__wrapped__, "it has a decorator"),
        (Judge(), "it is an object of type Judge"),
        (partial(brief, reference=""), "it is an object of type partial"),
        (lambda response, lock=LOCK: 1.0, "it has a parameter whose default is an object of type lock"),
        (eval("lambda response: 1.0"), "its source is not known"),
    ],
)
def test_functions_without_a_source_exist_in_this_process_only(here, monkeypatch, function, reason):
    given = GivenFunctions(function, here / "rewards")
    (path,) = given.paths
    assert path.startswith(f"{ONLY_HERE}:") and not (here / "rewards").exists()
    (warning,) = given.warnings()
    assert f"exists only in this process ({reason})" in warning
    monkeypatch.delitem(sys.modules, ONLY_HERE, raising=False)
    problem = function_problem("scorer.path", path, ARGUMENTS)
    assert problem is not None and "make the call Experiment(..., reward=<function>) again" in problem
    given.provide()
    monkeypatch.delitem(sys.modules, ONLY_HERE)
    given.provide()
    assert function_problem("scorer.path", path, ARGUMENTS) is None
    assert load_function("scorer.path", path, ARGUMENTS) is function


def test_a_file_that_changed_since_its_import_is_not_stored(here, monkeypatch):
    file = here / "changing.py"
    file.write_text("def score(response): return 1.0\n")
    spec = importlib.util.spec_from_file_location("__main__", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert "only_in_this_process" not in GivenFunctions(module.score, here / "a").paths[0]
    file.write_text("def score(response): return 2.0\n")
    assert GivenFunctions(module.score, here / "b").reasons == {"score": "its source is not known"}


def test_objects_of_one_name_have_different_addresses(here):
    given = GivenFunctions([Judge(), Judge()], here)
    assert len(set(given.paths)) == 2


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("my_rewards.py:brief", "got the text 'my_rewards.py:brief'; for the address of a function set"),
        (["org/model"], "for a model set scorer=reward_model model.reward=<model>"),
        (Judge, "got the class Judge"),
        (3, "got 3 of type int"),
        ([brief, None], "got None of type NoneType"),
        ([], "got []"),
        ({"brief": brief}, "of type dict"),
    ],
)
def test_objects_that_are_no_functions_are_refused(tmp_path, wrong, message):
    with pytest.raises(UserError, match=r"reward must be a function or a list of functions") as refused:
        GivenFunctions(wrong, tmp_path)
    assert message in str(refused.value)


def test_a_reward_model_as_an_object_is_refused(tmp_path):
    import torch

    with pytest.raises(UserError, match=r"got a model \(Linear\); save it to a folder"):
        GivenFunctions(torch.nn.Linear(1, 1), tmp_path)


def test_literals_have_one_text_in_every_process():
    letters = sorted("abcdefghij")
    assert literal(set(letters)) == f"set({letters})"
    values = [1, -2.5, "a\n", b"x", True, None, [1, (2,), ()], {"k": [{"x": 1}]}, {}, set(), {3}, (1,)]
    assert all(eval(literal(value)) == value for value in values)
    assert not any(map(literal, [math.inf, math.nan, LOCK, [LOCK], {1: LOCK}, {LOCK: 1}]))
