"""Rules between the optimizer, the backend and the samples that the optimizer trains on."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from rlhf.checks.rules import doubt, training_rule
from rlhf.config.root import Config
from rlhf.config.schedule import ESSScaling, Optimizer
from rlhf.config.schema import plain


@training_rule
def optimizer_is_available(cfg: Config) -> Iterator[str]:
    """Yield an error if the backend or the installed packages lack the optimizer."""
    name = cfg.optim.optimizer
    if name is not Optimizer.adamw and not cfg.backend.any_optimizer:
        yield (
            f"optim.optimizer must be adamw with backend={cfg.backend.name} (its engine has no other "
            f"optimizer), got {name.value}; set optim.optimizer=adamw or backend=torch"
        )
    elif name is Optimizer.adamw_8bit and importlib.util.find_spec("bitsandbytes") is None:
        yield (
            "optim.optimizer=adamw_8bit needs the package bitsandbytes, which is not installed; "
            "run: pip install -e '.[bnb]', or set optim.optimizer=adamw"
        )


@training_rule
def ess_needs_a_sampler(cfg: Config) -> Iterator[str]:
    """Yield an error if the learning rate is scaled by a sample size and no sampler gives log-probs."""
    scaling = cfg.optim.ess_scaling
    if scaling is not ESSScaling.none and (cfg.algo.supervised or not cfg.generator.rollouts):
        stored = (
            f"algo={cfg.algo.name}"
            if cfg.algo.supervised
            else f"generator={cfg.generator.name} without a path"
        )
        yield (
            f"optim.ess_scaling must be none with {stored} (the effective sample size is computed from the "
            f"sampler's log-probs), got {scaling.value}; set optim.ess_scaling=none"
        )


@doubt
def ess_without_scaling(cfg: Config) -> Iterator[str]:
    """Yield a warning if the on-policy sample size is set and the learning rate is not scaled."""
    optim = cfg.optim
    if optim.ess_scaling is ESSScaling.none and optim.ess_on_policy != 1:
        yield (
            f"optim.ess_on_policy={plain(optim.ess_on_policy)} has no effect with optim.ess_scaling=none; "
            "set optim.ess_scaling=sqrt"
        )
