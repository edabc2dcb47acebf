"""The generated part of a page in docs/results, between two marks."""

from __future__ import annotations

from rlhf.core.errors import UserError


def fill(document: str, marks: tuple[str, str], text: str) -> str:
    """Return the text of a page with `text` between its two marks.

    Raises:
        UserError: a mark is missing, or the marks are in the wrong order.
    """
    before, first, rest = document.partition(marks[0])
    _, second, after = rest.partition(marks[1])
    if not (first and second):
        raise UserError(
            f"the page must contain '{marks[0]}' and then '{marks[1]}' (the generated part is between them), "
            "got neither or one; restore the missing line"
        )
    return f"{before}{first}\n{text}\n{second}{after}"
