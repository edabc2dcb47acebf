"""The price of a study: a pilot of a few updates for each distinct cost, replaced by means of finished rows.

    seconds of a run = start + updates x seconds per update + evaluations x seconds per evaluation

`price.json` has the pilots. CPU seconds do not depend on other load of the machine.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from pathlib import Path
from statistics import fmean
from typing import Any

from rlhf.config.identity import what_counts
from rlhf.config.root import Config
from rlhf.core import files
from rlhf.core.errors import RunError, UserError
from rlhf.experiment import Experiment
from rlhf.loggers.hooks import Hook, StopRun
from rlhf.processes.signals import interruptible
from rlhf.runs.folder import RunFolder
from rlhf.study import attempt
from rlhf.study.planning import DONE, Plan, Planned
from rlhf.study.rows import FINISHED
from rlhf.study.tuning import Run

UPDATES = 8  # of a pilot
_FREE = 2  # first updates of a pilot, which are slower, and are not counted


@dataclass(frozen=True, kw_only=True)
class Pilot:
    """The measured cost of a run, in CPU seconds.

    Attributes:
        start: loading, and everything but updates and evaluations.
        episode: seconds per episode of training.
        evaluation: seconds per evaluation.
        stages: seconds of the stages before the run for one seed; 0: they existed.
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
        updates = cfg.num_updates(self.examples)
        episodes = updates * cfg.episodes_per_update
        return self.start + episodes * self.episode + _evaluations(cfg, updates) * self.evaluation


@dataclass(frozen=True)
class Price:
    """What the missing runs of a study cost.

    Attributes:
        done_s: CPU seconds of the rows.
        left_s: CPU seconds of the runs without a row.
        stages_s: CPU seconds of stages that are not made yet, included in `left_s`.
        unknown: runs of a cost without a pilot, which are not included.
        disk: bytes of all run folders.
        memory_gb: largest peak memory of a run.
    """

    done_s: float
    left_s: float
    stages_s: float
    unknown: int
    disk: int
    memory_gb: float

    def lines(self, workers: int) -> Iterator[str]:
        """Yield the price as text.

        Args:
            workers: number of runs in parallel.
        """
        ends = datetime.now() + timedelta(seconds=self.left_s / workers)
        yield f"CPU-hours: {self.done_s / 3600:.1f} done, {self.left_s / 3600:.1f} left" + (
            f" ({self.stages_s / 3600:.1f} for stages)" if self.stages_s else ""
        )
        yield f"with {workers} workers until {ends:%Y-%m-%d %H:%M}"
        yield f"disk {self.disk / 1e9:.1f} GB, memory {self.memory_gb:.1f} GB per worker"
        if self.unknown:
            yield f"{self.unknown} runs have no price yet; run: rlhf study price <file>"


def price(plan: Plan) -> Price:
    """Return the price of a study from its rows and its pilots."""
    done = [each for each in plan.runs if each.state == DONE and each.row is not None]
    pilots, means = read_pilots(plan.spec.folder / "price.json"), _means(done)
    made = {_stages(plan, each.run) for each in done}
    left, unknown, stages = 0.0, 0, {}  # type: float, int, dict[object, float]
    for run in plan.missing:
        pilot = pilots.get(cost(cfg := plan.configs.config(run)))
        if pilot is not None and (models := _stages(plan, run)) not in made:
            stages[models] = pilot.stages
        names = (run.cell, (run.cell.task, run.cell.method))
        if (known := next((means[name] for name in names if name in means), None)) is not None:
            left += known
        elif pilot is not None:
            left += pilot.seconds(cfg)
        else:
            unknown += 1
    runs = len(done) + len(plan.missing)
    disk = sum(each.disk for each in pilots.values()) // max(1, len(pilots)) * runs
    memory = [
        *(each.row.memory_gb or 0 for each in done if each.row),
        *(p.memory_gb for p in pilots.values()),
    ]
    made_s = sum(stages.values())
    used = sum(each.row.cpu_s for each in done if each.row)
    return Price(used, left + made_s, made_s, unknown, disk, max(memory, default=0.0))


def check_budget(plan: Plan, found: Price) -> None:
    """Raise UserError if a study costs more than its budget."""
    limit, hours = plan.spec.budget.get("cpu_hours"), (found.done_s + found.left_s) / 3600
    if limit is not None and hours > limit:
        raise UserError(
            f"budget.cpu_hours must be at least the price of the study, got {limit:g} for {hours:.1f} "
            f"CPU-hours; take fewer seeds, or set budget: {{cpu_hours: {math.ceil(hours)}}}"
        )


def pilots_due(plan: Plan) -> list[Planned]:
    """Return a missing run of each distinct cost that has no pilot."""
    known = read_pilots(plan.spec.folder / "price.json")
    found: dict[str, Planned] = {}
    for run in plan.missing:
        found.setdefault(cost(plan.configs.config(run)), plan.planned(run))
    return [each for key, each in found.items() if key not in known]


def measure(plan: Plan, planned: Planned) -> Pilot:
    """Carry out a pilot in a process of its own, and add it to `price.json`.

    Raises:
        RunError: the pilot failed.
    """
    file, cfg = plan.spec.folder / "price.json", plan.configs.config(planned.run)
    folder = plan.spec.folder / "pilots" / planned.folder.name
    files.discard(folder)
    folder.mkdir(parents=True)
    attempt.wait_for(attempt.forked(folder, lambda: _measure(cfg, folder)))
    result = folder / "pilot.json"
    if not result.exists():
        raise RunError(f"the pilot of {planned.run} failed; its output: {folder / attempt.OUTPUT}")
    found = Pilot(**files.read_json(result, files.delete_command(result)))
    files.write_json(file, {k: asdict(v) for k, v in {**read_pilots(file), cost(cfg): found}.items()})
    return found


def read_pilots(file: Path) -> dict[str, Pilot]:
    """Return the pilots in a file, by `cost`."""
    tree = files.read_json(file, files.delete_command(file)) if file.exists() else {}
    return {key: Pilot(**each) for key, each in tree.items()}


def cost(cfg: Config) -> str:
    """Return a digest of the settings on which the cost of an episode and of an evaluation depends."""
    tree = what_counts(cfg)
    algo = [cfg.algo.name, cfg.algo.samples_per_prompt, cfg.schedule.epochs]
    return files.digest(
        [algo, *(tree[name] for name in ("model", "task", "scorer", "gold", "generator", "eval"))]
    )


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


def _measure(cfg: Config, folder: Path) -> None:
    """Carry out a pilot in this process, and write its cost to pilot.json."""
    from rlhf.stages.prerequisites import complete
    from rlhf.stages.run import run as train

    watch, files_of = _Stopwatch(), RunFolder(folder)
    with interruptible():
        complete(cfg, train)
        stages = attempt.cpu_s()
        every = UPDATES if cfg.schedule.eval_every else 0
        experiment = Experiment.__new__(Experiment)
        pilot = cfg.with_({"schedule.eval_every": every, "schedule.save_every": 0})
        experiment.set_up(pilot, [], files_of)
        experiment.hooks = [watch]
        experiment.execute()
    updates = watch.updates[:UPDATES]
    counted = updates[_FREE:] if len(updates) > _FREE + 1 else updates
    per_update = (counted[-1] - counted[0]) / (len(counted) - 1) if len(counted) > 1 else 0.0
    evaluation = watch.evaluated - updates[-1] if watch.evaluated else 0.0
    start = updates[0] - stages - per_update - evaluation
    passes = (
        None
        if cfg.epochs is None
        else round(watch.num_updates * cfg.schedule.prompts_per_update / cfg.epochs)
    )
    kept = (files_of.metrics, files_of.completions, files_of.log, folder / attempt.OUTPUT)
    files.write_json(
        folder / "pilot.json",
        asdict(
            Pilot(
                start=max(0.0, start),
                episode=per_update / cfg.episodes_per_update,
                evaluation=evaluation,
                stages=stages,
                examples=passes,
                memory_gb=attempt.peak_gb(),
                disk=sum(file.stat().st_size for file in kept if file.exists()),
            )
        ),
    )


def _evaluations(cfg: Config, updates: int) -> int:
    """Return the number of evaluations of a run, with the one before training."""
    every = cfg.schedule.eval_every
    period = every if every >= 1 else max(1.0, every * updates)
    return 0 if every == 0 else 1 + math.ceil(updates / period)


def _stages(plan: Plan, run: Run) -> tuple[str, int]:
    """Return what the stages before a run depend on."""
    return run.cell.task, plan.configs.config(run).stages.seed


def _means(done: Iterable[Planned]) -> dict[object, float]:
    """Return the mean CPU seconds of finished rows, by cell and by task and method."""
    found: dict[object, list[float]] = {}
    for each in done:
        if each.row is not None and each.row.status == FINISHED:
            for key in (each.run.cell, (each.run.cell.task, each.run.cell.method)):
                found.setdefault(key, []).append(each.row.cpu_s)
    return {key: fmean(values) for key, values in found.items()}
