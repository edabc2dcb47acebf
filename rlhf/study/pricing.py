"""The price of a study: a pilot of a few updates for each distinct cost, replaced by means of finished rows.

    seconds of a run = start + episodes x seconds per episode + evaluations x seconds per evaluation

CPU seconds are counted, which do not depend on other load of the machine. `price.json` has the pilots.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from pathlib import Path
from statistics import fmean
from typing import Any

from rlhf.checks.job import check_job
from rlhf.config.root import Config
from rlhf.core import files
from rlhf.core.errors import RunError, UserError
from rlhf.loggers.hooks import Hook, StopRun
from rlhf.processes.signals import interruptible
from rlhf.report.runs import read_run
from rlhf.runs.folder import RunFolder
from rlhf.study import attempt
from rlhf.study.planning import DONE, Plan, Planned
from rlhf.study.rows import FINISHED
from rlhf.study.tuning import Run

UPDATES = 8  # of a pilot; the first two are slower, and are not counted
_PRICES = "price.json"


@dataclass(frozen=True, kw_only=True)
class Pilot:
    """The measured cost of a run.

    Attributes:
        start, episode, evaluation: CPU seconds of loading, of an episode of training, of an evaluation.
        stages: CPU seconds of the stages before the run for one seed; about 0 if they existed.
        examples: size of the training data; None: the length of the run does not depend on it.
        memory_gb: peak memory in GB.
        disk: bytes that stay of a run.
    """

    start: float
    episode: float
    evaluation: float
    stages: float
    examples: int | None
    memory_gb: float
    disk: int

    def seconds(self, cfg: Config) -> float:
        """Return the CPU seconds of a run with the same cost per episode."""
        updates, every = cfg.num_updates(self.examples), cfg.schedule.eval_every
        evaluations = (
            1 + math.ceil(updates / max(1.0, every if every >= 1 else every * updates)) if every else 0
        )
        episodes = updates * cfg.episodes_per_update
        return self.start + episodes * self.episode + evaluations * self.evaluation


@dataclass(frozen=True)
class Price:
    """The price of a study: CPU seconds of its rows and of its missing runs, and what else it takes.

    `stages_s`, the seconds of stages that are not made yet, are part of `left_s`; `unknown` missing runs, of
    a cost without a pilot, are not. `disk` is in bytes, and `memory_gb` is that of the largest run.
    """

    done_s: float
    left_s: float
    stages_s: float
    unknown: int
    disk: int
    memory_gb: float

    def lines(self, workers: int) -> Iterator[str]:
        """Yield the price as text, for a number of runs in parallel."""
        stages = f" ({self.stages_s / 3600:.1f} for stages)" if self.stages_s else ""
        yield f"CPU-hours: {self.done_s / 3600:.1f} done, {self.left_s / 3600:.1f} left{stages}"
        ends = datetime.now() + timedelta(seconds=self.left_s / workers)
        yield f"workers: {workers}, until {ends:%Y-%m-%d %H:%M}; memory {self.memory_gb:.1f} GB each"
        yield f"disk: {self.disk / 1e9:.2f} GB"
        if self.unknown:
            yield f"{self.unknown} runs have no price yet; run: rlhf study price <file>"


def price(plan: Plan) -> Price:
    """Return the price of a study from its rows and its pilots."""
    done = [each for each in plan.runs if each.state == DONE and each.row is not None]
    pilots, means = read_pilots(plan.spec.folder / _PRICES), _means(done)
    made = {_stages(plan, each.run) for each in done}
    left, unknown, stages = 0.0, 0, {}  # type: float, int, dict[object, float]
    groups: dict[Run, list[Run]] = {}
    for run in plan.missing:
        groups.setdefault(run._replace(seed=0), []).append(run)
    for run, *others in groups.values():
        count = 1 + len(others)
        pilot = pilots.get(plan.configs.cost(run))
        names = (run.cell, (run.cell.task, run.cell.method))
        if (known := next((means[name] for name in names if name in means), None)) is not None:
            left += known * count
        elif pilot is not None:
            left += pilot.seconds(plan.configs.config(run)) * count
        else:
            unknown += count
        for models in {_stages(plan, each) for each in (run, *others)} - made:
            stages[models] = max(stages.get(models, 0.0), pilot.stages if pilot else 0.0)  # made by the first
    rows = [each.row for each in done if each.row is not None]
    memory = [*(row.memory_gb or 0.0 for row in rows), *(pilot.memory_gb for pilot in pilots.values())]
    disk = fmean([each.disk for each in pilots.values()] or [0]) * (len(done) + len(plan.missing))
    stages_s, used_s = sum(stages.values()), sum(row.cpu_s for row in rows)
    return Price(used_s, left + stages_s, stages_s, unknown, round(disk), max(memory, default=0.0))


def measured_price(plan: Plan) -> Price:
    """Return the price after a pilot of each distinct cost that has none.

    Raises:
        UserError: the price is above the budget of the study.
        RunError: a pilot failed.
    """
    due: dict[str, Planned] = {}
    for run in plan.missing:
        due.setdefault(plan.configs.cost(run), plan.planned(run))
    known = read_pilots(file := plan.spec.folder / _PRICES)
    for key, planned in due.items():
        if key not in known:
            known[key] = _pilot(plan, planned)
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
    tree = files.read_json(file, files.delete_command(file)) if file.exists() else {}
    return {key: Pilot(**each) for key, each in tree.items()}


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


def _pilot(plan: Plan, planned: Planned) -> Pilot:
    """Carry out a pilot in a process of its own."""
    folder = plan.spec.folder / "pilots" / planned.folder.name
    files.discard(folder)
    folder.mkdir(parents=True)
    attempt.wait_for(attempt.forked(folder, lambda: _measure(plan.configs.config(planned.run), folder)))
    result = folder / "pilot.json"
    if not result.exists():
        raise RunError(f"the pilot of {planned.run} failed; its output: {folder / attempt.OUTPUT}")
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


def _stages(plan: Plan, run: Run) -> tuple[str, int]:
    """Return what the stages before a run depend on."""
    return run.cell.task, run.seed if "stages.seed" in plan.spec.repeat else 0


def _means(done: Iterable[Planned]) -> dict[object, float]:
    """Return the mean CPU seconds of finished rows, by cell and by task and method."""
    found: dict[object, list[float]] = {}
    for each in done:
        if each.row is not None and each.row.status == FINISHED:
            for key in (each.run.cell, (each.run.cell.task, each.run.cell.method)):
                found.setdefault(key, []).append(each.row.cpu_s)
    return {key: fmean(values) for key, values in found.items()}
