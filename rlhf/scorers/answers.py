"""Answers that can be checked, as texts and numbers. No torch here."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation


def find_answer(text: str, pattern: str) -> str | None:
    """The last match of `pattern` in a text, its first group where it has one; None where there is none.

    A worked solution may name numbers in the same form on its way, so what comes last is the answer.
    """
    matches = list(re.finditer(pattern, text))
    if not matches:
        return None
    return matches[-1].group(1) if matches[-1].re.groups else matches[-1].group()


def normalize_answer(answer: str) -> str | Decimal:
    """An answer as it is compared: a number without thousands separators (5.0 == 5), else the bare text."""
    bare = answer.strip().rstrip(".,").replace(",", "").removeprefix("$")
    try:
        number = Decimal(bare)
    except InvalidOperation:
        return bare
    return number if number.is_finite() else bare


def answer_matches(response: str, reference: str, pattern: str) -> bool:
    """Whether the answer in `response` equals the one in `reference`; False where either has none."""
    given, wanted = find_answer(response, pattern), find_answer(reference, pattern)
    if given is None or wanted is None:
        return False
    return normalize_answer(given) == normalize_answer(wanted)
