"""What is looked at before Hydra makes a folder or starts a job: the config, and the folder that is there.

Hydra makes the run folder before it calls the task function, so these checks are a Hydra callback: a run that
is refused leaves nothing behind. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from rlhf.checks.check import refuse, typed, warn, words
from rlhf.checks.check import warnings as validate_warnings
from rlhf.checks.machine import check_machine
from rlhf.config.mistakes import CONFIG_ERRORS, explain
from rlhf.config.run import Resume
from rlhf.core.errors import UserError
from rlhf.launch.jobs import BASIC_SWEEPER, announce, own_words
from rlhf.runs.folder import RunFolder
from rlhf.runs.resuming import prepare

if TYPE_CHECKING:
    from rlhf.config.root import Config


class Preflight(Callback):
    """Refuses a run, or a sweep with one bad job, before anything is made; ends a run that is finished."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Check the one job, and its folder."""
        cfg = checked(config, words(config.hydra.overrides))
        try:
            folder = RunFolder(Path(config.hydra.run.dir))
            if cfg.resume is Resume.never or folder.finished() is None:
                check_machine(cfg)
            finished = prepare(folder, cfg)
        except UserError as error:
            refuse(error.problems)
        if finished is not None:
            announce(folder, finished, cfg.metric)
            raise SystemExit(0)

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Check every job of the sweep before the first starts."""
        found: list[str] = []
        doubts: list[str] = []
        batch = jobs(config)
        for overrides, own in zip(batch, own_words(batch), strict=True):
            label = own or "every job"
            try:
                job = GlobalHydra.instance().config_loader().load_sweep_config(config, overrides)
                cfg = typed(job, overrides)
            except UserError as error:
                found += [f"{label}: {problem}" for problem in error.problems]
            except CONFIG_ERRORS as error:
                found.append(f"{label}: {explain(error, overrides)}")
            else:
                doubts += [f"{label}: {doubt}" for doubt in validate_warnings(cfg)]
        if found:
            refuse(found)
        warn(doubts)


def checked(config: DictConfig, overrides: Sequence[str]) -> Config:
    """The typed config of a single job; ends the command where it is wrong."""
    try:
        cfg = typed(config, overrides)
    except UserError as error:
        refuse(error.problems)
    warn(validate_warnings(cfg))
    return cfg


def jobs(config: DictConfig) -> list[list[str]]:
    """Overrides of each job of a sweep; where the sweeper chooses as it goes, without what it chooses."""
    parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
    if config.hydra.sweeper._target_ != BASIC_SWEEPER:
        return [
            [
                o.input_line or ""
                for o in parser.parse_overrides(words(config.hydra.overrides))
                if not o.is_sweep_override()
            ]
        ]
    swept = [f"{key}={value}" for key, value in (config.hydra.sweeper.params or {}).items()]
    (batch,) = BasicSweeper.split_arguments(
        parser.parse_overrides([*swept, *words(config.hydra.overrides)]), None
    )
    return batch
