"""The environments that come along: tools, games, and those of other libraries."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from functools import cache, partial
from itertools import groupby
from pathlib import Path
from types import UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from transformers import PreTrainedTokenizerBase
from transformers.utils import get_json_schema
from transformers.utils.chat_parsing import parse_response
from transformers.utils.chat_parsing.response_templates import ResponseTemplate, load_response_template

from rlhf.config.environments import ToolsConfig
from rlhf.core.errors import UserError, one_line
from rlhf.environments.environment import Answer, EnvironmentFactory, Example, Turns, checked, factory
from rlhf.environments.environment import asynchronous_calls as asynchronous
from rlhf.text.chat import QUESTION, START, render, template_name
from rlhf.usercode.address import load_function

# Python functions as tools: a reply may call them, and the next message has what they return.
#
# A function is described to the model by its type hints and its docstring (Google style). The chat template
# writes the descriptions into the prompt, and a response template of transformers reads the calls of a reply.
# Of a class, each episode has an instance of its own, whose public methods are tools.


_HERMES = {  # the calls of Hermes, Qwen 2.5 and Qwen 3
    "start_anchor_pattern": r"\A",
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>"},
        "tool_calls": {
            "open": "<tool_call>", "close": "</tool_call>", "content": "json", "repeats": True,
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {},
    },
}  # fmt: skip
_MOST_CHARACTERS = 200  # of an error in a message
_HINTS = (str, int, float, bool, list, dict, tuple, type(None), Any, ...)  # of arguments
_TYPES: dict[str, type | tuple[type, ...]] = {
    "string": str, "integer": int, "number": (int, float), "boolean": bool, "array": list, "object": dict,
    "null": type(None),
}  # fmt: skip


class _Tool(NamedTuple):
    """A function, or a method of a class, as a model sees it."""

    function: Callable[..., Any]  # of a class: without an instance
    kind: type | None  # the class
    types: dict[str, list[Any]]  # of the arguments
    schema: dict[Any, Any]


def build(config: ToolsConfig, tokenizer: PreTrainedTokenizerBase) -> EnvironmentFactory:
    """Return the factory of the environments of a run.

    Raises:
        UserError: a function, the response template or the chat template cannot be used.
    """
    tools, described = _tools(tuple(config.functions)).values(), schemas(config.functions)
    turns = Turns(tokenizer, config.role, config.message_tokens, tools=described)
    prompt = render(tokenizer, [{"role": "user", "content": QUESTION}], tools=described)
    arguments = {
        "functions": tuple(config.functions),
        "template": _response_template(tokenizer, config.response_template, turns),
        "start": prompt.rpartition(QUESTION)[2],
    }
    called = [getattr(tool.kind, name, None) for tool in tools for name in ("reset", "close")]
    kind = _AsyncTools if any(map(asynchronous, [*called, *(tool.function for tool in tools)])) else Tools
    return factory(config, turns, f"{__name__}:{kind.__name__}", arguments)


def schemas(functions: Sequence[str]) -> list[dict[str, Any]]:
    """Return the descriptions of functions as JSON schemas, for the argument `tools` of a chat template.

    Raises:
        UserError: a function has no type hints or no docstring, or two have one name.
    """
    return [tool.schema for tool in _tools(tuple(functions)).values()]


def gives_rewards(functions: Sequence[str]) -> bool:
    """Return whether the type hint of a function says that it returns an answer, which may have a reward."""
    found = _tools(tuple(functions)).values()
    return any(get_type_hints(tool.function).get("return") is Answer for tool in found)


class _AsyncTools:
    """Functions that a reply may call. A reply without a call ends the episode.

    Consecutive calls of asynchronous functions run concurrently.

    Args:
        functions: addresses of the functions and classes.
        template: a response template of transformers.
        start: what the chat template writes between a message and a reply, such as a mark of thoughts.
    """

    in_loop = True  # an event loop runs the methods

    def __init__(self, functions: Sequence[str], template: ResponseTemplate, start: str) -> None:
        self._tools, self._schemas = _tools(tuple(functions)), schemas(functions)
        self._waiting = [name for name, tool in self._tools.items() if asynchronous(tool.function)]
        self._template, self._start = template, start
        self._results: list[Answer] = []  # of calls
        self._made = {kind: kind() for kind in {tool.kind: 0 for tool in self._tools.values()} if kind}
        if not any(hasattr(kind, "close") for kind in self._made):
            self.close = None  # type: ignore[method-assign, assignment]

    async def reset(self, example: Example) -> None:
        """Begin the episode: call the method `reset` of each class with the columns of the row."""
        for made in self._made.values():
            if reset := getattr(made, "reset", None):
                known = {"example": example, "prompt": example.prompt, **example.record}
                named = inspect.signature(reset).parameters
                rest = any(each.kind is each.VAR_KEYWORD for each in named.values())
                given = {name: known[name] for name in known if name in named or (rest and name != "example")}
                if (text := await self._awaited(reset(**given))) is not None:
                    raise TypeError(
                        f"its text belongs in the prompt of the row; return None, not {text!r:.80}"
                    )

    async def step(self, reply: str) -> Answer:
        """Make all calls of a reply, in their order, and return the answer."""
        results = self._results = []
        parsed: dict[str, Any] = {}
        try:
            parsed = self._read(reply)
        except Exception as error:  # the parsers raise whatever a reply leads to
            results.append(_error(f"the call cannot be read: {str(error).partition(chr(10))[0]}"))
        found = parsed.get("tool_calls") or []
        calls = [call.get("function") if isinstance(call, dict) else None for call in found]

        def waits(call: Any) -> bool:
            return isinstance(call, dict) and call.get("name") in self._waiting

        for concurrent, some in groupby(calls, waits):
            if concurrent:
                results += await asyncio.gather(*map(self._result, some))
            for call in () if concurrent else some:
                results.append(await self._result(call))
                if self._results is not results:  # the reply was given up
                    return Answer()
        return _joined(results)

    async def close(self) -> None:
        """End the episode: call the methods `close` of the classes."""
        for made in self._made.values():
            if close := getattr(made, "close", None):
                await self._awaited(close())

    def _read(self, reply: str) -> dict[str, Any]:
        """Return the parts of a reply. A call ends where its JSON ends, also if an argument has the end mark.

        Raises:
            ValueError, TypeError: a call cannot be read.
        """
        read = partial(
            parse_response, response_template=self._template, prefix=self._start, tools=[*self._schemas]
        )
        close, end = self._template.fields["tool_calls"].close_re, 0
        with suppress(Exception):  # as in `step`
            return read(reply)
        while close and (found := close.search(reply, end)) and found[0]:
            end = found.end()
            try:
                read(reply[:end])
            except Exception:  # as in `step`; the mark is inside of the JSON
                reply = f"{reply[: found.start() + 1]}{START}{reply[found.start() + 1 :]}"
        return json.loads(json.dumps(read(reply), ensure_ascii=False).replace(START, ""))

    def timed_out(self, limit_s: float) -> Answer:
        """Return the answer to a reply with a call that takes too long; the calls behind it are not made."""
        results, self._results = self._results, []
        return _joined([*results, _error(f"timed out after {limit_s:g} s")])

    async def _result(self, call: Any) -> Answer:
        """Make a call, and return its result."""
        name, given = (call.get("name"), call.get("arguments")) if isinstance(call, dict) else (None, None)
        if not isinstance(name, str) or not isinstance(given, dict):
            return _error("a call must be an object with a name and an object of arguments")
        if name not in self._tools:
            return _error(f"there is no tool {name}, only {', '.join(self._tools)}")
        tool = self._tools[name]
        function = getattr(self._made[tool.kind], name) if tool.kind else tool.function
        try:
            inspect.signature(function).bind(**given)
        except TypeError as error:
            return _error(f"{name}: {error}")
        for key, described in tool.schema["function"]["parameters"]["properties"].items():
            if key in given and not _fits(given[key], described):
                must = json.dumps(described.get("enum", described.get("type")))
                return _error(f"{name}: {key} must be {must}, got {given[key]!r}")
        try:
            given = {key: _meant(value, tool.types.get(key, [])) for key, value in given.items()}
            result = await self._awaited(function(**given))
            return checked(result) if isinstance(result, Answer) else Answer(_text(name, result))
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # a tool may raise anything; the model chose the arguments
            return _error(one_line(error))

    async def _awaited(self, result: Any) -> Any:
        """Return a result; wait for it if that is necessary."""
        if inspect.isawaitable(result):
            return await result if self.in_loop else asyncio.run(asyncio.wait_for(result, None))
        return result


def _at_once(method: Callable[..., Coroutine[Any, Any, Any]]) -> Any:
    """Return a method that returns the result of an asynchronous one, which waits for nothing."""

    def call(*given: Any) -> Any:
        try:
            method(*given).send(None)
        except StopIteration as ended:
            return ended.value

    return call


class Tools(_AsyncTools):
    """Functions of which none is asynchronous: their calls are made in a thread, one after another."""

    in_loop = False

    reset, step, close = map(_at_once, (_AsyncTools.reset, _AsyncTools.step, _AsyncTools.close))  # type: ignore[arg-type]


def _joined(results: Sequence[Answer]) -> Answer:
    """Return the answer to a reply from the results of its calls; the episode is done if there are none."""
    figures = Counter[str]()
    for each in results:
        figures.update(each.figures)
    message, error = "\n".join(each.message for each in results), any(each.error for each in results)
    done = not results or any(each.done for each in results)
    return Answer(message, sum(each.reward for each in results), done, error, figures)


@cache
def _tools(functions: tuple[str, ...]) -> dict[str, _Tool]:
    """Return functions, and the public methods of classes, by their names."""
    found: dict[str, _Tool] = {}
    for address in functions:
        named = load_function("environment.functions", address, None)
        try:
            tools = {name: _tool(name, *each) for name, each in _callable(named).items()}
        except Exception as error:  # of several kinds
            reason = " ".join(map(str, error.args))
            raise UserError(
                "environment.functions must name functions, or classes of methods, with type hints, and a "
                f"docstring with a line for each argument below Args: ({reason}), got {address}; write them"
            ) from None
        for name in tools.keys() & found.keys():
            raise UserError(f"environment.functions must have different names, got {name} twice; rename one")
        found |= tools
    return found


def _callable(named: Any) -> dict[str, tuple[Callable[..., Any], type | None]]:
    """Return a function by its name; of a class that needs no arguments, the public methods.

    Raises:
        ValueError: there are none.
        TypeError: the class needs arguments.
    """
    if not isinstance(named, type):
        return {named.__name__: (named, None)}
    inspect.signature(named).bind()
    names = dict.fromkeys(name for each in reversed(named.__mro__) for name in vars(each) if name[0] != "_")
    members = {name: getattr(named, name) for name in names if name not in ("reset", "close")}
    methods = [name for name, each in members.items() if inspect.isroutine(each)]
    if not methods:
        raise ValueError(f"{named.__name__} has no public method")
    return {name: (members[name], named) for name in methods}


def _tool(name: str, function: Callable[..., Any], kind: type | None) -> _Tool:
    """Return a function as a model sees it.

    Raises:
        ValueError: no call in JSON can give an argument, or the function yields.
    """
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ValueError(f"{name} must return its result, and not yield it")
    hints, parameters = get_type_hints(function), [*inspect.signature(function).parameters.values()]
    if kind is not None and inspect.isfunction(inspect.getattr_static(kind, name)):
        del parameters[0]  # self
    types = {each.name: _plain(hints.get(each.name, Any)) for each in parameters}
    for each in parameters:
        if each.kind not in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY):
            raise ValueError(f"{each.name} of {name} must be given by its name")
        if other := [found for found in types[each.name] if found not in _HINTS and not _texts(found)]:
            raise ValueError(
                f"{each.name} of {name} must be of a type of JSON or an Enum of texts, and dict in place of "
                f"a dataclass, not {other[0]}"
            )
    described: Any = lambda: None  # noqa: E731
    described.__name__, described.__doc__ = name, inspect.getdoc(function)
    described.__signature__ = inspect.Signature(parameters)
    shown = [*types, *(["return"] if all(each in _HINTS for each in _plain(hints.get("return"))) else [])]
    described.__annotations__ = {key: _in_json(hint) for key, hint in hints.items() if key in shown}
    return _Tool(function, kind, types, get_json_schema(described))


def _plain(hint: Any) -> list[Any]:
    """Return the types in a type hint."""
    if get_origin(hint) is Literal:
        return [*map(type, get_args(hint))]
    return [each for inner in get_args(hint) for each in _plain(inner)] if get_args(hint) else [hint]


def _texts(kind: Any) -> dict[str, Enum]:
    """Return the members of an Enum of texts by their values; {}: another type."""
    members = {each.value: each for each in kind} if isinstance(kind, type) and issubclass(kind, Enum) else {}
    return members if all(isinstance(value, str) for value in members) else {}


def _in_json(hint: Any) -> Any:
    """Return a type hint with the values of each Enum in its place."""
    origin, inner = get_origin(hint), get_args(hint)
    if texts := _texts(hint):
        return Literal[tuple(texts)]
    if not inner or origin is Literal:
        return hint
    return (Union if origin is UnionType else origin)[tuple(map(_in_json, inner))]


def _meant(value: Any, types: Sequence[Any]) -> Any:
    """Return an argument with members of the Enums among its types in place of their values.

    Raises:
        KeyError: only an Enum is allowed, and has no such value.
    """
    if isinstance(value, list):
        return [_meant(each, types) for each in value]
    if isinstance(value, dict):
        return {key: _meant(each, types) for key, each in value.items()}
    members = {text: member for kind in types for text, member in _texts(kind).items()}
    if not members or not isinstance(value, str) or (str in types and value not in members):
        return value
    return members[value]


def _response_template(
    tokenizer: PreTrainedTokenizerBase, file: str | None, turns: Turns
) -> ResponseTemplate:
    """Return the response template in a file, of a tokenizer, or for a known form of calls."""
    found: Any = getattr(tokenizer, "response_template", None)
    chat = str(tokenizer.chat_template)
    if found is None and "<tool_call>" in chat and "<function=" not in chat:
        found = _HERMES
    if found is file is None and not turns.describes_tools:
        raise UserError(
            "model.policy must name a model whose chat template describes tools (the model learns of them by "
            f"the prompt), got {template_name(tokenizer)}; set model.policy=Qwen/Qwen3-0.6B, or "
            "model.chat_template=<file with a Jinja template that does so>, or environment=python "
            "environment.path=<file>.py:<Class>"
        )
    try:
        if file is not None:
            found = json.loads(Path(file).expanduser().read_text(encoding="utf-8"))
        template: ResponseTemplate = load_response_template(found)
        if "tool_calls" not in template.fields:
            raise ValueError("it has no field tool_calls")
    except (OSError, ValueError) as error:
        what = template_name(tokenizer) if file is None else file
        raise UserError(
            "environment.response_template must be a JSON file with a response template of transformers that "
            f"reads the calls of tools ({error}), got {file or 'null'} with {what}; set "
            "environment.response_template=<file>.json"
        ) from None
    return template


def _fits(value: Any, schema: dict[str, Any]) -> bool:
    """Return whether a value has a type of a JSON schema."""
    if value is None and schema.get("nullable"):
        return True
    types = schema.get("type", [])
    types = [types] if isinstance(types, str) else types
    known = [each for each in types if each in _TYPES]
    fits = any(isinstance(value, _TYPES[t]) and isinstance(value, bool) == (t == "boolean") for t in known)
    return (fits or not known) and value in schema.get("enum", [value])


def _text(name: str, result: Any) -> str:
    """Return a text unchanged, and another value as JSON; numpy and torch give numbers and lists.

    Raises:
        TypeError: the result is no such value; the text that Python has for it may change from run to run.
    """

    def plain(value: Any) -> Any:
        return value.tolist() if hasattr(value, "tolist") else json.JSONEncoder().default(value)

    try:
        return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=plain)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} must return text, numbers, lists, dicts or None ({error})") from error


def _error(text: str) -> Answer:
    return Answer(f"error: {text}"[:_MOST_CHARACTERS], error=True)


# The environments of the embedded tasks: a calculator, and the game of guessing a number.


class Calculator:
    """Adds two numbers for the model; the reward is 1 for the right sum.

    The replies are " calc 7 + 5", which is answered with " 12", and " #### 20", which ends the episode.
    """

    def reset(self, example: Example) -> None:
        """Begin an episode; the reference of the example is the right last reply."""
        self.right = example.reference

    def step(self, reply: str) -> Answer:
        """Return the sum of a call, the reward of an answer, or an error."""
        if call := re.fullmatch(r" calc (\d+) \+ (\d+)", reply):
            return Answer(f" {int(call[1]) + int(call[2])}")
        if re.fullmatch(r" #### \d+", reply):
            return Answer(reward=float(reply == self.right), done=True)
        return Answer(" error", error=True)


class GuessNumber:
    """Answers a guess with " higher" or " lower"; the reward is 1 for the right number."""

    def reset(self, example: Example) -> None:
        """Begin an episode; the record of the example has the number as `secret`."""
        self.secret: int = example.record["secret"]

    def step(self, reply: str) -> Answer:
        """Return where the number is, or the reward."""
        if not re.fullmatch(r" \d+", reply):
            return Answer(" error", error=True)
        right = int(reply) == self.secret
        return Answer(" higher" if int(reply) < self.secret else " lower", float(right), right)


# Environments of other libraries. A library is imported when its class is used.
#
# The first observation is the prompt with `task=environment`. With other tasks it is no message.


class Gymnasium:
    """An environment of gymnasium whose observations are written as texts.

    Args:
        id: its name.
        actions: the action that each word means, such as {left: 0}; {}: a reply is the action.
        options: further arguments of `gymnasium.make`.
    """

    def __init__(self, id: str, actions: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        from gymnasium import make

        self._game, self._actions, self._seen = make(id, **options), actions, ""
        self._words = f"\nAnswer with one of: {', '.join(actions)}" if actions else ""

    def reset(self, example: Example) -> str:
        """Begin the episode with the seed of the example, and return the first observation."""
        self._seen = str(self._game.reset(seed=example.seed % 2**31)[0])
        return self._seen + self._words

    def step(self, reply: str) -> Answer:
        """Take an action. Another word changes nothing: the message has the observation and the words."""
        word, actions = reply.strip(), self._actions
        if actions and word not in actions:
            return Answer(self._seen + self._words, error=True)
        seen, reward, ended, cut, _ = self._game.step(actions[word] if actions else reply)
        self._seen = str(seen)
        return Answer(self._seen, float(reward), bool(ended or cut))

    def close(self) -> None:
        """End the environment."""
        self._game.close()


class OpenEnv:
    """A session of an OpenEnv server, which must allow as many sessions as there are episodes in a request.

    Args:
        url: the address of the server, http or https.
        action: the field of an action that has the reply.
        observation: the field of an observation that is the message; None: all fields, as JSON.
    """

    def __init__(self, url: str, action: str, observation: str | None) -> None:
        self._url = f"ws{url.removeprefix('http').rstrip('/')}/ws"
        self._action, self._observation = action, observation
        self._session: Any = None

    async def reset(self, example: Example) -> str:
        """Begin a session with the seed of the example, and return the first observation."""
        from websockets.asyncio.client import connect

        self._session = await connect(self._url, max_size=2**24, proxy=None)
        return self._text(await self._ask("reset", {"seed": example.seed % 2**31}))

    async def step(self, reply: str) -> Answer:
        """Send a reply as an action."""
        found = await self._ask("step", {self._action: reply})
        return Answer(self._text(found), found.get("reward") or 0.0, bool(found.get("done")))

    def _text(self, found: dict[str, Any]) -> str:
        seen, name = found["observation"], self._observation
        return json.dumps(seen, ensure_ascii=False) if name is None else str(seen[name])

    async def close(self) -> None:
        """End the session."""
        if self._session is not None:
            await self._session.send(json.dumps({"type": "close"}))
            await self._session.close()

    async def _ask(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        await self._session.send(json.dumps({"type": kind, "data": data}))
        found = json.loads(await self._session.recv())
        if found["type"] == "error":
            raise RuntimeError(f"the server answers: {found['data'].get('message')}")
        return dict(found["data"])
