"""What is wrong with a run, all at once and before anything is loaded: key as typed, rule, value, remedy.

Each section knows its own rules (`Section.problems`); those that cross sections are here. Imports no torch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from rlhf.checks.algorithms import no_effect, stored_completions
from rlhf.checks.judges import judges, training_sees_its_judge
from rlhf.checks.models import models
from rlhf.checks.numbers import numbers
from rlhf.checks.schedule import division, length, objective_metric
from rlhf.config.catalogue import options
from rlhf.config.mistakes import explain, undefined, unknown_key
from rlhf.config.root import Config
from rlhf.config.schema import sections
from rlhf.core.errors import UserError, report
from rlhf.core.launched import is_first_rank

if TYPE_CHECKING:
    from rlhf.checks.rules import Rule


def problems(cfg: Config, rules: tuple[Rule, ...] | None = None) -> list[str]:
    """Everything that is wrong with the run `cfg`, each thing once.

    `rules` are those that cross sections; None: all.
    """
    found: list[str] = []
    for _, section in sections(cfg):
        found += section.problems(cfg)
    for rule in RULES if rules is None else rules:
        found += rule(cfg)
    return list(dict.fromkeys(found))


def warnings(cfg: Config) -> list[str]:
    """Settings without effect, or allowed but doubtful, each once."""
    found: list[str] = []
    for _, section in sections(cfg):
        found += section.warnings(cfg)
    for doubt in DOUBTS:
        found += doubt(cfg)
    return list(dict.fromkeys(found))


RULES: tuple[Rule, ...] = (numbers, length, division, stored_completions, judges, models, objective_metric)


MEASURED: tuple[Rule, ...] = (numbers, judges, models)  # of what is measured, and not trained


DOUBTS: tuple[Rule, ...] = (training_sees_its_judge, no_effect)


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
    if found := problems(cfg):
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


def words(overrides: Any) -> list[str]:
    """The overrides of the command line as typed: an interpolation in them is not to be resolved here."""
    return list(OmegaConf.to_container(overrides.task, resolve=False))  # type: ignore[arg-type]


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
