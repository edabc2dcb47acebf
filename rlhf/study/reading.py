"""Reading of study files: all problems are reported together, each with its line.

Overrides are not composed here: `rlhf study plan` checks the runs. This module imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rlhf.core.errors import UserError
from rlhf.study.document import Document
from rlhf.study.formula import problems, read_formula
from rlhf.study.spec import QUANTITIES, VALUE, Axis, Grid, Include, Method, Spec, Table, Task, Tune, folder_of

_KEYS = (
    *("study", "title", "set", "repeat", "seeds", "tasks", "methods", "axes", "grids", "tune", "tables"),
    *("figures", "claims", "budget", "looks", "resources", "include", "config_dir", "page", "interval"),
    *("margin", "analysis", "accept", "keep"),
)


def read_spec(file: Path | str) -> Spec:
    """Return the declaration of a study.

    Raises:
        UserError: the file cannot be read or is invalid; the error has all problems, each with its line.
    """
    return _Reading(Path(file), ()).spec()


class _Reading:
    """The reading of one study file; `around`: the files that include the file."""

    tasks: Mapping[str, Task]
    methods: Mapping[str, Method]
    axes: Mapping[str, Axis]

    def __init__(self, file: Path, around: tuple[Path, ...]) -> None:
        self.doc = Document(file)
        self.around = (*around, file.resolve())
        self.top = self.doc.mapping(self.doc.tree, "", _KEYS)
        self.name = str(self.top.get("study", "")) or file.stem
        if not re.fullmatch(r"[\w.-]+", self.name):
            self.doc.wrong(
                "study", "must be a name of letters, digits, _ and -", self.name, "rename the study"
            )

    def spec(self) -> Spec:
        """Return the declaration. The order matters: grids name tasks, methods and axes."""
        doc, top = self.doc, self.top
        self.seeds = self.read_seeds(top.get("seeds", "5"), "seeds")
        self.tasks, self.methods = self.read_tasks(), self.read_methods()
        self.axes = self.read_axes()
        self.grids = self.read_grids("grids", top.get("grids"), self) or [{}]
        included = list(self.read_include())
        self.check_axes_are_used(included)
        folder = folder_of(doc.file, self.name)
        budget = doc.mapping(top.get("budget"), "budget", ("cpu_hours", "gpu_hours"))
        root = folder.parent.parent  # paths of the file are relative to the folder of studies/
        spec = Spec(
            file=doc.file,
            name=self.name,
            title=str(top.get("title", self.name)),
            overrides=doc.overrides(top.get("set"), "set"),
            repeat=doc.texts(top.get("repeat", "seed"), "repeat"),
            seeds=self.seeds,
            tasks=self.tasks,
            methods=self.methods,
            axes=self.axes,
            grids=self.grids,
            tune=self.read_tune(),
            tables=[*self.read_tables("tables")] or [Table(VALUE, axis) for axis in [*self.axes] or [""]],
            figures=list(self.read_tables("figures")),
            claims=self.read_claims(),
            budget={name: doc.number(value, f"budget.{name}", 0.0) for name, value in budget.items()},
            looks=max(1, doc.number(top.get("looks"), "looks", 1, int)),
            resources=_texts_of(doc.mapping(top.get("resources"), "resources")),
            include=included,
            config_dir=root / str(top["config_dir"]) if "config_dir" in top else None,
            page=root / str(top["page"]) if "page" in top else folder / "page.md",
            interval=doc.one_of(top.get("interval", "t"), "interval", ("t", "percentile"), "an interval"),
            margin=doc.number(top["margin"], "margin", 0.02) if "margin" in top else None,
            analysis=top.get("analysis"),
            accept=tuple(doc.number(v, "accept", 0, int) for v in doc.texts(top.get("accept"), "accept")),
            keep=doc.some_of(top.get("keep"), "keep", ("models", "stages"), "what to keep"),
            lines=doc.lines,
        )
        doc.check()
        return spec

    def other(self, name: object, key: str) -> Spec | None:
        """Return the study that `from` or `include` names, or None after adding the problem."""
        beside, root = self.doc.file.parent, folder_of(self.doc.file, self.name).parent
        files = (beside / f"{name}.yaml", root / f"{name}.yaml", root / f"{name}/study.yaml")
        found = [file for file in files if file.is_file()]
        if not found or found[0].resolve() in self.around:
            self.doc.wrong(key, "must name another study", name, f"choose one in {root}")
            return None
        try:
            return _Reading(found[0], self.around).spec()
        except UserError as error:
            self.doc.problems += [(self.doc.line(key), problem) for problem in error.problems]
            return None

    def read_seeds(self, tree: Any, key: str) -> tuple[int, ...]:
        """Return the seeds: 1 to a number, or a list."""
        if isinstance(tree, str) and re.fullmatch("[1-9][0-9]*", tree):
            return tuple(range(1, int(tree) + 1))
        texts = tree if isinstance(tree, list) else []
        found = tuple(int(each) for each in texts if str(each).isdigit())
        if not found or len({*found}) < len(texts):
            rule = "must be a number of seeds, or a list of different seeds"
            self.doc.wrong(key, rule, tree, "write 10, or [1, 2, 3]")
        return found

    def read_tasks(self) -> dict[str, Task]:
        """Return the tasks; without tasks, all runs belong to one task with the name of the study."""
        doc, tree, found = self.doc, self.top.get("tasks"), {}
        if isinstance(tree, dict) and isinstance(tree.get("from"), str):
            other = self.other(tree["from"], "tasks.from")
            return dict(other.tasks) if other else {}
        for name, content in doc.mapping(tree, "tasks").items():
            at, known = f"tasks.{name}", ("set", "metric", "name", "at_kl", "worst", "fall")
            each = doc.mapping({"set": content} if isinstance(content, list) else content, at, known)
            metric = each.get("metric")
            found[name] = Task(
                overrides=doc.overrides(each.get("set"), f"{at}.set"),
                metric=metric,
                name=str(each.get("name", (metric or "value").rpartition("/")[2].replace("_", " "))),
                at_kl=doc.number(each["at_kl"], f"{at}.at_kl", 1.0) if "at_kl" in each else None,
                worst=doc.number(each.get("worst"), f"{at}.worst", 0.0),
                fall=doc.number(each.get("fall"), f"{at}.fall", 0.1),
            )
        return found or {self.name: Task()}

    def read_methods(self) -> dict[str, Method]:
        """Return the methods: a list of overrides, or a mapping with set and base."""
        doc, tree, found = self.doc, self.doc.mapping(self.top.get("methods"), "methods"), {}
        if not tree:
            doc.wrong("methods", "must have a method", "none", "write methods: {dpo: [algo=dpo]}")
        for name, content in tree.items():
            at = f"methods.{name}"
            each = doc.mapping(
                {"set": content} if not isinstance(content, dict) else content, at, ("set", "base")
            )
            others = [other for other in tree if other != name]
            base = (
                doc.one_of(each["base"], f"{at}.base", others, "another method") if "base" in each else None
            )
            found[name] = Method(doc.overrides(each.get("set"), at), base)
        return found

    def read_axes(self) -> dict[str, Axis]:
        """Return the axes: a key with values, or overrides of each value."""
        doc, found = self.doc, {}
        for name, content in doc.mapping(self.top.get("axes"), "axes").items():
            at = f"axes.{name}"
            each = doc.mapping(content, at, ("key", "values", "base"))
            key, tree = each.get("key"), each.get("values")
            if name in ("task", "method"):
                doc.wrong(at, "must have a name of its own", name, "rename the axis")
            if isinstance(tree, dict):
                values = {value: doc.overrides(of, f"{at}.values.{value}") for value, of in tree.items()}
            else:
                values = {value: (f"{key}={value}",) for value in doc.texts(tree, f"{at}.values")}
                if not key or not values:
                    doc.wrong(
                        at, "must have key and values", content, "write {key: <config key>, values: [0, 1]}"
                    )
            base = each.get("base")
            by_task = base if isinstance(base, dict) else dict.fromkeys(self.tasks, base)
            for task in self.tasks.keys() ^ by_task.keys():
                doc.wrong(
                    f"{at}.base", "must have a value for each task", task, f"tasks: {', '.join(self.tasks)}"
                )
            bases = {
                task: doc.one_of(of, f"{at}.base", values, "one of its values")
                for task, of in by_task.items()
            }
            found[name] = Axis(values, bases, key)
        return found

    def read_grids(self, key: str, tree: Any, names: Spec | _Reading) -> list[Grid]:
        """Return grids over the names of this study, or of one that it includes."""
        doc = self.doc
        found: list[Grid] = []
        axes = {name: list(axis.values) for name, axis in names.axes.items()}
        values = {"task": list(names.tasks), "method": list(names.methods), **axes}
        if tree is not None and not isinstance(tree, list):
            doc.wrong(key, "must be a list of grids", tree, f"write {key}: [{{<axis>: all}}]")
            tree = []
        for place, content in enumerate(tree or []):
            at = f"{key}.{place}"
            grid = doc.mapping(content, at, list(values))
            found.append({n: doc.some_of(of, f"{at}.{n}", values[n], f"a {n}") for n, of in grid.items()})
        return found

    def check_axes_are_used(self, included: Iterable[Include]) -> None:
        """Add a problem for each axis that no grid and no included study names."""
        used = {name for names in (*self.grids, *(each.levels for each in included)) for name in names}
        for name in self.axes.keys() - used:
            self.doc.wrong(
                f"axes.{name}", "must be used by a grid", "none", f"write grids: [{{{name}: all}}]"
            )

    def read_levels(self, tree: Any, key: str) -> dict[str, str]:
        """Return one value of each axis that is named."""
        levels = self.doc.mapping(tree, key, list(self.axes))
        return {
            axis: self.doc.one_of(value, f"{key}.{axis}", self.axes[axis].values, f"a value of {axis}")
            for axis, value in levels.items()
        }

    def read_include(self) -> Iterable[Include]:
        """Yield the studies whose rows are shown beside those of this one."""
        for name, content in self.doc.mapping(self.top.get("include"), "include").items():
            at = f"include.{name}"
            each = self.doc.mapping(content, at, ("grids", "as"))
            if (other := self.other(name, at)) is not None:
                grids = self.read_grids(f"{at}.grids", each.get("grids"), other)
                yield Include(other, grids or other.grids, self.read_levels(each.get("as"), f"{at}.as"))

    def read_tune(self) -> Tune | None:
        """Return the tuning; what is not given is that of `from`."""
        doc, own = self.doc, ("set", "seeds", "at", "reach", "extend", "from", "check")
        if "tune" not in self.top:
            return None
        content = doc.mapping(self.top["tune"], "tune")
        source = self.other(content["from"], "tune.from") if "from" in content else None
        given = Tune({}, (), {"": {}}, {}) if source is None or source.tune is None else source.tune
        values = {key: doc.texts(of, f"tune.{key}") for key, of in content.items() if key not in own}
        if not values and not given.values:
            doc.wrong("tune", "must have a config key", "none", "write tune: {optim.lr: [3e-5, 1e-4, 3e-4]}")
        at, reach = doc.mapping(content.get("at"), "tune.at"), content.get("reach")
        points = {point: self.read_levels(of, f"tune.at.{point}") for point, of in at.items()} or given.at
        limits = doc.mapping(reach, "tune.reach", list(points)).items()
        own_seeds = content.get("seeds")
        seeds = given.seeds if own_seeds is None and given.seeds else self.read_seeds(own_seeds, "tune.seeds")
        if both := {*seeds} & {*self.seeds}:
            doc.wrong(
                "tune.seeds", "must not be seeds of the tables", sorted(both), "choose others, as [101, 102]"
            )
        return Tune(
            values=values or given.values,
            seeds=seeds,
            at=points,
            reach={point: self.read_levels(of, f"tune.reach.{point}") for point, of in limits} or given.reach,
            extend=doc.number(content.get("extend"), "tune.extend", 0, int),
            source=source,
            overrides=doc.overrides(content["set"], "tune.set") if "set" in content else given.overrides,
            check=doc.one_of(content.get("check", "false"), "tune.check", ("true", "false"), "a boolean")
            == "true",
        )

    def read_claims(self) -> dict[str, str]:
        """Return the formula of each claim; the form and the names in it are checked."""
        found = _texts_of(self.doc.mapping(self.top.get("claims"), "claims"))
        for said, text in found.items():
            formula, at = read_formula(text), f"claims.{said}"
            if formula is None:
                remedy = "write loss(dpo) < loss(ppo, rloo) at lag=64"
                self.doc.wrong(at, "must compare quantities of methods", text, remedy)
            for rule in problems(formula, self.methods, self.axes) if formula else ():
                self.doc.wrong(at, f"must {rule}", text, "fix the formula")
        return found

    def read_tables(self, key: str) -> Iterable[Table]:
        """Yield what the page shows: quantities over axes, or at the bases of all axes."""
        for place, text in enumerate(self.doc.texts(self.top.get(key), key)):
            said, _, title = text.partition(" as ")
            quantity, over, axis = said.partition(" over ")
            quantity, at = quantity.removeprefix("value ").strip(), f"{key}.{place}"
            if quantity not in QUANTITIES and "/" not in quantity:
                rule = f"must be <quantity> over <axis> ({', '.join(QUANTITIES)}, or a metric)"
                self.doc.wrong(at, rule, text, "write value over <axis>")
            elif not over or self.doc.one_of(axis, at, self.axes, "over an axis"):
                yield Table(quantity, axis, title)


def _texts_of(tree: Mapping[str, object]) -> dict[str, str]:
    return {name: str(value) for name, value in tree.items()}
