"""The rows of a data set: texts, dialogues, recognised columns, columns for reward functions. No torch."""

from __future__ import annotations

import ast
import json
import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from functools import cache, lru_cache
from itertools import dropwhile
from typing import Any

from rlhf.config.algorithms import Data
from rlhf.config.schema import data_file
from rlhf.config.tasks import PREFERENCE_COLUMNS, ColumnsConfig
from rlhf.core.errors import UserError, setting
from rlhf.usercode.address import GIVEN

log = logging.getLogger(__name__)

# Forms in which data sets store texts and dialogues, and their conversion.


_TABLES = data_file("rlhf.tasks", "columns.yaml")

Row = dict[str, Any]
Rows = Iterator[tuple[str, Row]]  # each with its place for messages, such as "line 3 of x.jsonl"
Convert = Callable[[Row], Row]  # returns the example of a row; raises `BadRow`
TOOLS = "tools"  # column beside messages: the functions that the assistant may call, as JSON schemas
_ASSISTANT = "\n\nAssistant:"  # before each answer in dialogues that are one text, as in hh-rlhf


@dataclass(eq=False)
class BadRow(Exception):
    """A row without the required content; the caller adds the key and the place to the message."""

    rule: str  # what the data must have, after "<key> must"
    got: str  # what the row has, after the place of the row
    remedy: str = "correct or remove that row"


class Written(float):
    """A number of a JSON file that has its digits, such as 1.50 or 1e3, as text."""

    written: str

    def __new__(cls, text: str) -> Written:
        """Return the number that a text means."""
        made = super().__new__(cls, text)
        made.written = text
        return made

    def __str__(self) -> str:
        return self.written


@lru_cache
def note(text: str) -> None:
    """Say once how data are read."""
    log.warning("%s", text)


def _messages_of(value: Any) -> Any:
    """Return the messages that a text contains, or the value itself."""
    if not isinstance(value, str) or not value.lstrip().startswith("[") or "{" not in value:
        return value
    for read in (json.loads, ast.literal_eval):
        try:
            found = read(value)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            continue
        return found if is_dialogue(found) else value
    return value


def is_dialogue(value: Any) -> bool:
    """Return whether a value is a list of messages: of objects with a role."""
    found = value if isinstance(value, list) else []
    return found != [] and all(isinstance(each, dict) and {"role", "from"} & each.keys() for each in found)


# Columns of the data that reward functions ask for. They travel with a prompt as its record.
#
# A source adds the column `record` to its rows: the columns of the row that a function asks for, as JSON
# text. Without such a function, there is no record.


RECORD = "record"


@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """The columns of the data that the reward functions of a run ask for.

    Attributes:
        columns: name of a column -> config key and address of a function that cannot do without the column;
            without a function, the address is empty.
        optional: names of columns that a function receives if the data have them.
        rest: a function receives all columns (`**kwargs`).
        parts: the columns of each part of a mixture of tasks, by the name of the part.
        positions: name of a parameter that receives another value by position -> key, address and that value.
    """

    columns: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    optional: frozenset[str] = frozenset()
    rest: bool = False
    parts: Mapping[str, Wanted] = field(default_factory=dict)
    positions: Mapping[str, tuple[str, str, str]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return self.asks or bool(self.positions) or any(self.parts.values())

    @property
    def asks(self) -> bool:
        """Whether a function asks for columns, so that rows have a record."""
        return bool(self.columns or self.optional or self.rest)

    def read(self, names: Collection[str], available: Collection[str], place: str) -> list[str] | None:
        """Return the columns of a file to read: `names` and those of the record; None: all columns.

        Args:
            names: columns that are read anyway.
            available: all columns of the data.
            place: the data, for messages.

        Raises:
            UserError: a function asks for a column that the data lack, or receives another value instead.
        """
        for name, (key, path, value) in self.positions.items():
            if name in available and (value == "response" or name not in names):
                raise UserError(
                    f"{key} must name a function with a parameter response if others are columns of the data "
                    f"(without it, {name} would be the {value}), got {path} for {place} with the column "
                    f"{name}; rename the parameter that is the response to response"
                )
        for name, (key, path) in self.columns.items():
            if name not in available:
                near = get_close_matches(name, available, n=1)
                if not path:  # the key itself names the column
                    raise UserError(
                        f"{key} must name a column of every split ({', '.join(available)}), got {name}, "
                        f"which {place} lacks; set {setting(key, near[0] if near else 'null')}"
                    )
                remedy = f"did you mean {near[0]}?" if near else "rename the parameter, or give it a default"
                raise UserError(
                    f"{key} must name a function whose parameters are prompt, response, reference, messages "
                    f"or columns of the data ({', '.join(available)}), got {path} with the parameter {name}, "
                    f"which {place} lacks; {remedy}"
                )
        return None if self.rest else list(dict.fromkeys([*names, *self.columns, *self.optional]))

    def record(self, row: Row) -> str:
        """Return the columns of a row that functions ask for, as JSON text; dates and decimals become texts.

        Raises:
            BadRow: a column has binary data, such as an image.
        """
        kept = self.columns.keys() | (row.keys() - GIVEN if self.rest else self.optional)
        asked = {name: row[name] for name in row if name in kept}
        for name in filter(lambda name: _has_bytes(asked[name]), asked):
            rule = f"have texts, numbers, lists or objects in its column {name}, which a function receives"
            remedy = f"remove the column {name}, or write its texts as strings"
            raise BadRow(rule, "with bytes (such as an image or a sound)", remedy)
        return json.dumps(asked, default=str)

    def recording(self, convert: Convert) -> Convert:
        """Return the function `convert`, which also adds the record to a row."""
        return lambda row: {**convert(row), RECORD: self.record(row)} if self.asks else convert(row)


def _has_bytes(value: Any) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return isinstance(value, bytes) or any(map(_has_bytes, inner))


NOTHING = Wanted()


def described(value: Any) -> str:
    """Return the JSON type of a value, and the value if it is short, for messages."""
    if value is None:
        return "null"
    kinds = {bool: "true or false", int: "a number", float: "a number", str: "a text", list: "a list"}
    other = "an object" if isinstance(value, dict) else type(value).__name__
    kind = next((kinds[each] for each in kinds if isinstance(value, each)), other)
    return f"{kind} ({value})" if isinstance(value, int | float) and len(str(value)) < 20 else kind


# The columns of a data set: which of them is the prompt, the response, or a dialogue, and their conversion.
#
# Texts stay texts. Dialogues are lists of messages with `role`, `content` and further keys, as in the
# `messages` format of chat models and in the conversational formats of TRL. The response of a dialogue is a
# list, too: of its one message.


Message = dict[str, Any]  # role and content (texts), and what else the data have, such as tool_calls
Prompt = str | list[Message]
Response = str | list[Message]  # one message of the assistant, or none


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The columns of a data set by their role. A role that no column has is None."""

    prompt: str | None = None
    context: str | None = None  # appended to the prompt after an empty line
    response: str | None = None
    chosen: str | None = None
    rejected: str | None = None
    messages: str | None = None  # whole dialogues
    tools: str | None = None  # beside messages
    chat: bool = False  # prompts that are texts become messages of the user

    @property
    def names(self) -> list[str]:
        """The names of the columns that are read."""
        return [name for each in fields(self) if isinstance(name := getattr(self, each.name), str)]

    def described(self) -> str:
        """Return the roles and their columns as text: "question as prompt, answer as response"."""
        named = {each.name: getattr(self, each.name) for each in fields(self)}
        if self.context is not None:
            named["prompt"] = f"{self.prompt} + {named.pop('context')}"
        found = {role: name for role, name in named.items() if isinstance(name, str)}
        return ", ".join(name if name == role else f"{name} as {role}" for role, name in found.items())

    def conversion(self, data: Data) -> Convert:
        """Return the function that converts a row to an example with the content `data`."""
        if data is Data.preferences:
            return self.pair
        return self.demonstration if data is Data.references else self.example

    def example(self, row: Row) -> Row:
        """Return the prompt and the reference response of a row.

        A prompt of text is the column `query`, and its reference a text; a prompt of messages is the column
        `messages`, and its reference a list of one message. Without a reference response,
        `reference_response` is empty. Rows of pairs have the column `rejected`, too, and rows of dialogues
        with tools the column `tools`.

        Raises:
            BadRow: the row lacks a column, or a value has the wrong form.
        """
        prompt: Prompt
        reference: Response
        others: Row = {}
        if self.messages is not None:
            prompt = _conversation(row, self.messages)
            answered = prompt[-1]["role"] == "assistant" and len(prompt) > 1
            if prompt[-1]["role"] == "assistant" and not answered:
                raise BadRow(f"have a message before the answer in its column {self.messages}", "without it")
            reference = [prompt.pop()] if answered else []
        elif self.response is None and self.chosen is not None and self.rejected is not None:
            prompt, reference, others["rejected"] = self._pair(row)
        elif (column := self.response or self.chosen) is not None:
            prompt, reference = answer(self._prompt(row), row, column)
        else:
            prompt = self._prompt(row)
            reference = "" if isinstance(prompt, str) else []
        if isinstance(prompt, str):
            return {"query": prompt, "reference_response": reference, **others}
        others |= {} if self.tools is None else self._tools(row)
        return {"messages": prompt, "reference_response": reference, **others}

    def demonstration(self, row: Row) -> Row:
        """Return the prompt and the response that SFT imitates; see `example`.

        Raises:
            BadRow: the row lacks a column, a value has the wrong form, or a dialogue ends without an answer.
        """
        last = "assistant" if self.messages is None else _conversation(row, self.messages)[-1]["role"]
        if last != "assistant":
            rule = f"have dialogues that end with a message of the assistant in its column {self.messages}"
            raise BadRow(rule, f"with a last message of {last}")
        return self.example(row)

    def pair(self, row: Row) -> Row:
        """Return `prompt`, `chosen` and `rejected` of a row: texts, or messages (perhaps with `tools`).

        Raises:
            BadRow: the row lacks a column, or a value has the wrong form.
        """
        made = dict(zip(PREFERENCE_COLUMNS, self._pair(row), strict=True))
        return made if self.tools is None or isinstance(made["prompt"], str) else made | self._tools(row)

    def _tools(self, row: Row) -> Row:
        """Return the tools of a row: a list of JSON schemas, or its JSON text; None: there are none."""
        assert self.tools is not None
        value = row.get(self.tools)
        with suppress(ValueError, TypeError):
            value = json.loads(value) if isinstance(value, str) and value else value
            value = [json.loads(each) if isinstance(each, str) else each for each in value or []]
            if all(isinstance(each, dict) for each in value):
                return {TOOLS: value or None}
        rule = f"have tools as a list of JSON schemas (or its JSON text) in its column {self.tools}"
        raise BadRow(rule, f"with {described(row.get(self.tools))}")

    def _pair(self, row: Row) -> tuple[Prompt, Response, Response]:
        assert self.chosen is not None and self.rejected is not None
        if self.prompt is None and not isinstance(row.get(self.chosen), list):
            # As in hh-rlhf: the prompt ends with the last mark of the part that both dialogues share
            whole = _text(row, self.chosen), _text(row, self.rejected)
            before, mark, _ = os.path.commonprefix(whole).rpartition(_ASSISTANT)
            if mark:
                end = len(before) + len(mark)
                return whole[0][:end], whole[0][end:], whole[1][end:]
            rule = "have a column of prompts, or whole dialogues with '\\n\\nAssistant:' before each answer"
            raise BadRow(rule, "without them", "add the column prompt")
        asked = self._prompt(row) if self.prompt is not None else []
        first, chosen = answer(asked, row, self.chosen)
        second, rejected = answer(asked, row, self.rejected)
        if first != second:
            rule = f"have the same messages before the answers in {self.chosen} and {self.rejected}"
            raise BadRow(rule, "with different messages")
        if first == []:
            raise BadRow(f"have prompts, in a column of their own or in {self.chosen}", "without a prompt")
        return first, chosen, rejected

    def _prompt(self, row: Row) -> Prompt:
        assert self.prompt is not None
        if isinstance(row.get(self.prompt), list):
            return _conversation(row, self.prompt)
        prompt = _text(row, self.prompt)
        context = row.get(self.context) if self.context is not None else None
        prompt = f"{prompt}\n\n{_text(row, str(self.context))}" if context else prompt
        return [{"role": "user", "content": prompt}] if self.chat else prompt


def _text(row: Row, column: str) -> str:
    """Return the text in a column of a row.

    Raises:
        BadRow: the row lacks the column, or the value is not a text that can be written as UTF-8.
    """
    if column not in row:
        raise BadRow(f"have the column {column} in every row", f"with the columns {', '.join(row) or 'none'}")
    value = row[column]
    if isinstance(value, int | Written) and not isinstance(value, bool):
        # Of a number with a fraction, only JSON has the digits. Other formats store it in binary.
        note(f"numbers in the column {column} are read as text, as they are written")
        return str(value)
    if not isinstance(value, str):
        remedy = "write the value as text, in quotes"
        if value is None or value != value:
            remedy = "correct or remove the rows without a value"
        elif isinstance(value, dict):
            remedy = "write the field that is meant as a column of its own"
        raise BadRow(f"have a text in its column {column} in every row", f"with {described(value)}", remedy)
    try:
        value.encode()
    except UnicodeEncodeError:
        rule = f"have text of whole Unicode characters in its column {column}"
        raise BadRow(rule, "with half of a surrogate pair (\\ud800 to \\udfff)") from None
    return value


def _conversation(row: Row, column: str) -> list[Message]:
    """Return the messages in a column of a row, with all their keys that have a value.

    `role` and `content` come first. A message without content, such as a call of a tool, has the content "".

    Raises:
        BadRow: the value is not a list of at least one message, or a role or a content is not a text.
    """
    value = row.get(column)
    rule = f"have dialogues (lists of messages with role and content, both texts) in its column {column}"
    if not isinstance(value, list) or not value:
        found = "an empty list" if value == [] else described(value)
        remedy = 'write [{"role": "user", "content": "..."}, ...], as a list or as its JSON text'
        raise BadRow(rule, f"with {found}" if column in row else "without that column", remedy)
    messages = []
    for message in value:
        keys = message if isinstance(message, dict) else {}
        given = {name: each for name, each in keys.items() if each is not None}
        others = {name: each for name, each in given.items() if name not in ("role", "content")}
        if "role" not in keys or not ("content" in keys or others):
            found = ", ".join(keys) or described(message)
            remedy = 'write {"role": ..., "content": ...} for each message'
            if {"from", "value"} <= keys.keys():
                found += " (as in ShareGPT)"
                remedy += ", with user in place of human and assistant in place of gpt"
            elif isinstance(message, str) and column != "messages":
                remedy += ", or one text in place of the list"
            raise BadRow(rule, f"with {found} in place of role and content", remedy)
        try:
            content = "" if others and "content" not in given else _text(keys, "content")
            role = _text(keys, "role")
        except BadRow as error:
            parts = isinstance(keys.get("content"), list)
            remedy = "write the text of its parts as one text" if parts else error.remedy
            raise BadRow(rule, f"{error.got} in place of a text", remedy) from None
        if (meant := _TABLES["roles"].get(role)) is not None:
            rule = f"have messages with the roles of chat templates in its column {column}"
            raise BadRow(rule, f"with a message of {role}", f"write {meant} in place of {role} in all rows")
        messages.append({"role": role, "content": content, **others})
    return messages


def only_prompt(row: Row, column: str, chat: bool) -> dict[str, Prompt]:
    """Return the column `prompt` with the text in a column of a row; with `chat`, messages.

    Raises:
        BadRow: the value is no text; with `chat`, neither a text nor a list of messages.
    """
    return {"prompt": Layout(prompt=column, chat=True)._prompt(row) if chat else _text(row, column)}


def answer(before: Prompt, row: Row, column: str) -> tuple[Prompt, Response]:
    """Return the prompt and the response of a row: two texts, or two lists of messages.

    If the response is a list of messages, the prompt is a list of messages, too. A prompt of text then
    becomes a message of the user, unless the response contains the user's messages. A prompt of messages may
    be repeated in the response. A text behind a prompt of messages becomes a message of the assistant.

    Args:
        before: the prompt; an empty list if the response contains the prompt.
        row: the row.
        column: the column of the response, a text or a list of messages.

    Raises:
        BadRow: the response does not end with a message of the assistant.
    """
    if not isinstance(row.get(column), list):
        written = _text(row, column)
        return before, written if isinstance(before, str) else [{"role": "assistant", "content": written}]
    *turns, last = _conversation(row, column)
    if last["role"] != "assistant":
        rule = f"have a message of the assistant at the end of its column {column}"
        raise BadRow(rule, f"with a message of {last['role']}")
    if isinstance(before, list):
        return turns if turns[: len(before)] == before else [*before, *turns], [last]
    asked = any(turn["role"] == "user" for turn in turns)  # the messages then repeat the text
    return turns if asked else [*turns, {"role": "user", "content": before}], [last]


def converted(rows: Rows, convert: Convert, key: str) -> Rows:
    """Yield each row after `convert`, with its place.

    Raises:
        UserError: `convert` refuses a row, or a row has dialogues where the first row has texts.
    """
    first: tuple[str, str] | None = None  # place and form
    for place, row in rows:
        try:
            made = convert({name: _messages_of(value) for name, value in row.items()})
        except BadRow as error:
            raise UserError(f"{key} must {error.rule}, got {place} {error.got}; {error.remedy}") from None
        prompt = made.get("messages", made.get("prompt"))
        if isinstance(prompt, list) and all(message["role"] == "system" for message in prompt):
            raise UserError(
                f"{key} must have a message of the user in each dialogue, got {place} with a system message "
                "only; add the message to answer"
            )
        form = "a dialogue" if isinstance(prompt, list) else "a text"
        first = first or (place, form)
        if form != first[1]:
            raise UserError(
                f"{key} must have texts in all rows or dialogues in all rows, got {first[0]} with {first[1]} "
                f"and {place} with {form}; convert one of them"
            )
        yield place, made


@cache
def conversion(columns: tuple[str, ...]) -> Convert:
    """Return the function that checks and converts a row with the canonical columns `columns`.

    It raises BadRow if the row lacks a column, or a value has the wrong form. Rows of messages and of pairs
    may have the column `tools`.
    """

    def convert(row: Row) -> Row:
        beside = TOOLS if TOOLS in row else None
        if columns == ("messages",):
            return Layout(messages="messages", tools=beside).example(row)
        if columns == PREFERENCE_COLUMNS:
            prompt = "prompt" if "prompt" in row else None
            return Layout(prompt=prompt, chosen="chosen", rejected="rejected", tools=beside).pair(row)
        return {column: _text(row, column) for column in columns}

    return convert


def with_all_replies(example: Row) -> Row:
    """Return a converted row with the column `demonstration`: its dialogue from the first reply on."""
    if "messages" not in example:
        raise BadRow("have dialogues for task.all_replies=true", "with texts", "set task.all_replies=false")
    whole = example["messages"] + example["reference_response"]
    if whole[0]["role"] == "assistant":
        rule = "have a message before the first reply for task.all_replies=true"
        raise BadRow(rule, "without it", "correct or remove that row, or set task.all_replies=false")
    return {**example, "demonstration": list(dropwhile(lambda each: each["role"] != "assistant", whole))}


_CONTEXT = "input"  # beside `instruction`, in the format of Alpaca
_MANY = 12  # columns that a message lists


def recognise(names: Sequence[str], config: ColumnsConfig, data: Data, key: str, place: str) -> Layout:
    """Return the layout of a data set with the columns `names`.

    Args:
        names: the columns of the data set.
        config: the columns that the user names.
        data: what an example must contain.
        key: config key that names the data, for messages.
        place: file or folder of the data, for messages.

    Raises:
        UserError: a named column does not exist, or the columns lack what an example needs or are ambiguous.
    """
    taken = {each.name: getattr(config, each.name) for each in fields(config)}
    found: dict[str, Any] = {}
    for role, usual in _TABLES["names"].items():
        named = taken[role]
        if named is not None and named not in names:
            close = get_close_matches(str(named), names, n=1)
            remedy = "name one of these columns"
            if close:
                remedy = f"did you mean {setting(f'task.columns.{role}', close[0])}?"
            raise UserError(
                f"task.columns.{role} must name a column of the data ({', '.join(names)}), got {named} with "
                f"{key}={place}; {remedy}"
            )
        likely = [name for name in names if name.lower() in usual and name not in taken.values()]
        if named is None and len(likely) > 1:
            raise UserError(
                f"{key} must have one column of {role}s (the choice is not clear), got {place} with "
                f"{' and '.join(likely)}; set {setting(f'task.columns.{role}', likely[0])}"
            )
        found[role] = named if named is not None else next(iter(likely), None)
    prompt, response, messages = found["prompt"], found["response"], found["messages"]
    beside = next((name for name in names if name.lower() == TOOLS), None)
    if messages is not None and config.prompt is None and data is not Data.preferences:
        if None in (prompt, response) or config.messages is not None:
            return Layout(messages=messages, tools=beside)
        raise UserError(
            f"{key} must have dialogues or prompts with responses (both can be read), got {place} with "
            f"{messages}, {prompt} and {response}; set {setting('task.columns.messages', messages)} or "
            f"{setting('task.columns.prompt', prompt)}"
        )
    pairs = None not in (found["chosen"], found["rejected"])
    asks = pairs or (data is not Data.preferences and prompt is not None)
    if not asks or (data is Data.references and response is None and found["chosen"] is None):
        raise _lacks(names, data, key, place)
    if data is Data.references and set(names) >= {*_TABLES["labelled"]} and config.response is None:
        raise UserError(
            f"{key} must have only good responses (SFT imitates all), got {place} with labels; keep the rows "
            "whose label is true, without that column, or set task.columns.response=completion for all rows"
        )
    context = None  # of Alpaca's format, unless the user names the column of prompts
    if config.prompt is None and str(prompt).lower() == "instruction":
        context = next((name for name in names if name.lower() == _CONTEXT), None)
    unused = {"messages": None} | ({"response": None} if data is Data.preferences else {})
    return Layout(**{**found, **unused}, context=context, tools=beside)


def _lacks(names: Sequence[str], data: Data, key: str, place: str) -> UserError:
    """Return the error for data without the columns of an example."""
    roles, needs = _TABLES["needs"][data.value]
    listed = ", ".join(names[:_MANY]) + (f" and {len(names) - _MANY} others" if len(names) > _MANY else "")
    if data is Data.preferences and set(names) >= {*_TABLES["labelled"]}:
        return UserError(
            f"{key} must have {needs}, got {place} with {listed} (single responses with a label); write a "
            "row with prompt, chosen and rejected for each prompt with a good and a bad completion, or train "
            "on the good ones alone with algo=sft"
        )
    missing = [role for role in roles if not any(name.lower() in _TABLES["names"][role] for name in names)]
    free = [name for name in names if not any(name.lower() in each for each in _TABLES["names"].values())]
    remedy = f"add {' and '.join(missing)}"
    if len(free) >= len(missing):
        settings = {}
        for role in sorted(missing, key=lambda role: role != "rejected"):  # "non_preferred" contains "prefer"
            parts = _TABLES["similar"].get(role, [""])
            likely = next((name for name in free if any(part in name.lower() for part in parts)), None)
            settings[role] = f"task.columns.{role}=<column>"
            if likely is not None:
                free.remove(likely)
                settings[role] = setting(f"task.columns.{role}", likely)
        remedy = f"rename the columns or set, for example, {' '.join(settings[role] for role in missing)}"
    return UserError(f"{key} must have {needs}, got {place} with {listed or 'none'}; {remedy}")
