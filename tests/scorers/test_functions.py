"""Reward functions: parameters by name, lists of functions, the signature of TRL, processes of their own."""

import asyncio
import re
import sys
from types import SimpleNamespace

import pytest
import torch

from rlhf.checks.check import checked, composed, problems
from rlhf.config.algorithms import DPOConfig
from rlhf.config.scorers import FunctionScorerConfig
from rlhf.core.errors import Interrupted, RunError, UserError
from rlhf.objectives.dpo import OnlineDPO
from rlhf.processes import signals
from rlhf.scorers.function import build
from rlhf.usercode.address import ONLY_HERE, GivenFunctions, load_function, parameters_of
from rlhf.words.compose import compose, digest
from tests.scorers.test_scorers import TOKENIZER, rollouts
from tests.tiny_models import scorer_context


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Return the working directory, with one.py, two.py and the package pkg."""
    (tmp_path / "one.py").write_text(
        "def words(prompt, response, reference): return len(response.split())\n"
        "def same(response, reference): return float(response == reference)\n"
    )
    (tmp_path / "two.py").write_text("def words(response): return -1\n")
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "help.py").write_text("def f(text): return 1.0\n")
    (tmp_path / "pkg" / "top.py").write_text("from .help import f\ndef score(response): return f(response)\n")
    (tmp_path / "pkg" / "late.py").write_text(
        "def score(response):\n    from .help import f\n    return f('')\n"
    )
    monkeypatch.chdir(tmp_path)
    for name in ("one", "two", "pkg", "pkg.top", "pkg.help", "pkg.late"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr("sys.path", [entry for entry in sys.path if entry])
    return tmp_path


def batch_of(config: FunctionScorerConfig, batch=None):
    scorer = build(config, scorer_context(TOKENIZER))
    return scorer(rollouts() if batch is None else batch)


# -- several functions -----------------------------------------------------------------------------


def test_several_functions_give_their_weighted_sum_and_a_metric_each(here):
    words = ["scorer.path=[one.py:words,one.py:same]", "scorer.weights=[2,-1]"]
    cfg = compose(["scorer=function", "scorer.missing_eos_score=null", *words])
    assert not [text for text in problems(cfg) if text.startswith("scorer")]
    batch = batch_of(cfg.scorer)
    assert batch.scores.tolist() == [[1, 4], [6, 2], [4, 2]]
    assert batch.parts["same"].tolist() == [[1, 0], [0, 0], [0, 0]]
    figures = OnlineDPO(DPOConfig()).describe(batch)
    assert figures["objective/scores/words"].value() == pytest.approx(10 / 6)
    assert figures["objective/scores"].value() == pytest.approx(19 / 6)
    config = FunctionScorerConfig(path=["one.py:words", "one.py:same"], missing_eos_score=-9)
    assert batch_of(config).scores.tolist() == [[2, -9], [-9, 1], [2, 1]], "of the sum"


def test_functions_of_the_same_name_are_told_apart_by_their_files(here):
    assert list(FunctionScorerConfig(path=["one.py:words", "two:words"]).functions()) == [
        "one_words",
        "two_words",
    ]


WRONG = {
    "scorer.path=[]": "scorer.path must name a function .*set scorer.path=my_module:my_function",
    "scorer.path=[one.py:nope]": "there is no nope in it.* set scorer.path=one.py:words",
    "scorer.path=[one.py:words,3]": "scorer.path must be <module>:<function> .*, got 3; ",
    "scorer.path=3": "scorer.path must be <module>:<function> .*, got 3; ",
    "scorer.path=[one.py:words,one.py:words]": "name each function once .*; leave one out",
    "scorer.path=[one.py:words] scorer.weights=[1,2]": r"got \[1,2\]; set 'scorer.weights=\[1\]'",
    "scorer.path=one.py:words scorer.weights=[1]": r"leave it out, or set 'scorer.path=\[one.py:words\]'$",
    "scorer.path='one.py:words,one.py:same'": r"set 'scorer.path=\[one.py:words,one.py:same\]'$",
    "scorer.path={a:one.py:words,b:one.py:same}": r"set 'scorer.path=\[one.py:words,one.py:same\]'$",
    "scorer.path=[one.py:words] scorer.weights=[nan]": "scorer.weights must be finite",
    "scorer.path=lists.py:f": "got false; set scorer.batched=true$",
    "scorer.path=later.py:lists": "set scorer.batched=true$",
    "scorer.path=pkg/top.py:score": r"\(line 1 of pkg/top.py has one\).* set scorer.path=pkg.top:score$",
}


@pytest.mark.parametrize("words", WRONG)
def test_a_wrong_list_or_address_is_reported_with_a_remedy(here, words):
    (here / "lists.py").write_text("def f(prompts, completions, **kwargs): return [1.0]\n")
    (here / "later.py").write_text(ASYNC)
    cfg = compose(["scorer=function", *words.split()])
    (found,) = cfg.scorer.problems("scorer")
    assert re.search(WRONG[words], found), found


def test_the_remedy_for_relative_imports_works(here):
    for name in ("top", "late"):
        assert not list(FunctionScorerConfig(path=f"pkg.{name}:score").problems("scorer"))
        assert batch_of(FunctionScorerConfig(path=f"pkg.{name}:score")).scores.tolist() == [[1, 1]] * 3
    with pytest.raises(UserError, match=r"set scorer.path=pkg.top:score"):
        batch_of(FunctionScorerConfig(path="pkg/top.py:score"))


def test_a_list_without_scorer_function_is_reported_with_the_choice_of_the_scorer(here):
    words = ["task=tldr", "scorer.path=[one.py:words,two.py:words]"]
    with pytest.raises(UserError, match="set scorer=function 'scorer.path=.one.py"):
        checked(composed(words))


# -- parameters ------------------------------------------------------------------------------------


def received(source: str) -> tuple:
    names = {}
    exec(source, names)
    found = parameters_of(__import__("inspect").signature(names["f"]))
    return found.position, found.values, found.columns, found.optional, found.rest


THREE = ("prompt", "response", "reference")


@pytest.mark.parametrize(
    ("source", "position", "values", "columns", "optional", "rest"),
    [
        ("def f(p, r, a): ...", THREE, {}, (), (), False),
        ("def f(p, r, a, tests): ...", THREE, {}, ("tests",), (), False),
        ("def f(*texts): ...", THREE, {}, (), (), False),
        ("def f(*args, **kwargs): ...", THREE, {}, (), (), False),
        ("def f(p, r, /, a='', *, scale=2): ...", THREE, {}, (), ("scale",), False),
        ("def f(response): ...", (), {"response": "response"}, (), (), False),
        ("def f(*, response, tests): ...", (), {"response": "response"}, ("tests",), (), False),
        ("def f(answer, completion): ...", (), {"completion": "response"}, ("answer",), (), False),
        (
            "def f(prompts, completions, **kwargs): ...",
            (),
            {"prompts": "prompt", "completions": "response"},
            (),
            (),
            True,
        ),
        (
            "def f(messages, response, k=1): ...",
            (),
            {"messages": "messages", "response": "response"},
            (),
            ("k",),
            False,
        ),
    ],
)
def test_a_parameter_response_means_that_all_parameters_are_names(
    source, position, values, columns, optional, rest
):
    assert received(source) == (position, values, columns, optional, rest)


@pytest.mark.parametrize(
    "source",
    [
        "def f(messages, answer, x): ...",
        "def f(prompt, reference, x): ...",
        "def f(x, y): ...",
        "def f(x, /, response): ...",
    ],
)
def test_parameters_that_cannot_be_meant_are_refused(source):
    with pytest.raises(TypeError):
        received(source)


DIALOGUE = [{"role": "user", "content": "Hi", "name": "Ann"}]


def test_the_signature_of_trl_receives_lists_columns_and_messages(here):
    (here / "lists.py").write_text(
        "def texts(prompts, completions, answer, **kwargs):\n"
        "    assert prompts[0] == 'w8' and completions[0] == 'w1' and list(kwargs) == ['level'], kwargs\n"
        "    return [a + l for a, l in zip(answer, kwargs['level'])]\n"
        "def turns(prompts, completions, **kwargs):\n"
        "    assert prompts[0] == [{'role': 'user', 'content': 'Hi', 'name': 'Ann'}]\n"
        "    return [len(c[0]['content']) + (c[0]['role'] == 'assistant') for c in completions]\n"
        "def both(messages, response):\n"
        "    return len(messages[0]['name'] + response)\n"
    )
    batch = rollouts()
    batch.records = [{"answer": i, "level": 10} for i in range(3)]
    config = FunctionScorerConfig(path="lists.py:texts", batched=True)
    assert batch_of(config, batch).scores.tolist() == [[10, 10], [11, 11], [12, 12]]
    batch.dialogues = [DIALOGUE] * 3
    config = FunctionScorerConfig(path="lists.py:turns", batched=True)
    assert batch_of(config, batch).scores.tolist() == [[3, 6], [9, 3], [6, 3]]
    assert batch_of(FunctionScorerConfig(path="lists.py:both"), batch).scores[0].tolist() == [5, 8]


# -- what functions do -----------------------------------------------------------------------------


def test_a_random_reward_repeats_for_the_same_responses_and_differs_between_them(here):
    (here / "noise.py").write_text("import random\ndef f(response): return random.random()\n")
    first, again = (batch_of(FunctionScorerConfig(path="noise.py:f")).scores for _ in range(2))
    assert torch.equal(first, again) and len(set(first.flatten().tolist())) == 6


@pytest.mark.process
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_function_may_use_a_pool_of_processes_that_call_functions_of_its_file(here, method):
    (here / "pool.py").write_text(
        "import multiprocessing\n"
        "def count(text): return len(text.split())\n"
        "def f(responses):\n"
        f"    with multiprocessing.get_context('{method}').Pool(2) as pool:\n"
        "        return pool.map(count, responses)\n"
    )
    (here / "folder").mkdir()
    (here / "pool.py").rename(here / "folder" / f"pool_{method}.py")
    config = FunctionScorerConfig(path=f"folder/pool_{method}.py:f", batched=True)
    assert batch_of(config).scores.tolist() == [[1, 2], [3, 1], [2, 1]]


# -- asynchronous functions, and functions that leave responses out ---------------------------------

ASYNC = """
import asyncio, functools, threading
import rlhf
running = most = 0
async def score(response):
    return await scaled(response, 1)
async def scaled(response, scale):
    global running, most
    running += 1
    most = max(most, running)
    await asyncio.sleep(0.02)
    running -= 1
    if scale == 0:
        raise KeyError("gone")
    return scale * len(response.split())
def plain(response):
    return score(response)
async def lists(responses):
    return [await score(each) for each in responses]
async def few(responses):
    return [len(each.split()) if len(each.split()) < 2 else None for each in responses]
class Object:
    async def __call__(self, response):
        return await score(response)
made = Object()
double = functools.partial(scaled, scale=2)
fails = functools.partial(scaled, scale=0)
def nothing(response):
    return None
def odd(response):
    return None if len(response.split()) % 2 == 0 else 1
def even(response):
    return 1 if len(response.split()) % 2 == 0 else None
def stops(response):
    return next(iter(()))
def nan(response):
    return float("nan")
"""
WORDS = [[1, 2], [3, 1], [2, 1]]


@pytest.fixture
def later(here):
    (here / "later.py").write_text(ASYNC)
    sys.modules.pop("later", None)
    return here


@pytest.mark.parametrize("name", ["score", "plain", "made"])
def test_asynchronous_functions_are_awaited_concurrently(later, name):
    assert batch_of(FunctionScorerConfig(path=f"later.py:{name}")).scores.tolist() == WORDS
    assert sys.modules["later"].most == 6


def test_asynchronous_functions_of_a_sum_run_concurrently_also_inside_of_an_event_loop(later):
    config = FunctionScorerConfig(path=["later.py:lists", "later.py:few"], batched=True, weights=[1.0, 10.0])
    expected = [[11, 2], [3, 11], [2, 11]]

    async def inside():
        return batch_of(config).scores.tolist()

    assert asyncio.run(inside()) == expected
    both, batch = FunctionScorerConfig(path=["later.py:score", "later.py:double"]), rollouts()
    batch.records = [{}] * 3  # the second one has a parameter with a default, which may be a column
    assert batch_of(both, batch).scores.tolist() == [[3 * each for each in row] for row in WORDS]
    assert sys.modules["later"].most == 12


def test_an_error_of_an_asynchronous_function_names_its_line(later):
    with pytest.raises(RunError, match=r"later.py:fails raised KeyError: 'gone' \(.*later.py, line 14\)"):
        batch = rollouts()
        batch.records = [{}] * 3
        batch_of(FunctionScorerConfig(path="later.py:fails"), batch)


def test_a_signal_ends_the_wait_for_an_asynchronous_function(later, monkeypatch):
    def check():
        raise Interrupted("stopped")

    monkeypatch.setattr(signals, "active", SimpleNamespace(check=check))
    with pytest.raises(Interrupted):
        batch_of(FunctionScorerConfig(path="later.py:score"))


def test_a_function_of_a_sum_that_returns_none_does_not_judge_the_response(later):
    config = FunctionScorerConfig(path=["later.py:odd", "one.py:words"], weights=[0.1, 0.2])
    batch = batch_of(config)
    assert torch.equal(batch.scores.double(), torch.tensor([[0.3, 0.4], [0.7, 0.3], [0.4, 0.3]]).double())
    figures = OnlineDPO(DPOConfig()).describe(batch)
    assert figures["objective/scores/odd"].value() == 1 and figures["objective/scores/odd"].count == 4
    assert figures["objective/scores/words"].count == 6
    other = FunctionScorerConfig(path=["later.py:odd", "later.py:even"], missing_eos_score=-5)
    assert batch_of(other).scores.tolist() == [[1, -5], [-5, 1], [1, 1]]


@pytest.mark.parametrize(
    ("path", "weights", "said"),
    [
        ("later.py:nothing", None, "returned None"),
        (["later.py:nothing"], None, "return a number from one of nothing"),
        (["later.py:odd", "later.py:nothing"], None, "return a number from one of odd, nothing"),
        (["later.py:odd", "one.py:words"], [1.0, 0.0], "return a number from one of odd, words"),
        (["later.py:nan", "one.py:words"], None, "returned nan"),
        ("later.py:stops", None, "raised StopIteration"),
    ],
)
def test_a_response_that_no_function_judges_is_an_error(later, path, weights, said):
    with pytest.raises(RunError, match=said):
        batch_of(FunctionScorerConfig(path=path, weights=weights))


def test_an_asynchronous_function_that_is_given_as_an_object_scores(monkeypatch):
    async def given(response: str) -> float:
        await asyncio.sleep(0)
        return float(len(response))

    functions = GivenFunctions(given)
    monkeypatch.setitem(sys.modules, ONLY_HERE, None)
    functions.provide()
    assert batch_of(FunctionScorerConfig(path=functions.paths[0])).scores[0].tolist() == [2, 5]


def test_no_file_is_written_beside_a_reward_file(here):
    load_function("scorer.path", "two.py:words", ())
    assert not (here / "__pycache__").exists()


def test_a_config_with_one_function_keeps_its_digest():
    words = ["scorer=function", "scorer.path=one.py:words"]
    assert digest(compose([*words])) == digest(compose([*words, "scorer.weights=null"]))
    assert digest(compose([*words])) != digest(compose(["scorer=function", "scorer.path=[one.py:words]"]))
