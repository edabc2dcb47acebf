"""Results of evaluations in the terminal: the metrics of each model, and a table of all models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Group
from rich.table import Table

from rlhf.config.run import Progress
from rlhf.core import confidence
from rlhf.core.console import say_items
from rlhf.core.formatting import lines_of
from rlhf.loggers.display import EVALUATION_METRICS, metric_texts, print_samples, shown

if TYPE_CHECKING:
    from rlhf.config.root import Config
    from rlhf.core.metrics import Evaluation

_COUNTS = ("update", "episode", "examples")
_SIDE_BY_SIDE = 3  # largest number of models in columns beside each other; more models are rows
_WIDTH = 24  # largest width of a column
_PADDING = 3  # blanks between two cells


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
    rows = [shown(row) for row in rows]
    about = rows[0]["settings"] if rows else {}
    title = [f"{name} {about[name]}" for name in ("split", "generator", "scorer", "gold") if name in about]
    every = {**dict(zip(_COUNTS, _COUNTS, strict=True)), **EVALUATION_METRICS}
    names = {name: short for name, short in every.items() if any(name in row for row in rows)}
    models = short_names([row["model"] for row in rows])
    full = dict(zip(models, (row["model"] for row in rows), strict=True))
    paths = [f"{name}: {path}" for name, path in full.items() if name != path]
    by_model = [[confidence.text(row, name) for name in names] for row in rows]
    headings = list(names.values())
    if len(rows) <= _SIDE_BY_SIDE:
        first, others = ("", headings), list(zip(models, by_model, strict=True))
    else:
        by_metric = [[cells[place] for cells in by_model] for place in range(len(headings))]
        first, others = ("model", models), list(zip(headings, by_metric, strict=True))
    tables = (part(first, group) for group in _fitting_groups(first, others, width))
    return Group(*lines_of(title, width), *tables, *paths)


def short_names(models: Sequence[str]) -> list[str]:
    """Return a name of at most `_WIDTH` columns for each model: the last part of its path that others lack.

    The start of a longer name is left out. Names that are not unique get a number.
    """
    names, paths = [], [model.rstrip("/").split("/") for model in models]
    for path in paths:
        equal = [sum(each[-end:] == path[-end:] for each in paths) for end in range(1, len(path) + 1)]
        name = path[-1 - equal.index(1)] if 1 in equal else path[-1]
        names.append(name if len(name) <= _WIDTH else f"…{name[1 - _WIDTH :]}")
    doubled = {name for name in names if names.count(name) > 1}
    return [f"{i} {name[4 - _WIDTH :]}" if name in doubled else name for i, name in enumerate(names, 1)]


_Column = tuple[str, list[str]]  # heading and cells


def _fitting_groups(first: _Column, others: list[_Column], width: int) -> Iterator[list[_Column]]:
    """Yield the columns `others` in groups, each of which fits in `width` beside the column `first`."""
    group: list[_Column] = []
    room = width - 1 - _breadth(first)
    left = room
    for column in others:
        needed = _breadth(column)
        if group and needed > left:
            yield group
            group, left = [], room
        group.append(column)
        left -= needed
    yield group


def _breadth(column: _Column) -> int:
    """Return the width of a column with its padding."""
    heading, cells = column
    return max(map(len, [heading, *cells])) + _PADDING


def part(first: _Column, others: list[_Column]) -> Table:
    """Return a table of the column `first` and the columns `others`."""
    made = Table(box=box.SIMPLE)
    made.add_column(first[0], no_wrap=True)
    for heading, _ in others:
        made.add_column(heading, justify="right", no_wrap=True)
    for cells in zip(first[1], *(cells for _, cells in others), strict=True):
        made.add_row(*cells)
    return made
