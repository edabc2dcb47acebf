"""Reading of study files: all problems are reported together, each with its line."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from rlhf.core.errors import UserError
from rlhf.study.spec import Axis, Formula, Grid, Include, Method, Quantity, Spec, Table, Task, Tune, folder_of
from rlhf.usercode.address import function_problem
from rlhf.words.mistakes import suggestion

# Reading of study files: all problems are reported together, each with its line.
#
# Overrides are not composed here: `rlhf study plan` checks the runs.


_KEYS = (
    *("study", "title", "set", "repeat", "seeds", "tasks", "methods", "axes", "grids", "tune", "tables"),
    *("figures", "claims", "budget", "looks", "resources", "include", "config_dir", "page", "interval"),
    *("margin", "analysis", "accept", "keep", "curves"),
)
_BETTER, _BUDGET, _CURVES = ("higher", "lower"), ("cpu_hours",), ("gold and proxy over kl",)


def read_spec(file: Path | str, made_of: Path | None = None) -> Spec:
    """Return the declaration of a study; `made_of` is that of `Document`.

    Raises:
        UserError: the file cannot be read or is invalid; the error has all problems, each with its line.
    """
    return _Reading(Path(file), (), made_of).spec()


# YAML files whose problems are reported together, each with its line.
#
# Scalars of YAML stay texts: YAML 1.1 reads `1e-4` as a text, and `on` and `no` as booleans. So a value is
# parsed by whoever knows its type; for an override this is the config.


_NAME, _RESERVED = r"[^\s,()=|`]{1,32}", ("all", "best", "same", "task", "method", "seed", "part", "from")
_WORDS = ", ".join(_RESERVED)


class Document:
    """The content of a YAML file, and the problems that its readers found.

    Args:
        file: the file.
        made_of: the file that it was made of, which messages then name, without lines.

    A value that has another form than a reader wants is a problem, and the reader returns an empty value.

    Attributes:
        values: texts, lists and dictionaries by key; keys inside of other keys have dots, elements of lists
            their number. The whole file has the key "".
        lines: line number of each key.
        problems: line and error message of each problem.

    Raises:
        UserError: the file cannot be read, or is not a YAML mapping.
    """

    def __init__(self, file: Path, made_of: Path | None = None) -> None:
        self.file, self.made_of = file, made_of
        self.values: dict[str, Any] = {}
        self.lines: dict[str, int] = {}
        self.problems: list[tuple[int, str]] = []
        try:
            node = yaml.compose(file.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
            if not isinstance(node, yaml.MappingNode):
                raise UserError(f"{file} must be a mapping, as study: <name>; write at least methods:")
            self._plain(node, "")
        except OSError as error:
            raise UserError(f"{file} must be a study file, got: {error.strerror}; fix the path") from None
        except (yaml.YAMLError, UnicodeError, RecursionError) as error:
            mark, got = getattr(error, "problem_mark", None), getattr(error, "problem", None) or str(error)
            got = "an alias inside of what it names" if isinstance(error, RecursionError) else got
            at = f"{file}, line {mark.line + 1}:" if mark else f"{file}"
            remedy = "indent by spaces, close each bracket, quote texts with ': ' or '#'"
            raise UserError(f"{at} must be YAML, got: {' '.join(got.split())}; {remedy}") from None

    def _plain(self, node: yaml.Node, key: str) -> Any:
        def inner(name: object, at: yaml.Node, value: yaml.Node) -> Any:
            below, line = _below(key, name), at.start_mark.line + 1
            if below in self.lines:
                self.wrong(below, "must be given once", f"it again in line {line}", "rename one")
                return self.values[below]
            self.lines[below] = line
            return self._plain(value, below)

        found: Any = node.value
        if isinstance(node, yaml.SequenceNode):
            found = [inner(place, each, each) for place, each in enumerate(found)]
        elif isinstance(node, yaml.MappingNode):
            keys = [(_as_written(name), name, value) for name, value in found]
            found = {name: inner(name, at, value) for name, at, value in keys}
        self.values[key] = found
        return found

    def wrong(self, key: str, rule: str, got: object, remedy: str) -> None:
        """Add a problem: a key, the rule that it breaks, its value and a remedy."""
        self.add(key, f"{key} {rule}, got {got or 'nothing'}; {remedy}")

    def add(self, key: str, text: str) -> None:
        """Add the text of a problem."""
        line = self.line(key)
        where = str(self.made_of or self.file) + (f", line {line}" if line and not self.made_of else "")
        self.problems.append((line, f"{where}: {text}"))

    def line(self, key: str) -> int:
        """Return the line of a key, or of the nearest key around it; 0 if there is none."""
        while key and key not in self.lines:
            key = key.rpartition(".")[0]
        return self.lines.get(key, 0)

    def check(self) -> None:
        """Raise UserError with all problems in the order of lines, if there are any."""
        if self.problems:
            raise UserError(*dict.fromkeys(text for _, text in sorted(self.problems)))

    def mapping(self, key: str, known: Collection[str] | None = None) -> dict[str, Any]:
        """Return a mapping, without keys that are not `known`; None: any keys."""
        tree = self.values.get(key) or {}
        if not isinstance(tree, dict):
            self.wrong(key, "must be a mapping", tree, f"write {key}: {{<name>: <value>}}")
            return {}
        for name in tree.keys() - set(tree if known is None else known):
            remedy = suggestion(name, known or (), "did you mean {}?") or "leave it out"
            self.wrong(_below(key, name), f"must be one of {', '.join(known or ())}", name, remedy)
        return {name: value for name, value in tree.items() if known is None or name in known}

    def items(self, key: str) -> dict[str, str]:
        """Return the texts of a list by their keys; one text is a list of one."""
        tree = self.values.get(key) or []
        if isinstance(tree, str):
            return {key: tree}
        if isinstance(tree, list) and all(isinstance(each, str) for each in tree):
            return {_below(key, place): each for place, each in enumerate(tree)}
        self.wrong(key, "must be a list", tree, f"write {key}: [<a>, <b>]")
        return {}

    def texts(self, key: str) -> tuple[str, ...]:
        """Return the texts of a list."""
        return tuple(self.items(key).values())

    def text(self, key: str, default: str = "", form: str = ".+", what: str = "a text") -> str:
        """Return a text; `form`: the regular expression that it has, and `what` says so."""
        value = self.values.get(key, default)
        if isinstance(value, str) and (key not in self.values or re.fullmatch(form, value, re.DOTALL)):
            return value
        self.wrong(key, f"must be {what}", value, f"write {key}: {default or '<text>'}")
        return default

    def named(self, key: str) -> dict[str, Any]:
        """Return a mapping from names: words that a claim, `--only` and a table can contain."""
        for name in (tree := self.mapping(key)):
            if not re.fullmatch(_NAME, name) or name in _RESERVED:
                rule = f"must be named by up to 32 characters without space and , ( ) = | `, and not {_WORDS}"
                self.wrong(_below(key, name), rule, name, "rename it")
        return tree

    def path(self, key: str, *form: str) -> Path:
        """Return a path, which is relative to the folder of the file; `form`: as of `text`."""
        return Path(os.path.normpath(self.file.parent / self.text(key, *form)))

    def address(self, key: str) -> str:
        """Return the address of a function, <module>:<function> or <file>.py:<function> with a `path`."""
        at = str(self.path(key)) if ".py:" in (text := self.text(key)) else text
        if problem := function_problem(key, at, None):
            self.add(key, problem)
        return text

    def overrides(self, key: str) -> tuple[str, ...]:
        """Return a list of overrides, with quotes around values that contain an interpolation, for Hydra."""
        found = []
        for each in self.texts(key):
            name, equals, value = each.partition("=")
            if not each.startswith("~") and not equals:
                self.wrong(key, "must be a list of overrides", each, "write <key>=<value>, as algo=dpo")
            found.append(f"{name}='{value}'" if "${" in value and value[0] not in "'\"" else each)
        return tuple(found)

    def number(self, key: str, default: Any, kind: type[int] | type[float] = float, least: int = 0) -> Any:
        """Return a number of at least `least`."""
        tree = self.values.get(key)
        if tree is None:
            return default
        try:
            value = kind(tree)
        except (TypeError, ValueError):
            value = -1
        if least <= value < float("inf"):
            return value
        word = "a whole number" if kind is int else "a number"
        good = 0.1 if default is None else default
        self.wrong(key, f"must be {word} of at least {least}", tree, f"write {good}")
        return default

    def one_of(self, key: str, choices: Iterable[str], what: str, default: str | None = None) -> str:
        """Return the value of a key, which is one of the choices; `what`: what the choices are."""
        known, value = list(choices), self.values.get(key, default)
        if isinstance(value, str) and value in known:
            return value
        guess = suggestion(value, known, "did you mean {}?") if isinstance(value, str) else ""
        rule = f"must be {what} ({', '.join(known) or 'there are none'})"
        self.wrong(key, rule, value, guess or "choose one of them")
        return ""

    def some_of(self, key: str, choices: Iterable[str], what: str) -> tuple[str, ...]:
        """Return some of the choices, of a list or a single one; `all`: all of them."""
        if self.values.get(key) == "all":
            return tuple(choices)
        if key in self.values and not self.values[key]:
            self.wrong(key, f"must have {what}", "none", f"write {key}: all, or leave it out")
        found = (self.one_of(each, choices, what) for each in self.items(key))
        return tuple(each for each in found if each)

    def seeds(self, key: str, default: tuple[int, ...] = ()) -> tuple[int, ...]:
        """Return the seeds: 1 to a number, or a list."""
        tree = self.values.get(key)
        if tree is None and default:
            return default
        if isinstance(tree, str) and re.fullmatch("[1-9][0-9]{0,3}", tree):
            return tuple(range(1, int(tree) + 1))
        texts = tree if isinstance(tree, list) else []
        found = tuple(int(each) for each in texts if re.fullmatch("[0-9]{1,9}", str(each)))
        if not found or len({*found}) < len(texts):
            rule = "must be a number of seeds (to 9999), or a list of different seeds (to 999999999)"
            self.wrong(key, rule, tree, "write 10, or [1, 2, 3]")
        return found


def _as_written(node: yaml.Node) -> str:
    """Return a key as text; a key that is a list or a mapping as it is written in the file."""
    start, end = node.start_mark, node.end_mark
    return node.value if isinstance(node, yaml.ScalarNode) else start.buffer[start.pointer : end.pointer]


def _below(key: str, name: object) -> str:
    return f"{key}.{name}" if key else str(name)


class _Reading(Document):
    """The reading of one study file; `around`: the files that include the file."""

    tasks: Mapping[str, Task]
    methods: Mapping[str, Method]
    axes: Mapping[str, Axis]

    def __init__(self, file: Path, around: tuple[Path, ...], made_of: Path | None = None) -> None:
        super().__init__(file, made_of)
        self.around = (*around, file.resolve())
        self.mapping("", _KEYS)
        self.name = self.text("study", file.stem)
        if not re.fullmatch(r"\w[\w.-]{0,59}", self.name):
            rule = "must be a name of at most 60 letters, digits, ., _ and -"
            self.wrong("study", rule, self.name, "write study: <name>")

    def spec(self) -> Spec:
        """Return the declaration. The order matters: grids name tasks, methods and axes."""
        self.of_tables = self.seeds("seeds", (1, 2, 3, 4, 5))
        self.tasks, self.methods = self.read_tasks(), dict(self.read_methods())
        self.axes = dict(self.read_axes())
        grids = self.read_grids("grids", self) or [{}]
        included = list(self.read_include())
        others = (names for each in included for names in (each.levels, *each.grids))
        used = {name for names in (*grids, *others) for name in names}
        for name in self.axes.keys() - used:
            self.wrong(f"axes.{name}", "must be used by a grid", "none", f"write grids: [{{{name}: all}}]")
        given = self.mapping("resources", ("threads", "gpus", "minutes"))
        resources = {x: str(self.number(f"resources.{x}", 1, int, int(x != "gpus"))) for x in given}
        page = self.path("page", "page.md", r".+\.md", "<file>.md")
        values = [Table(Quantity.VALUE, axis) for axis in self.axes or [""]]
        spec = Spec(
            file=self.file,
            name=self.name,
            title=self.text("title", self.name),
            overrides=self.overrides("set"),
            repeat=self.texts("repeat") or ("seed",),
            seeds=self.of_tables,
            tasks=self.tasks,
            methods=self.methods,
            axes=self.axes,
            grids=grids,
            tune=self.read_tune(),
            tables=[*self.read_tables("tables")] or values,
            figures=list(self.read_tables("figures")),
            curves=any([self.one_of(each, _CURVES, "curves") for each in self.items("curves")]),
            claims=self.read_claims(),
            budget={each: self.number(f"budget.{each}", 0.0) for each in self.mapping("budget", _BUDGET)},
            looks=self.number("looks", 1, int, 1),
            resources=resources,
            include=included,
            config_dir=self.path("config_dir") if "config_dir" in self.values else None,
            page=page if "page" in self.values else folder_of(self.file, self.name) / "page.md",
            interval=self.one_of("interval", ("t", "percentile"), "an interval", "t"),
            margin=self.number("margin", None),
            analysis=self.address("analysis") if "analysis" in self.values else None,
            accept=tuple(self.number(each, 0, int) for each in self.items("accept")),
            keep=self.some_of("keep", ("models",), "what to keep"),
            lines=self.lines,
        )
        self.check()
        return spec

    def other(self, name: object, key: str) -> Spec | None:
        """Return the study that `from` or `include` names, or None after adding the problem."""
        beside, root = self.file.parent, folder_of(self.file, self.name).parent
        files = (beside / f"{name}.yaml", root / f"{name}.yaml", root / f"{name}/study.yaml")
        found = [file for file in files if file.is_file()]
        if not found or found[0].resolve() in self.around:
            known = [file.stem for file in (*beside.glob("*.yaml"), *root.glob("*.yaml"))]
            guess = suggestion(str(name), {*known} - {self.name}, "did you mean {}?")
            self.wrong(key, "must name another study", name, guess or f"choose one in {root}")
            return None
        try:
            return _Reading(found[0], self.around).spec()
        except UserError as error:
            self.problems += [(self.line(key), problem) for problem in error.problems]
            return None

    def read_tasks(self) -> dict[str, Task]:
        """Return the tasks; without tasks, all runs belong to one task with the name of the study."""
        found = {}
        if isinstance(source := self.values.get("tasks.from"), str):
            self.mapping("tasks", ("from",))
            other = self.other(source, "tasks.from")
            return dict(other.tasks) if other else {}
        for name, content in self.named("tasks").items():
            at = f"tasks.{name}"
            if not isinstance(content, list):
                self.mapping(at, ("set", "metric", "name", "at_kl", "at_time", "better", "worst", "fall"))
            what = "a metric of the evaluations, eval/<name>"
            metric = self.text(f"{at}.metric", "", "eval/.+", what) or None
            better = self.one_of(f"{at}.better", _BETTER, "a direction", _BETTER[0])
            if better == _BETTER[1] and f"{at}.worst" not in self.values:
                rule = "must be given if lower values are better (a run that diverged has this value)"
                self.wrong(f"{at}.worst", rule, "none", "write worst: 100")
            found[name] = Task(
                overrides=self.overrides(at if isinstance(content, list) else f"{at}.set"),
                metric=metric,
                name=self.text(f"{at}.name", (metric or "value").rpartition("/")[2].replace("_", " ")),
                at_kl=self.number(f"{at}.at_kl", None),
                at_time=self.number(f"{at}.at_time", None),
                sign=-1 if better == _BETTER[1] else 1,
                worst=self.number(f"{at}.worst", 0.0),
                fall=self.number(f"{at}.fall", 0.1),
            )
        return found or {self.name: Task()}

    def read_methods(self) -> Iterator[tuple[str, Method]]:
        """Yield the methods by name: a list of overrides, or a mapping with set and base."""
        tree = self.named("methods")
        if not tree:
            self.wrong("methods", "must have a method", "none", "write methods: {dpo: [algo=dpo]}")
        for name, content in tree.items():
            at, base = f"methods.{name}", None
            if isinstance(content, dict) and "base" in self.mapping(at, ("set", "base")):
                base = self.one_of(f"{at}.base", [each for each in tree if each != name], "another method")
            yield name, Method(self.overrides(f"{at}.set" if isinstance(content, dict) else at), base)

    def read_axes(self) -> Iterator[tuple[str, Axis]]:
        """Yield the axes by name: a key with values, or overrides of each value."""
        for name, content in self.named("axes").items():
            at = f"axes.{name}"
            each = self.mapping(at, ("key", "values", "base"))
            key, base = each.get("key"), each.get("base")
            if isinstance(tree := each.get("values"), dict):
                values = {value: self.overrides(f"{at}.values.{value}") for value in tree}
            else:
                values = {value: (f"{key}={value}",) for value in self.texts(f"{at}.values")}
                if not key or not values or len(values) < len(self.texts(f"{at}.values")):
                    remedy = "write {key: <config key>, values: [0, 1]}"
                    self.wrong(at, "must have key and different values", content, remedy)
            if isinstance(base, dict):
                for task in self.tasks.keys() ^ base.keys():
                    tasks = f"tasks: {', '.join(self.tasks)}"
                    self.wrong(f"{at}.base", "must have a value for each task", task, tasks)
                bases = {task: self.one_of(f"{at}.base.{task}", values, "one of its values") for task in base}
            else:
                bases = dict.fromkeys(self.tasks, self.one_of(f"{at}.base", values, "one of its values"))
            yield name, Axis(values, bases, key)

    def read_grids(self, key: str, names: Spec | _Reading) -> list[Grid]:
        """Return grids; `names`: the tasks, methods and axes, of this study or of one that it includes."""
        found: list[Grid] = []
        axes = {name: list(axis.values) for name, axis in names.axes.items()}
        values = {"task": list(names.tasks), "method": list(names.methods), **axes}
        tree = self.values.get(key) or []
        if not isinstance(tree, list):
            self.wrong(key, "must be a list of grids", tree, f"write {key}: [{{<axis>: all}}]")
            return []
        for at in (f"{key}.{place}" for place in range(len(tree))):
            grid = self.mapping(at, list(values))
            found.append({name: self.some_of(f"{at}.{name}", values[name], f"a {name}") for name in grid})
        return found

    def read_levels(self, key: str) -> dict[str, str]:
        """Return one value of each axis that is named."""
        named = [(axis, self.axes[axis].values) for axis in self.mapping(key, list(self.axes))]
        return {axis: self.one_of(f"{key}.{axis}", values, f"a value of {axis}") for axis, values in named}

    def read_include(self) -> Iterable[Include]:
        """Yield the studies whose rows are shown beside those of this one."""
        for name in self.mapping("include"):
            at = f"include.{name}"
            self.mapping(at, ("grids", "as"))
            if (other := self.other(name, at)) is not None:
                grids = self.read_grids(f"{at}.grids", other) or other.grids
                yield Include(other, grids, self.read_levels(f"{at}.as"))

    def read_tune(self) -> Tune | None:
        """Return the tuning; what is not given is that of `from`."""
        content = self.mapping("tune")
        if "tune" not in self.values:
            return None
        source = self.other(content["from"], "tune.from") if "from" in content else None
        if source is not None and source.tune is None:
            self.wrong("tune.from", "must name a study that tunes", source.name, "choose another one")
        if "from" in content and (source is None or source.tune is None):
            return None
        if source is None and "check" in content:
            self.wrong("tune.check", "must have tune.from, whose choices it checks", "none", "leave it out")
        given = Tune({}, (), {"": {}}, {}) if source is None or source.tune is None else source.tune
        keys = content.keys() - {"set", "seeds", "at", "reach", "extend", "from", "check"}
        values = {key: self.texts(f"tune.{key}") for key in content if key in keys} or given.values
        if not values:
            self.wrong("tune", "must have a config key", "none", "write tune: {optim.lr: [3e-5, 1e-4, 3e-4]}")
        for key, several in values.items():
            if len({*several}) < max(2, len(several)):
                remedy = f"write {key}: [1e-4, 3e-4], or set it"
                self.wrong(f"tune.{key}", "must have several different values", several, remedy)
        named = list(self.mapping("tune.at"))
        points = {point: self.read_levels(f"tune.at.{point}") for point in named} or given.at
        limits = self.mapping("tune.reach", list(points))
        for point in named[1:]:
            if point != "+".join(each for each in limits or given.reach if each in point.split("+")):
                remedy = "say in tune.reach which cells use it; a+b names points in the order of tune.reach"
                self.wrong(f"tune.at.{point}", "must be reached by a cell", point, remedy)
        seeds = self.seeds("tune.seeds", given.seeds)
        if both := {*seeds} & {*self.of_tables}:
            remedy = "choose others, as [101, 102]"
            self.wrong("tune.seeds", "must not be seeds of the tables", sorted(both), remedy)
        return Tune(
            values=values,
            seeds=seeds,
            at=points,
            reach={point: self.read_levels(f"tune.reach.{point}") for point in limits} or given.reach,
            extend=self.number("tune.extend", 0, int),
            source=source,
            overrides=self.overrides("tune.set") if "set" in content else given.overrides,
            check=self.one_of("tune.check", ("true", "false"), "a boolean", "false") == "true",
        )

    def read_claims(self) -> dict[str, str]:
        """Return the formula of each claim; the form and the names in it are checked."""
        found = {said: str(text) for said, text in self.mapping("claims").items()}
        for said, text in found.items():
            at = f"claims.{said}"
            if (formula := Formula.read(text)) is None:
                remedy = "write loss(dpo) < 0.5 * loss(ppo, rloo) at lag=64"
                self.wrong(at, "must compare quantities of methods", text, remedy)
                continue
            if formula.left is None:
                self.address(at)
            for rule in formula.problems(self.methods, self.axes, self.tasks):
                self.wrong(at, f"must {rule}", text, "fix the formula")
        return found

    def read_tables(self, key: str) -> Iterable[Table]:
        """Yield what the page shows: quantities over axes, or at the bases of all axes."""
        for at, text in self.items(key).items():
            found = Table.read(text, self.tasks, self.axes)
            if isinstance(found, Table):
                yield found
            else:
                self.add(at, f"{at} {found}")
