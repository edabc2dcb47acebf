"""Completions of the same prompt by several groups."""

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
    """What one run answered: its group, the run, the row of completions.jsonl."""

    group: Group
    run: Run
    row: dict[str, Any]


@dataclass(frozen=True)
class Sample:
    """A held-out prompt, its reference response with the judge's score (None: no judge), and the answers.

    `before` is the answer of the untrained policy, where it is the same for all.
    """

    prompt: str
    reference: str
    reference_score: float | None
    before: dict[str, Any] | None
    answers: list[Answer]


def samples(groups: Sequence[Group], count: int) -> list[Sample]:
    """`count` prompts of each task, those first that most groups have answered; of each group the run with
    the lowest seed, at its last evaluation.
    """
    return [sample for task in by_task(groups) for sample in of_task(task, count)]


def of_task(groups: Sequence[Group], count: int) -> list[Sample]:
    """`samples` of groups that have one task."""
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
    """The row whose response all rows have; None where they differ."""
    return rows[0] if len({row["response"] for row in rows}) == 1 else None
