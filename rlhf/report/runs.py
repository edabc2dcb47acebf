"""Run folders of finished and unfinished runs, as the report reads them."""

from __future__ import annotations

import glob
import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from rlhf.core.errors import UserError
from rlhf.core.files import read_lines
from rlhf.runs.folder import RunFolder
from rlhf.runs.resuming import ASIDE

if TYPE_CHECKING:
    from rlhf.core.metrics import Row


class Status(StrEnum):
    """The state of a run."""

    finished = "finished"
    unfinished = "unfinished"  # running, interrupted or killed: the run folder does not show which
    failed = "failed"  # stopped because the loss was not finite


@dataclass(frozen=True)
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

    @property
    def num_updates(self) -> int | None:
        """The number of updates of the complete run; None before the first row."""
        return self.state.get("num_updates")

    @cached_property
    def status(self) -> Status:
        """The state of the run; a failed run that was resumed past the failed update is no longer failed."""
        if self.state.get("finished") is True:
            return Status.finished
        failed = self.folder / "failed_batch.json"
        if failed.is_file() and read_json(failed)["update"] >= self.state.get("update", 0):
            return Status.failed
        return Status.unfinished

    @property
    def progress(self) -> str:
        """The status and the last update, as text."""
        if self.status is Status.finished:
            return "finished"
        if not self.rows:
            return f"{self.status}, no metrics"
        return f"{self.status}, update {self.update} of {self.num_updates or '?'}"

    @cached_property
    def evaluations(self) -> list[Row]:
        """The rows of metrics.jsonl that evaluations wrote."""
        return [row for row in self.rows if any(name.startswith("eval/") for name in row)]

    @cached_property
    def trained(self) -> list[Row]:
        """The rows of metrics.jsonl that updates wrote."""
        return [row for row in self.rows if "lr" in row]

    def first(self, metric: str) -> float | None:
        """Return the value of `metric` before training; None if it was not evaluated before training."""
        return next((row.get(metric) for row in self.evaluations if row["update"] == 0), None)

    def last(self, metric: str) -> float | None:
        """Return the value of `metric` at the last evaluation; None without an evaluation of `metric`."""
        return self.evaluations[-1].get(metric) if self.evaluations else None

    def seconds(self, phase: str = "update") -> float:
        """Return the seconds that all updates spent in `phase`: the sum of `time/<phase>_s` over the rows."""
        return sum(row.get(f"time/{phase}_s", 0.0) for row in self.trained)

    def seconds_at(self, update: float) -> float | None:
        """Return the seconds that the updates up to `update` took, interpolated linearly between rows.

        Evaluations and loading are not counted. The result is None if `update` is after the last row.
        """
        done, before = 0.0, 0.0
        for row in self.trained:
            took = row.get("time/update_s", 0.0)
            if row["update"] >= update:
                return done + took * (update - before) / (row["update"] - before)
            done, before = done + took, row["update"]
        return done if update <= before else None

    @property
    def episodes(self) -> float:
        """The number of responses that the run has trained on."""
        return self.state.get("episode", 0)

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
    def hardware(self) -> str:
        """The GPUs, and the CPU with its number of cores."""
        devices = self.environment.get("devices") or []
        names = [f"{devices.count(name)} x {name}" for name in dict.fromkeys(devices)]
        cpu = f"{self.environment.get('cores', '?')} cores {self.environment.get('processor', '')}".strip()
        return ", ".join([*names, cpu])

    def completions(self) -> list[dict[str, Any]]:
        """Return the rows of completions.jsonl; an empty list if the file does not exist."""
        return read_lines(RunFolder(self.folder).completions)


@dataclass(frozen=True)
class FoundRuns:
    """The runs in the folders of a command line, and the skipped paths, each with the reason."""

    runs: list[Run]
    left_out: list[str] = field(default_factory=list)


def find_runs(arguments: Sequence[str], own: Path | None = None) -> FoundRuns:
    """Read all runs in `arguments`: run folders, folders with run folders at any depth, shell patterns.

    Two kinds of run folders are skipped unless an argument names them: the stages of embedded tasks (in the
    cache folder of a run), and folders moved aside by `resume=never`. Files (if there are several paths) and
    the output folder `own` of the report are also skipped.

    Raises:
        UserError: an argument contains no run, or a file of a run cannot be read.
    """
    runs: dict[Path, Run] = {}
    problems, left_out = [], []
    paths = [Path(path) for argument in arguments for path in sorted(glob.glob(argument)) or [argument]]
    for path in paths:
        if path == own or (path.is_file() and len(paths) > 1):
            left_out.append(f"{path} (not a folder of runs)")
            continue
        inside = [read_run(folder) for folder in ([path] if is_run(path) else run_folders(path))]
        skipped = {run.folder: reason for run in inside if (reason := reason_to_skip(run, path))}
        if len(skipped) == len(inside):
            nothing = "no run in it" if path.exists() else "no such folder"
            problems.append(
                f"{path} must be a run folder or contain run folders (a run folder has config.yaml and "
                f"environment.json), got {next(iter(skipped.values()), nothing)}; pass a folder that "
                "rlhf.train made: outputs/<run name>"
            )
        left_out += [f"{folder} ({reason})" for folder, reason in skipped.items()]
        runs |= {run.folder.resolve(): run for run in inside if run.folder not in skipped}
    if problems:
        raise UserError(*problems)
    return FoundRuns(list(runs.values()), left_out)


def is_run(folder: Path) -> bool:
    """Return whether `folder` is a run folder."""
    return (folder / "config.yaml").is_file() and (folder / "environment.json").is_file()


def reason_to_skip(run: Run, argument: Path) -> str:
    """Return the reason to skip a run found inside the folder `argument`; an empty string to read the run."""
    if run.folder == argument:
        return ""
    cache, output = (Path(str(run.config.get(key))).name for key in ("cache_dir", "output_dir"))
    if run.folder.parent != argument and run.folder.parent.name == cache != output:
        return "a stage of other runs"
    return "moved aside by resume=never" if ASIDE in run.folder.name else ""


def run_folders(folder: Path) -> list[Path]:
    """Return the run folders inside `folder` at any depth, ordered by name; run folders are not searched."""
    found = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if path.is_dir() and not path.is_symlink():
            found += [path] if is_run(path) else run_folders(path)
    return found


def read_run(folder: Path) -> Run:
    """Read one run folder.

    Raises:
        UserError: a file is damaged, or does not have the keys that a run writes.
    """
    files = RunFolder(folder)
    try:
        config = flat(files.read_config())
        run = Run(
            folder=folder,
            config=config,
            rows=sorted(read_lines(files.metrics), key=lambda row: row["update"]),
            state=files.read_state() or {},
            environment=read_json(files.environment),
        )
        missing = [key for key in ("seed", "algo.name", "task.name") if key not in config]
        if missing:
            raise ValueError(f"config.yaml has no {missing[0]}")
        return run
    except (ValueError, KeyError, yaml.YAMLError) as error:
        problem = str(error).removeprefix("error: ")
        raise UserError(
            f"{folder} must contain undamaged files of a run (the report reads them), got: {problem}; "
            "leave the folder out"
        ) from error


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object from `file`."""
    return dict(json.loads(file.read_text(encoding="utf-8")))


def flat(tree: dict[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested dictionaries as one dictionary with dotted keys; lists are values."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            leaves |= flat(value, f"{prefix}{key}.")
        else:
            leaves[f"{prefix}{key}"] = value
    return leaves
