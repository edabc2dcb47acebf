"""Reward functions that are given as objects: places, and functions of this process only."""

import math
import re
import subprocess
import sys
import threading
from collections import Counter
from functools import lru_cache, partial

import pytest
import torch

from rlhf.core.errors import UserError
from rlhf.usercode.address import ONLY_HERE, GivenFunctions, function_problem, load_function

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


TWO = [lambda response: 1.0, lambda response: 2.0]


def test_functions_of_modules_keep_their_place(tmp_path, monkeypatch):
    assert GivenFunctions([brief, math.sqrt, cached]).paths == [
        f"{__name__}:brief",
        "math:sqrt",
        f"{__name__}:cached",
    ]
    file = tmp_path / "elsewhere.py"
    file.write_text("def score(response): return 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "elsewhere", raising=False)
    import elsewhere

    assert GivenFunctions(elsewhere.score).paths == [f"{file}:score"]  # not on a new process's path
    assert load_function("scorer.path", f"{file}:score", ARGUMENTS) is elsewhere.score
    monkeypatch.chdir(tmp_path)
    assert GivenFunctions(elsewhere.score).paths == ["elsewhere:score"]


async def waiting(response):
    return float(LOCK.locked())


waiting.__qualname__ = "outer.<locals>.waiting"
waiting.__name__ = "later"


@pytest.mark.parametrize(
    "function",
    [
        scaled(0.5),
        scaled(1, LOCK),
        countdown(),
        counting(),
        waiting,
        Judge(),
        Judge().__call__,
        Judge.strict,
        partial(brief, reference=""),
        lambda response, lock=LOCK: 1.0,
        eval("lambda response: 1.0"),
    ],
)
def test_other_functions_are_used_as_objects_of_this_process_and_warn(monkeypatch, function):
    given = GivenFunctions(function)
    (path,) = given.paths
    assert path.startswith(f"{ONLY_HERE}:") and len(list(given.warnings())) == 1
    monkeypatch.setitem(sys.modules, ONLY_HERE, None)
    assert function_problem("scorer.path", path, ARGUMENTS)
    given.provide()
    assert function_problem("scorer.path", path, ARGUMENTS) is None
    assert load_function("scorer.path", path, ARGUMENTS) is function


def test_the_address_depends_on_what_the_function_does(monkeypatch):
    path = lambda function: GivenFunctions(function).paths[0]  # noqa: E731
    reading = lambda response: brief(response, "") + inner(response)  # noqa: E731
    inner = scaled(1)
    others = [scaled(1), scaled(2), scaled([1]), scaled({1, "a"}), countdown(), *TWO, Judge(), Judge().strict]
    others += [partial(brief, reference="a"), partial(brief, reference="b"), reading]
    before = [path(each) for each in others]
    assert len(set(before)) == len(others) and len(set(GivenFunctions([Judge(), Judge()]).paths)) == 2
    assert [path(each) for each in others] == before and path(scaled(1)) == before[0]
    inner = scaled(2)
    assert path(reading) != before[-1]
    limited = path(Judge.strict)
    monkeypatch.setitem(brief.__globals__, "LIMIT", 4)
    assert path(Judge.strict) != limited


@pytest.mark.process
def test_a_new_process_gives_the_same_address():
    code = (
        "from tests.usercode import test_given_functions as t\n"
        "print(*t.GivenFunctions([t.scaled({'a', 'b', 'c'}), t.Judge.strict, t.Judge(), *t.TWO]).paths)"
    )
    run = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout for _ in "12"]
    assert run[0] == run[1] and run[0].count(ONLY_HERE) == 5


@pytest.mark.parametrize(
    "wrong", ["my_rewards.py:brief", Judge, 3, [brief, None], [], {}, torch.nn.Identity()]
)
def test_objects_that_are_no_functions_are_refused(wrong):
    with pytest.raises(UserError, match="reward must be a function or a list of functions"):
        GivenFunctions(wrong)
