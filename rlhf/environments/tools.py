"""Python functions as tools: a reply may call them, and the next message has what they return.

A function is described to the model by its type hints and its docstring (Google style). The chat template
writes the descriptions into the prompt, and a response template of transformers reads the calls of a reply.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

from transformers.utils import get_json_schema
from transformers.utils.chat_parsing import parse_response
from transformers.utils.chat_parsing.response_templates import ResponseTemplate, load_response_template

from rlhf.config.address import load_function
from rlhf.core.chat_format import QUESTION, render, template_name
from rlhf.core.control import START
from rlhf.core.errors import UserError, one_line
from rlhf.environments.environment import Answer, EnvironmentFactory, Example, factory
from rlhf.environments.turns import Turns

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlhf.config.environment import ToolsConfig

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


def build(config: ToolsConfig, tokenizer: PreTrainedTokenizerBase) -> EnvironmentFactory:
    """Return the factory of the environments of a run.

    Raises:
        UserError: a function, the response template or the chat template cannot be used.
    """
    described = schemas(config.functions)
    turns = Turns(tokenizer, config.role, config.message_tokens, tools=described)
    prompt = render(tokenizer, [{"role": "user", "content": QUESTION}], tools=described)
    arguments = {
        "functions": tuple(config.functions),
        "template": _response_template(tokenizer, config.response_template),
        "start": prompt.rpartition(QUESTION)[2],
    }
    return factory(config, turns, f"{__name__}:Tools", arguments)


def schemas(functions: Sequence[str]) -> list[dict[str, Any]]:
    """Return the descriptions of functions as JSON schemas, for the argument `tools` of a chat template.

    Raises:
        UserError: a function has no type hints or no docstring, or two have one name.
    """
    return [schema for _, schema in _tools(tuple(functions)).values()]


class Tools:
    """Functions that a reply may call. A reply without a call ends the episode, without a reward.

    Args:
        functions: addresses of the functions.
        template: a response template of transformers.
        start: what the chat template writes between a message and a reply, such as a mark of thoughts.
    """

    def __init__(self, functions: Sequence[str], template: ResponseTemplate, start: str) -> None:
        self._tools, self._schemas = _tools(tuple(functions)), schemas(functions)
        self._template, self._start = template, start
        self._results: list[tuple[str, bool]] = []  # of calls: the text, and whether it is an error

    def reset(self, example: Example) -> None:
        """Begin the episode."""

    def step(self, reply: str) -> Answer:
        """Make all calls of a reply, in their order."""
        self._results = results = []
        parsed: dict[str, Any] = {}
        try:
            parsed = self._read(reply)
        except Exception as error:  # the parsers raise whatever a reply leads to
            results.append(_error(f"the call cannot be read: {str(error).partition(chr(10))[0]}"))
        for call in parsed.get("tool_calls") or []:
            results.append(self._result(call))
            if self._results is not results:  # the reply was given up
                break
        return self._answer(results) if results else Answer(done=True)

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
        whole: dict[str, Any] = json.loads(json.dumps(read(reply), ensure_ascii=False).replace(START, ""))
        return whole

    def timed_out(self, limit_s: float) -> Answer:
        """Return the answer to a reply with a call that takes too long; the calls behind it are not made."""
        results, self._results = self._results, []
        return self._answer([*results, _error(f"timed out after {limit_s:g} s")])

    def _answer(self, results: list[tuple[str, bool]]) -> Answer:
        return Answer("\n".join(text for text, _ in results), error=any(wrong for _, wrong in results))

    def _result(self, call: Any) -> tuple[str, bool]:
        """Make a call; return the text of its result, and whether it is an error."""
        call = call.get("function") if isinstance(call, dict) else None
        name, given = (call.get("name"), call.get("arguments")) if isinstance(call, dict) else (None, None)
        if not isinstance(name, str) or not isinstance(given, dict):
            return _error("a call must be an object with a name and an object of arguments")
        if name not in self._tools:
            return _error(f"there is no tool {name}, only {', '.join(self._tools)}")
        function, schema = self._tools[name]
        try:
            inspect.signature(function).bind(**given)
        except TypeError as error:
            return _error(f"{name}: {error}")
        for key, described in schema["function"]["parameters"]["properties"].items():
            if key in given and not _fits(given[key], described):
                return _error(
                    f"{name}: {key} must be {json.dumps(described.get('type'))}, got {given[key]!r}"
                )
        try:
            return _text(name, function(**given)), False
        except BaseException as error:  # a tool may raise anything; the model chose the arguments
            return _error(one_line(error))


@cache
def _tools(functions: tuple[str, ...]) -> dict[str, tuple[Callable[..., Any], dict[Any, Any]]]:
    """Return functions and their JSON schemas by the names of the functions."""
    found: dict[str, tuple[Callable[..., Any], dict[Any, Any]]] = {}
    for address in functions:
        function = load_function("environment.functions", address, None)
        try:
            _check_hints(function)
            schema = get_json_schema(function)
        except Exception as error:  # of several kinds
            reason = " ".join(map(str, error.args))
            raise UserError(
                "environment.functions must name functions with type hints, and a docstring with a line for "
                f"each argument below Args: ({reason}), got {address}; write them"
            ) from error
        name = schema["function"]["name"]
        if name in found:
            raise UserError(f"environment.functions must have different names, got {name} twice; rename one")
        found[name] = function, schema
    return found


def _check_hints(function: Callable[..., Any]) -> None:
    """Raise ValueError for an argument that no call in JSON can give, and for a function that yields."""
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ValueError(f"{function.__name__} must return its result, and not yield it")
    hints = get_type_hints(function)
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ValueError(f"{name} of {function.__name__} must be given by its name")
        if other := [each for each in _plain(hints.get(name, Any)) if each not in _HINTS]:
            raise ValueError(f"{name} of {function.__name__} must be of a type of JSON, not {other[0]}")


def _plain(hint: Any) -> list[Any]:
    """Return the types in a type hint."""
    if get_origin(hint) is Literal:
        return [*map(type, get_args(hint))]
    return [each for inner in get_args(hint) for each in _plain(inner)] if get_args(hint) else [hint]


def _response_template(tokenizer: PreTrainedTokenizerBase, file: str | None) -> ResponseTemplate:
    """Return the response template in a file, of a tokenizer, or for a known form of calls."""
    found: Any = getattr(tokenizer, "response_template", None)
    chat = str(tokenizer.chat_template)
    if found is None and "<tool_call>" in chat and "<function=" not in chat:
        found = _HERMES
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
        ) from error
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


def _error(text: str) -> tuple[str, bool]:
    return f"error: {text}"[:_MOST_CHARACTERS], True
