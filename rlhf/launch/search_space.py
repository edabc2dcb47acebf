"""The search space of a search: the swept overrides, as distributions of Optuna.

    optim.lr=tag(log,interval(1e-5,1e-2))   FloatDistribution(log=True)
    schedule.epochs=range(1,4)              IntDistribution: 1, 2 or 3
    algo.beta=0.1,0.2                       CategoricalDistribution

This module imports no torch, and Optuna only in functions.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, RangeSweep
from omegaconf import DictConfig, OmegaConf

from rlhf.checks.check import overrides_of
from rlhf.config.search import SEARCH_SWEEPER, SearchConfig
from rlhf.core.errors import UserError

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """The overrides of a search.

    Attributes:
        fixed: the overrides that all trials share.
        distributions: the distribution of each swept key.
    """

    fixed: list[str]
    distributions: dict[str, BaseDistribution]

    @property
    def example(self) -> list[str]:
        """The overrides of a trial in the middle of the space."""
        return [*self.fixed, *overrides({key: middle(each) for key, each in self.distributions.items()})]


def is_search(sweeper: DictConfig) -> bool:
    """Return whether `hydra.sweeper` is that of `hydra/sweeper=search`."""
    return bool(sweeper._target_ == SEARCH_SWEEPER)


def check_search(sweeper: DictConfig) -> None:
    """Check the settings of a search in `hydra.sweeper`; another sweeper is not checked.

    Raises:
        UserError: Optuna is not installed, or a setting is invalid.
    """
    if not is_search(sweeper):
        return
    if importlib.util.find_spec("optuna") is None:
        raise UserError(
            "hydra/sweeper=search needs Optuna (it proposes the values), which is not installed; run: pip "
            "install -e '.[optuna]', or leave hydra/sweeper=search out"
        )
    if problems := list(settings_of(sweeper).problems("hydra.sweeper")):
        raise UserError(*problems)


def settings_of(sweeper: DictConfig) -> SearchConfig:
    """Return the settings of a search from `hydra.sweeper`."""
    settings = OmegaConf.to_object(sweeper)
    assert isinstance(settings, SearchConfig)
    return settings


def parsed_overrides(config: DictConfig, params: Mapping[str, Any] | None = None) -> list[Override]:
    """Return the overrides of a sweep: `params`, which are those of its recipe, then the command line."""
    words = [f"{key}={value}" for key, value in (params or {}).items()]
    parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
    return parser.parse_overrides([*words, *overrides_of(config.hydra.overrides)])


def search_space(config: DictConfig) -> SearchSpace:
    """Return the search space of `hydra.sweeper.params` and of the command line, which takes precedence.

    Raises:
        UserError: no key is swept, or an interval is invalid.
    """
    last = {each.get_key_element(): each for each in parsed_overrides(config, config.hydra.sweeper.params)}
    swept = {key: each for key, each in last.items() if each.is_sweep_override()}
    if not swept:
        raise UserError(
            "hydra/sweeper=search needs a key with several values (the search space), got none; add for "
            "example 'optim.lr=tag(log,interval(1e-5,1e-2))'"
        )
    fixed = [each.input_line or "" for key, each in last.items() if key not in swept]
    return SearchSpace(fixed, {key: distribution(each) for key, each in swept.items()})


def distribution(override: Override) -> BaseDistribution:
    """Return the distribution of a swept override.

    Raises:
        UserError: the interval is invalid, or the range is empty.
    """
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    sweep: Any = override.value()
    try:
        if override.is_interval_sweep():
            whole = isinstance(sweep.start, int) and isinstance(sweep.end, int)
            kind = IntDistribution if whole else FloatDistribution
            return kind(sweep.start, sweep.end, log="log" in sweep.tags)
        if override.is_range_sweep():
            low, high, step = bounds(sweep)
            if all(isinstance(each, int) for each in (sweep.start, sweep.stop, sweep.step)):
                return IntDistribution(int(low), int(high), step=int(step))
            return FloatDistribution(float(low), float(high), step=float(step))
    except ValueError as error:
        raise UserError(
            f"{override.key_or_group} must have valid bounds ({error}), got {override.input_line}; "
            "correct the bounds"
        ) from None
    return CategoricalDistribution(list(override.sweep_string_iterator()))


def bounds(sweep: RangeSweep) -> tuple[Decimal, Decimal, Decimal]:
    """Return the smallest and the largest value of a range, and its step, as exact decimal numbers.

    Raises:
        ValueError: the range is empty.
    """
    count = len(list(sweep.range()))
    if not count:
        raise ValueError("the range has no value")
    first, step = Decimal(str(sweep.start)), Decimal(str(sweep.step))
    low, high = sorted((first, first + (count - 1) * step))
    return low, high, abs(step)


def middle(found: BaseDistribution) -> Any:
    """Return the value in the middle of a distribution; of a list, the first value."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if isinstance(found, CategoricalDistribution):
        return found.choices[0]
    assert isinstance(found, FloatDistribution | IntDistribution)
    if found.log:
        value = math.sqrt(found.low * found.high)
    elif found.step:
        return found.low + round((found.high - found.low) / found.step / 2) * found.step
    else:
        value = (found.low + found.high) / 2
    return round(value) if isinstance(found, IntDistribution) else value


def overrides(values: Mapping[str, Any]) -> list[str]:
    """Return the values of a trial as overrides; numbers are rounded to six significant digits."""
    return [f"{key}={f'{value:.6g}' if isinstance(value, float) else value}" for key, value in values.items()]
