"""The group `environment`: what is refused before a run folder exists, and the names of runs without one."""

import importlib.util
import re

import pytest

from rlhf.checks.check import problems, warnings
from rlhf.config.compose import compose
from rlhf.config.environment import GymnasiumConfig, PythonEnvironmentConfig
from rlhf.config.identity import run_name, what_counts

GUESS = "environment=guess_number"
GYM = ("task=reasoning_gym", "task.chat=true", "algo=grpo", "scorer=environment", "scorer@gold=none")
SOURCE = """
class Counter:
    def __init__(self, most=3):
        self.most = most
    def reset(self, example):
        pass
    def step(self, reply):
        return "", 1.0, True

class Half:
    def reset(self, example):
        pass

class Narrow(Counter):
    def step(self):
        return "", 1.0, True

class Yields(Counter):
    def reset(self, example):
        yield "prompt"

class Waits(Counter):
    async def step(self, reply):
        yield "", 1.0, True

class Closes(Counter):
    def close(self, how):
        pass

import abc, functools

class Abstract(Counter, abc.ABC):
    @abc.abstractmethod
    def rules(self): ...

def given(method):
    @functools.wraps(method)
    def call(self, text):
        return method(self, text, 5)
    return call

class Wrapped(Counter):
    @given
    def reset(self, example, more): ...
    @staticmethod
    def step(reply): ...
    async def close(self, *further): ...
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "own_game.py"
    path.write_text(SOURCE)
    return path


def own(file, name="Counter", *words):
    return compose([*GYM, "environment=python", f"environment.path={file}:{name}", *words])


def test_a_class_with_reset_and_step_has_no_problem(file):
    cfg = own(file, "Counter", "+environment.arguments={most: 2}")
    assert problems(cfg) == [] and list(cfg.environment.job_problems("environment")) == []


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Narrow", r"a method step\(self, reply\) that returns \(too many .*line 15\); correct step"),
        ("Yields", r"a method reset\(self, example\) that returns \(it yields.*, line 19\); correct reset"),
        ("Waits", r"step.* \(it yields, and a call runs nothing\), got Waits \(.*own_game.py, line 23\)"),
        ("Closes", r"a method close\(self\) that returns .*'how'.*line 27\); correct close"),
        ("Abstract", "with all methods, got .* without rules"),
    ],
)
def test_a_method_that_cannot_be_called_is_named_with_its_line(file, name, said):
    (problem,) = own(file, name).environment.job_problems("environment")
    assert re.match(f"environment.path must name a class .*{said}", problem)
    assert list(own(file, "Wrapped").environment.job_problems("environment")) == []


@pytest.mark.parametrize(
    ("name", "words", "said"),
    [
        ("Conter", [], "did you mean environment.path="),
        ("Half", [], "without step; add step"),
        ("Counter", ["+environment.arguments={least: 2}"], "got an unexpected keyword argument 'least'"),
    ],
)
def test_a_class_that_cannot_play_ends_the_command_before_the_run_folder_exists(
    command, file, name, words, said
):
    answer = command(*GYM, "environment=python", f"environment.path={file}:{name}", *words)
    assert answer.code == 2 and not answer.runs and said in answer.err
    assert "[" not in answer.err.partition("set environment.path=")[2][:1], "one class, not a list"


def test_a_class_must_be_named():
    (problem,) = PythonEnvironmentConfig().problems("environment")
    assert problem == "environment.path must name a class, got null; set environment.path=<file>.py:<Class>"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["task=arithmetic", "scorer=environment"], "scorer must not be environment with environment=none"),
        ([*GYM[:4], GUESS, "scorer@gold=environment"], "scorer@gold must not be environment"),
        (["task=arithmetic", GUESS], f"environment must be none with {GUESS} and"),
        (
            ["task=reasoning_gym", "task.chat=true", "algo=reward", GUESS],
            "environment must be none with algo=reward",
        ),
        (
            ["scorer=weighted", "+scorer@scorer.parts.game=environment"],
            "scorer@scorer.parts.game must not be environment with environment=none",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_an_environment_is_refused(words, said):
    assert any(problem.startswith(said) for problem in problems(compose(words)))


def test_too_few_tokens_for_every_turn_are_doubtful():
    cfg = compose([*GYM, GUESS, "environment.reply_tokens=8"])
    assert any("set generator.response_length=1568" in text for text in warnings(cfg))
    cfg = cfg.with_({"generator.response_length": 1568})
    assert not any("has no room" in text for text in warnings(cfg))


def test_a_run_without_an_environment_has_the_name_of_earlier_versions(file):
    plain = compose(["task=arithmetic", "algo=grpo"])
    assert "environment" not in str(what_counts(plain)) and "environment" in str(what_counts(own(file)))
    assert run_name(own(file)) != run_name(own(file, "Counter", "environment.max_turns=2"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["environment=tools"], "environment.functions must name at least one function"),
        (
            ["environment=gymnasium"],
            "environment.id must name an environment, got null; set environment.id=FrozenLake-v1",
        ),
        (
            ["environment=openenv"],
            "environment.url must begin with http:// or https://, got null; set environment.url=http://localhost",
        ),
        (["environment=openenv", "environment.url=host:1"], "environment.url must begin with http:// or"),
    ],
)
def test_what_an_environment_needs_is_named(words, said):
    assert any(problem.startswith(said) for problem in problems(compose([*GYM, *words])))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["environment.id=Nope-v9"], "environment.id must be an environment that gymnasium makes"),
        (["+environment.options={size: 3}"], "environment.id must be an environment that gymnasium makes"),
        (["+environment.actions={left: 0, fly: 9}"], "environment.actions must be actions of FrozenLake-v1"),
        ([], "environment.actions must say which action of FrozenLake-v1 each word means (Discrete(4)"),
        (["+environment.actions={left: 0}"], None),
    ],
)
def test_a_game_is_made_before_a_run_and_has_the_actions(words, said):
    config = compose([*GYM, "environment=gymnasium", "environment.id=FrozenLake-v1", *words]).environment
    found = [*config.job_problems("environment")]
    assert [each[: len(said)] for each in found] == [said] if said else not found


def test_a_missing_package_is_reported_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (problem,) = GymnasiumConfig(id="FrozenLake-v1").problems("environment")
    assert problem.endswith("run: pip install -e '.[gymnasium]'")


def test_a_tool_must_be_a_function_or_a_class(file):
    words = [*GYM, "environment=tools", f"environment.functions=[{file}:Counter]"]
    assert not problems(compose(words))
    file.write_text(f"{file.read_text()}\nNUMBER = 3\n")
    (problem,) = problems(compose([*words[:-1], f"environment.functions=[{file}:NUMBER]"]))
    assert problem.startswith("environment.functions must name a function")
