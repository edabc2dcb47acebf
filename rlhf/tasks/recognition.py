"""Which columns of a data set are the prompt, the response, or a dialogue. This module imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from rlhf.config.algo import Data
from rlhf.config.task import ColumnsConfig
from rlhf.core.errors import UserError
from rlhf.core.pasting import setting
from rlhf.tasks.columns import Layout
from rlhf.tasks.formats import TOOLS

# Recognised names of the columns, in any case. `reference_response` is the name in the embedded tasks.
NAMES = {
    "prompt": ("prompt", "query", "question", "instruction"),
    "response": ("response", "completion", "answer", "output", "reference", "reference_response"),
    "chosen": ("chosen",),
    "rejected": ("rejected",),
    "messages": ("messages", "conversations"),
}
_KTO = {"completion", "label"}  # columns of single responses, good and bad ones
# Parts of names of columns that may be the chosen or the rejected responses; the latter are looked for first.
_SIMILAR = {
    "rejected": ("reject", "non_prefer", "dispref", "worse", "worst", "lose", "losing", "bad", "negative"),
    "chosen": ("chosen", "prefer", "better", "best", "win", "good", "positive"),
}
CONTEXT = "input"  # beside `instruction`, in the format of Alpaca
_MANY = 12  # columns that a message lists
NEEDS = {  # content of an example -> the columns that it needs, for messages
    Data.prompts: "a column of prompts (prompt, query, question or instruction) or of dialogues (messages)",
    Data.references: "a column of prompts (such as prompt) and a column of responses (such as response), or "
    "dialogues (messages), because SFT imitates responses",
    Data.preferences: "the columns prompt, chosen and rejected, because the run reads pairs",
}


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
    found: dict[str, Any] = {role: _column(role, names, config, key, place) for role in NAMES}
    context = _context(found["prompt"], names, config)
    beside = next((name for name in names if name.lower() == TOOLS), None)
    if data is Data.preferences:
        if found["chosen"] is None or found["rejected"] is None:
            raise _lacks(names, data, key, place)
        return Layout(**{**found, "messages": None, "response": None}, context=context, tools=beside)
    if found["messages"] is not None and config.prompt is None:
        if found["prompt"] is None or found["response"] is None or config.messages is not None:
            return Layout(messages=found["messages"], tools=beside)
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
    if data is Data.references and set(names) >= _KTO and config.response is None:
        raise UserError(
            f"{key} must have only good responses (SFT imitates all of them), got {place} with a label for "
            "each completion; keep the rows whose label is true, without the column label, or set "
            "task.columns.response=completion for all rows"
        )
    return Layout(**{**found, "messages": None}, context=context, tools=beside)


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
    if data is Data.preferences and set(names) >= _KTO:
        return UserError(
            f"{key} must have {NEEDS[data]}, got {place} with {', '.join(names)} (single responses with a "
            "label); write a row with prompt, chosen and rejected for each prompt with a good and a bad "
            "completion, or train on the good ones alone with algo=sft"
        )
    missing = [role for role in wanted if not any(name.lower() in NAMES[role] for name in names)]
    free = [name for name in names if not any(name.lower() in each for each in NAMES.values())]
    remedy = f"add {' and '.join(missing)}"
    if len(free) >= len(missing):
        meant: dict[str, str | None] = {}
        for role in sorted(missing, key=lambda role: role != "rejected"):  # "non_preferred" contains "prefer"
            left = [name for name in free if name not in meant.values()]
            likely = (
                name for name in left if any(part in name.lower() for part in _SIMILAR.get(role, ("",)))
            )
            meant[role] = next(likely, None)
        settings = [
            setting(f"task.columns.{role}", name)
            if (name := meant[role])
            else f"task.columns.{role}=<column>"
            for role in missing
        ]
        remedy = f"rename the columns or set, for example, {' '.join(settings)}"
    listed = ", ".join(names[:_MANY]) + (f" and {len(names) - _MANY} others" if len(names) > _MANY else "")
    return UserError(f"{key} must have {NEEDS[data]}, got {place} with {listed or 'none'}; {remedy}")
