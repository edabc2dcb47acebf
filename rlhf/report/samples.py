"""Completions of the same held-out prompt by several groups, for comparison side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlhf.report.groups import by_task

if TYPE_CHECKING:
    from rlhf.report.groups import Group
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
        reference: text of the reference response.
        reference_score: score of the reference response by the judge; None without a judge.
        before: completions.jsonl row of the response before training; None if there is no such row, or if the
            responses of the groups before training differ.
        answers: one response for each group that answered the prompt.
    """

    prompt: str
    reference: str
    reference_score: float | None
    before: dict[str, Any] | None
    answers: list[Answer]


def samples(groups: Sequence[Group], count: int) -> list[Sample]:
    """Return up to `count` prompts of each task, ordered by the number of groups that answered the prompt.

    The responses of a group are those of its run with the lowest seed, at the last evaluation of that run.
    """
    return [sample for task in by_task(groups) for sample in of_task(task, count)]


def of_task(groups: Sequence[Group], count: int) -> list[Sample]:
    """Return up to `count` prompts of groups that have the same task; see `samples`."""
    answers: dict[str, list[Answer]] = {}
    before: dict[str, list[dict[str, Any]]] = {}
    for group in groups:
        run, rows = next(((run, rows) for run in group.measured if (rows := run.completions())), (None, []))
        if run is None:
            continue
        last = rows[-1]["update"]
        for prompt, row in {row["prompt"]: row for row in rows if row["update"] == last}.items():
            answers.setdefault(prompt, []).append(Answer(group, run, row))
        for row in rows:
            if row["update"] == 0 < last:
                before.setdefault(row["prompt"], []).append(row)
    prompts = sorted(answers, key=lambda prompt: -len(answers[prompt]))[:count]
    return [
        Sample(
            prompt=prompt,
            reference=answers[prompt][0].row["reference"],
            reference_score=answers[prompt][0].row.get("reference_gold_score"),
            before=same(before.get(prompt, [])),
            answers=answers[prompt],
        )
        for prompt in prompts
    ]


def same(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the first row if all rows have the same response, else None; None if `rows` is empty."""
    return rows[0] if len({row["response"] for row in rows}) == 1 else None
