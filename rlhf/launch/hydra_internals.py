"""Private parts of Hydra and of its submitit launcher that this project depends on.

Hydra has no public interface for these uses. All uses of private parts are in this module, and each has a
test in tests/launch/test_hydra_internals.py, so that these tests fail after an incompatible upgrade. This
module imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton
from hydra.plugins.launcher import Launcher
from omegaconf import DictConfig, OmegaConf


def uses_basic_sweeper(config: DictConfig) -> bool:
    """Return whether the sweeper is Hydra's own, which runs every combination of the given values."""
    target: str = config.hydra.sweeper._target_
    return target == f"{BasicSweeper.__module__}.{BasicSweeper.__qualname__}"


def combinations(overrides: list[Override]) -> list[list[str]]:
    """Return the overrides of each job that Hydra's own sweeper makes from the swept `overrides`."""
    (jobs,) = BasicSweeper.split_arguments(overrides, max_batch_size=None)
    return jobs


def flags() -> dict[str, bool]:
    """Return the flags of Hydra's command line, such as `--cfg`, and whether a value follows each flag."""
    actions = get_args_parser()._actions
    return {flag: action.nargs != 0 for action in actions for flag in action.option_strings}


@contextmanager
def launchers_wrapped_by(wrap: Callable[[Launcher], Launcher]) -> Iterator[None]:
    """Replace the launcher of a sweep by `wrap(launcher)`. Hydra has no hook between sweeper and launcher."""
    original = Plugins.instantiate_launcher

    def instantiate(plugins: Plugins, *, config: DictConfig, **others: Any) -> Launcher:
        launcher = wrap(original(plugins, config=config, **others))
        launcher.setup(config=config, **others)
        return launcher

    Plugins.instantiate_launcher = instantiate  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Plugins.instantiate_launcher = original  # type: ignore[method-assign]


def submitit_executor(launcher: Launcher) -> str | None:
    """Return the executor of a submitit launcher, "slurm" or "local"; None for another launcher."""
    return getattr(launcher, "_EXECUTOR", None)


def joblib_settings(launcher: Launcher) -> dict[str, Any] | None:
    """Return the settings of a joblib launcher, which can be changed; None for another launcher."""
    return getattr(launcher, "joblib", None)


def submitit_general_settings() -> set[str]:
    """Return the keys of `hydra.launcher` that apply to every submitit executor."""
    from hydra_plugins.hydra_submitit_launcher.config import BaseQueueConf

    return set(map(str, OmegaConf.structured(BaseQueueConf)))


def submitit_calls(jobs: Sequence[list[str]], first: int) -> list[tuple[Any, ...]]:
    """Return the arguments with which a submitit launcher is called in each job.

    Args:
        jobs: overrides of each job.
        first: number of the first job.
    """
    state = Singleton.get_state()
    return [
        (overrides, "hydra.sweep.dir", number, f"job_id_for_{number}", state)
        for number, overrides in enumerate(jobs, first)
    ]
