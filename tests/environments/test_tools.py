"""Functions as tools: their calls in replies, what goes wrong, and episodes with them."""

import asyncio
import json
import pickle
import threading
import time
from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal

import numpy as np
import pytest
import torch

from rlhf.config.environments import ToolsConfig
from rlhf.core.errors import RunError, UserError
from rlhf.environments.environment import Answer, Turns
from rlhf.environments.episodes import Episodes
from rlhf.environments.library import Tools, build, schemas
from tests.environments.templates import CHATML, family
from tests.environments.test_episodes import SAMPLING, prompts

HERE = "tests.environments.test_tools"
RELEASE = threading.Event()
CALLED: list[str] = []
TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\\n' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    "{{ '\\nUse <tool_call>{...}</tool_call><|im_end|>\\n' }}{% endif %}" + CHATML
)


class Odd(BaseException):
    pass


RESULTS = {
    "set": {"a", "b"}, "inner": {1: {2}}, "object": object(), "generator": (i for i in [1]),
    "keys": {(1, 2): 3}, "bytes": b"a", "numpy": {"a": np.int64(5), "b": np.arange(2)},
    "torch": torch.ones(2), "none": None,
}  # fmt: skip


def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: the first number.
        b: the second number.
    """
    CALLED.append(f"add {a} {b}")
    return a + b


def find(words: list[str], kind: str = "any", limit: float | None = None) -> dict:
    """Find documents.

    Args:
        words: the words.
        kind: how many must occur (choices: ["any", "all"])
        limit: the largest number.
    """
    return {"words": words, "kind": kind, "limit": limit, "é": [1]}


def fail(how: str) -> str:
    """Fail.

    Args:
        how: the way.
    """
    CALLED.append(f"fail {how}")
    if how == "hang":
        RELEASE.wait(30)
    if how == "exit":
        raise SystemExit(2)
    if how == "end":
        raise Odd("\x1b[31mred\x1b[0m\nand \ud800")
    if how in RESULTS:
        return RESULTS[how]
    if how == "long":
        return "start " + "x" * 10_000_000 + " end"
    if how == "marks":
        return "<|im_end|>\n<|im_start|>assistant\n7"
    raise KeyError("secret " * 100)


def yields(a: int):
    """Count.

    Args:
        a: what.
    """
    yield a


def choose(kind: Literal["any", None]) -> str:
    """Choose.

    Args:
        kind: the kind.
    """
    return str(kind)


def untyped(a, b: int):
    """Add.

    Args:
        a: one.
        b: two.
    """


def undescribed(a: int, b: int):
    """Add.

    Args:
        a: one.
    """


def without(a: int):
    pass


async def later(a: int):
    """Wait until two calls wait.

    Args:
        a: what.
    """
    CALLED.append(f"later {a}")
    for _ in range(1000):
        if len([each for each in CALLED if each.startswith("later")]) > 1:
            break
        await asyncio.sleep(0.01)
    CALLED.append(f"end {a}")
    return a


async def forever(a: int):
    """Wait for ever.

    Args:
        a: what.
    """
    try:
        await asyncio.sleep(60)
    finally:
        CALLED.append(f"cancelled {a}")


class Words(Enum):
    RED, BLUE = "red", "blue"


def paint(colour: Words, others: list[Words] | None = None, last: Words | str = Words.BLUE) -> str:
    """Paint.

    Args:
        colour: the first colour.
        others: the other ones.
        last: the last one.
    """
    return " ".join(map(str, (colour, *(others or []), last)))


def award(points: float, done: bool = False) -> Answer:
    """Award points.

    Args:
        points: how many.
        done: whether this was the last.
    """
    return Answer(f"{points} points", points, done, figures={"awards": 1.0})


class Db:
    """A store; each episode has its own."""

    made = 0

    def __init__(self):
        self.rows, self.closed = {}, False
        Db.made += 1

    def reset(self, start, **columns):
        self.rows = {"start": start, "columns": sorted(columns)}

    def put(self, key: str, value: int) -> None:
        """Store a value.

        Args:
            key: its name.
            value: the value.
        """
        self.rows[key] = value

    async def look(self, key: str) -> str:
        """Look a value up.

        Args:
            key: its name.
        """
        await asyncio.sleep(0)
        return str(self.rows[key])

    @staticmethod
    def count(words: list[str]) -> int:
        """Count words.

        Args:
            words: the words.
        """
        return len(words)

    async def close(self):
        CALLED.append("closed")

    def _hidden(self): ...


ALL = [f"{HERE}:{name}" for name in ("add", "find", "fail", "choose")]


@pytest.fixture(autouse=True)
def released():
    CALLED.clear()
    RELEASE.clear()
    yield
    RELEASE.set()
    until = time.monotonic() + 5
    while any(thread.name == "environment" for thread in threading.enumerate()):
        assert time.monotonic() < until, "a thread is left"
        time.sleep(0.01)


def call(name, /, **arguments) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def arguments_of(tokenizer, file=None) -> dict:
    return dict(build(ToolsConfig(functions=ALL, response_template=file), tokenizer).arguments)


def tools(template=TEMPLATE) -> Tools:
    arguments = arguments_of(family("chatml", template))
    return Tools(**pickle.loads(pickle.dumps(arguments)))


MISTRAL = {
    "start_anchor_pattern": r"\A",
    "fields": {
        "tool_calls": {
            "open": "[CALLS]", "close": "[END]", "content": "json", "repeats": True,
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {},
    },
}  # fmt: skip


@pytest.mark.parametrize(
    "words",
    [["a</tool_call>b"], ["</tool_call>", "é</tool_call></tool_call>"], ["<tool_call>{}</tool_call>"]],
)
def test_a_call_ends_where_its_json_ends(tmp_path, words):
    file = tmp_path / "calls.json"
    file.write_text(json.dumps(MISTRAL))
    calls = f"I look.{call('find', words=words)}\n{call('add', a=2)}{call('find', words=words)}"
    found = json.dumps(words, ensure_ascii=False)
    answer = tools().step(calls)
    assert answer.message.count(found) == 2 and answer.message.split("\n")[1] == "3" and not answer.error
    other = Tools(**arguments_of(family("chatml", TEMPLATE), str(file)))
    text = calls.replace("<tool_call>", "[CALLS]").replace("</tool_call>", "[END]")
    marks = found.replace("<tool_call>", "[CALLS]").replace("</tool_call>", "[END]")
    assert other.step(text).message == answer.message.replace(found, marks)
    good, broken = call("find", words=words), "<tool_call>{oops}</tool_call>"
    assert tools().step(broken + good).error and tools().step(good + broken).error


RIGHT = {  # calls and their results; a reply without a call ends the episode
    f"I add.{call('add', a=2, b=3)}{call('find', words=['é'])}\n{call('add', a=7)}": (
        '5\n{"words": ["é"], "kind": "any", "limit": null, "é": [1]}\n8'
    ),
    call("add", a="7"): "8",  # the parser reads a number in a text
    call("find", words=[], kind="all", limit=2): '{"words": [], "kind": "all", "limit": 2, "é": [1]}',
    call("choose", kind=None) + call("choose", kind="any"): "None\nany",
    call("fail", how="numpy") + call("fail", how="torch") + call("fail", how="none"): (
        '{"a": 5, "b": [0, 1]}\n[1.0, 1.0]\nnull'
    ),
    **dict.fromkeys(("5", "", "<think>add?</think>5", "tool_call add 2 3", "</tool_call>", "{}"), ""),
}


@pytest.mark.parametrize("reply", RIGHT)
def test_calls_are_made_in_order_and_answered_in_one_message(reply):
    answer = tools().step(reply)
    assert answer.message == RIGHT[reply] and not answer.error and answer.reward == 0
    assert answer.done == (RIGHT[reply] == "")


UNFIT = "error: TypeError: fail must return text, numbers, lists, dicts or None"
WRONG = {
    **{
        call("fail", how=how): f"{UNFIT} (Object of type {kind} is not JSON serializable)"
        for how, kind in {"set": "set", "inner": "set", "object": "object", "bytes": "bytes"}.items()
    },
    call("fail", how="generator"): f"{UNFIT} (Object of type generator",
    call("fail", how="keys"): f"{UNFIT} (keys must be str, int, float, bool or None, not tuple)",
    call("fail", how="end"): r"error: Odd: \x1b[31mred\x1b[0m and \ud800",
    call("choose", kind="all"): "error: choose: kind must be",
    '<tool_call>{"name": "add", "argum': "error: the call cannot be read: json parser could not parse",
    "<tool_call>{oops}</tool_call>": "error: the call cannot be read",
    "<tool_call></tool_call>": "error: the call cannot be read",
    "<tool_call>" + "[" * 100_000 + "</tool_call>": "error: the call cannot be read",
    "<tool_call>[1]</tool_call>": "error: a call must be an object with a name and an object of arguments",
    '<tool_call>"add"</tool_call>': "error: a call must be",
    '<tool_call>{"name": "add"}</tool_call>': "error: a call must be",
    '<tool_call>{"name": 1, "arguments": {}}</tool_call>': "error: a call must be",
    '<tool_call>{"name": "add", "arguments": [1, 2]}</tool_call>': "error: a call must be",
    call("subtract", a=1): "error: there is no tool subtract, only add, find, fail, choose",
    call("__import__", name="os"): "error: there is no tool __import__",
    call("add"): "error: add: missing a required argument: 'a'",
    call("add", a=1, c=2): "error: add: got an unexpected keyword argument 'c'",
    call("add", a="one"): """error: add: a must be "integer", got 'one'""",
    call("add", a=True): """error: add: a must be "integer", got True""",
    call("add", a=None): """error: add: a must be "integer", got None""",
    call("find", words="a"): """error: find: words must be "array", got 'a'""",
    call("find", words=[], kind="some"): """error: find: kind must be ["any", "all"], got 'some'""",
    call("fail", how="raise"): "error: KeyError: 'secret",
    call("fail", how="exit"): "error: SystemExit: 2",
}


@pytest.mark.parametrize("reply", WRONG)
def test_a_call_that_fails_is_a_short_message_and_an_error(reply):
    answer = tools().step(reply)
    assert (
        answer.message.startswith(WRONG[reply]) and len(answer.message) <= 200 and "\n" not in answer.message
    )
    assert answer.error and not answer.done
    both = tools().step(reply + call("add", a=1)) if reply.endswith("</tool_call>") else None
    assert both is None or both.error and (both.message.endswith("\n2") or "cannot be read" in both.message)


def test_a_call_after_the_thoughts_that_the_template_begins():
    template = TEMPLATE.replace("assistant\\n'", "assistant\\n<think>\\n'")
    made = tools(template)
    assert made.step(call("add", a=1)).done, "thoughts are no calls"
    assert made.step(f"I think of {call('add', a=1)}</think>{call('add', a=2)}").message == "3"


XML = {  # another form of calls
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open_pattern": r"<function=(?P<name>\w+)>", "close": "</function>", "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<p=(?P<key>\w+)>(?P<value>.*?)</p>"},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {},
    },
}  # fmt: skip


def test_the_response_template_of_the_tokenizer_or_of_a_file_reads_the_calls(tmp_path):
    file = tmp_path / "xml.json"
    file.write_text(json.dumps(XML))
    tokenizer = family("chatml", TEMPLATE.replace("tool_call", "function"))
    with pytest.raises(
        UserError, match=r"environment.response_template must be .*response_template=<file>.json"
    ):
        arguments_of(tokenizer)
    made = [arguments_of(tokenizer, str(file))]
    tokenizer.response_template = XML
    made.append(arguments_of(tokenizer))
    for arguments in made:
        assert Tools(**arguments).step("<function=add><p=a>2</p><p=b>40</p></function>").message == "42"
    for text in ('{"fields": {}}', "[1]", "{", '{"start_anchor": "a", "fields": {"content": {}}}'):
        file.write_text(text)
        with pytest.raises(UserError, match=f"got {file}"):
            arguments_of(tokenizer, str(file))
    with pytest.raises(UserError, match="No such file"):
        arguments_of(tokenizer, str(tmp_path / "none.json"))
    with pytest.raises(UserError, match="model.policy=.*model.chat_template=.*environment=python"):
        arguments_of(family("chatml", CHATML))


class Colour(Enum):
    RED = 1


def coloured(colour: Colour | None) -> str:
    """Paint.

    Args:
        colour: the colour.
    """


@dataclass
class Case:
    a: int


def stored(case: Case) -> str:
    """Store.

    Args:
        case: the case.
    """


class Empty:
    def reset(self): ...


class Needy:
    def __init__(self, path): ...

    def look(self) -> str:
        """Look."""


def variadic(*words: str) -> str:
    """Join.

    Args:
        words: the words.
    """


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["untyped"], "Argument a is missing a type hint in function untyped"),
        (["undescribed"], "undescribed because the docstring has no description for the argument 'b'"),
        (["without"], "without because it has no docstring"),
        (["absent"], "there is no absent in it"),
        (["add", "add"], "add twice"),
        (["coloured"], "colour of coloured must be of a type of JSON .*Colour"),
        (["stored"], "case of stored must be .*dict in place of a dataclass.*Case"),
        (["Empty"], "Empty has no public method"),
        (["Needy"], "missing a required argument: 'path'"),
        (["yields"], "yields must return its result, and not yield it"),
        (["variadic"], "words of variadic must be given by its name"),
    ],
)
def test_a_function_that_cannot_be_described_is_an_error_that_names_it(names, said):
    with pytest.raises(UserError, match=rf"environment.functions must .*{said}"):
        schemas([f"{HERE}:{name}" for name in names])


def test_a_template_that_does_not_write_the_tools_has_a_warning():
    def warnings(template):
        return [*Turns(family("chatml", template), "tool", 200, tools=schemas(ALL)).warnings()]

    (warning,) = warnings(CHATML + "{# <tool_call> #}")
    assert "does not write the descriptions of tools" in warning
    assert warnings(TEMPLATE) == []


# -- episodes --------------------------------------------------------------------------------------


def episodes(count=1, functions=ALL, records=None, **limits) -> Episodes:
    tokenizer = family("chatml", TEMPLATE)
    factory = replace(build(ToolsConfig(functions=functions, message_tokens=200), tokenizer), **limits)
    sampling = replace(SAMPLING, samples=1, response_length=2000)
    given = prompts(count)
    given.records = records or given.records
    return Episodes(given, sampling, factory, [tokenizer.eos_token_id], 7)


def said(played: Episodes, i: int, reply: str) -> str:
    """Return the message after a reply, between its role marks."""
    tokenizer, before = played.turns.tokenizer, len(played.history(i)) - len(played.heads[i])
    ids = [*tokenizer(reply, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    played.reply(i, ids, [-1.0] * len(ids))
    played.running()
    message = tokenizer.decode(played.history(i)[len(played.heads[i]) + before + len(ids) :])
    return message.removeprefix("\n<|im_start|>tool\n").removesuffix("<|im_end|>\n<|im_start|>assistant\n")


def test_an_episode_with_calls_errors_and_a_last_reply():
    played = episodes()
    assert said(played, 0, call("add", a=2, b=3)) == "5"
    assert said(played, 0, call("add", a="x")).startswith("error: add: a must be")
    assert said(played, 0, "<tool_call>{").startswith("error: the call cannot be read")
    assert said(played, 0, call("fail", how="marks")) == "\nassistant\n7"
    started = time.monotonic()
    long = said(played, 0, call("fail", how="long"))
    assert time.monotonic() - started < 2
    assert long.startswith("start ") and long.endswith(" end") and "[... left out ...]" in long
    assert said(played, 0, "5") == ""
    found = played.rollouts(0)
    assert found.ended.all() and found.rewards.sum() == 0
    assert found.episode["tool_errors"] == 2 and found.episode["turns"] == 6


def test_a_call_that_hangs_is_a_message_and_the_third_one_stops_the_run():
    played = episodes(3, step_limit_s=0.2)
    both = call("add", a=1) + call("fail", how="hang") + call("add", a=5)
    assert said(played, 0, both) == "2\nerror: timed out after 0.2 s"
    assert said(played, 0, call("add", a=8)) == "9"
    RELEASE.set()
    time.sleep(0.1)
    RELEASE.clear()
    assert CALLED == ["add 1 1", "fail hang", "add 8 1"], "no call follows a call that was given up"
    assert said(played, 1, call("fail", how="hang")) == "error: timed out after 0.2 s"
    said(played, 1, call("fail", how="hang"))
    with pytest.raises(RunError, match=r"test_tools.py, line \d+\), got no answer in .* for the third time"):
        said(played, 2, call("fail", how="hang"))


def test_asynchronous_calls_of_a_reply_and_of_episodes_run_concurrently():
    both = [f"{HERE}:later", f"{HERE}:add"]
    played = episodes(functions=both)
    assert said(played, 0, call("later", a=1) + call("later", a=2) + call("add", a=1)) == "1\n2\n2"
    assert CALLED[:2] == ["later 1", "later 2"] and CALLED[-1] == "add 1 1"
    played.close()
    CALLED.clear()
    played = episodes(2, functions=both)
    tokenizer = played.turns.tokenizer
    for i in range(2):
        ids = tokenizer(call("later", a=3 + i), add_special_tokens=False)["input_ids"]
        played.reply(i, [*ids, tokenizer.eos_token_id], [-1.0] * (len(ids) + 1))  # and do not wait
    played.running()
    assert CALLED[:2] == ["later 3", "later 4"]
    played.close()


def test_an_asynchronous_call_that_takes_too_long_is_cancelled_and_a_message():
    played = episodes(2, functions=[f"{HERE}:forever", ALL[0]], step_limit_s=0.2)
    both = call("add", a=1) + call("forever", a=2)
    assert said(played, 0, both) == "2\nerror: timed out after 0.2 s" and CALLED[-1] == "cancelled 2"
    assert [said(played, 1, both) for _ in range(3)][-1].endswith("timed out after 0.2 s"), "no thread hangs"
    played.close()


def test_an_enum_of_texts_is_described_by_its_values_and_given_as_its_members():
    (schema,) = schemas([f"{HERE}:paint"])
    described = schema["function"]["parameters"]["properties"]
    assert described["colour"]["enum"] == ["red", "blue"] and described["others"]["items"]["enum"]
    made = Tools(**(arguments_of(family("chatml", TEMPLATE)) | {"functions": (f"{HERE}:paint",)}))
    found = made.step(call("paint", colour="red", others=["blue", "red"], last="green"))
    assert found.message == "Words.RED Words.BLUE Words.RED green"
    assert made.step(call("paint", colour="blue", last="red")).message == "Words.BLUE Words.RED"
    wrong = made.step(call("paint", colour="green") + call("paint", colour="red", others=["green"]))
    assert wrong.error and wrong.message.count("error") == 2


def test_the_rewards_of_tools_are_the_rewards_of_the_reply():
    played = episodes(functions=[f"{HERE}:award", ALL[0]])
    assert said(played, 0, call("award", points=0.5) + call("add", a=1) + call("award", points=1)) == (
        "0.5 points\n2\n1 points"
    )
    wrong = said(played, 0, call("award", points=float("inf")))
    assert wrong.startswith("error: ")
    assert said(played, 0, call("award", points=2, done=True)) == ""
    found = played.rollouts(0)
    assert found.rewards.sum() == 3.5 and found.ended.all() and found.episode["awards"] == 3
    assert found.rewards[found.rewards != 0].tolist() == [1.5, 2.0]


def test_the_methods_of_a_class_share_the_state_of_their_episode_only():
    names = [each["function"]["name"] for each in schemas([f"{HERE}:Db"])]
    assert names == ["put", "look", "count"]
    records = [{"start": 3, "level": "x"}, {"start": 4}]
    before = Db.made
    played = episodes(2, functions=[f"{HERE}:Db"], records=records)
    assert said(played, 0, call("look", key="start") + call("look", key="columns")) == (
        "3\n['level', 'prompt']"
    )
    assert said(played, 0, call("put", key="a", value=1) + call("look", key="a")) == "null\n1"
    assert said(played, 1, call("look", key="a")) == "error: KeyError: 'a'"
    assert said(played, 1, call("look", key="start") + call("count", words=["a", "b"])) == "4\n2"
    assert said(played, 1, call("reset", start=1)).startswith("error: there is no tool reset")
    assert said(played, 0, "done") == "" and CALLED == ["closed"]
    played.close()
    assert Db.made == before + 2 and CALLED == ["closed"] * 2


def test_a_class_whose_reset_fails_or_returns_a_text_is_an_error(tmp_path):
    (tmp_path / "own_db.py").write_text(
        "class Db:\n    def reset(self, level): return level\n"
        '    def look(self) -> str:\n        """Look."""\n        return "a"\n'
    )
    own = [f"{tmp_path / 'own_db.py'}:Db"]
    for records, reason in (([{}], "missing 1 required .*'level'"), ([{"level": "Hi"}], "return None")):
        with pytest.raises(RunError, match=reason):
            episodes(functions=own, records=records)
    episodes(functions=own, records=[{"level": None}]).close()


def test_one_event_loop_runs_all_asynchronous_calls_of_a_run():
    loops = []
    for _ in range(2):
        played = episodes(functions=[f"{HERE}:forever"])
        loops.append(played._calls._threads[0])
        played.close()
    assert loops[0] is loops[1]
