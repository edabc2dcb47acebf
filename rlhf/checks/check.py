"""Check of a config before a run starts, and in the process of a job: all problems are reported together."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from rlhf.checks import (
    algorithms,  # noqa: F401
    data,  # noqa: F401
    generators,  # noqa: F401
    models,  # noqa: F401
    rules,  # noqa: F401
)
from rlhf.checks.rules import DOUBTS, RULES, TRAINING_RULES, training_rule
from rlhf.config.environments import default_scorer
from rlhf.config.root import Config, to_config
from rlhf.config.schema import sections
from rlhf.core.errors import UserError, report
from rlhf.core.launched import is_first_rank, rank
from rlhf.loggers.logger import Hook, load_hooks
from rlhf.terminal.console import print_error
from rlhf.usercode.address import class_problem
from rlhf.words import catalogue
from rlhf.words.mistakes import explain, unknown_keys

# Check of a config before a run starts: find every problem of the run, and report all problems together.
#
# Each section checks its own fields (`Section.problems`); rules over several sections are in the other
# modules of this folder. The check loads no models and no data, and this package imports no torch.


# Importing a module of rules registers its rules.

_FIRST_RANK_S = 5.0  # seconds that the first rank has to report a problem, before another rank does


def problems(cfg: Config, training: bool = True) -> list[str]:
    """Return an error message for every problem of the config, without duplicates.

    Args:
        cfg: the config of a run.
        training: whether the run trains; False: the model of the run is only evaluated.
    """
    found: list[str] = []
    for key, section in sections(cfg):
        found += section.problems(key)
    for rule in [*RULES, *(TRAINING_RULES if training else ())]:
        found += rule(cfg)
    return list(dict.fromkeys(found))


def warnings(cfg: Config) -> list[str]:
    """Return a warning for each setting that has no effect or is doubtful, without duplicates."""
    found: list[str] = []
    for key, section in sections(cfg):
        found += section.warnings(key)
    for doubt in DOUBTS:
        found += doubt(cfg)
    return list(dict.fromkeys(found))


def checked(cfg: Config, training: bool = True) -> Config:
    """Return a config unchanged, after all checks (see `problems`).

    Raises:
        UserError: the config is invalid; the error contains every problem.
    """
    if found := problems(cfg, training):
        raise UserError(*found)
    return cfg


def as_objects(config: DictConfig, overrides: Sequence[str] = ()) -> Config:
    """Return a composed config as an object of section objects, without checks of the values.

    Raises:
        UserError: a key is unknown, is not set, or has a value of the wrong type.
    """
    config = config.copy()
    if "hydra" in config:
        with read_write(config), open_dict(config):
            del config["hydra"]
    found = unknown_keys(config, overrides)
    found += [*algorithms.typed_problems(overrides), *catalogue.hidden()]
    try:
        unset = sorted(OmegaConf.missing_keys(config))
        found += [f"{key} must be set (it has no default), got ???; set {key}=<value>" for key in unset]
        if found:
            raise UserError(*found)
        return to_config(config if "scorer=reward_model" in overrides else default_scorer(config))
    except OmegaConfBaseException as error:
        raise UserError(explain(error, overrides)) from None


def overrides_of(overrides: Any) -> list[str]:
    """Return the overrides of the command line as typed, with unresolved interpolations.

    Args:
        overrides: `hydra.overrides` of the config.
    """
    return list(OmegaConf.to_container(overrides.task, resolve=False))  # type: ignore[arg-type]


def warn(doubts: Sequence[str]) -> None:
    """Print warnings to stderr, on rank 0."""
    if is_first_rank():
        for doubt in doubts:
            print_error(f"warning: {doubt}")


def refuse(problems: Sequence[str]) -> NoReturn:
    """Print problems to stderr, and end the command.

    Another rank than the first waits before it prints: the end of the first rank, if that has the same
    problems, ends it before.

    Raises:
        SystemExit: always, with exit code 2.
    """
    if is_first_rank():
        print_error(report(list(problems)))
    else:
        time.sleep(_FIRST_RANK_S)
        print_error(f"rank {rank()}: {report(list(problems))}")
    raise SystemExit(2)


# Checks in the process of a job, which may run on another machine than the command.
#
# This module imports no torch; the user's reward functions and hooks may.


@training_rule
def hooks_exist(cfg: Config) -> Iterator[str]:
    """Yield an error for each hook whose class is not found."""
    for path in cfg.hooks:
        if problem := class_problem("hooks", path):
            yield problem


def check_job(cfg: Config) -> list[Hook]:
    """Import the user's code, connect to services and trackers, and return the hooks of this rank.

    Raises:
        UserError: the code cannot be imported or called, or a service refuses connections.
    """
    found = [problem for key, section in sections(cfg) for problem in section.job_problems(key)]
    if found:
        raise UserError(*found)
    return load_hooks(cfg.hooks) if is_first_rank() else []
