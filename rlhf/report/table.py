"""The table of final results, for the terminal, for Markdown and for the HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import TYPE_CHECKING

from rich import box
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from rlhf.report.groups import Group
    from rlhf.report.runs import Run

# Metrics of an evaluation: column heading, name in metrics.jsonl, decimals. Empty columns are left out.
EVALUATED = (
    ("win rate", "eval/win_rate", 3),
    ("gold score", "eval/gold_score", 2),
    ("accuracy", "eval/accuracy", 3),
    ("loss", "eval/loss", 3),
    ("KL", "eval/kl", 2),
    ("perplexity", "eval/ppl", 2),
    ("tokens", "eval/response_tokens", 1),
)

COST = ("updates, s", "episodes/s")  # headings of the two columns that follow the metrics


@dataclass(frozen=True)
class Cell:
    """A metric of a group, averaged over its runs.

    Attributes:
        before: mean before training; None if the metric was not measured before training.
        after: mean at the last evaluation.
        spread: standard deviation over seeds; None for a single seed.
        decimals: number of decimals to show.
    """

    before: float | None
    after: float
    spread: float | None
    decimals: int

    def __str__(self) -> str:
        return self.final if self.initial is None else f"{self.initial} → {self.final}"

    @property
    def initial(self) -> str | None:
        """The value before training as text; None if there is no such value."""
        return None if self.before is None else f"{self.before:.{self.decimals}f}"

    @property
    def final(self) -> str:
        """The value at the last evaluation as text, with its standard deviation."""
        spread = "" if self.spread is None else f" ± {self.spread:.{self.decimals}f}"
        return f"{self.after:.{self.decimals}f}{spread}"


@dataclass(frozen=True)
class Results:
    """A table of column headings and one row of cells per group; None: the group lacks the metric."""

    columns: list[str]
    rows: list[tuple[Group, list[Cell | None]]]


def results(groups: Sequence[Group]) -> Results:
    """Return the table of the last evaluation and the cost, averaged over the finished runs of each group.

    If a group has no finished run, the mean is over its unfinished runs.
    """
    runs = [run for group in groups for run in group.runs]
    present = [column for column in EVALUATED if any(run.last(column[1]) is not None for run in runs)]
    rows = []
    for group in groups:
        cells = [
            cell(
                [run.last(name) for run in group.measured],
                [run.first(name) for run in group.measured],
                decimals,
            )
            for _, name, decimals in present
        ]
        cells.append(cell([run.seconds() or None for run in group.measured], [], 0))
        cells.append(cell([pace(run) for run in group.measured], [], 0))
        rows.append((group, cells))
    return Results([*(heading for heading, *_ in present), *COST], rows)


def cell(after: Sequence[float | None], before: Sequence[float | None], decimals: int) -> Cell | None:
    """Return the cell of a metric, given one value per run; None if no run has a value."""
    known = [value for value in after if value is not None]
    if not known:
        return None
    start = [value for value in before if value is not None]
    return Cell(
        before=mean(start) if start else None,
        after=mean(known),
        spread=stdev(known) if len(known) > 1 else None,
        decimals=decimals,
    )


def pace(run: Run) -> float | None:
    """Return the episodes per second of update time; None if the run has no times."""
    return run.episodes / run.seconds() if run.seconds() else None


def for_terminal(found: Results) -> Table:
    """Return the table for the terminal; groups without a finished run are dimmed."""
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("setting", style="bold", min_width=12)
    table.add_column("seeds", min_width=5)
    for heading in found.columns:
        table.add_column(heading, justify="right")
    for group, cells in found.rows:
        table.add_row(
            escape(group.label),
            escape(group.seeds),
            *("" if each is None else each.final for each in cells),
            style=None if group.finished else "dim",
        )
    return table


def for_markdown(found: Results) -> str:
    """Return the table in Markdown."""
    rows = [["setting", "seeds", *found.columns]]
    for group, cells in found.rows:
        figures = ["" if each is None else str(each) for each in cells]
        rows.append([f"`{group.label}`", group.seeds, *figures])
    lines = ["| " + " | ".join(text.replace("|", "\\|") for text in row) + " |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])
