"""The choice of tuned settings for each task, method and point, from runs with seeds of their own.

The value with the highest mean over the tuning seeds is chosen; among equal ones, the first. A run that
diverged or failed counts as the worst value of its task. `rates.json` has every choice. This module imports
no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from rlhf.core import files
from rlhf.core.errors import UserError
from rlhf.study.cells import Cell, cells, tuning_cell, tuning_point
from rlhf.study.rows import FINISHED, TUNE, Row
from rlhf.study.spec import Spec, Tune

Tuned = tuple[tuple[str, str], ...]  # value of each tuned key


class Run(NamedTuple):
    """A run of a study: a cell, a seed, the value of each tuned key, and the part (table or tune)."""

    cell: Cell
    seed: int
    tuned: Tuned
    part: str

    def __str__(self) -> str:
        shown = [f"{key}={value}" for key, value in self.tuned] if self.part == TUNE else []
        return " ".join([str(self.cell), *shown, f"seed {self.seed}"])

    def names(self) -> dict[str, Any]:
        """Return the fields of a row that name its run."""
        task, method, levels = self.cell
        names = {"task": task, "method": method, "levels": dict(levels)}
        return names | {"seed": self.seed, "part": self.part, "tuned": dict(self.tuned)}


@dataclass(frozen=True)
class Choice:
    """A choice of tuned settings."""

    chosen: Mapping[str, str]  # value of each tuned key
    values: Mapping[str, Sequence[float]] = field(default_factory=dict)  # per seed, by settings compared
    lead: float | None = None  # difference of the means of the best and the second best settings
    ties: Sequence[str] = ()  # settings whose mean equals that of the chosen ones
    edge: bool = False  # whether a chosen number is the smallest or largest of those that were compared


class Tuning:
    """The choices of a study, and the runs from which they are made.

    Args:
        spec: the study.
        find: returns the row of a run, or None.

    Attributes:
        runs: all tuning runs that are known to be needed, with or without a row.
        choices: the complete choices, by task, method and point.
    """

    def __init__(self, spec: Spec, find: Callable[[Run], Row | None]) -> None:
        self.spec, self.find = spec, find
        self.runs: list[Run] = []
        self.choices: dict[tuple[str, str, str], Choice] = {}
        if (tune := spec.tune) is None:
            return
        saved = read_choices(spec.folder / "rates.json")
        source = read_choices(tune.source.folder / "rates.json") if tune.source else {}
        due = {_key(spec, cell): tuning_cell(spec, cell) for cell in cells(spec)}
        for key, cell in due.items():
            known = source.get(key)
            if known is not None and not tune.check:
                self.choices[key] = known
                continue
            compared = _neighbours(tune, known) if known else grid(tune)
            runs, choice = self._compare(tune, cell, compared, 0 if known else tune.extend)
            if choice is None and key in saved and {*map(_said, compared)} <= saved[key].values.keys():
                choice = saved[key]  # the rows are not here
            else:
                self.runs += runs
            if choice is not None:
                self.choices[key] = choice

    def tuned(self, cell: Cell) -> Tuned | None:
        """Return the settings of a cell; None: they are not chosen yet."""
        if self.spec.tune is None:
            return ()
        choice = self.choices.get(_key(self.spec, cell))
        return None if choice is None else tuple(choice.chosen.items())

    def _compare(
        self, tune: Tune, cell: Cell, compared: list[Tuned], extend: int
    ) -> tuple[list[Run], Choice | None]:
        """Return the runs that compare settings of a cell, and the choice if all runs have rows.

        A choice on the edge adds up to `extend` further settings.
        """
        task = self.spec.tasks[cell.task]
        while True:
            runs = [Run(cell, seed, each, TUNE) for each in compared for seed in tune.seeds]
            values: dict[Tuned, list[float]] = {each: [] for each in compared}
            for run in runs:
                if (row := self.find(run)) is None:
                    return runs, None
                value = row.metrics.get(task.metric or row.metric, task.worst)
                values[run.tuned].append(value if row.status == FINISHED else task.worst)
            means = {each: task.sign * fmean(found) for each, found in values.items()}
            best = max(compared, key=means.__getitem__)
            beyond = _beyond(best, compared)
            if beyond is None or not extend:
                break
            compared, extend = [*compared, beyond], extend - 1
        others = {each: mean for each, mean in means.items() if each != best}
        return runs, Choice(
            chosen=dict(best),
            values={_said(each): found for each, found in values.items()},
            lead=means[best] - max(others.values()) if others else None,
            ties=[_said(each) for each, mean in others.items() if mean == means[best]],
            edge=beyond is not None,
        )

    def problems(self) -> Iterator[str]:
        """Yield ties and choices on an edge, for the plan."""
        for key, choice in self.choices.items():
            name = f"{' '.join(filter(None, key))}: {_said(tuple(choice.chosen.items()))}"
            if choice.ties:
                yield f"{name} ties with {', '.join(choice.ties)}"
            if choice.edge:
                yield f"{name} is on the edge of what was compared"


def grid(tune: Tune) -> list[Tuned]:
    """Return the settings of a file that are compared."""
    return [tuple(zip(tune.values, each, strict=True)) for each in product(*tune.values.values())]


def examples(spec: Spec) -> list[Run]:
    """Return a run of each tuning cell with each settings of the file."""
    if (tune := spec.tune) is None:
        return []
    due = dict.fromkeys(tuning_cell(spec, cell) for cell in cells(spec))
    return [Run(cell, tune.seeds[0], each, TUNE) for cell in due for each in grid(tune)]


def read_choices(file: Path) -> dict[tuple[str, str, str], Choice]:
    """Return the choices in a file; none if it does not exist.

    Raises:
        UserError: the file is damaged.
    """
    if not file.exists():
        return {}
    remedy = f"delete the file: {files.delete_command(file)}"
    tree = files.read_json(file, remedy)
    try:
        return {
            (task, method, point): Choice(**choice)
            for task, methods in tree.items()
            for method, points in methods.items()
            for point, choice in points.items()
        }
    except (TypeError, AttributeError) as error:
        raise UserError(f"{file} must have choices as studies write them, got: {error}; {remedy}") from None


def write_choices(file: Path, choices: Mapping[tuple[str, str, str], Choice]) -> None:
    """Write choices in place of a file: {task: {method: {point: choice}}}."""
    tree: dict[str, Any] = {}
    for (task, method, point), choice in choices.items():
        tree.setdefault(task, {}).setdefault(method, {})[point] = asdict(choice)
    file.parent.mkdir(parents=True, exist_ok=True)
    files.write_json(file, tree)


def _key(spec: Spec, cell: Cell) -> tuple[str, str, str]:
    return cell.task, cell.method, tuning_point(spec, cell)


def _neighbours(tune: Tune, known: Choice) -> list[Tuned]:
    """Return the chosen settings of another study and those beside them, one key at a time."""
    found = [tuple(known.chosen.items())]
    for key, value in known.chosen.items():
        values = sorted({*tune.values[key], value}, key=float)
        place = values.index(value)
        beside = values[max(0, place - 1) : place] + values[place + 1 : place + 2]
        found += [tuple({**known.chosen, key: each}.items()) for each in beside]
    return found


def _beyond(best: Tuned, compared: Sequence[Tuned]) -> Tuned | None:
    """Return settings beyond the edge on which the best settings lie; None: they lie on no edge.

    The next number continues the pattern: 3e-5, 1e-4, 3e-4 is continued by 1e-3.
    """
    for key, value in best:
        try:
            numbers = sorted({float(dict(each)[key]) for each in compared})
        except ValueError:  # texts have no edge
            continue
        if len(numbers) < 2 or float(value) not in (numbers[0], numbers[-1]):
            continue
        edge, *inner = numbers if float(value) == numbers[0] else numbers[::-1]
        following = inner[0] * edge / inner[1] if len(inner) > 1 and inner[1] else edge * edge / inner[0]
        return tuple({**dict(best), key: f"{following:.2g}"}.items())
    return None


def _said(tuned: Tuned) -> str:
    return " ".join(f"{key}={value}" for key, value in tuned)
