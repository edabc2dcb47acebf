"""The runs of a study: their identity, tuned settings, state, and the collection of their rows."""

from __future__ import annotations

import ast
import copy
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from rlhf.checks.check import as_objects, composed, composed_node, problems
from rlhf.config.root import Config, candidates
from rlhf.config.run import Progress
from rlhf.config.schema import PARTS, SCHEMAS, dotted, sections
from rlhf.core import files
from rlhf.core.errors import UserError
from rlhf.core.launched import RESULTS
from rlhf.core.machine import cached_folder
from rlhf.core.statistics import detectable
from rlhf.runs.lock import LOCK, Lock
from rlhf.study.rows import FAILED, FINISHED, Results, Row, judged, named, read_rows, write_rows
from rlhf.study.spec import TABLE, TUNE, Cell, Run, Spec, Tune, Tuned
from rlhf.usercode.address import ONLY_HERE
from rlhf.words import catalogue
from rlhf.words.compose import run_name, what_counts
from rlhf.words.mistakes import explained, is_own, lacking, one_of, suggestion

# The choice of tuned settings for each task, method and point, from runs with seeds of their own.
#
# The value with the highest mean over the tuning seeds is chosen; among equal ones, the first. A run that
# diverged or failed counts as the worst value of its task. `rates.json` has every choice.


@dataclass(frozen=True)
class _Choice:
    """A choice of tuned settings."""

    chosen: Mapping[str, str]  # value of each tuned key
    values: Mapping[str, Sequence[float]] = field(default_factory=dict)  # per seed, by settings compared
    lead: float | None = None  # difference of the means of the best and the second best settings
    ties: Sequence[str] = ()  # settings whose mean equals that of the chosen ones
    edge: bool = False  # whether a chosen number is the smallest or largest of those that were compared


class _Tuning:
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
        self.choices: dict[tuple[str, str, str], _Choice] = {}
        if (tune := spec.tune) is None:
            return
        saved = read_choices(spec.folder / "rates.json")
        source = read_choices(tune.source.folder / "rates.json") if tune.source else {}
        due = {(c.task, c.method, spec.tuning_point(c)): spec.tuning_cell(c) for c in spec.cells()}
        for key, cell in due.items():
            known = source.get(key)
            if known is not None and not tune.check:
                self.choices[key] = known
                continue
            compared = _neighbours(tune, known) if known else _grid(tune)
            runs, choice = self._compare(cell, compared, 0 if known else tune.extend)
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
        choice = self.choices.get((cell.task, cell.method, self.spec.tuning_point(cell)))
        return None if choice is None else tuple(choice.chosen.items())

    def _compare(self, cell: Cell, compared: list[Tuned], extend: int) -> tuple[list[Run], _Choice | None]:
        """Return the runs that compare settings of a cell, and the choice if all runs have rows.

        A choice on the edge adds up to `extend` further settings.
        """
        task, seeds = self.spec.tasks[cell.task], self.spec.tune.seeds if self.spec.tune else ()
        while True:
            runs = [Run(cell, seed, each, TUNE) for each in compared for seed in seeds]
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
        return runs, _Choice(
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


def _grid(tune: Tune) -> list[Tuned]:
    """Return the settings of a file that are compared."""
    return [tuple(zip(tune.values, each, strict=True)) for each in product(*tune.values.values())]


def read_choices(file: Path) -> dict[tuple[str, str, str], _Choice]:
    """Return the choices in a file; none if it does not exist.

    Raises:
        UserError: the file is damaged.
    """
    with read_saved(file, "choices") as tree:
        return {
            (task, method, point): _Choice(**choice)
            for task, methods in tree.items()
            for method, points in methods.items()
            for point, choice in points.items()
        }


@contextmanager
def read_saved(file: Path, what: str) -> Iterator[dict[str, Any]]:
    """Yield the JSON object in a file to be read in the block; an empty one if the file does not exist.

    Raises:
        UserError: the file is damaged; `what`: what it has.
    """
    remedy = f"delete the file: {files.delete_command(file)}"
    try:
        yield files.read_json(file, remedy) if file.exists() else {}
    except (TypeError, AttributeError) as error:
        raise UserError(f"{file} must have {what} as studies write them, got: {error}; {remedy}") from None


def write_choices(file: Path, choices: Mapping[tuple[str, str, str], _Choice]) -> None:
    """Write choices in place of a file: {task: {method: {point: choice}}}."""
    tree: dict[str, Any] = {}
    for (task, method, point), choice in choices.items():
        tree.setdefault(task, {}).setdefault(method, {})[point] = asdict(choice)
    file.parent.mkdir(parents=True, exist_ok=True)
    files.write_json(file, tree)


def _neighbours(tune: Tune, known: _Choice) -> list[Tuned]:
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


# Identity of a run: its settings, the content of its inputs, and the results version of the project.
#
# Neither the commit nor the wording of the overrides belongs to the identity.


# Fields of sections that name data, a model or a function; `parts` of a section are sections of their own.
_DATA = ("path", "preferences_path", "chat_template", "template", "rubric")
_MODELS = ("base", "policy", "reference", "reward", "tokenizer")


def run_digest(cfg: Config) -> str:
    """Return eight hex digits of the settings that the result of a run depends on.

    The digits are those of the run name, except that absolute paths below the current folder count as
    relative ones, so that a checkout can be moved.
    """
    here = json.dumps(f"{Path.cwd()}/")[:-1]  # with the quotation mark that begins a text
    return files.digest(json.loads(json.dumps(what_counts(cfg)).replace(here, '"')))


def inputs(cfg: Config) -> dict[str, str]:
    """Return a digest of the content of each input outside of the settings.

    Returns:
        Config keys of local data and models (of hub names the revision in the cache, if it is there), and
        files of the user's code, such as "my_lab/objective.py", with those that they import from their own
        package. What does not exist has no digest.
    """
    found: dict[str, str] = {}
    for key, section in sections(cfg):
        for name in section.__dataclass_fields__:
            for place, text in _texts(dotted(key, name), getattr(section, name)):
                if name in (*_DATA, *_MODELS) and ":" not in text:  # else the address of a function
                    path = Path(text).expanduser()
                    is_name = name in (*_MODELS, "path") and text.count("/") == 1
                    if os.path.exists(path):  # False also for a long text
                        found[place] = files.digest_of(path)
                    elif is_name and (folder := cached_folder(text)) is not None:
                        found[place] = folder.name
                if name == "path":
                    found |= _sources(text)
        modules = [f"{each.__module__}:" for each in type(section).__mro__ if each in SCHEMAS.values()]
        for address in (*modules, PARTS.get(type(section), "")):
            found |= _sources(address)
    return found


def stale(row: Row, wanted: Mapping[str, str], accept: tuple[int, ...] = ()) -> str | None:
    """Return why the row of a run is not its result any more; None if it is.

    Args:
        row: a row with the settings of the run.
        wanted: the `inputs` of the run now.
        accept: earlier results versions whose rows are used.
    """
    if row.results not in (RESULTS, *accept):
        return f"results version {row.results}, now {RESULTS}"
    changed = [name for name, content in wanted.items() if row.inputs.get(name) != content]
    return f"{', '.join(changed)} changed" if changed else None


def _texts(key: str, value: object) -> Iterator[tuple[str, str]]:
    """Yield the texts in a value, which may be a mapping or a list, with their keys."""
    if isinstance(value, dict | list | tuple):
        for name, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _texts(f"{key}.{name}", each)
    elif isinstance(value, str) and value:
        yield key, value


def _sources(address: str) -> dict[str, str]:
    """Return the digests of the file of a function or class, and of the files of its package it imports."""
    place, colon, _ = address.rpartition(":")
    top = place.partition(".")[0]
    if not colon or place == ONLY_HERE or top == "rlhf":
        return {}
    if place.endswith(".py"):
        file = Path(place).expanduser()
        return {place: files.digest_of(file)} if file.is_file() else {}
    found: dict[str, str] = {}
    waiting = [place]
    for name in waiting:  # the list grows
        source = _file_of(*name.split("."))
        if source is None:  # the name is that of an object of a module, or the module is not a Python file
            continue
        is_package = source.name == "__init__.py"
        found[name.replace(".", "/") + ("/__init__.py" if is_package else ".py")] = files.digest_of(source)
        for other in _imported(source, name if is_package else name.rpartition(".")[0]):
            if other.partition(".")[0] == top and other not in waiting:
                waiting.append(other)
    return found


def _file_of(root: str, *below: str) -> Path | None:
    """Return the Python file of a module, without importing it or the packages that contain it, or None."""
    if (spec := find_spec(root)) is None:
        return None
    folders = [Path(each, *below) for each in spec.submodule_search_locations or ()]
    files = [file for each in folders for file in (each / "__init__.py", each.with_suffix(".py"))]
    files += [] if below else [Path(spec.origin or "")]
    return next((file for file in files if file.suffix == ".py" and file.is_file()), None)


def _imported(file: Path, package: str) -> Iterator[str]:
    """Yield the modules (and perhaps objects of modules) that a file imports, by their full names."""
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


# The runs of a study and their state: done, stale or missing.


DONE, STALE, MISSING = "done", "stale", "missing"
Only = Mapping[str, Sequence[str]] | None  # values of "task", "method", axes, "part" or "seed"; None: any


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A run with its identity and its row."""

    run: Run
    digest: str  # `identity.run_digest` of its config
    inputs: Mapping[str, str]  # `identity.inputs` of its config
    folder: Path  # its run folder
    row: Row | None = None  # None: missing or stale
    stale: Row | None = None
    reason: str | None = None  # why its row is stale

    @property
    def identity(self) -> dict[str, Any]:
        """The fields of a row that say what it was made of."""
        return {"run": self.digest, "inputs": dict(self.inputs), "results": RESULTS}

    @property
    def state(self) -> str:
        """`DONE`, `STALE` or `MISSING`."""
        return DONE if self.row else STALE if self.stale else MISSING


class Configs:
    """The configs of the runs of a study.

    Options of groups are composed once for all runs that share them, because that takes most of the time.
    """

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.nodes: dict[tuple[str, ...], DictConfig] = {}
        self.of_cells: dict[Run, Config] = {}  # by run with seed 0, as `costs`
        self.costs: dict[Run, str] = {}
        self.runs: dict[Run, Planned] = {}

    def config(self, run: Run) -> Config:
        """Return the config of a run, without checks of the values.

        Raises:
            UserError: an override is invalid.
        """
        if (of_cell := run._replace(seed=0)) not in self.of_cells:
            self.of_cells[of_cell] = self._compose(self.spec.overrides_of(run))
        cfg = self.of_cells[of_cell].with_(dict.fromkeys(self.spec.repeat, run.seed))
        threads = int(self.spec.resources.get("threads", 0)) or (None if "gpus" in self.spec.resources else 1)
        own = {"output_dir": str(self.spec.folder / "runs"), "progress": Progress.plain, "eval.samples": 0}
        return cfg.with_({**own, "backend.threads": cfg.backend.threads or threads})

    def planned(self, run: Run) -> Planned:
        """Return a run with its identity, as if it had no row."""
        if run not in self.runs:
            cfg = self.config(run)
            folder = self.spec.folder / "runs" / run_name(cfg)
            self.runs[run] = Planned(run=run, digest=run_digest(cfg), inputs=inputs(cfg), folder=folder)
        return self.runs[run]

    def cost(self, run: Run) -> str:
        """Return a digest of the settings on which the cost of an episode and of an evaluation depends."""
        if (of_cell := run._replace(seed=0)) not in self.costs:
            cfg, counted = self.config(run), what_counts(self.config(run))
            parts = [counted[name] for name in ("model", "task", "scorer", "gold", "generator", "eval")]
            algo = [cfg.algo.name, cfg.algo.samples_per_prompt, cfg.schedule.epochs]
            self.costs[of_cell] = files.digest([*algo, *parts])
        return self.costs[of_cell]

    def problems(self, runs: Iterable[Run]) -> Iterator[str]:
        """Yield the problems of the cells of runs, each once, with the line of the method."""
        found: dict[str, list[Run]] = {}
        examples = {each._replace(seed=0): each for each in runs}.values()
        table = next((run for run in examples if run.part == TABLE), None)
        for run in examples:
            try:
                texts = problems(self.config(run))
                if run is table:  # does the seed change another key?
                    tuned = self.spec.tune.seeds if self.spec.tune else ()
                    seed = max(*self.spec.seeds, *tuned, 0) + 1
                    changed = self.of_cells[run._replace(seed=0)].with_(dict.fromkeys(self.spec.repeat, seed))
                    if self._compose(self.spec.overrides_of(run._replace(seed=seed))) != changed:
                        rule = "repeat must have keys that no other key reads, got"
                        texts.append(f"{rule} {', '.join(self.spec.repeat)}; leave them out")
            except UserError as error:
                texts = self._mistakes(self.spec.overrides_of(run)) or list(error.problems)
            for text in texts:
                found.setdefault(text, []).append(run)
        for text, (run, *others) in found.items():
            key = self.spec.origin(run, text.partition(" ")[0])
            more = f" and {len(others)} more cells" if others else ""
            yield f"{self.spec.at(key)} ({run.cell}{more}): {text}"

    def _mistakes(self, words: Sequence[str]) -> list[str]:
        """Return why a config cannot be composed, and what is wrong with the values that are left then."""
        typed = catalogue.read_overrides(words)
        try:
            cfg = self._compose(words)
        except UserError as error:
            wrong = tuple(f"{text.partition(' ')[0]}." for text in error.problems)
            rest = [each.text for each in typed if not f"{each.key}.".startswith(wrong)]
            return [*error.problems, *(self._mistakes(rest) if len(rest) < len(words) else ())]
        keys = [each.key for each in typed]
        found = (text for key, section in sections(cfg) for text in section.problems(key))
        return [text for text in found if text.partition(" ")[0] in keys]

    def _compose(self, words: Sequence[str]) -> Config:
        if (folder := self.spec.config_dir) is not None and not folder.is_dir():
            rule = f"config_dir must be a folder laid out like conf/ (relative to {self.spec.file})"
            raise UserError(f"{rule}, got {folder}; fix the path")
        with catalogue.also(self.spec.config_dir):
            if len(candidates()) > 1:  # generator=auto depends on all overrides
                return composed(list(words))
            options = tuple(  # overrides that may select an option of a group, or add or remove something
                each.text
                for each in catalogue.read_overrides(words)
                if each.sign or not ("." in each.key and "@" not in each.key or each.key in self.spec.repeat)
            )
            if options not in self.nodes:
                self.nodes[options] = composed_node(list(options))
            node = copy.deepcopy(self.nodes[options])
            with explained(words):
                for each in OverridesParser.create().parse_overrides([w for w in words if w not in options]):
                    OmegaConf.update(node, each.key_or_group, each.value())
            return as_objects(node, words)


class Plan:
    """The runs of a study, in the order in which they are carried out, with their states.

    Args:
        spec: the study.
        rows: all known rows; of several with the same identity, the first counts.
        configs: the configs of the runs.
        only: the values to which the runs are restricted.

    Attributes:
        runs: tuning first, then seed by seed over all cells.
        undecided: runs whose tuned settings are not chosen yet; they have the first values.
        tuning: the tuning.
        unused: rows whose settings no run has, though a run has their names.
    """

    def __init__(
        self, spec: Spec, rows: Iterable[Row], configs: Configs | None = None, only: Only = None
    ) -> None:
        self.spec, self.configs, self.only = spec, configs or Configs(spec), _selection(spec, only or {})
        self.rows = {row.run: row for row in reversed(list(rows))}
        unknown = [row for row in self.rows.values() if not row.results and 0 in spec.accept]
        self.unnamed = {_names(vars(row)): row for row in unknown}
        first = tuple((key, values[0]) for key, values in spec.tune.values.items()) if spec.tune else ()
        self.examples = [Run(cell, spec.seeds[0], first, TABLE) for cell in spec.cells()]  # of all cells
        try:
            self.tuning = _Tuning(spec, lambda run: self._planned(run).row)
            self.runs = [self._planned(run) for run in self.tuning.runs if self._selected(run)]
            tuned = {cell: self.tuning.tuned(cell) for cell in spec.cells()}
            every = [Run(c, seed, tuned[c] or first, TABLE) for seed, c in product(spec.seeds, tuned)]
            chosen = [*filter(self._selected, every)]
            self.undecided = [run for run in chosen if tuned[run.cell] is None]
            self.runs += [self._planned(run) for run in chosen if tuned[run.cell] is not None]
        except UserError as error:  # the first of perhaps many
            tried = [*self.examples]
            if tune := spec.tune:
                due = dict.fromkeys(map(spec.tuning_cell, spec.cells()))
                tried += [Run(cell, tune.seeds[0], each, TUNE) for cell in due for each in _grid(tune)]
            found = list(self.configs.problems(tried)) or error.problems
            raise UserError(*found, *_of_claims(spec)) from None
        used = {row.run for each in self.runs if (row := each.row or each.stale)}
        names = {_names(each.run.names())[:-1] for each in self.runs}
        self.unused = [r for r in self.rows.values() if r.run not in used and _names(vars(r))[:-1] in names]

    def after(self, rows: Iterable[Row]) -> Plan:
        """Return the plan of the same runs with other rows."""
        return Plan(self.spec, rows, self.configs, self.only)

    def check(self) -> None:
        """Raise UserError with the problems of all runs."""
        spec = self.spec
        found = [*self.configs.problems([*(each.run for each in self.runs), *self.undecided])]
        first: dict[str, Run] = {}
        for each in [*self.runs, *map(self.configs.planned, self.examples)]:
            if (other := first.setdefault(each.digest, each.run)).cell != (cell := each.run.cell):
                rule = f"must differ from {other.cell} in a setting, got equal runs; leave one out"
                found.append(f"{spec.at(f'methods.{cell.method}')} ({cell}) {rule}")
        if found := [*found, *_of_metrics(self.configs, self.examples), *_of_claims(spec)]:
            raise UserError(*dict.fromkeys(found))

    @property
    def missing(self) -> list[Run]:
        """The runs without a row, and those whose settings are not chosen yet."""
        return [*(each.run for each in self.runs if not each.row), *self.undecided]

    def lines(self) -> Iterator[str]:
        """Yield a plan as text: runs by grid and task, their states, and what the seeds can show."""
        spec = self.spec
        yield f"{spec.name}: {len(self.runs) + len(self.undecided)} runs, {len(spec.cells())} cells"
        numbered = reversed([*enumerate(spec.grids)])  # a cell belongs to the first grid that has it
        grid_of = {cell: number for number, grid in numbered for cell in spec.cells([grid])}
        states = [(run, MISSING) for run in self.undecided] + [(each.run, each.state) for each in self.runs]
        counts: Counter[tuple[int, str, str]] = Counter()
        for run, state in states:
            counts[-1 if run.part == TUNE else grid_of[run.cell], run.cell.task, state] += 1
        rows: list[tuple[str, ...]] = [("grid", "task", DONE, STALE, MISSING)]
        for number, grid in enumerate([{}, *spec.grids], -1):
            words = (f"{k}={'all' if len(v) > 3 else '/'.join(v)}" for k, v in grid.items())
            name = "tune" if number < 0 else ", ".join(words) or "bases"
            for task in spec.tasks:
                found = [counts[number, task, state] for state in (DONE, STALE, MISSING)]
                if any(found):
                    rows.append((name, task, *map(str, found)))
        grids, tasks = (max(map(len, column)) for column in [*zip(*rows, strict=True)][:2])
        for name, task, done, old, missing in rows:
            yield f"  {name:{grids}}  {task:{tasks}} {done:>6} {old:>6} {missing:>8}"
        reasons = Counter(each.reason for each in self.runs if each.reason)
        yield from (f"stale: {count} rows, {reason}" for reason, count in reasons.items())
        if self.unused:
            yield f"not used: {len(self.unused)} rows with other settings"
        for key, several in spec.set_twice().items():
            yield f"set twice: {key} ({', '.join(several)}; the last one counts)"
        for key, name in named(spec):
            if is_own(name):
                yield f"{key}: your code must return {name}, no run has it otherwise"
        yield from (f"tuning: {text}" for text in self.tuning.problems())
        if len(spec.seeds) > 1:
            size = detectable(1.0, len(spec.seeds))
            yield f"{len(spec.seeds)} seeds find a paired difference of {size:.1f} sd with 80 % probability"

    def _planned(self, run: Run) -> Planned:
        """Return a run with its row."""
        found = self.configs.planned(run)
        row = self.rows.get(found.digest) or self.unnamed.get(_names(run.names()))
        reason = stale(row, found.inputs, self.spec.accept) if row else None
        return replace(found, stale=row, reason=reason) if reason else replace(found, row=row)

    def _selected(self, run: Run) -> bool:
        """Return whether `only` includes a run."""
        own = {"task": run.cell.task, "method": run.cell.method, "part": run.part, "seed": str(run.seed)}
        own |= dict(run.cell.levels)
        return all(own[name] in values for name, values in self.only.items())


def _selection(spec: Spec, only: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Return the values to which runs are restricted, by name.

    Raises:
        UserError: the study has no such name, or no such value.
    """
    seeds = [*spec.seeds, *(spec.tune.seeds if spec.tune else ())]
    known = {"task": [*spec.tasks], "method": [*spec.methods], "seed": [*map(str, seeds)]}
    known |= {"part": [TABLE, TUNE], **{axis: [*declared.values] for axis, declared in spec.axes.items()}}
    found = {
        name: [str(each) for each in ([values] if isinstance(values, str | int) else values)]
        for name, values in only.items()
    }
    for name, values in found.items():
        if name not in known:
            guess = suggestion(name, known, "did you mean {}?") or "write method=<name>"
            raise UserError(f"runs must be selected by {', '.join(known)}, got {name}; {guess}")
        for value in values:
            if value not in known[name]:
                raise UserError(one_of(name, value, known[name]))
    return found


def _of_metrics(configs: Configs, runs: Sequence[Run]) -> Iterator[str]:
    """Yield the problems of metrics that runs lack; with code of the user, runs may have any other metric."""
    for key, name in named(configs.spec):
        group, _, rest = key.partition(".")
        own = [run for run in runs if group != "tasks" or run.cell.task == rest.removesuffix(".metric")]
        code = [any(file.endswith(".py") for file in configs.planned(run).inputs) for run in own]
        found = [lacking(name, configs.config(run), each) for run, each in zip(own, code, strict=True)]
        said = next(filter(None, found), None)
        if said and (all(found) or group == "tasks"):
            yield f"{configs.spec.at(key)} must {said[0]}, got {name}; {said[1]}"


def _of_claims(spec: Spec) -> Iterator[str]:
    """Yield the problems of claims about cells that no grid has."""
    somewhere = {each.said for each in judged(Results(spec, [], [()] * len(spec.include)))}
    for said, text in spec.claims.items():
        if said not in somewhere:
            rule = f"must be about cells of the grids, got {text}; add a grid with these cells"
            yield f"{spec.at(f'claims.{said}')} {rule}"


def _names(fields: Mapping[str, Any]) -> tuple:
    """Return the names of a run or of a row as a key."""
    levels, tuned = frozenset(fields["levels"].items()), tuple(fields["tuned"].items())
    return fields["task"], fields["method"], levels, fields["seed"], fields["part"], tuned


# Collection of rows: each run writes `row.json` in its folder, and one process writes `rows.jsonl`.


ROW = "row.json"  # of a run folder
FAILURES = "failures.jsonl"  # of a run folder: attempts without a row


class Collection:
    """The rows of a study: those of run folders, and those of its file."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.read: dict[Path, tuple[int, list[Row]]] = {}  # rows of each file with its time of change

    def rows(self) -> list[Row]:
        """Return all rows, one for each run; those of run folders count first."""
        found: dict[str, Row] = {}
        for file in (self.spec.rows, *self.spec.folder.glob(f"runs/*/{ROW}")):
            with suppress(FileNotFoundError):  # another process has begun the run again
                if self.read.get(file, (0,))[0] != (changed := file.stat().st_mtime_ns):
                    self.read[file] = changed, read_rows(file)
                found |= {row.run: row for row in self.read[file][1]}
        return list(found.values())

    def collect(self, configs: Configs) -> bool:
        """Write `rows.jsonl` and `rates.json`, unless another process does; return whether they were written.

        Rows get the present names of their cells. Stale rows go to the history.
        """
        lock = Lock(self.spec.folder / LOCK, self.spec.rows)
        if not lock.acquire():
            return False
        try:
            plan = Plan(self.spec, self.rows(), configs)
            dropped = {each.stale.run: each.reason for each in plan.runs if each.stale}
            dropped |= {row.run: "other settings" for row in plan.unused}
            kept = {run: row for run, row in plan.rows.items() if run not in dropped}
            kept |= {each.row.run: replace(each.row, **each.run.names()) for each in plan.runs if each.row}
            for run in dropped.keys() & {row.run for row in read_rows(self.spec.rows)}:
                self.spec.record("stale", reason=dropped[run], row=asdict(plan.rows[run]))
            write_rows(self.spec.rows, kept.values())
            if plan.tuning.choices:
                write_choices(self.spec.folder / "rates.json", plan.tuning.choices)
        finally:
            lock.release()
        return True

    def forget_failures(self) -> None:
        """Remove the rows of runs that failed, so that these runs are carried out again."""
        for file in self.spec.folder.glob(f"runs/*/{ROW}"):
            if any(row.status == FAILED for row in read_rows(file)):
                file.unlink()
                file.with_name(FAILURES).unlink(missing_ok=True)
        rows = read_rows(self.spec.rows)
        if any(row.status == FAILED for row in rows):
            write_rows(self.spec.rows, [row for row in rows if row.status != FAILED])
