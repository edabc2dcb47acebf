"""What is looked at before Hydra makes a folder or starts a job: the config, and the folder that is there.

Hydra makes the run folder before it calls the task function, so these checks are a Hydra callback: a run that
is refused leaves nothing behind. Imports no torch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from rlhf import hardware, validate
from rlhf.config import Config, Resume
from rlhf.errors import UserError, report
from rlhf.explain import CONFIG_ERRORS, explain, undefined, unknown_key
from rlhf.folder import RunFolder, is_first_rank, prepare
from rlhf.memory import plan as memory
from rlhf.options import options

BASIC_SWEEPER = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"


def own_words(batch: Sequence[Sequence[str]]) -> list[str]:
    """What each job of a sweep has of its own among its words; empty where that is nothing."""
    shared = set(batch[0]).intersection(*batch[1:]) if len(batch) > 1 else set()
    return [" ".join(word for word in words if word not in shared) for words in batch]


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
                doubts += [f"{label}: {doubt}" for doubt in validate.warnings(cfg)]
        if found:
            refuse(found)
        warn(doubts)


def checked(config: DictConfig, overrides: Sequence[str]) -> Config:
    """The typed config of a single job; ends the command where it is wrong."""
    try:
        cfg = typed(config, overrides)
    except UserError as error:
        refuse(error.problems)
    warn(validate.warnings(cfg))
    return cfg


def check_machine(cfg: Config) -> None:
    """Look whether this machine has the processes, the GPUs and the memory for the run.

    Raises:
        UserError: it has not.
    """
    if found := list(hardware.problems(cfg)):
        raise UserError(*found)
    check_memory(cfg)


def check_memory(cfg: Config) -> None:
    """Look whether this machine has the memory for the run; a sweep's jobs may run on another than we do.

    Raises:
        UserError: a device has clearly too little.
    """
    if found := memory.problems(cfg):
        raise UserError(*found)
    warn(memory.warnings(cfg))


def typed(config: DictConfig, overrides: Sequence[str] = ()) -> Config:
    """Turn a composed config into the objects of its schemas, and check it.

    Raises:
        UserError: with every problem that was found.
    """
    config = config.copy()
    if "hydra" in config:
        with read_write(config), open_dict(config):
            del config["hydra"]
    found = [unknown_key(key, key, section, overrides) for key, section in undefined(config)]
    found += unknown_tuning(overrides)
    try:
        unset = sorted(OmegaConf.missing_keys(config))
        found += [f"{key} must be set (it has no default), got ???; set {key}=<value>" for key in unset]
        if found:
            raise UserError(*found)
        cfg = OmegaConf.to_object(config)
    except OmegaConfBaseException as error:
        raise UserError(explain(error, overrides)) from error
    assert isinstance(cfg, Config)
    if found := validate.problems(cfg):
        raise UserError(*found)
    return cfg


def unknown_tuning(overrides: Sequence[str]) -> list[str]:
    """A `tuned=` that names no file; Hydra lets it pass, as the group is optional."""
    names = [word.partition("=")[2] for word in overrides if word.lstrip("+").startswith("tuned=")]
    return [
        f"tuned must be one of {', '.join(options('tuned'))}, got {name!r}; write ~tuned for none"
        for name in names
        if name not in options("tuned")
    ]


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


def words(overrides: Any) -> list[str]:
    """The overrides of the command line as typed: an interpolation in them is not to be resolved here."""
    return list(OmegaConf.to_container(overrides.task, resolve=False))  # type: ignore[arg-type]


def announce(folder: RunFolder, state: dict[str, Any], metric: str) -> None:
    """Say that a run is finished, with its result and where its model is."""
    if not is_first_rank():
        return
    print(found_finished(folder, state["result"].get(metric), metric))
    if folder.model.is_dir():
        print(f"model: {folder.model}")
    print("to run it again: resume=never")


def found_finished(folder: RunFolder, value: float | None, metric: str) -> str:
    """What to say of a run that is finished."""
    return f"finished already: {folder.path}" + ("" if value is None else f" ({metric} {value:.4g})")


def warn(doubts: Sequence[str]) -> None:
    """Show warnings."""
    if is_first_rank():
        for doubt in doubts:
            print(f"warning: {doubt}", file=sys.stderr)


def refuse(problems: Sequence[str]) -> NoReturn:
    """Show problems, and end the command."""
    if is_first_rank():
        print(report(list(problems)), file=sys.stderr)
    raise SystemExit(2)
