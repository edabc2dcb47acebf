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
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton
from hydra.plugins.completion_plugin import CompletionPlugin
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf


def uses_basic_sweeper(config: DictConfig) -> bool:
    """Return whether the sweeper is Hydra's own, which runs every combination of the given values."""
    target: str = config.hydra.sweeper._target_
    return target == f"{BasicSweeper.__module__}.{BasicSweeper.__qualname__}"


def register_sweeper(target: str, sweeper: type[Sweeper]) -> None:
    """Let Hydra make `sweeper` for the `_target_` of a config, which must begin with `hydra_plugins.`."""
    Plugins.instance().class_name_to_class[target] = sweeper


def combinations(overrides: list[Override]) -> list[list[str]]:
    """Return the overrides of each job that Hydra's own sweeper makes from the swept `overrides`."""
    (jobs,) = BasicSweeper.split_arguments(overrides, max_batch_size=None)
    return jobs


def flags() -> dict[str, bool]:
    """Return the flags of Hydra's command line, such as `--cfg`, and whether a value follows each flag."""
    actions = get_args_parser()._actions
    return {flag: action.nargs != 0 for action in actions for flag in action.option_strings}


def matching_keys(config: DictConfig, word: str) -> list[str]:
    """Return the keys of a config that begin with a word, such as `algo.` and `seed=`, by Hydra's completion.

    After `<key>=` the result is the key with its value; if the value is null, nothing.
    """
    return CompletionPlugin._get_matches(config, word)


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


def submits_to_slurm(config: DictConfig) -> bool:
    """Return whether the launcher of a sweep submits SLURM jobs."""
    return str(config.hydra.launcher._target_).endswith(".SlurmLauncher")


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


def multirun_config(overrides: list[str]) -> DictConfig:
    """Return the config of the sweep `python -m rlhf.train -m <overrides>`. Hydra must be initialized."""
    hydra = GlobalHydra.instance().hydra
    assert hydra is not None, "inside hydra.initialize_config_dir"
    return hydra.compose_config(
        config_name="config", overrides=overrides, run_mode=RunMode.MULTIRUN, with_log_configuration=False
    )
