"""The price of a study: a pilot of a few updates for each distinct cost, replaced by means of finished rows.

    seconds of a run = start + episodes x seconds per episode + evaluations x seconds per evaluation

CPU seconds are counted, which do not depend on other load of the machine. `price.json` has the pilots.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.live import Live
from rich.text import Text

from rlhf.checks.job import check_job
from rlhf.config.root import Config
from rlhf.core import files
from rlhf.core.console import console, show
from rlhf.core.errors import RunError, UserError
from rlhf.loggers.hooks import Hook, StopRun
from rlhf.processes.signals import interruptible
from rlhf.report.runs import read_run
from rlhf.runs.folder import RunFolder
from rlhf.study import attempt
from rlhf.study.planning import Plan
from rlhf.study.rows import FINISHED
from rlhf.study.tuning import Run

UPDATES = 8  # of a pilot; the first two are slower, and are not counted
_PRICES = "price.json"
_BAR = 20  # characters of a bar


@dataclass(frozen=True, kw_only=True)
class Pilot:
    """The measured cost of a run, in CPU seconds."""

    start: float  # of loading
    episode: float  # of an episode of training
    evaluation: float
    stages: float  # of the stages before the run for one seed; about 0 if they existed
    examples: int | None  # size of the training data; None: the length of the run does not depend on it
    memory_gb: float  # peak memory
    disk: int  # bytes that stay of a run

    def seconds(self, cfg: Config) -> float:
        """Return the CPU seconds of a run with the same cost per episode."""
        updates, every = cfg.num_updates(self.examples), cfg.schedule.eval_every
        interval = max(1.0, every if every >= 1 else every * updates)  # updates between two evaluations
        evaluations = 1 + math.ceil(updates / interval) if every else 0
        return self.start + updates * cfg.episodes_per_update * self.episode + evaluations * self.evaluation


@dataclass(frozen=True)
class Price:
    """The price of a study: CPU seconds of its rows and of its missing runs, and what else it takes."""

    done_s: float
    left_s: float
    stages_s: float  # of stages that are not made yet; a part of `left_s`
    unknown: int  # missing runs of a cost without a pilot, which are not in `left_s`
    disk: int  # bytes
    memory_gb: float  # of the largest run

    def lines(self, workers: int) -> Iterator[str]:
        """Yield the price as text, for a number of runs in parallel."""
        stages = f" ({duration(self.stages_s)} for stages)" if self.stages_s else ""
        yield f"CPU time: {duration(self.done_s)} done, {duration(self.left_s)} left{stages}"
        if self.left_s:
            ends = datetime.now() + timedelta(seconds=self.left_s / workers)
            yield f"workers: {workers}, until {ends:%Y-%m-%d %H:%M}; memory {self.memory_gb:.1f} GB each"
        yield f"disk: {self.disk / 1e9:.2f} GB"
        if self.unknown:
            yield f"{self.unknown} runs have no price yet; run: rlhf study price <file>"


def duration(seconds: float) -> str:
    """Return CPU time in hours, below 0.1 hours in minutes."""
    return f"{seconds / 3600:.1f} h" if seconds >= 360 else f"{seconds / 60:.1f} min"


def bar(done: int, of: int) -> str:
    """Return how many of all are done as a bar and as numbers."""
    filled = round(_BAR * done / max(1, of))
    return f"{'#' * filled}{'.' * (_BAR - filled)} {done} of {of}"


def price(plan: Plan) -> Price:
    """Return the price of a study from its rows and its pilots."""
    pilots = read_pilots(plan.spec.folder / _PRICES)
    rows = {each.run: each.row for each in plan.runs if each.row}
    cost, config = plan.configs.cost, plan.configs.config
    seconds: dict[object, list[float]] = {}  # of finished runs, by cost, and by cost and cell
    ratios: dict[str, list[float]] = {}  # to the pilot, by cost
    for run, row in rows.items():
        if row.status == FINISHED:
            for key in ((kind := cost(run)), (kind, run.cell)):
                seconds.setdefault(key, []).append(row.cpu_s)
            if kind in pilots:
                ratios.setdefault(kind, []).append(row.cpu_s / pilots[kind].seconds(config(run)))

    def estimate(run: Run) -> float | None:
        """Return the mean of the cell, otherwise the pilot times its error for other cells; None: unknown."""
        if known := seconds.get((kind := cost(run), run.cell)):
            return fmean(known)
        if kind in pilots:
            return pilots[kind].seconds(config(run)) * fmean(ratios.get(kind, [1.0]))
        return fmean(seconds[kind]) if kind in seconds else None

    def models(run: Run) -> tuple[str, int]:
        """Return what the stages before a run depend on."""
        return run.cell.task, run.seed if "stages.seed" in plan.spec.repeat else 0

    made = {models(run) for run in rows}
    left, unknown, stages = 0.0, 0, {}  # type: float, int, dict[object, float]
    for run in plan.missing:
        if (taken := estimate(run)) is None:
            unknown += 1
        else:
            left += taken
        pilot = pilots.get(cost(run))
        if pilot is not None and (own := models(run)) not in made:
            stages[own] = max(stages.get(own, 0.0), pilot.stages)  # the first pilot of a task made them
    memory = [*(row.memory_gb or 0.0 for row in rows.values()), *(each.memory_gb for each in pilots.values())]
    return Price(
        done_s=sum(row.cpu_s for row in rows.values()),
        left_s=left + sum(stages.values()),
        stages_s=sum(stages.values()),
        unknown=unknown,
        disk=round(fmean([each.disk for each in pilots.values()] or [0]) * (len(rows) + len(plan.missing))),
        memory_gb=max(memory, default=0.0),
    )


def measured_price(plan: Plan) -> Price:
    """Return the price after a pilot of each distinct cost that has none.

    Raises:
        UserError: the price is above the budget of the study.
        RunError: a pilot failed.
    """
    known = read_pilots(file := plan.spec.folder / _PRICES)
    due: dict[str, Run] = {}
    for run in plan.missing:
        if (cost := plan.configs.cost(run)) not in known:
            due.setdefault(cost, run)
    for number, (cost, run) in enumerate(due.items(), 1):
        show(f"[{number}/{len(due)}] pilot of {UPDATES} updates: {run}")
        known[cost] = _pilot(plan, run, f"{plan.spec.name}  {bar(number - 1, len(due))} pilots")
        files.write_json(file, {each: asdict(pilot) for each, pilot in known.items()})
    found = price(plan)
    limit, hours = plan.spec.budget.get("cpu_hours"), (found.done_s + found.left_s) / 3600
    if limit is not None and hours > limit:
        raise UserError(
            f"budget.cpu_hours must be at least the price of the study, got {limit:g} for {hours:.1f} "
            f"CPU-hours; take fewer seeds, or set budget: {{cpu_hours: {math.ceil(hours)}}}"
        )
    return found


def read_pilots(file: Path) -> dict[str, Pilot]:
    """Return the pilots in a file, by `Configs.cost`."""
    remedy = files.delete_command(file)
    tree = files.read_json(file, remedy) if file.exists() else {}
    try:
        return {key: Pilot(**each) for key, each in tree.items()}
    except TypeError as error:
        raise UserError(f"{file} must have pilots as studies write them, got: {error}; {remedy}") from None


class _Stopwatch(Hook):
    """Takes the CPU time after updates, and stops the run after the evaluation that follows."""

    def __init__(self) -> None:
        self.updates: list[float] = []
        self.evaluated: float | None = None
        self.num_updates = 0

    def after_update(self, state: Any, metrics: Any) -> None:
        self.updates.append(attempt.cpu_s())
        self.num_updates = state.num_updates
        if len(self.updates) > UPDATES:  # without evaluations
            raise StopRun("pilot")

    def after_evaluation(self, state: Any, metrics: Any, completions: Any) -> None:
        if self.updates:
            self.evaluated = attempt.cpu_s()
            raise StopRun("pilot")


def _pilot(plan: Plan, run: Run, progress: str) -> Pilot:
    """Carry out a pilot in a process of its own; `progress`: what a terminal shows meanwhile."""
    folder = plan.spec.folder / "pilots" / plan.configs.planned(run).folder.name
    files.discard(folder)
    folder.mkdir(parents=True)
    cfg, output = plan.configs.config(run), folder / attempt.OUTPUT
    process, seen = attempt.forked(lambda: _measure(cfg, folder), output), set[str]()
    with Live(Text(progress), console=console, transient=True, auto_refresh=False):
        attempt.wait_for(process, lambda: attempt.announce(folder, run, seen))
    result = folder / "pilot.json"
    if not result.exists():
        raise RunError(f"the pilot of {run} failed; its output: {output}")
    return Pilot(**files.read_json(result, files.delete_command(result)))


def _measure(cfg: Config, folder: Path) -> None:
    """Carry out a pilot in this process, and write its cost to pilot.json."""
    from rlhf.stages.prerequisites import complete
    from rlhf.stages.run import run as train

    watch, run = _Stopwatch(), RunFolder(folder)
    with interruptible():
        complete(cfg, train)
        stages = attempt.cpu_s()
        every = UPDATES if cfg.schedule.eval_every else 0
        pilot = cfg.with_({"schedule.eval_every": every, "schedule.save_every": 0})
        train(pilot, run, hooks=[*check_job(cfg), watch])
    updates = watch.updates[:UPDATES]
    counted = updates[2:] if len(updates) > 3 else updates
    per_update = (counted[-1] - counted[0]) / max(1, len(counted) - 1)
    evaluation = watch.evaluated - updates[-1] if watch.evaluated else 0.0
    drawn = watch.num_updates * cfg.schedule.prompts_per_update
    kept = (run.metrics, run.completions, run.log, folder / attempt.OUTPUT)
    found = Pilot(
        start=max(0.0, updates[0] - stages - per_update - evaluation),
        episode=per_update / cfg.episodes_per_update,
        evaluation=evaluation,
        stages=stages,
        examples=None if cfg.epochs is None else round(drawn / cfg.epochs),
        memory_gb=round((read_run(folder).peak_gib or 0.0) * 2**30 / 1e9, 2),
        disk=sum(file.stat().st_size for file in kept if file.exists()),
    )
    files.write_json(folder / "pilot.json", asdict(found))
