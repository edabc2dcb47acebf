"""Check of a config before a run starts: find every problem of the run, and report all problems together.

Each section checks its own fields (`Section.problems`); rules over several sections are in the other modules
of this folder. The check loads no models and no data, and this package imports no torch.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NoReturn

from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

# Importing a module of rules registers its rules.
from rlhf.checks import (  # noqa: F401
    algorithms,
    asynchrony,
    environments,
    folders,
    generators,
    job,
    judges,
    model_folders,
    models,
    names,
    schedule,
    secrets,
    tasks,
)
from rlhf.checks.rules import DOUBTS, RULES, TRAINING_RULES
from rlhf.config import own_files
from rlhf.config.environment import default_scorer
from rlhf.config.mistakes import explain, unknown_keys
from rlhf.config.root import Config, to_config
from rlhf.config.schema import sections
from rlhf.core.errors import UserError, report
from rlhf.core.launched import is_first_rank, rank
from rlhf.core.output import print_error

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
    found += [
        *names.unknown_tuning(overrides),
        *names.typed_names(overrides),
        *names.removed(overrides),
        *own_files.hidden(),
    ]
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
