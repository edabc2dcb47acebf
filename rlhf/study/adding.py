"""Methods of another file beside the committed rows of a study: a study file that includes these rows.

Anchor runs repeat a few committed rows first, which shows whether old and new rows may be paired.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev

import yaml

from rlhf.core.errors import UserError
from rlhf.core.files import write_atomically
from rlhf.core.formatting import figure
from rlhf.core.statistics import detectable
from rlhf.study import history, pricing
from rlhf.study.cells import Cell, cells
from rlhf.study.document import Document
from rlhf.study.planning import Plan, Planned
from rlhf.study.reading import read_spec
from rlhf.study.rows import TABLE
from rlhf.study.spec import Spec
from rlhf.study.study import Study, differing

_SHARED = ("set", "repeat", "seeds", "axes", "tune", "tables", "figures", "margin", "resources")
_OWN = ("title", "seeds", "grids", "claims", "budget", "config_dir", "page", "keep")


def write_study(base: Spec, mine: Path) -> Path:
    """Write the file of a study that runs the methods of `mine` and includes the rows of `base`.

    Args:
        base: a study with rows.
        mine: a YAML file with `methods`, and perhaps with `study` (the name) and keys of `_OWN`. A grid
            without `method` has the new methods.

    Returns:
        The file, beside that of `base`.

    Raises:
        UserError: the file has other keys, a method has the name of one in `base`, another study has the
            name, or a run is invalid. No file was written.
    """
    own, other = Document(mine), Document(base.file).values[""]
    given = own.mapping("", ("study", "methods", *_OWN))
    methods = own.mapping("methods")
    for name in methods.keys() & base.methods.keys():
        own.wrong(f"methods.{name}", f"must not be a method of {base.name}", name, "rename the method")
    if not methods:
        own.wrong("methods", "must have a method", "none", "write methods: {mine: [algo=mine]}")
    if not isinstance(own.values.get("grids", []), list):
        own.wrong("grids", "must be a list of grids", given["grids"], "write grids: [{<axis>: all}]")
    for place in range(len(own.values.get("grids", []))):
        own.mapping(f"grids.{place}")
    own.check()
    name = given.get("study", mine.stem)
    beside = base.file.parent
    file = beside.parent / name / "study.yaml" if base.file.name == "study.yaml" else beside / f"{name}.yaml"
    if file.resolve() == mine.resolve():
        raise UserError(f"study must name another file than {mine}, got {name}; set study: {name}_beside")
    claims = own.mapping("claims")
    known = beside.name if base.file.name == "study.yaml" else base.file.stem  # by which the file is found
    grids = given.get("grids") or [grid for grid in other.get("grids", [{}]) if "method" not in grid]
    paths = [(given, "config_dir"), (given, "page"), *((claims, said) for said in claims)]
    for values, key in paths:  # paths of the new file are relative to its own folder
        if isinstance(text := values.get(key), str) and (values is given or ".py:" in text):
            values[key] = os.path.relpath(mine.parent / text, file.parent)
    given |= {"claims": claims} if claims else {}
    tree = {
        "study": name,
        "title": f"{', '.join(methods)} beside {base.title}",
        "include": {known: {}},
        "tasks": {"from": known},
        **{key: other[key] for key in _SHARED if key in other},
        **{key: given[key] for key in _OWN if key in given},
        "grids": [{"method": list(methods), **grid} for grid in grids],
        "methods": {**other["methods"], **methods},
    }
    text = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=100)
    if file.exists() and file.read_text() != text:
        raise UserError(f"{file} exists and differs from what {mine} says; edit it, or delete it and repeat")
    if is_new := not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, text)
    try:
        spec = read_spec(file, made_of=mine)
        Plan(replace(spec, file=mine, lines=own.lines), []).check()  # messages name the lines of `mine`
    except UserError:
        if is_new:
            file.unlink()
        raise
    return file


def anchors(base: Study, added: Spec) -> list[Planned]:
    """Return the runs that are repeated: two seeds of a method in two cells of the new methods.

    The method is the base of a new method, or the first one that has rows in these cells.
    """
    new = [name for name in added.methods if name not in base.spec.methods]
    bases = [method for name in new if (method := added.methods[name].base)]
    places = {(cell.task, cell.levels) for cell in cells(added) if cell.method in new}
    rows = [each for each in base.plan({"part": [TABLE]}).runs if each.row]
    for method in (*bases, *base.spec.methods):
        shared = {Cell(task, method, levels) for task, levels in places} & {each.run.cell for each in rows}
        if found := sorted(shared, key=cells(base.spec).index):
            ends, seeds = {found[0], found[-1]}, base.spec.seeds[:2]
            return [each for each in rows if each.run.cell in ends and each.run.seed in seeds]
    return []


def compare(base: Study, added: Spec) -> Iterator[str]:
    """Repeat the anchors, and yield what that says about old and new rows as text."""
    equal, gaps, chosen = True, [], anchors(base, added)  # type: bool, list[float], list[Planned]
    if chosen:
        minutes = sum(each.row.cpu_s for each in chosen if each.row) / 60
        yield f"{len(chosen)} anchors: about {math.ceil(minutes)} min of CPU time, and the stages before"
    for each in chosen:
        where = {"task": each.run.cell.task, "method": each.run.cell.method, "seed": str(each.run.seed)}
        row, new = base.repeat({**where, **dict(each.run.cell.levels)}, added.folder / "anchors")
        found, task = differing(row, new), base.spec.tasks[row.task]
        before, after = (each.metrics.get(task.metric or each.metric, task.worst) for each in (row, new))
        equal, gaps = equal and not found, [*gaps, after - before]
        yield f"anchor {each.run}: " + (f"differs in {', '.join(found)}" if found else "equal bits")
    equal = equal and bool(gaps)
    history.record(added, "anchors", equal=equal, differences=gaps)
    if equal:
        yield "old and new rows are paired by seed"
    elif not gaps:
        yield "no anchor: no committed row can be repeated here, so old and new rows are not paired"
    else:
        yield f"old and new rows are not paired; the anchors differ by {figure(fmean(gaps))} on average"
        if len(gaps) > 1 and abs(fmean(gaps)) > detectable(stdev(gaps), len(gaps)):
            hours = pricing.price(base.plan()).done_s / 3600
            yield f"more than chance: run the methods of {base.spec.name} here, too ({hours:.1f} CPU-hours)"
