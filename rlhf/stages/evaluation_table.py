"""Results of evaluations in the terminal: the metrics of each model, and a table of all models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Group
from rich.table import Table

from rlhf.config.run import Progress
from rlhf.core import confidence
from rlhf.core.console import say_items
from rlhf.loggers.display import EVALUATION_METRICS, metric_texts, print_samples

if TYPE_CHECKING:
    from rlhf.config.root import Config
    from rlhf.core.metrics import Evaluation

_COUNTS = ("update", "episode", "examples")
_SIDE_BY_SIDE = 3  # largest number of models in columns beside each other; more models are rows
_FIRST_WIDTH = 24  # largest width of the first column
_CELL_WIDTH = 21  # largest width of another column, which is the width of a metric with its interval
_PADDING = 2  # blanks beside a cell, and beside a table


def show(row: dict[str, Any], evaluation: Evaluation, cfg: Config, last: bool) -> None:
    """Print the metrics of a model, and `eval.samples` completions if the model is the last one, else one."""
    if cfg.progress is Progress.off:
        return
    update = f" (update {row['update']})" if "update" in row else ""
    say_items(f"{row['model']}{update}:", metric_texts(row))
    if cfg.eval.samples:
        print_samples(evaluation.samples[: cfg.eval.samples if last else 1])


def table(rows: list[dict[str, Any]], width: int = 80) -> Group:
    """Return a table of rows of evaluations.jsonl, with every metric that any row has.

    The table has a column for each model, or, if there are many models, a row. Columns that do not fit in
    `width` columns of the terminal are in another table below.
    """
    about = rows[0]["settings"] if rows else {}
    title = ", ".join(
        f"{name} {about[name]}" for name in ("split", "generator", "scorer", "gold") if name in about
    )
    counts = {name: name for name in _COUNTS if any(name in row for row in rows)}
    names = {name: short for name, short in EVALUATION_METRICS.items() if any(name in row for row in rows)}
    models = [row["model"] for row in rows]
    by_model = [
        [*(count(row, name) for name in counts), *(confidence.text(row, name) for name in names)]
        for row in rows
    ]
    headings = [*counts.values(), *names.values()]
    if len(rows) <= _SIDE_BY_SIDE:
        first, others = ("", headings), list(zip(models, by_model, strict=True))
    else:
        by_metric = [[cells[place] for cells in by_model] for place in range(len(headings))]
        first, others = ("model", models), list(zip(headings, by_metric, strict=True))
    return Group(title, *(part(first, group) for group in _fitting_groups(first, others, width)))


_Column = tuple[str, list[str]]  # heading and cells


def _fitting_groups(first: _Column, others: list[_Column], width: int) -> Iterator[list[_Column]]:
    """Yield the columns `others` in groups, each of which fits in `width` beside the column `first`."""
    group: list[_Column] = []
    room = width - _PADDING - _breadth(first, _FIRST_WIDTH)
    left = room
    for column in others:
        needed = _breadth(column, _CELL_WIDTH)
        if group and needed > left:
            yield group
            group, left = [], room
        group.append(column)
        left -= needed
    yield group


def _breadth(column: _Column, limit: int) -> int:
    """Return the width of a column with its padding; texts longer than `limit` are folded."""
    heading, cells = column
    return min(max(map(len, [heading, *cells])), limit) + _PADDING


def part(first: _Column, others: list[_Column]) -> Table:
    """Return a table of the column `first` and the columns `others`."""
    made = Table(box=box.SIMPLE)
    made.add_column(first[0], overflow="fold", max_width=_FIRST_WIDTH)
    for heading, _ in others:
        made.add_column(heading, justify="right", overflow="fold", max_width=_CELL_WIDTH)
    for cells in zip(first[1], *(cells for _, cells in others), strict=True):
        made.add_row(*cells)
    return made


def count(row: dict[str, Any], name: str) -> str:
    """Return the counter `name` of a row as text; empty if the model is not from a run."""
    return f"{row[name]:,}" if name in row else ""
