"""The trials of reward functions and environments on examples of the data, before a model is loaded."""

import math
import random
import re

import numpy
import pytest
import torch

from rlhf.assembly.training import build_task
from rlhf.config.algorithms import Data
from rlhf.core.errors import UserError
from rlhf.stages import inspection
from rlhf.stages.inspection import TEXT, tried, tried_environment
from rlhf.usercode.address import load_class
from rlhf.words.compose import compose
from tests.environments.test_episodes import tokenizer as chat_tokenizer
from tests.tiny_models import tiny_tokenizer


def trials(tmp_path, body, *words, arguments="prompt, response, reference", reference="w2"):
    file = tmp_path / "own.py"
    file.write_text(f"import math, random, time\nimport numpy, torch\ndef score({arguments}):\n    {body}\n")
    (tmp_path / "data.jsonl").write_text(
        "".join(f'{{"prompt": "w{i}", "response": "{reference}", "tests": [{i}]}}\n' for i in range(9))
    )
    words = (f"scorer.path={file}:score", *words)
    cfg = compose(["task=local", f"task.path={tmp_path}/data.jsonl", "algo=rloo", "scorer=function", *words])
    tokenizer = tiny_tokenizer()
    return tried(cfg, build_task(cfg, tokenizer, cfg.data, 2))


LISTS = {"arguments": "prompts, responses, references"}
WRONG = {
    "return None": "returned None for line 1 of .*must be a finite number",
    "return float('nan')": "returned nan for line 1 of",
    "return math.inf": "returned inf for line 1 of",
    "return 'good'": "returned 'good' for line 1 of",
    "return {'score': 1.0}": r"returned \{'score': 1.0\} for line 1 of .*: correct the function$",
    "return [1.0, 2.0]": r"returned \[1.0, 2.0\] for .*or set scorer.batched=true",
    "return prompt[99]": r"raised IndexError: string index out of range \(.*own.py, line 4\) for line 1 of",
    "import sys; sys.exit('no')": r"called sys.exit\('no'\) \(.*own.py, line 4\)",
    "from .helpers import f": r"raised ImportError: attempted relative import.*own.py, line 4",
}


@pytest.mark.parametrize("body", WRONG)
def test_a_function_that_fails_or_returns_no_score_is_a_mistake_of_the_user(tmp_path, body):
    with pytest.raises(UserError, match=WRONG[body]):
        trials(tmp_path, body)


@pytest.mark.parametrize(
    ("body", "said"),
    [("return [1.0]", "1 scores for 3 responses"), ("return 1.0", "float 1.0"), ("1 / 0", "ZeroDivision")],
)
def test_a_batched_function_must_return_a_score_for_each_example(tmp_path, body, said):
    with pytest.raises(UserError, match=said):
        trials(tmp_path, body, "scorer.batched=true", **LISTS)


def test_the_examples_have_reference_responses_or_else_a_short_text(tmp_path):
    (found,) = trials(tmp_path, "return tests[0] + 0.5", arguments="response, tests")
    assert found.responses == ["w2"] * 3 and len(set(found.scores)) == 3 and found.warning is None
    (found,) = trials(tmp_path, "return len(response)", reference="")
    assert found.responses == [TEXT] * 3


def test_every_function_of_a_list_and_the_judge_are_tried_and_all_problems_are_reported(tmp_path):
    (tmp_path / "two.py").write_text(
        "def a(p, r, ref): return 1\ndef b(p, r, ref): return 'x'\ndef c(p, r, ref): 1/0\n"
    )
    words = [f"scorer.path=[{tmp_path}/two.py:a,{tmp_path}/two.py:b]", "scorer@gold=function"]
    with pytest.raises(UserError) as refused:
        trials(tmp_path, "", *words, f"gold.path={tmp_path}/two.py:c")
    first, second = refused.value.problems
    assert re.match("scorer.path=.*two.py:b returned 'x'", first)
    assert re.match("gold.path=.*two.py:c raised ZeroDivisionError", second)


def test_one_of_several_functions_may_leave_examples_to_the_others(tmp_path):
    (tmp_path / "two.py").write_text(
        "async def a(response, tests): return 1 if tests[0] else None\ndef b(response): return 2\n"
    )
    first, second = trials(tmp_path, "", f"scorer.path=[{tmp_path}/two.py:a,{tmp_path}/two.py:b]")
    assert any(math.isnan(score) for score in first.scores) and second.scores == [2, 2, 2]
    assert any(line.split()[0] == "None" for line in first.lines())
    with pytest.raises(UserError, match="two.py:a returned None"):
        trials(tmp_path, "", f"scorer.path=[{tmp_path}/two.py:a]")


def test_a_function_that_fails_for_an_empty_response_is_a_warning(tmp_path):
    (found,) = trials(tmp_path, "return 1 / len(response)")
    assert re.match("a policy may sample an empty response: scorer.path=.*ZeroDivisionError", found.warning)


def test_a_function_that_fails_for_all_responses_but_the_references_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(inspection, "TEXT", "w3 w4")
    with pytest.raises(UserError, match="returned None for .*, response 'w3 w4'"):
        trials(tmp_path, "return 1.0 if not response or response == reference else None")


def test_a_slow_function_is_tried_on_one_example_and_the_report_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(inspection, "BUDGET_S", 0.05)
    (found,) = trials(tmp_path, "time.sleep(0.1); return 1.0")
    assert found.scores == [1.0] and re.match(r"1 tried, because this took 0.\d s", list(found.lines())[-1])


def test_the_trial_changes_no_random_state_and_no_setting(tmp_path):
    body = (
        "random.seed(1), numpy.random.seed(1), torch.manual_seed(1), torch.set_default_dtype(torch.float64)"
        ", torch.set_grad_enabled(False); return random.random() + numpy.random.rand() + torch.rand(1)"
    )
    before = random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    trials(tmp_path, body)
    after = random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    assert before == after and torch.get_default_dtype() is torch.float32 and torch.is_grad_enabled()


GAMES = """
import abc

SEEN = []

class Game:
    def __init__(self, limit=3):
        SEEN.append("made")
        if limit == 0:
            raise ValueError("no limit")
    def reset(self, example):
        SEEN.append(f"reset {example.record['tests']}")
    def step(self, reply):
        SEEN.append(f"step {reply!r}")
        return " no", 0.0, False
    def close(self):
        SEEN.append("closed")

class Reset(Game):
    def reset(self, example):
        return example.record["secret"]

class Third(Game):
    def reset(self, example):
        if example.record["tests"] == [2]:
            raise KeyError("third row")

class Empty(Game):
    def step(self, reply):
        return reply[0], 0.0, True

class Five(Game):
    def step(self, reply):
        return "", 0.0, True, False, {}

class Narrow(Game):
    def step(self):
        return "", 1.0, True

class Yields(Game):
    def reset(self, example):
        yield "prompt"

class Waits(Game):
    async def step(self, reply):
        yield "", 1.0, True

class Closes(Game):
    def step(self, reply):
        return "", 1.0, True
    def close(self, how):
        pass

class Abstract(Game, abc.ABC):
    @abc.abstractmethod
    def rules(self): ...

class Pair(Game):
    def reset(self, example):
        return "You see a door.", {"info": 1}

class Seen(Game):
    def reset(self, example):
        return "You see a door."

class Later(Game):
    async def reset(self, example): ...
    async def step(self, reply):
        return " no", 0.0, False

class Nothing(Game):
    def reset(self, example):
        return ""
"""


def game(tmp_path, name, *words):
    """Return the description and the warnings of the trial of a class, and what its methods noted."""
    (tmp_path / "games.py").write_text(GAMES)
    for split in ("train", "validation"):
        rows = [f'{{"prompt": "{split}{" a" * i}", "response": " b", "tests": [{i}]}}\n' for i in range(9)]
        (tmp_path / f"{split}.jsonl").write_text("".join(rows))
    words = [f"task.path={tmp_path}", f"environment.path={tmp_path}/games.py:{name}", *words]
    cfg = compose(["task=local", "environment=python", "algo=rloo", *words])
    task = build_task(cfg, chat_tokenizer(), Data.prompts, 2)
    found = tried_environment(cfg, task)
    return *found, load_class("environment.path", cfg.environment.path).reset.__globals__["SEEN"]


@pytest.mark.parametrize("name", ["Game", "Later", "Nothing"])
def test_an_environment_plays_a_turn_of_three_rows_and_is_closed(tmp_path, name):
    _, warnings, seen = game(tmp_path, name)
    assert not warnings
    assert seen.count("made") == seen.count("closed") == 3
    if name == "Game":
        assert [each for each in seen if "reset" in each] == [f"reset [{i}]" for i in range(3)]
        assert seen.count("step ''") == 3


WRONG_GAMES = {
    "Reset": r"in reset \(.*games.py, line 21\), got KeyError: 'secret'",
    "Third": "got KeyError: 'third row'",
    "Empty": r"in step \(.*games.py, line \d+\), got IndexError",
    "Five": "in step .*, got TypeError",
    "Narrow": "in step .*, got TypeError",
    "Yields": "in reset .*, got TypeError",
    "Waits": "in step .*, got TypeError",
    "Closes": "in close .*, got TypeError",
    "Abstract": "in reset .*, got TypeError",
    "Pair": "in reset .*, got TypeError",
}


@pytest.mark.parametrize("name", WRONG_GAMES)
def test_an_environment_that_fails_is_a_mistake_of_the_user_unless_the_run_goes_on(tmp_path, name):
    with pytest.raises(UserError, match=f"games.py:{name} must .*{WRONG_GAMES[name]}.*; correct the class"):
        game(tmp_path, name)
    _, (warning,), _ = game(tmp_path, name, "environment.on_error=end")
    assert re.search(WRONG_GAMES[name], warning)


def test_what_an_environment_opened_is_closed_after_an_error(tmp_path):
    game(tmp_path, "Game")
    *_, seen = game(tmp_path, "Third", "environment.on_error=end")
    assert seen.count("made") == seen.count("closed") == 6


def test_a_class_that_cannot_be_made_is_a_mistake_of_the_user(tmp_path):
    with pytest.raises(UserError, match="got ValueError: no limit"):
        game(tmp_path, "Game", "+environment.arguments={limit: 0}")


def test_a_text_of_reset_that_no_model_reads_is_a_warning_with_a_remedy(tmp_path):
    _, (warning,), _ = game(tmp_path, "Seen")
    assert "You see a door." in warning and "set task=environment" in warning
