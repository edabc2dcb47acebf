"""The cells of a study, and the overrides of a run. This module imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import NamedTuple

from rlhf.config.overrides import read_overrides
from rlhf.study.spec import Grid, Spec


class Cell(NamedTuple):
    """Settings whose runs differ only in the seed: a task, a method, and a value of each axis.

    `levels` has a pair (axis, value) for each axis of the study, in the order of the file.
    """

    task: str
    method: str
    levels: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        return " ".join([self.task, self.method, *(f"{axis}={value}" for axis, value in self.levels)])

    def at(self, levels: Mapping[str, str], method: str | None = None) -> Cell:
        """Return the cell with other values of some axes, or another method."""
        changed = tuple((axis, levels.get(axis, value)) for axis, value in self.levels)
        return Cell(self.task, method or self.method, changed)


def cell_of(spec: Spec, task: str, method: str, levels: Mapping[str, str]) -> Cell:
    """Return a cell; an axis without a value has the base of the task."""
    bases = ((axis, declared.bases.get(task, "")) for axis, declared in spec.axes.items())
    return Cell(task, method, tuple((axis, levels.get(axis, base)) for axis, base in bases))


def cells(spec: Spec, grids: Sequence[Grid] | None = None) -> list[Cell]:
    """Return the cells of grids (None: those of the study), each once, in the order of the grids."""
    found: dict[Cell, None] = {}
    for grid in spec.grids if grids is None else grids:
        names = {"task": tuple(spec.tasks), "method": tuple(spec.methods), **grid}
        for values in product(*names.values()):
            levels = dict(zip(names, values, strict=True))
            found[cell_of(spec, levels.pop("task"), levels.pop("method"), levels)] = None
    return list(found)


def _layers(spec: Spec, cell: Cell, seed: int, tuned: Mapping[str, str]) -> dict[str, Sequence[str]]:
    """Return the overrides of a run by the key of the study file that they come from; a later key wins."""
    for_choice = spec.tune.overrides if spec.tune is not None and seed in spec.tune.seeds else ()
    return {
        "set": spec.overrides,
        f"tasks.{cell.task}": spec.tasks[cell.task].overrides,
        f"methods.{cell.method}": spec.methods[cell.method].overrides,
        **{f"axes.{axis}": spec.axes[axis].values[value] for axis, value in cell.levels},
        "tune.set": for_choice,
        **{f"tune.{key}": [f"{key}={value}"] for key, value in tuned.items()},
        "repeat": [f"{key}={seed}" for key in spec.repeat],
    }


def overrides(spec: Spec, cell: Cell, seed: int, tuned: Mapping[str, str]) -> list[str]:
    """Return the overrides of a run, each key once, without those of the machine, as paths.

    Args:
        spec: the study.
        cell: the cell of the run.
        seed: the value of all keys of `spec.repeat`.
        tuned: the value of each tuned key.
    """
    texts = [text for layer in _layers(spec, cell, seed, tuned).values() for text in layer]
    return list({each.key: each.text for each in read_overrides(texts)}.values())


def origin(spec: Spec, cell: Cell, seed: int, tuned: Mapping[str, str], key: str) -> str:
    """Return the key of the study file from which a run has a config key, by default that of the method."""
    layers = _layers(spec, cell, seed, tuned).items()
    found = [name for name, texts in layers if any(each.key == key for each in read_overrides(texts))]
    return key if key in spec.lines else found[-1] if found else f"methods.{cell.method}"


def set_twice(spec: Spec) -> dict[str, list[str]]:
    """Return the config keys that several keys of the study file set: config key -> keys of the file."""
    found: dict[str, dict[str, None]] = {}
    tuned = dict.fromkeys(spec.tune.values, "") if spec.tune else {}
    for cell in cells(spec):
        origins: dict[str, list[str]] = {}
        for origin, texts in _layers(spec, cell, 0, tuned).items():
            for each in read_overrides(texts):
                origins.setdefault(each.key, []).append(origin)
        for key, several in origins.items():
            if len(several) > 1:
                found.setdefault(key, {}).update(dict.fromkeys(several))
    return {key: list(several) for key, several in found.items()}


def tuning_point(spec: Spec, cell: Cell) -> str:
    """Return the name of the point of `spec.tune.at` whose choice a cell uses: the last one that it reaches.

    A cell reaches a point if one of its values is at least that of `reach`; numbers are compared as numbers,
    and other values by their place in the file. The point `a+b` is for cells that reach `a` and `b`.
    """
    assert spec.tune is not None

    def rank(axis: str, value: str) -> float:
        try:
            return float(value)
        except ValueError:
            return list(spec.axes[axis].values).index(value)

    reached = [
        point
        for point, limits in spec.tune.reach.items()
        if any(
            axis in limits and rank(axis, value) >= rank(axis, limits[axis]) for axis, value in cell.levels
        )
    ]
    both = "+".join(reached)
    return both if both in spec.tune.at else [next(iter(spec.tune.at)), *reached][-1]


def tuning_cell(spec: Spec, cell: Cell) -> Cell:
    """Return the cell of the runs that choose the tuned values of a cell."""
    assert spec.tune is not None
    return cell_of(spec, cell.task, cell.method, spec.tune.at[tuning_point(spec, cell)])
