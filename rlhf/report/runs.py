"""Run folders as a report reads them: whatever is there, finished or not."""

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
    """How far a run came."""

    finished = "finished"
    unfinished = "unfinished"  # running, interrupted or killed: its folder does not tell which
    failed = "failed"  # it stopped at a loss that is not finite


@dataclass(frozen=True)
class Run:
    """One run folder.

    Attributes:
        config: the resolved config, flat: dotted key -> value.
        rows: of metrics.jsonl, by update.
        state: of trainer_state.json; empty before the first row.
        environment: of environment.json.
    """

    folder: Path
    config: dict[str, Any]
    rows: list[Row]
    state: dict[str, Any]
    environment: dict[str, Any]

    @property
    def seed(self) -> int:
        """The run's seed."""
        return int(self.config["seed"])

    @property
    def update(self) -> int:
        """The last update that there is a row of."""
        return int(self.rows[-1]["update"]) if self.rows else 0

    @property
    def num_updates(self) -> int | None:
        """Updates of the whole run; None before the first row."""
        return self.state.get("num_updates")

    @cached_property
    def status(self) -> Status:
        """How far the run came; a failure that a later session left behind is none."""
        if self.state.get("finished") is True:
            return Status.finished
        failed = self.folder / "failed_batch.json"
        if failed.is_file() and read_json(failed)["update"] >= self.state.get("update", 0):
            return Status.failed
        return Status.unfinished

    @property
    def progress(self) -> str:
        """The status in words."""
        if self.status is Status.finished:
            return "finished"
        if not self.rows:
            return f"{self.status}, no figures"
        return f"{self.status}, update {self.update} of {self.num_updates or '?'}"

    @cached_property
    def evaluations(self) -> list[Row]:
        """The rows of evaluations."""
        return [row for row in self.rows if any(name.startswith("eval/") for name in row)]

    @cached_property
    def trained(self) -> list[Row]:
        """The rows of updates."""
        return [row for row in self.rows if "lr" in row]

    def first(self, metric: str) -> float | None:
        """The figure before training; None where that was not evaluated."""
        return next((row.get(metric) for row in self.evaluations if row["update"] == 0), None)

    def last(self, metric: str) -> float | None:
        """The figure of the last evaluation; None where there is none."""
        return self.evaluations[-1].get(metric) if self.evaluations else None

    def seconds(self, phase: str = "update") -> float:
        """Seconds that all updates together spent in `time/<phase>_s`."""
        return sum(row.get(f"time/{phase}_s", 0.0) for row in self.trained)

    def seconds_at(self, update: float) -> float | None:
        """Seconds of updates (without evaluations and loading) until `update`, between rows in proportion."""
        done, before = 0.0, 0.0
        for row in self.trained:
            took = row.get("time/update_s", 0.0)
            if row["update"] >= update:
                return done + took * (update - before) / (row["update"] - before)
            done, before = done + took, row["update"]
        return done if update <= before else None

    @property
    def episodes(self) -> float:
        """Responses trained on so far."""
        return self.state.get("episode", 0)

    @property
    def command(self) -> str:
        """The command line, as it can be typed again."""
        program, *words = self.environment.get("command") or ["train.py"]
        module = {"train.py": "python -m rlhf.train"}.get(program, program)
        return " ".join([module, *map(shlex.quote, words)])

    @property
    def commit(self) -> str:
        """The commit of the code, and whether files were changed since."""
        git = self.environment.get("git")
        if not git:
            return "unknown"
        return git["commit"][:10] + (" + changes" if git["changed"] else "")

    @property
    def hardware(self) -> str:
        """Accelerators, or the processor and its cores."""
        devices = self.environment.get("devices") or []
        names = [f"{devices.count(name)} x {name}" for name in dict.fromkeys(devices)]
        cpu = f"{self.environment.get('cores', '?')} cores {self.environment.get('processor', '')}".strip()
        return ", ".join([*names, cpu])

    def completions(self) -> list[dict[str, Any]]:
        """All completions of evaluations; empty where there are none."""
        return read_lines(RunFolder(self.folder).completions)


@dataclass(frozen=True)
class Found:
    """The runs that the folders of a command line name, and what was left out of them, in words."""

    runs: list[Run]
    left_out: list[str] = field(default_factory=list)


def find_runs(arguments: Sequence[str], own: Path | None = None) -> Found:
    """All runs in `arguments`: run folders, folders that contain some at any depth, shell patterns.

    Within a folder, the stages of embedded tasks (in the cache of a run) and folders that `resume=never`
    moved aside are left out; named themselves, they are read. Files, and the report's `own` folder, are
    skipped.

    Raises:
        UserError: for each argument that holds no run; a file of a run cannot be read.
    """
    runs: dict[Path, Run] = {}
    problems, left_out = [], []
    paths = [Path(path) for argument in arguments for path in sorted(glob.glob(argument)) or [argument]]
    for path in paths:
        if path == own or (path.is_file() and len(paths) > 1):
            left_out.append(f"{path} (no folder of runs)")
            continue
        inside = [read_run(folder) for folder in ([path] if is_run(path) else below(path))]
        skipped = {run.folder: why for run in inside if (why := no_run_of_its_own(run, path))}
        if len(skipped) == len(inside):
            nothing = "no run in it" if path.exists() else "no such folder"
            problems.append(
                f"{path} must be a run folder, or contain some (a run folder holds config.yaml and "
                f"environment.json), got {next(iter(skipped.values()), nothing)}; name what rlhf.train made, "
                "outputs/<run name>"
            )
        left_out += [f"{folder} ({why})" for folder, why in skipped.items()]
        runs |= {run.folder.resolve(): run for run in inside if run.folder not in skipped}
    if problems:
        raise UserError(*problems)
    return Found(list(runs.values()), left_out)


def is_run(folder: Path) -> bool:
    """Whether `folder` is that of one run."""
    return (folder / "config.yaml").is_file() and (folder / "environment.json").is_file()


def no_run_of_its_own(run: Run, argument: Path) -> str:
    """Why a run that was found somewhere in `argument` is left out; empty where it is not."""
    if run.folder == argument:
        return ""
    cache, output = (Path(str(run.config.get(key))).name for key in ("cache_dir", "output_dir"))
    if run.folder.parent != argument and run.folder.parent.name == cache != output:
        return "a stage of other runs"
    return "moved aside by resume=never" if ASIDE in run.folder.name else ""


def below(folder: Path) -> list[Path]:
    """The run folders in `folder`, by name; none is looked for within a run."""
    found = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if path.is_dir() and not path.is_symlink():
            found += [path] if is_run(path) else below(path)
    return found


def read_run(folder: Path) -> Run:
    """Read one run folder.

    Raises:
        UserError: one of its files is not what a run writes.
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
            f"{folder} must hold the files of a run as it wrote them (the report is made of them), got: "
            f"{problem}; leave the folder out"
        ) from error


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object."""
    return dict(json.loads(file.read_text(encoding="utf-8")))


def flat(tree: dict[Any, Any], at: str = "") -> dict[str, Any]:
    """Nested dictionaries as one with dotted keys; lists are values."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            found |= flat(value, f"{at}{key}.")
        else:
            found[f"{at}{key}"] = value
    return found
