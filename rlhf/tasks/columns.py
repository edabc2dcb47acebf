"""The columns of a data set: which of them is the prompt, the response, or a dialogue, and their conversion.

Texts stay texts. Dialogues are lists of messages {role, content}, as in the `messages` format of chat models
and in the conversational formats of TRL. This module imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from rlhf.config.algo import Data
from rlhf.config.task import PREFERENCE_COLUMNS, ColumnsConfig
from rlhf.core.errors import UserError
from rlhf.core.pasting import setting
from rlhf.tasks.formats import number_as_text, parsed, without_prompt
from rlhf.tasks.reading import described

if TYPE_CHECKING:
    from rlhf.tasks.reading import Row

Message = dict[str, str]  # role and content
Prompt = str | list[Message]

# Recognised names of the columns, in any case. `reference_response` is the name in the embedded tasks.
NAMES = {
    "prompt": ("prompt", "query", "question", "instruction"),
    "response": ("response", "completion", "answer", "output", "reference", "reference_response"),
    "chosen": ("chosen",),
    "rejected": ("rejected",),
    "messages": ("messages", "conversations"),
}
CONTEXT = "input"  # beside `instruction`, in the format of Alpaca
NEEDS = {  # content of an example -> the columns that it needs, for messages
    Data.prompts: "a column of prompts (prompt, query, question or instruction) or of dialogues (messages)",
    Data.references: "a column of prompts (such as prompt) and a column of responses (such as response), or "
    "dialogues (messages), because SFT imitates responses",
    Data.preferences: "the columns prompt, chosen and rejected, because the run reads pairs",
}


class BadRow(Exception):
    """A row without the required content; the caller adds the key and the place to the message.

    Args:
        rule: what the data must have, after "<key> must".
        got: what the row has, after the place of the row.
        remedy: what to do about such a row.
    """

    def __init__(self, rule: str, got: str, remedy: str = "correct or remove that row") -> None:
        super().__init__(rule, got)
        self.rule = rule
        self.got = got
        self.remedy = remedy

    def problem(self, key: str, place: str) -> str:
        """Return the error message for the row at `place` of the data that `key` names."""
        return f"{key} must {self.rule}, got {place} {self.got}; {self.remedy}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The columns of a data set by their role. A role that no column has is None."""

    prompt: str | None = None
    context: str | None = None  # appended to the prompt after an empty line
    response: str | None = None
    chosen: str | None = None
    rejected: str | None = None
    messages: str | None = None  # whole dialogues

    @property
    def names(self) -> list[str]:
        """The names of the columns that are read."""
        return [name for each in fields(self) if (name := getattr(self, each.name)) is not None]

    @property
    def has_references(self) -> bool:
        """Whether the prompts have reference responses; dialogues may have them."""
        return bool(self.messages or self.response or self.chosen)

    def described(self) -> str:
        """Return the roles and their columns as text: "question as prompt, answer as response"."""
        named = {each.name: getattr(self, each.name) for each in fields(self)}
        if self.context is not None:
            named["prompt"] = f"{self.prompt} + {named.pop('context')}"
        found = {role: name for role, name in named.items() if name is not None}
        return ", ".join(name if name == role else f"{name} as {role}" for role, name in found.items())

    def example(self, row: Row) -> Row:
        """Return the prompt and the reference response of a row.

        A prompt of text is the column `query`; a prompt of messages is the column `messages`. Without a
        reference response, `reference_response` is empty.

        Raises:
            BadRow: the row lacks a column, or a value has the wrong form.
        """
        if self.messages is not None:
            turns = conversation(row, self.messages)
            answered = turns[-1]["role"] == "assistant" and len(turns) > 1
            if turns[-1]["role"] == "assistant" and not answered:
                raise BadRow(f"have a message before the answer in its column {self.messages}", "without it")
            reference = turns.pop()["content"] if answered else ""
            return {"messages": turns, "reference_response": reference}
        if self.prompt is None:
            prompt, reference, _ = self._pair(row)
        elif (column := self.response or self.chosen) is not None:
            prompt, reference = answer(self._prompt(row), row, column)
            if column == self.chosen and isinstance(prompt, str):  # chosen may repeat the prompt
                reference = reference.removeprefix(prompt)
        else:
            prompt, reference = self._prompt(row), ""
        return {"query" if isinstance(prompt, str) else "messages": prompt, "reference_response": reference}

    def demonstration(self, row: Row) -> Row:
        """Return the prompt and the response that SFT imitates; see `example`.

        Raises:
            BadRow: the row lacks a column, a value has the wrong form, or a dialogue ends without an answer.
        """
        if (
            self.messages is not None
            and (last := conversation(row, self.messages)[-1]["role"]) != "assistant"
        ):
            raise BadRow(
                f"have dialogues that end with a message of the assistant in its column {self.messages}",
                f"with a last message of {last}",
            )
        return self.example(row)

    def pair(self, row: Row) -> Row:
        """Return `prompt` (text or messages), `chosen` and `rejected` (texts) of a row.

        Raises:
            BadRow: the row lacks a column, or a value has the wrong form.
        """
        return dict(zip(PREFERENCE_COLUMNS, self._pair(row), strict=True))

    def _pair(self, row: Row) -> tuple[Prompt, str, str]:
        assert self.chosen is not None and self.rejected is not None
        if not isinstance(row.get(self.chosen), list):
            if self.prompt is None:
                if found := without_prompt(text(row, self.chosen), text(row, self.rejected)):
                    return found
                raise BadRow(
                    "have a column of prompts beside texts in chosen and rejected, or whole dialogues with "
                    "'\\n\\nAssistant:' before each answer",
                    "without them",
                    "add the column prompt",
                )
            prompt, rejected = self._prompt(row), text(row, self.rejected)
            return prompt, text(row, self.chosen), rejected
        before = self._prompt(row) if self.prompt is not None else []
        first, chosen = answer(before, row, self.chosen)
        second, rejected = answer(before, row, self.rejected)
        if first != second:
            raise BadRow(
                f"have the same messages before the answers in {self.chosen} and {self.rejected}",
                "with different messages",
            )
        if not first:
            raise BadRow(f"have prompts, in a column of their own or in {self.chosen}", "without a prompt")
        return first, chosen, rejected

    def _prompt(self, row: Row) -> Prompt:
        assert self.prompt is not None
        if isinstance(row.get(self.prompt), list):
            return conversation(row, self.prompt)
        prompt = text(row, self.prompt)
        context = row.get(self.context) if self.context is not None else None
        return f"{prompt}\n\n{text(row, str(self.context))}" if context else prompt


def not_text(value: Any) -> str:
    """Return the remedy for a value in place of a text."""
    if value is None or value != value:
        return "correct or remove the rows without a value"
    if isinstance(value, dict):
        return "write the field that is meant as a column of its own"
    return "write the value as text, in quotes"


def text(row: Row, column: str) -> str:
    """Return the text in a column of a row.

    Raises:
        BadRow: the row lacks the column, or the value is not a text that can be written as UTF-8.
    """
    if column not in row:
        raise BadRow(f"have the column {column} in every row", f"with the columns {', '.join(row) or 'none'}")
    value = row[column]
    if not isinstance(value, str):
        if (number := number_as_text(value, column)) is not None:
            return number
        raise BadRow(
            f"have a text in its column {column} in every row", f"with {described(value)}", not_text(value)
        )
    try:
        value.encode()
    except UnicodeEncodeError:
        raise BadRow(
            f"have text of whole Unicode characters in its column {column}",
            "with half of a surrogate pair (\\ud800 to \\udfff)",
        ) from None
    return value


def conversation(row: Row, column: str) -> list[Message]:
    """Return the messages in a column of a row, with `role` and `content` only.

    Raises:
        BadRow: the value is not a list of at least one message, or a content is not a text.
    """
    value = row.get(column)
    rule = f"have dialogues (lists of messages with role and content, both texts) in its column {column}"
    if not isinstance(value, list) or not value:
        found = "an empty list" if value == [] else described(value)
        remedy = 'write [{"role": "user", "content": "..."}, ...], as a list or as its JSON text'
        raise BadRow(rule, f"with {found}" if column in row else "without that column", remedy)
    messages = []
    for message in value:
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            found = ", ".join(message) if isinstance(message, dict) else described(message)
            if isinstance(message, dict) and {"from", "value"} <= message.keys():
                found += " (as in ShareGPT: rename human to user, gpt to assistant)"
            raise BadRow(rule, f"with {found} in place of role and content")
        try:
            messages.append({name: text(message, name) for name in ("role", "content")})
        except BadRow as error:
            raise BadRow(rule, f"{error.got} in place of a text") from None
    return messages


def answer(before: Prompt, row: Row, column: str) -> tuple[Prompt, str]:
    """Return the prompt and the response of a row.

    If the response is a list of messages, the prompt is a list of messages, too. A prompt of text then
    becomes a message of the user, unless the response contains the user's messages. A prompt of messages may
    be repeated in the response.

    Args:
        before: the prompt; an empty list if the response contains the prompt.
        row: the row.
        column: the column of the response, a text or a list of messages.

    Raises:
        BadRow: the response does not end with a message of the assistant.
    """
    if not isinstance(row.get(column), list):
        return before, text(row, column)
    turns = conversation(row, column)
    if turns[-1]["role"] != "assistant":
        raise BadRow(
            f"have a message of the assistant at the end of its column {column}",
            f"with a message of {turns[-1]['role']}",
        )
    response = turns.pop()["content"]
    if isinstance(before, str):
        asked = any(turn["role"] == "user" for turn in turns)  # the messages then repeat the text
        return turns if asked else [*turns, {"role": "user", "content": before}], response
    repeated = turns[: len(before)] == before
    return turns if repeated else [*before, *turns], response


def converted(
    rows: Iterator[tuple[str, Row]], convert: Callable[[Row], Row], key: str
) -> Iterator[tuple[str, Row]]:
    """Yield each row after `convert`, with its place.

    Raises:
        UserError: `convert` refuses a row, or a row has dialogues where the first row has texts.
    """
    first: tuple[str, Row] | None = None
    for place, row in rows:
        try:
            made = convert(parsed(row))
        except BadRow as error:
            raise UserError(error.problem(key, place)) from None
        prompt = made.get("messages") or made.get("prompt")
        if isinstance(prompt, list) and all(message["role"] == "system" for message in prompt):
            raise UserError(
                f"{key} must have a message of the user in each dialogue, got {place} with a system message "
                "only; add the message to answer"
            )
        first = first or (place, made)
        if form(made) != form(first[1]):
            raise UserError(
                f"{key} must have texts in all rows or dialogues in all rows, got {first[0]} with "
                f"{form(first[1])} and {place} with {form(made)}; convert one of them"
            )
        yield place, made


def form(row: Row) -> str:
    """Return the form of the prompt of a converted row: "a dialogue" or "a text"."""
    is_dialogue = "messages" in row or isinstance(row.get("prompt"), list)
    return "a dialogue" if is_dialogue else "a text"


def conversion(columns: Sequence[str]) -> Callable[[Row], Row]:
    """Return the function that checks and converts a row with the canonical columns `columns`."""
    if tuple(columns) == PREFERENCE_COLUMNS:
        return pair
    if tuple(columns) == ("messages",):
        return Layout(messages="messages").example
    return lambda row: {column: text(row, column) for column in columns}


def pair(row: Row) -> Row:
    """Return `prompt`, `chosen` and `rejected` of a row that has columns with these names.

    Raises:
        BadRow: a value has the wrong form, or there is no prompt.
    """
    prompt = "prompt" if "prompt" in row else None
    for column in PREFERENCE_COLUMNS[1:]:
        if column not in row:
            text(row, column)
    return Layout(prompt=prompt, chosen="chosen", rejected="rejected").pair(row)


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
    found = {role: _column(role, names, config, key, place) for role in NAMES}
    context = _context(found["prompt"], names, config)
    if data is Data.preferences:
        if found["chosen"] is None or found["rejected"] is None:
            raise _lacks(names, data, key, place)
        return Layout(
            prompt=found["prompt"], context=context, chosen=found["chosen"], rejected=found["rejected"]
        )
    if found["messages"] is not None and config.prompt is None:
        if found["prompt"] is None or found["response"] is None or config.messages is not None:
            return Layout(messages=found["messages"])
        raise UserError(
            f"{key} must have dialogues or prompts with responses (both can be read), got {place} with "
            f"{found['messages']}, {found['prompt']} and {found['response']}; set "
            f"{setting('task.columns.messages', found['messages'])} or "
            f"{setting('task.columns.prompt', found['prompt'])}"
        )
    if found["prompt"] is None and None in (found["chosen"], found["rejected"]):
        raise _lacks(names, data, key, place)
    if data is Data.references and found["response"] is None and found["chosen"] is None:
        raise _lacks(names, data, key, place)
    if data is Data.references and set(names) == {"prompt", "completion", "label"}:  # as in KTO
        raise UserError(
            f"{key} must have only good responses (SFT imitates all of them), got {place} with a label for "
            "each completion; keep the rows whose label is true, without the column label"
        )
    return Layout(
        prompt=found["prompt"],
        context=context,
        response=found["response"],
        chosen=found["chosen"],
        rejected=found["rejected"],
    )


def _column(role: str, names: Sequence[str], config: ColumnsConfig, key: str, place: str) -> str | None:
    """Return the column with the role `role`, or None."""
    named = getattr(config, role)
    if named is not None:
        if named not in names:
            close = get_close_matches(str(named), names, n=1)
            remedy = (
                f"did you mean {setting(f'task.columns.{role}', close[0])}?"
                if close
                else "name one of these columns"
            )
            raise UserError(
                f"task.columns.{role} must name a column of the data ({', '.join(names)}), got {named} with "
                f"{key}={place}; {remedy}"
            )
        return str(named)
    taken = [value for each in fields(config) if (value := getattr(config, each.name)) is not None]
    found = [name for name in names if name.lower() in NAMES[role] and name not in taken]
    if len(found) > 1:
        raise UserError(
            f"{key} must have one column of {role}s (the choice is not clear), got {place} with "
            f"{' and '.join(found)}; set {setting(f'task.columns.{role}', found[0])}"
        )
    return found[0] if found else None


def _context(prompt: str | None, names: Sequence[str], config: ColumnsConfig) -> str | None:
    """Return the column `input` of Alpaca's format, unless the user names the column of prompts."""
    if prompt is None or prompt.lower() != "instruction" or config.prompt is not None:
        return None
    return next((name for name in names if name.lower() == CONTEXT), None)


def _lacks(names: Sequence[str], data: Data, key: str, place: str) -> UserError:
    """Return the error for data without the columns of an example."""
    wanted = {
        Data.prompts: ("prompt",),
        Data.references: ("prompt", "response"),
        Data.preferences: ("prompt", "chosen", "rejected"),
    }[data]
    if data is Data.preferences and {"completion", "label"} <= set(names):  # as in KTO
        return UserError(
            f"{key} must have {NEEDS[data]}, got {place} with {', '.join(names)} (single responses with a "
            "label); write a row with prompt, chosen and rejected for each prompt with a good and a bad "
            "completion, or train on the good ones alone with algo=sft"
        )
    missing = [role for role in wanted if not any(name.lower() in NAMES[role] for name in names)]
    free = [name for name in names if not any(name.lower() in each for each in NAMES.values())]
    remedy = f"add {' and '.join(missing)}"
    if len(free) >= len(missing):
        settings = (setting(f"task.columns.{role}", name) for role, name in zip(missing, free, strict=False))
        remedy = f"rename the columns or set, for example, {' '.join(settings)}"
    return UserError(
        f"{key} must have {NEEDS[data]}, got {place} with {', '.join(names) or 'none'}; {remedy}"
    )
