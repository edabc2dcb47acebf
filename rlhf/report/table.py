"""The table of final results: for the terminal, for Markdown, for the page."""

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


# Figures of an evaluation: heading, name, decimals. Those that no run has are left out.
EVALUATED = (
    ("win-rate", "eval/win_rate", 3),
    ("gold score", "eval/gold_score", 2),
    ("accuracy", "eval/accuracy", 3),
    ("loss", "eval/loss", 3),
    ("KL", "eval/kl", 2),
    ("perplexity", "eval/ppl", 2),
    ("tokens", "eval/response_tokens", 1),
)


COST = ("updates, s", "episodes/s")


@dataclass(frozen=True)
class Cell:
    """A figure of a group, as means over its runs: before training (None: not measured), after it, and the
    standard deviation over seeds (None: there is one).
    """

    before: float | None
    after: float
    spread: float | None
    decimals: int

    def __str__(self) -> str:
        before = "" if self.before is None else f"{self.before:.{self.decimals}f} → "
        return before + self.final

    @property
    def final(self) -> str:
        """What it is after training."""
        spread = "" if self.spread is None else f" ± {self.spread:.{self.decimals}f}"
        return f"{self.after:.{self.decimals}f}{spread}"


@dataclass(frozen=True)
class Results:
    """Headings of the figures, and for each group its cells (None: no such figure)."""

    columns: list[str]
    rows: list[tuple[Group, list[Cell | None]]]


def results(groups: Sequence[Group]) -> Results:
    """Figures of the last evaluation of finished runs; of the others where a group has none finished."""
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
    """The cell of a figure from its values, one a run; None where no run has it."""
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
    """Episodes a second of updates."""
    return run.episodes / run.seconds() if run.seconds() else None


def for_terminal(found: Results) -> Table:
    """The table in colours and lines."""
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
    """The table in Markdown."""
    rows = [["setting", "seeds", *found.columns]]
    for group, cells in found.rows:
        figures = ["" if each is None else str(each) for each in cells]
        rows.append([f"`{group.label}`", group.seeds, *figures])
    lines = ["| " + " | ".join(text.replace("|", "\\|") for text in row) + " |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])
