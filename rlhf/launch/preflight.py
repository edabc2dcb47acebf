"""Checks before a run or a sweep: the config of every job, the machine, and the existing run folder.

Hydra creates the run folder before it calls the task function. These checks are a Hydra callback, so that a
rejected run leaves no folder behind. This module imports no torch.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from rlhf.checks.check import overrides_of, refuse, typed, warn, warnings
from rlhf.checks.machine import check_machine
from rlhf.checks.recipes import recipes_of_other_commands
from rlhf.config.arguments import repeated
from rlhf.config.mistakes import CONFIG_ERRORS, explain
from rlhf.config.run import Resume
from rlhf.core.errors import UserError
from rlhf.core.launched import is_first_rank
from rlhf.launch.hydra_internals import combinations, uses_basic_sweeper
from rlhf.launch.jobs import announce, distinct_overrides
from rlhf.runs.folder import RunFolder
from rlhf.runs.naming import earlier_name
from rlhf.runs.resuming import prepare, shorter_run

if TYPE_CHECKING:
    from rlhf.config.root import Config


@contextmanager
def ends_command() -> Iterator[None]:
    """End the command at an unexpected error. Hydra would only warn of an error in a callback, and go on.

    Raises:
        SystemExit: with code 1 and a traceback, if the block raises an exception.
    """
    try:
        yield
    except Exception:
        traceback.print_exc()
        raise SystemExit(1) from None


class Preflight(Callback):
    """Hydra callback that rejects an invalid run or sweep, and ends the command if the run is finished."""

    @ends_command()
    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Check a single run: its config, the machine and its run folder.

        Raises:
            SystemExit: with code 2 if a check fails, with code 0 if the run is already finished.
        """
        cfg = checked(config, overrides_of(config.hydra.overrides))
        try:
            folder = RunFolder(Path(config.hydra.run.dir))
            if cfg.resume is Resume.never or folder.finished() is None:
                check_machine(cfg)
            finished = prepare(folder, cfg)
        except UserError as error:
            refuse(error.problems)
        for note in (earlier_name(folder.path, cfg), shorter_run(folder, cfg)):
            if is_first_rank() and note is not None:
                print(f"note: {note}")
        if finished is not None:
            announce(folder, finished, cfg.metric)
            raise SystemExit(0)

    @ends_command()
    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Check the config of every job of a sweep before the first job starts.

        Raises:
            SystemExit: with code 2 if the config of a job is invalid.
        """
        problems = list(folders_outside(config))
        doubts: list[str] = []
        jobs = sweep_jobs(config)
        for overrides, distinct in zip(jobs, distinct_overrides(jobs), strict=True):
            label = distinct or "every job"
            try:
                job = GlobalHydra.instance().config_loader().load_sweep_config(config, overrides)
                cfg = typed(job, overrides)
            except UserError as error:
                problems += [f"{label}: {problem}" for problem in error.problems]
            except CONFIG_ERRORS as error:
                problems.append(f"{label}: {explain(error, overrides)}")
            else:
                wrong = [*recipes_of_other_commands(overrides), *wrong_direction(config, cfg)]
                problems += [f"{label}: {problem}" for problem in wrong]
                doubts += [f"{label}: {warning}" for warning in warnings(cfg)]
        if problems:
            refuse(problems)
        warn(doubts)


def checked(config: DictConfig, overrides: Sequence[str]) -> Config:
    """Return the typed config of a single run after printing its warnings.

    Raises:
        SystemExit: with code 2 if the config is invalid.
    """
    if found := [*recipes_of_other_commands(overrides)]:
        refuse(found)
    try:
        cfg = typed(config, overrides)
    except UserError as error:
        refuse(error.problems)
    warn([*repeated(overrides), *warnings(cfg)])
    return cfg


def folders_outside(config: DictConfig) -> Iterator[str]:
    """Yield an error if the run folders of a sweep are not below its folder."""
    sweep: Any = OmegaConf.to_container(config.hydra.sweep, resolve=False)
    subdir = str(sweep["subdir"])
    if Path(subdir).is_absolute() or ".." in Path(subdir).parts:
        yield (
            "hydra.sweep.subdir must be a path below hydra.sweep.dir (the folder of the sweep), got "
            f"{subdir}; set hydra.sweep.dir=<folder>"
        )


def wrong_direction(config: DictConfig, cfg: Config) -> Iterator[str]:
    """Yield an error if a search maximises a metric whose lower values are better."""
    direction = str(config.hydra.sweeper.get("direction", "")).rpartition(".")[2]
    if cfg.minimised and direction == "maximize":
        yield (
            f"hydra.sweeper.direction must be minimize for {cfg.metric} (lower values are better), got "
            "maximize; set hydra.sweeper.direction=minimize"
        )


def sweep_jobs(config: DictConfig) -> list[list[str]]:
    """Return the overrides of each job of a sweep.

    If the sweeper chooses values during the sweep, the result is one job without the swept overrides.
    """
    parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
    arguments = overrides_of(config.hydra.overrides)
    if not uses_basic_sweeper(config):
        overrides = parser.parse_overrides(arguments)
        return [[each.input_line or "" for each in overrides if not each.is_sweep_override()]]
    swept = [f"{key}={value}" for key, value in (config.hydra.sweeper.params or {}).items()]
    return combinations(parser.parse_overrides([*swept, *arguments]))
