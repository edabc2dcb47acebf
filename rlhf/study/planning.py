"""The runs of a study and their state: done, stale or missing. This module imports no torch."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from rlhf.checks.check import as_objects, problems
from rlhf.checks.composing import composed, composed_node
from rlhf.config import catalogue
from rlhf.config.best_generator import candidates
from rlhf.config.identity import run_name, what_counts
from rlhf.config.metric_names import is_own, lacking
from rlhf.config.mistakes import explained
from rlhf.config.overrides import Override, read_overrides
from rlhf.config.root import Config
from rlhf.config.run import Progress
from rlhf.config.schema import sections
from rlhf.config.suggestions import one_of, suggestion
from rlhf.core.errors import UserError
from rlhf.core.files import digest
from rlhf.core.statistics import detectable
from rlhf.study.cells import Cell, cells, origin, overrides, set_twice
from rlhf.study.claims import judged
from rlhf.study.identity import inputs, run_digest, stale
from rlhf.study.metrics import named
from rlhf.study.results import Results
from rlhf.study.rows import TABLE, TUNE, Row
from rlhf.study.spec import Spec
from rlhf.study.tuning import Run, Tuning, examples

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

    def overrides(self, run: Run) -> list[str]:
        """Return the overrides of a run, without those of the machine."""
        return overrides(self.spec, run.cell, run.seed, dict(run.tuned))

    def config(self, run: Run) -> Config:
        """Return the config of a run, without checks of the values.

        Raises:
            UserError: an override is invalid.
        """
        if (of_cell := run._replace(seed=0)) not in self.of_cells:
            self.of_cells[of_cell] = self._compose(self.overrides(run))
        cfg = self.of_cells[of_cell].with_(dict.fromkeys(self.spec.repeat, run.seed))
        threads = int(self.spec.resources.get("threads", 0)) or (None if "gpus" in self.spec.resources else 1)
        return cfg.with_(
            {
                "output_dir": str(self.spec.folder / "runs"),
                "progress": Progress.plain,
                "eval.samples": 0,
                "backend.threads": cfg.backend.threads or threads,
            }
        )

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
            cfg, parts = self.config(run), ("model", "task", "scorer", "gold", "generator", "eval")
            algo = [cfg.algo.name, cfg.algo.samples_per_prompt, cfg.schedule.epochs]
            counted = what_counts(cfg)
            self.costs[of_cell] = digest([*algo, *(counted[name] for name in parts)])
        return self.costs[of_cell]

    def problems(self, runs: Iterable[Run]) -> Iterator[str]:
        """Yield the problems of the cells of runs, each once, with the line of the method."""
        found: dict[str, list[Run]] = {}
        examples = {each._replace(seed=0): each for each in runs}.values()
        table = next((run for run in examples if run.part == TABLE), None)
        for run in examples:
            try:
                texts = problems(self.config(run))
                if run is table and self._seed_is_read(run):
                    keys = ", ".join(self.spec.repeat)
                    texts.append(f"repeat must have keys that no other key reads, got {keys}; leave them out")
            except UserError as error:
                texts = self._mistakes(self.overrides(run)) or list(error.problems)
            for text in texts:
                found.setdefault(text, []).append(run)
        for text, (run, *others) in found.items():
            key = origin(self.spec, run.cell, run.seed, dict(run.tuned), text.partition(" ")[0])
            more = f" and {len(others)} more cells" if others else ""
            yield f"{self.spec.at(key)} ({run.cell}{more}): {text}"

    def _mistakes(self, words: Sequence[str]) -> list[str]:
        """Return why a config cannot be composed, and what is wrong with the values that are left then."""
        typed = read_overrides(words)
        try:
            cfg = self._compose(words)
        except UserError as error:
            wrong = tuple(f"{text.partition(' ')[0]}." for text in error.problems)
            rest = [each.text for each in typed if not f"{each.key}.".startswith(wrong)]
            return [*error.problems, *(self._mistakes(rest) if len(rest) < len(words) else ())]
        keys = [each.key for each in typed]
        found = (text for key, section in sections(cfg) for text in section.problems(key))
        return [text for text in found if text.partition(" ")[0] in keys]

    def _seed_is_read(self, run: Run) -> bool:
        """Return whether another key depends on a key of `repeat`, so that the seed changes it."""
        tuned = self.spec.tune.seeds if self.spec.tune else ()
        other = run._replace(seed=max(*self.spec.seeds, *tuned, 0) + 1)
        changed = self.of_cells[run._replace(seed=0)].with_(dict.fromkeys(self.spec.repeat, other.seed))
        return self._compose(self.overrides(other)) != changed

    def _compose(self, words: Sequence[str]) -> Config:
        if (folder := self.spec.config_dir) is not None and not folder.is_dir():
            rule = f"config_dir must be a folder laid out like conf/ (relative to {self.spec.file})"
            raise UserError(f"{rule}, got {folder}; fix the path")
        with catalogue.also(self.spec.config_dir):
            if len(candidates()) > 1:  # generator=auto depends on all overrides
                return composed(list(words))
            options = tuple(each.text for each in read_overrides(words) if self._is_option(each))
            if options not in self.nodes:
                self.nodes[options] = composed_node(list(options))
            node = copy.deepcopy(self.nodes[options])
            with explained(words):
                for each in OverridesParser.create().parse_overrides([w for w in words if w not in options]):
                    OmegaConf.update(node, each.key_or_group, each.value())
            return as_objects(node, words)

    def _is_option(self, override: Override) -> bool:
        """Return whether an override may select an option of a group, or adds or removes something."""
        is_key = "." in override.key and "@" not in override.key
        return bool(override.sign) or not (is_key or override.key in self.spec.repeat)


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
        self.unnamed = {
            _names(vars(row)): row for row in self.rows.values() if not row.results and 0 in spec.accept
        }
        first = tuple((key, values[0]) for key, values in spec.tune.values.items()) if spec.tune else ()
        self.undecided: list[Run] = []
        self.examples = [Run(cell, spec.seeds[0], first, TABLE) for cell in cells(spec)]  # of all cells
        try:
            self.tuning = Tuning(spec, lambda run: self._planned(run).row)
            self.runs = [self._planned(run) for run in self.tuning.runs if self._selected(run)]
            for seed in spec.seeds:
                for cell in cells(spec):
                    tuned = self.tuning.tuned(cell)
                    run = Run(cell, seed, first if tuned is None else tuned, TABLE)
                    if not self._selected(run):
                        continue
                    if tuned is None:
                        self.undecided.append(run)
                    else:
                        self.runs.append(self._planned(run))
        except UserError as error:  # the first of perhaps many
            tried = [*self.examples, *examples(spec)]
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
        yield f"{spec.name}: {len(self.runs) + len(self.undecided)} runs, {len(cells(spec))} cells"
        grid_of: dict[Cell, int] = {}  # the first grid that has the cell
        for number, grid in enumerate(spec.grids):
            grid_of = dict.fromkeys(cells(spec, [grid]), number) | grid_of
        counts = Counter(
            (-1 if run.part == TUNE else grid_of[run.cell], run.cell.task, state)
            for run, state in (
                *((each.run, each.state) for each in self.runs),
                *((run, MISSING) for run in self.undecided),
            )
        )
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
        for key, several in set_twice(spec).items():
            yield f"set twice: {key} ({', '.join(several)}; the last one counts)"
        yield from (
            f"{key}: your code must return {name}, no run has it otherwise"
            for key, name in named(spec)
            if is_own(name)
        )
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
