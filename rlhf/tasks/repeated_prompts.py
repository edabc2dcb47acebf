"""Preference pairs whose responses repeat the prompt: a property of a data set, never of a row alone."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator

from datasets import Dataset

from rlhf.tasks.storage import mapped

log = logging.getLogger(__name__)

_REPEATED = 0.9  # share of the pairs that repeat the prompt in both responses, in data that do so
_ROLES = (("prompt", "query"), ("chosen", "reference_response"), ("rejected",))  # names of the columns


def repeating(pairs: Dataset) -> set[int]:
    """Return the parts of pairs of texts that repeat the prompt; data that are no mixture are part 0.

    A part repeats the prompt if both responses of at least `_REPEATED` of its rows begin with the prompt, and
    do not continue its last word. Otherwise, a response that begins with the prompt does so by accident.

    Args:
        pairs: columns `prompt` or `query`, `chosen` or `reference_response`, `rejected`; perhaps `part`.
    """
    total: Counter[int] = Counter()
    found: Counter[int] = Counter()
    for part, prompt, *responses in _rows(pairs):
        total[part] += 1
        found[part] += repeats(prompt, responses)
    return {part for part in total if found[part] >= _REPEATED * total[part]}


def repeats(prompt: str, responses: list[str]) -> bool:
    """Return whether all responses begin with the prompt, and do not continue its last word."""
    ends = [response[len(prompt) : len(prompt) + 1] for response in responses if response.startswith(prompt)]
    whole = not prompt[-1:].isalnum() or not any(map(str.isalnum, ends))
    return bool(prompt) and whole and len(ends) == len(responses)


def without_repeated_prompts(pairs: Dataset, parts: set[int], split: str) -> Dataset:
    """Return pairs of texts; in `parts`, without the prompt at the start of both responses."""
    if not parts:
        return pairs
    names = _names(pairs)
    changed = 0

    def cut(columns: dict[str, list[str]]) -> dict[str, list[str]]:
        nonlocal changed
        made: dict[str, list[str]] = {name: [] for name in names[1:]}
        for part, prompt, *responses in _rows_of(columns, names):
            repeated = part in parts and repeats(prompt, responses)
            changed += repeated
            for name, response in zip(made, responses, strict=True):
                made[name].append(response[len(prompt) :] if repeated else response)
        return made

    result = mapped(pairs, cut, batched=True)
    log.warning(
        "both responses of %d of %d pairs of the split %s begin with the prompt; it is removed from them",
        changed, len(pairs), split,
    )  # fmt: skip
    return result


def _names(pairs: Dataset) -> list[str]:
    return [next(name for name in usual if name in pairs.column_names) for usual in _ROLES]


def _rows(pairs: Dataset) -> Iterator[tuple]:
    names = _names(pairs)
    kept = [name for name in (*names, "part") if name in pairs.column_names]
    for columns in pairs.select_columns(kept).iter(1000):
        yield from _rows_of(columns, names)


def _rows_of(columns: dict[str, list], names: list[str]) -> Iterator[tuple]:
    """Yield part, prompt and both responses of each row."""
    texts = [columns[name] for name in names]
    parts = columns["part"] if "part" in columns else [0] * len(texts[0])
    return zip(parts, *texts, strict=True)
