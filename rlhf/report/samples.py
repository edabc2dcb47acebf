"""Completions of the same held-out prompt by several groups, for comparison side by side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf.report.groups import Group, Section
    from rlhf.report.runs import Run


@dataclass(frozen=True)
class Answer:
    """A response of one run to a held-out prompt; `row` is the row of its completions.jsonl."""

    group: Group
    run: Run
    row: dict[str, Any]


@dataclass(frozen=True)
class Sample:
    """A held-out prompt with the reference response and the responses of the groups.

    Attributes:
        prompt: text of the prompt.
        reference: text of the reference response; None if the prompt has none.
        reference_score: score of the reference response by the judge; None without a judge.
        before: completions.jsonl row of the response before training; None if there is no such row, or if the
            responses of the groups before training differ.
        answers: one response for each group that answered the prompt.
    """

    prompt: str
    reference: str | None
    reference_score: float | None
    before: dict[str, Any] | None
    answers: list[Answer]


def samples(section: Section, count: int) -> tuple[list[Sample], list[str]]:
    """Return up to `count` prompts, ordered by the number of groups that answered the prompt.

    The responses of a group are those of its run with the lowest seed, at the last evaluation of that run.
    Only the groups in the figures are included.

    Returns:
        The samples, and a remark about each run whose completions cannot be read.
    """
    answers: dict[str, list[Answer]] = {}
    before: dict[str, list[dict[str, Any]]] = {}
    remarks: list[str] = []
    for group in section.drawn if count else []:
        run, rows = _first_with_completions(group, remarks)
        if run is None:
            continue
        last = rows[-1]["update"]
        for prompt, row in {row["prompt"]: row for row in rows if row["update"] == last}.items():
            answers.setdefault(prompt, []).append(Answer(group, run, row))
        for row in rows:
            if row["update"] == 0 < last:
                before.setdefault(row["prompt"], []).append(row)
    prompts = sorted(answers, key=lambda prompt: -len(answers[prompt]))[:count]
    found = [
        Sample(
            prompt=prompt,
            reference=answers[prompt][0].row.get("reference"),
            reference_score=answers[prompt][0].row.get("reference_gold_score"),
            before=same(before.get(prompt, [])),
            answers=answers[prompt],
        )
        for prompt in prompts
    ]
    return found, remarks


def _first_with_completions(group: Group, remarks: list[str]) -> tuple[Run | None, list[dict[str, Any]]]:
    """Return the first run of a group with completions, and its rows; add unreadable runs to `remarks`."""
    for run in group.measured:
        try:
            if rows := run.completions():
                return run, rows
        except ValueError as error:
            remarks.append(f"The completions of {run.folder.name} are not shown ({error}).")
    return None, []


def same(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the first row if all rows have the same response, else None; None if `rows` is empty."""
    return rows[0] if len({row["response"] for row in rows}) == 1 else None
