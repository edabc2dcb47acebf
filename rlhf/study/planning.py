"""The runs of a study and their state: done, stale or missing. This module imports no torch."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from rlhf.checks.check import as_objects, problems
from rlhf.checks.composing import composed, composed_node
from rlhf.config import catalogue
from rlhf.config.best_generator import candidates
from rlhf.config.identity import run_name, what_counts
from rlhf.config.mistakes import explained
from rlhf.config.overrides import Override, read_overrides
from rlhf.config.root import Config
from rlhf.config.run import Progress
from rlhf.core.errors import UserError
from rlhf.core.files import digest
from rlhf.core.statistics import detectable
from rlhf.study.cells import Cell, cells, overrides, set_twice
from rlhf.study.identity import inputs, run_digest, stale
from rlhf.study.rows import TABLE, TUNE, Row
from rlhf.study.spec import Spec
from rlhf.study.tuning import Run, Tuned, Tuning

DONE, STALE, MISSING = "done", "stale", "missing"


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A run with its identity and its state.

    Attributes:
        run: the run.
        digest: `identity.run_digest` of its config.
        inputs: `identity.inputs` of its config.
        folder: its run folder.
        state: `DONE`, `STALE` or `MISSING`.
        row: its row; None if missing.
        reason: why its row is stale.
    """

    run: Run
    digest: str
    inputs: Mapping[str, str]
    folder: Path
    state: str = MISSING
    row: Row | None = None
    reason: str | None = None


class Configs:
    """The configs of the runs of a study.

    Options of groups are composed once for all runs that share them, because that takes most of the time.
    """

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.nodes: dict[tuple[str, ...], DictConfig] = {}
        self.of_cells: dict[Run, Config] = {}
        self.costs: dict[Run, str] = {}
        self.identities: dict[Run, tuple[str, str, Mapping[str, str]]] = {}

    def overrides(self, run: Run) -> list[str]:
        """Return the overrides of a run, without those of the machine."""
        return overrides(self.spec, run.cell, run.seed, dict(run.tuned))

    def config(self, run: Run) -> Config:
        """Return the config of a run, without checks of the values.

        Raises:
            UserError: an override is invalid.
        """
        of_cell = run._replace(seed=0)
        if of_cell not in self.of_cells:
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

    def identity(self, run: Run) -> tuple[str, str, Mapping[str, str]]:
        """Return the digest of the settings, the name of the run folder, and the inputs of a run."""
        if run not in self.identities:
            cfg = self.config(run)
            self.identities[run] = run_digest(cfg), run_name(cfg), inputs(cfg)
        return self.identities[run]

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
                texts = list(error.problems)
            for text in texts:
                found.setdefault(text, []).append(run)
        for text, several in found.items():
            key = f"methods.{several[0].cell.method}"
            more = f" and {len(several) - 1} more cells" if len(several) > 1 else ""
            line = self.spec.lines.get(key, 0)
            yield f"{self.spec.file}, line {line}: {key} ({several[0].cell}{more}): {text}"

    def _seed_is_read(self, run: Run) -> bool:
        """Return whether another key depends on a key of `repeat`, so that the seed changes it."""
        tuned = self.spec.tune.seeds if self.spec.tune else ()
        other = run._replace(seed=max(*self.spec.seeds, *tuned, 0) + 1)
        changed = self.of_cells[run._replace(seed=0)].with_(dict.fromkeys(self.spec.repeat, other.seed))
        return self._compose(self.overrides(other)) != changed

    def _compose(self, words: Sequence[str]) -> Config:
        """Return the config of overrides."""
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
        only: values of "task", "method" or axes, and "part", to which the runs are restricted.

    Attributes:
        runs: tuning first, then seed by seed over all cells.
        undecided: runs whose tuned settings are not chosen yet; they have the first values.
        tuning: the tuning.
        unused: rows whose settings no run has, though a run has their names.
    """

    def __init__(
        self,
        spec: Spec,
        rows: Iterable[Row],
        configs: Configs | None = None,
        only: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self.spec, self.configs, self.only = spec, configs or Configs(spec), only or {}
        self.rows = {row.run: row for row in reversed(list(rows))}
        self.unnamed = {
            _names(row): row for row in self.rows.values() if not row.results and 0 in spec.accept
        }
        self.undecided: list[Run] = []
        try:
            self.tuning = Tuning(spec, self._usable)
            self.runs = [self.planned(run) for run in self._wanted()]
        except UserError as error:  # the first of perhaps many
            first = [Run(cell, spec.seeds[0], _first(spec), TABLE) for cell in cells(spec)]
            raise UserError(*(list(self.configs.problems(first)) or error.problems)) from error
        used = {each.row.run for each in self.runs if each.row is not None}
        names = {_names_of(each.run) for each in self.runs}
        self.unused = [r for r in self.rows.values() if r.run not in used and _names(r)[:-1] in names]

    def after(self, rows: Iterable[Row]) -> Plan:
        """Return the plan of the same runs with other rows."""
        return Plan(self.spec, rows, self.configs, self.only)

    def planned(self, run: Run) -> Planned:
        """Return a run with its state."""
        digest, name, content = self.configs.identity(run)
        found = Planned(run=run, digest=digest, inputs=content, folder=self.spec.folder / "runs" / name)
        row = self.rows.get(digest) or self.unnamed.get((*_names_of(run), run.tuned))
        if row is None:
            return found
        reason = stale(row, content, self.spec.accept)
        return replace(found, state=STALE if reason else DONE, row=row, reason=reason)

    def check(self) -> None:
        """Raise UserError with the problems of all runs."""
        if found := list(self.configs.problems([*(each.run for each in self.runs), *self.undecided])):
            raise UserError(*found)

    @property
    def missing(self) -> list[Run]:
        """The runs without a row, and those whose settings are not chosen yet."""
        return [*(each.run for each in self.runs if each.state != DONE), *self.undecided]

    def lines(self) -> Iterator[str]:
        """Yield a plan as text: runs by grid and task, their states, and what the seeds can show."""
        spec = self.spec
        yield f"{spec.name}: {len(self.runs) + len(self.undecided)} runs, {len(cells(spec))} cells"
        yield f"  {'grid':32} {'task':14} {DONE:>6} {STALE:>6} {MISSING:>8}"
        groups: list[tuple[str, str, Iterable[Cell]]] = [
            ("tune", TUNE, [run.cell for run in self.tuning.runs])
        ]
        seen: set[Cell] = set()
        for grid in spec.grids:
            named = (f"{k}={'all' if len(v) > 3 else '/'.join(v)}" for k, v in grid.items())
            own = {*cells(spec, [grid])} - seen
            groups.append((", ".join(named) or "bases", TABLE, own))
            seen |= own
        for name, part, inner in groups:
            for task in spec.tasks:
                inside = {cell for cell in inner if cell.task == task}
                states = [
                    each.state for each in self.runs if each.run.part == part and each.run.cell in inside
                ]
                states += [MISSING for run in self.undecided if run.part == part and run.cell in inside]
                if states:
                    counts = [states.count(state) for state in (DONE, STALE, MISSING)]
                    yield f"  {name[:32]:32} {task[:14]:14} {counts[0]:6} {counts[1]:6} {counts[2]:8}"
        reasons = [each.reason for each in self.runs if each.reason]
        for reason in dict.fromkeys(reasons):
            yield f"stale: {reasons.count(reason)} rows, {reason}"
        if self.unused:
            yield f"not used: {len(self.unused)} rows with other settings"
        for key, several in set_twice(spec).items():
            yield f"set twice: {key} ({', '.join(several)}; the last one counts)"
        yield from (f"tuning: {text}" for text in self.tuning.problems())
        if len(spec.seeds) > 1:
            size = detectable(1.0, len(spec.seeds))
            yield f"{len(spec.seeds)} seeds find a paired difference of {size:.1f} sd with 80 % probability"

    def _wanted(self) -> Iterator[Run]:
        """Yield the runs whose settings are known, in their order; the others go to `undecided`."""
        yield from (run for run in self.tuning.runs if self._selected(run))
        for seed in self.spec.seeds:
            for cell in cells(self.spec):
                tuned = self.tuning.tuned(cell)
                run = Run(cell, seed, _first(self.spec) if tuned is None else tuned, TABLE)
                if self._selected(run):
                    if tuned is None:
                        self.undecided.append(run)
                    else:
                        yield run

    def _usable(self, run: Run) -> Row | None:
        """Return the row of a run unless it is missing or stale."""
        found = self.planned(run)
        return found.row if found.state == DONE else None

    def _selected(self, run: Run) -> bool:
        """Return whether `only` includes a run."""
        own = {"task": run.cell.task, "method": run.cell.method, "part": run.part, "seed": str(run.seed)}
        own |= dict(run.cell.levels)
        return all(own[name] in values for name, values in self.only.items())


def _first(spec: Spec) -> Tuned:
    """Return the first value of each tuned key."""
    return tuple((key, values[0]) for key, values in spec.tune.values.items()) if spec.tune else ()


def _names_of(run: Run) -> tuple:
    return run.cell.task, run.cell.method, frozenset(run.cell.levels), run.seed, run.part


def _names(row: Row) -> tuple:
    cell = row.task, row.method, frozenset(row.levels.items())
    return *cell, row.seed, row.part, tuple(row.tuned.items())
