"""Run folders of finished and unfinished runs, as the report reads them."""

from __future__ import annotations

import glob
import json
import math
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from omegaconf.errors import OmegaConfBaseException

from rlhf.config.algorithms import Trains
from rlhf.config.schema import SCHEMAS, data_file
from rlhf.core.errors import UserError
from rlhf.core.files import delete_command, flat, split_lines
from rlhf.loggers.logger import shown
from rlhf.runs.folder import RunFolder, counters_problem, record_problem
from rlhf.runs.resuming import ASIDE
from rlhf.words.compose import start_label

if TYPE_CHECKING:
    import pandas

    from rlhf.core.metrics import Row


UNITS = {"hours": 3600, "minutes": 60, "seconds": 1}  # of the training time, in seconds


class Status(StrEnum):
    """The state of a run."""

    finished = "finished"
    unfinished = "unfinished"  # running, interrupted or killed: the run folder does not show which
    failed = "failed"  # stopped because the loss was not finite
    stopped = "stopped"  # stopped by a hook, for example a pruned trial of a search


@dataclass(frozen=True, eq=False)
class Run:
    """The contents of one run folder.

    Attributes:
        folder: path of the run folder.
        config: the resolved config as a flat dictionary: dotted key -> value.
        rows: rows of metrics.jsonl, ordered by update.
        state: contents of trainer_state.json; empty before the first row.
        environment: contents of environment.json.
    """

    folder: Path
    config: dict[str, Any]
    rows: list[Row]
    state: dict[str, Any]
    environment: dict[str, Any]

    @property
    def seed(self) -> int:
        """The seed of the run."""
        return int(self.config["seed"])

    @property
    def update(self) -> int:
        """The update of the last row; 0 without rows."""
        return int(self.rows[-1]["update"]) if self.rows else 0

    @cached_property
    def status(self) -> Status:
        """The state of the run; a failed run that was resumed past the failed update is no longer failed."""
        if self.state.get("finished") is True:
            return Status.finished
        failed = self.folder / "failed_batch.json"
        if failed.is_file() and _read_json(failed, _batch_problem)["update"] >= self.state.get("update", 0):
            return Status.failed
        return Status.stopped if "stopped" in self.state else Status.unfinished

    @property
    def outcome(self) -> str:
        """The status; of a run that a hook stopped, the reason, such as "pruned"."""
        return str(self.state["stopped"] if self.status is Status.stopped else self.status)

    @property
    def progress(self) -> str:
        """The status and the last update, as text."""
        if self.status is Status.finished:
            return "finished"
        if not self.rows:
            return f"{self.outcome}, no metrics"
        return f"{self.outcome}, update {self.update} of {self.state.get('num_updates') or '?'}"

    @property
    def lost(self) -> str | None:
        """The rows that are known to be lost, as text; None if there are none."""
        if names := self.state.get("lost_rows"):
            return f"rows of {' and '.join(names)} from before a resume"
        end = self.state.get("update")
        if self.status is Status.finished and self.rows and isinstance(end, int) and self.update < end:
            return f"rows of metrics.jsonl after update {self.update} of {end}"
        return None

    @cached_property
    def evaluations(self) -> list[Row]:
        """The rows of metrics.jsonl that evaluations wrote."""
        return [row for row in self.rows if any(name.startswith("eval/") for name in row)]

    @cached_property
    def trained(self) -> list[Row]:
        """The rows of metrics.jsonl that updates wrote."""
        return [row for row in self.rows if "lr" in row]

    def first(self, metric: str) -> float | None:
        """Return the value of `metric` before training; for a metric of training rows, the first value.

        The result is None if there is no such value, or if it is the last one, too.
        """
        if metric.startswith("eval/"):
            before = self.evaluations[:-1]
            return next((row.get(metric) for row in before if row["update"] == 0), None)
        values = [row[metric] for row in self.trained if metric in row]
        return values[0] if len(values) > 1 else None

    def last(self, metric: str) -> float | None:
        """Return the value of `metric` at the last evaluation; for a metric of training rows, the last value.

        The result is None if the last evaluation did not measure the metric, or if no training row has it.
        """
        if metric.startswith("eval/"):
            return self.evaluations[-1].get(metric) if self.evaluations else None
        return next((row[metric] for row in reversed(self.trained) if metric in row), None)

    @property
    def peak_gib(self) -> float | None:
        """The peak memory in GiB; None before the first update."""
        return max((row["memory/peak_gib"] for row in self.trained if "memory/peak_gib" in row), default=None)

    @property
    def last_row_at(self) -> datetime | None:
        """The time at which the last row was written; None if metrics.jsonl does not exist."""
        file = RunFolder(self.folder).metrics
        return datetime.fromtimestamp(file.stat().st_mtime) if file.is_file() else None

    def seconds(self, phase: str = "update") -> float:
        """Return the seconds that all updates spent in `phase`: the sum of `time/<phase>_s` over the rows."""
        return sum(row.get(f"time/{phase}_s", 0.0) for row in self.trained)

    @cached_property
    def frame(self) -> pandas.DataFrame:
        """The rows as a table: a column for each metric, nan where a row lacks the metric.

        Further columns: `trained` (whether an update wrote the row); `seconds`, `minutes` and `hours` (time
        of the updates until then, without evaluations and loading; nan after the last one); with a virtual
        clock `virtual_s` (when the weights of the update were loaded).
        """
        import numpy as np
        import pandas

        table = pandas.DataFrame(self.rows)
        updates, took = ([row.get(name, 0.0) for row in self.trained] for name in ("update", "time/update_s"))
        seconds = np.interp(table["update"], [0.0, *updates], np.cumsum([0.0, *took]), right=math.nan)
        table["trained"] = ["lr" in row for row in self.rows]
        for unit, size in UNITS.items():
            table[unit] = seconds / size
        name = "rollouts/time_s"
        if loads := {row["update"]: row[name] for row in self.trained if name in row}:
            table["virtual_s"] = table["update"].map({0: 0.0, **loads})
        return table

    @property
    def command(self) -> str:
        """The command line, quoted for a shell."""
        program, *arguments = self.environment.get("command") or ["train.py"]
        module = {"train.py": "python -m rlhf.train"}.get(program, program)
        return " ".join([module, *map(shlex.quote, arguments)])

    @property
    def commit(self) -> str:
        """The commit of the code, marked if files differed from that commit."""
        git = self.environment.get("git")
        if not git:
            return "unknown"
        return git["commit"][:10] + (" + changes" if git["changed"] else "")

    @property
    def gpus(self) -> list[str]:
        """The GPUs by name, with their number."""
        devices = self.environment.get("devices") or []
        return [f"{devices.count(name)} x {name}" for name in dict.fromkeys(devices)]

    @property
    def hardware(self) -> str:
        """The GPUs, and the CPU with its number of cores."""
        cpu = f"{self.environment.get('cores', '?')} cores {self.environment.get('processor', '')}".strip()
        return ", ".join([*self.gpus, cpu])

    def completions(self) -> list[dict[str, Any]]:
        """Return the rows of completions.jsonl; an empty list if the file does not exist.

        Raises:
            ValueError: a line is not a JSON object with a prompt, a response and an update.
        """
        return _read_rows(RunFolder(self.folder).completions, ("update", "prompt", "response"))

    def groups(self) -> list[dict[str, Any]]:
        """Return the rows of groups.jsonl; an empty list if the file does not exist.

        Raises:
            ValueError: a line is not a row of a group.
        """
        return _read_rows(RunFolder(self.folder).groups, ("update", "version", "fate", "starts", "ends"))


@dataclass(frozen=True)
class FoundRuns:
    """The runs in the folders of a command line.

    Attributes:
        runs: the runs that can be read.
        broken: folders of runs that cannot be read, each with the reason.
        left_out: paths that are skipped on purpose, each with the reason.
    """

    runs: list[Run]
    broken: dict[Path, str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)


def find_runs(arguments: Sequence[str], own: Path | None = None) -> FoundRuns:
    """Read all runs in `arguments`: run folders, folders with run folders at any depth, shell patterns.

    Two kinds of run folders are skipped unless an argument names them: the stages of embedded tasks (in the
    cache folder of a run), and folders moved aside by `resume=never`. Files (if there are several paths) and
    the output folder `own` of the report are also skipped.

    Raises:
        UserError: an argument contains no run, or no run can be read.
    """
    runs: dict[Path, Run] = {}
    broken: dict[Path, str] = {}
    problems, left_out = [], []
    paths = [Path(path) for argument in arguments for path in sorted(glob.glob(argument)) or [argument]]
    for path in paths:
        if path == own or (path.is_file() and len(paths) > 1):
            left_out.append(f"{path} (not a folder of runs)")
            continue
        read, skipped = 0, {}
        for folder in _run_folders(path):
            if ASIDE in folder.name and folder != path:
                skipped[folder] = "moved aside by resume=never"
                continue
            try:
                run = load(folder)
            except ValueError as error:
                broken[folder] = str(error)
                continue
            # Inside of the cache folder of its run: a stage of an embedded task.
            cache, output = (Path(str(run.config.get(key))).name for key in ("cache_dir", "output_dir"))
            if path not in (folder, folder.parent) and folder.parent.name == cache != output:
                skipped[folder] = "a stage of other runs"
                continue
            read += 1
            runs[folder.resolve()] = run
        left_out += [f"{folder} ({reason})" for folder, reason in skipped.items()]
        if not read and not any(path == folder or path in folder.parents for folder in broken):
            nothing = "no run in it" if path.exists() else "no such folder"
            rule = f"{path} must be a run folder or contain some (with config.yaml and metrics.jsonl)"
            got = next(iter(skipped.values()), nothing)
            problems.append(f"{rule}, got {got}; pass a folder that rlhf.train made: outputs/<run name>")
    if not runs and not problems:
        problems = [_unreadable(*each, "pass the folder of another run") for each in broken.items()]
    if problems:
        raise UserError(*problems)
    return FoundRuns(list(runs.values()), broken, left_out)


def _run_folders(path: Path) -> list[Path]:
    """Return `path` if it is a run folder, else the run folders inside at any depth, ordered by name.

    A run folder contains at least two of the files of every run.
    """
    own = RunFolder(path)
    if sum(file.is_file() for file in (own.config, own.environment, own.metrics, own.state)) >= 2:
        return [path]
    inside = sorted(path.iterdir()) if path.is_dir() else []
    folders = (each for each in inside if each.is_dir() and not each.is_symlink())
    return [found for folder in folders for found in _run_folders(folder)]


def read_run(folder: Path) -> Run:
    """Read one run folder, with all metrics.

    Raises:
        UserError: a file is missing or damaged, or does not have the keys that a run writes.
    """
    try:
        return load(folder, hide=dict)
    except ValueError as error:
        raise UserError(_unreadable(folder, error, "leave the folder out")) from None


def _unreadable(folder: Path, reason: object, remedy: str) -> str:
    """Return the message about a run folder that cannot be read."""
    rule = f"{folder} must contain undamaged files of a run (the report reads them), got: {reason}"
    restore = f"{delete_command(RunFolder(folder).state)}, then the command of the run"
    return f"{rule}; to restore files from the last checkpoint: {restore}; or {remedy}"


def load(folder: Path, hide: Callable[[Row], Row] = shown) -> Run:
    """Read one run folder.

    Args:
        folder: the run folder.
        hide: returns a row of metrics.jsonl without the metrics that are not shown.

    Raises:
        ValueError: a file is missing or damaged; the message contains the file and the reason.
    """
    files = RunFolder(folder)
    try:
        rows = _read_rows(files.metrics, ["update"])
        numbers = ({name: value for name, value in row.items() if finite(value)} for row in rows)
        run = Run(
            folder=folder,
            config=_read_config(files),
            rows=sorted(map(hide, numbers), key=lambda row: row["update"]),
            state=_read_json(files.state, counters_problem) if os.path.lexists(files.state) else {},
            environment=_read_json(files.environment, record_problem),
        )
        run.status  # noqa: B018  reads failed_batch.json
        return run
    except OSError as error:
        at = f"{Path(error.filename).name}: {error.strerror}" if error.filename else str(error)
        raise ValueError(at) from error


def _read_config(files: RunFolder) -> dict[str, Any]:
    """Return config.yaml as a flat dictionary; `model.name` becomes the label of the model (`model_label`).

    Raises:
        ValueError: the file is not a config of a run.
    """
    name = files.config.name
    try:
        config = dict(flat(files.read_config()))
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        line = getattr(getattr(error, "problem_mark", None), "line", None)
        at = "" if line is None else f", line {line + 1}"
        raise ValueError(f"{name}{at}: not a config of a run") from error
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    if missing := [key for key in ("seed", "algo.name", "task.name") if key not in config]:
        raise ValueError(f"{name}: no key {missing[0]}" if config else f"{name}: the file is empty")
    if not isinstance(config["seed"], int):
        raise ValueError(f"{name}: seed is {config['seed']!r}, not a whole number")
    if option := config.get("model.name"):
        start = "model.base" if _trains(config) is Trains.base else "model.policy"
        config["model.name"] = start_label(config.get(start), option, str(config.get("cache_dir")))
    return config


def _trains(config: Mapping[str, Any]) -> Trains:
    """Return the model that the algorithm of a flat config trains; policy for an unknown algorithm."""
    return getattr(SCHEMAS.get(f"schema/algo/{config['algo.name']}"), "trains", Trains.policy)


def finite(value: object) -> bool:
    """Return True if a value of a file is a finite number."""
    return isinstance(value, int | float) and math.isfinite(value)


def _read_rows(file: Path, required: Sequence[str]) -> list[dict[str, Any]]:
    """Return the rows of a JSON-lines file, with the keys `required` and `update`; none without a file.

    Raises:
        ValueError: the file cannot be read, or a line is not such a row; the message names file and line.
    """
    try:
        rows, damaged = split_lines(file, required)
    except OSError as error:
        raise ValueError(f"{file.name}: {error.strerror}") from error
    for number in damaged:
        raise ValueError(f"{file.name}, line {number}: not a row with {', '.join(required)}")
    for number, row in enumerate(rows, 1):
        if not finite(row["update"]):
            raise ValueError(f"{file.name}, line {number}: update is {row['update']!r}, not a number")
    return rows


def _read_json(file: Path, problem: Callable[[dict[str, Any]], str | None]) -> dict[str, Any]:
    """Read a JSON object that has no `problem`; an OSError or a ValueError tells why not."""
    try:
        found = json.loads(file.read_bytes())
    except ValueError as error:
        raise ValueError(f"{file.name}: not valid JSON") from error
    if reason := problem(found) if isinstance(found, dict) else "not a JSON object":
        raise ValueError(f"{file.name}: {reason}")
    return found


def _batch_problem(found: dict[str, Any]) -> str | None:
    return None if finite(found.get("update")) else "update is not a number"


# Metrics that the report shows: title, heading, decimals, direction, scale; and the kinds of runs.


class Kind(StrEnum):
    """The kind of a run; the value is used in file names and in ids of the page."""

    rl = "rl"
    offline = "offline"
    reward = "reward"
    sft = "sft"

    @property
    def heading(self) -> str:
        """The kind in headings."""
        offline, reward = "Offline training of the policy", "Reward model"
        return {Kind.rl: "RL", Kind.offline: offline, Kind.reward: reward, Kind.sft: "SFT"}[self]


def kind_of(run: Run) -> Kind:
    """Return the kind of a run, given by the model that its algorithm trains and by its generator."""
    offline = run.config.get("generator.name") == "dataset"
    policy = Kind.offline if offline else Kind.rl
    return {Trains.base: Kind.sft, Trains.reward: Kind.reward}.get(_trains(run.config), policy)


@dataclass(frozen=True)
class Metric:
    """A metric of metrics.jsonl as the report shows it.

    Attributes:
        name: name in metrics.jsonl.
        title: title of a figure, with unit.
        heading: heading of a column.
        decimals: number of decimals in tables and sentences.
        better: 1 if higher is better, -1 if lower is better, 0 if neither.
        scale: settings that determine the scale of the metric: "scorer", "gold", "algo" or "". Values of runs
            that differ in these settings are not comparable and never share an axis.
        expected: value of the metric if nothing happens, such as 1 for a ratio.
        noise: largest difference from `expected` that is rounding noise. A metric that is never further from
            `expected` is not drawn. 0: the metric is always drawn.
        logarithmic: whether to draw the metric on a logarithmic axis if values differ by a factor above 30.
        rate: whether the metric is between 0 and 1.
    """

    name: str
    title: str
    heading: str
    decimals: int = 3
    better: int = 0
    scale: str = ""
    expected: float = 0.0
    noise: float = 0.0
    logarithmic: bool = False
    rate: bool = False

    def text(self, value: float) -> str:
        """Return a value of the metric as text."""
        return number(value, self.decimals)

    @property
    def evaluated(self) -> bool:
        """Whether evaluations on held-out data measure the metric."""
        return self.name.startswith("eval/")


_TABLE = data_file("rlhf.report", "metrics.yaml")
LISTS = _TABLE["lists"]
LEARNING, OPTIMIZATION, OFF_POLICY, _OTHERS = (
    [Metric(name, **fields) for name, fields in _TABLE[figure].items()]
    for figure in ("learning", "optimization", "off_policy", "tables")
)
METRICS = {each.name: each for each in (*LEARNING, *OPTIMIZATION, *OFF_POLICY, *_OTHERS)}


def main_metric(kind: Kind, runs: Sequence[Run]) -> Metric | None:
    """Return the metric of `results` in metrics.yaml that most runs have; None if no run has any of them.

    A metric of training is returned only if no run has a metric of evaluations.
    """
    names = _TABLE["results"][kind].split()
    counts = {name: sum(run.last(name) is not None for run in runs) for name in names}
    name = max(counts, key=lambda name: (counts[name] > 0 and METRICS[name].evaluated, counts[name]))
    return METRICS[name] if counts[name] else None


def value_of(row: Mapping[str, object], name: str) -> float | None:
    """Return the value of a metric for one response; None if completions.jsonl does not determine it."""
    keys = {"eval/score": "score", "eval/gold_score": "gold_score", "eval/win_rate": "gold_score"}
    keys["eval/accuracy"] = "gold_score" if "gold_score" in row else "score"
    value, reference = row.get(keys.get(name, "")), row.get("reference_gold_score")
    if not isinstance(value, int | float):
        return None
    if name == "eval/accuracy":  # of answers; that of pairs does not depend on a response
        return float(value == 1) if reference in (1, None) else None
    if name != "eval/win_rate":
        return float(value)
    return float(value > reference) if isinstance(reference, int | float) else None


def number(value: float, decimals: int) -> str:
    """Return a number as text with `decimals` decimals, and without the sign of a zero."""
    return f"{value:z,.{decimals}f}"


def duration(seconds: float) -> str:
    """Return a duration as text, in the unit that fits."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
