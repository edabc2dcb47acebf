"""Formatting of numbers, times, texts and paths for the terminal. This module imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

GAP = "  "  # between two items of a line


def figure(value: float) -> str:
    """Return a number with three decimals below 10 and fewer above, an integer without decimals.

    A number that rounds to zero is "0.000", without a sign, so that rounding noise is not shown.
    """
    if isinstance(value, int):
        return f"{value:,}"
    size = abs(value)
    if not math.isfinite(value):
        return str(value)
    if size < 0.0005:
        return "0.000"
    if size < 9.9995:
        return f"{value:.3f}"
    if size < 99.995:
        return f"{value:.2f}"
    return f"{value:.1f}" if size < 999.95 else f"{value:,.0f}"


def clock(seconds: float) -> str:
    """Return a duration as m:ss, or as h:mm:ss from one hour on."""
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def fitting(items: Iterable[str], width: int, gap: str = GAP) -> str:
    """Return the first items, joined by `gap`, that fit in `width` columns together."""
    line = ""
    for item in items:
        longer = f"{line}{gap}{item}" if line else item
        if len(longer) > width:
            break
        line = longer
    return line


def lines_of(items: Iterable[str], width: int, indent: str = "") -> list[str]:
    """Return lines of at most `width` columns with all items; no item is divided between two lines.

    Args:
        items: texts, which two spaces separate.
        width: the number of columns. A longer item has a line of its own.
        indent: text at the beginning of every line but the first.
    """
    lines: list[str] = []
    for item in items:
        if lines and len(lines[-1]) + len(GAP) + len(item) <= width:
            lines[-1] += GAP + item
        else:
            lines.append((indent if lines else "") + item)
    return lines


def printable(text: str) -> str:
    """Return `text` with escapes for line breaks and other characters that cannot be printed."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def shortened(text: str, width: int, *, end: bool = False) -> str:
    """Return `text` on one line of at most `width` characters, cut between words and marked with "...".

    White space becomes single blanks, and characters that cannot be printed become "?".

    Args:
        text: any text.
        width: the largest number of characters.
        end: keep the end of the text instead of its beginning.
    """
    words = "".join(c if c.isprintable() or c.isspace() else "?" for c in text).split()
    line = " ".join(words)
    if len(line) <= width:
        return line
    room = width - len("... ")
    if end:
        words.reverse()
    kept = fitting(words, room, " ")
    if end:
        kept = " ".join(kept.split(" ")[::-1])
    if not kept:  # a single long word, such as a sentence in Chinese
        kept = line[-room:] if end else line[:room]
    return f"... {kept}" if end else f"{kept} ..."


def short_path(path: Path) -> str:
    """Return a path as text, relative to the current folder if it is below that folder."""
    path = path.expanduser()
    below = path.is_absolute() and path.is_relative_to(Path.cwd())
    return str(path.relative_to(Path.cwd()) if below else path)
