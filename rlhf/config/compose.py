"""Composition of a config from overrides, as on the command line. This module imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

import hydra
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from rlhf.config import catalogue, plugins
from rlhf.config.environment import default_scorer
from rlhf.config.own_files import length_of, tuned_of
from rlhf.config.root import Config, to_config
from rlhf.core.pasting import override

OmegaConf.register_new_resolver("length_of", length_of, replace=True)  # conf/config.yaml
OmegaConf.register_new_resolver("tuned_of", tuned_of, replace=True)


def _chat_by_default(*, _root_: DictConfig) -> bool:
    """Return the default of `task.chat`; the module that reads files and models is above this one."""
    return bool(import_module("rlhf.checks.data").chat_by_default(_root_))


OmegaConf.register_new_resolver("chat_by_default", _chat_by_default, replace=True)  # conf/task/local.yaml


def compose(overrides: list[str]) -> Config:
    """Return the config of `python -m rlhf.train <overrides>`, without the checks of its values."""
    return to_config(default_scorer(compose_node(overrides)))


def compose_node(overrides: list[str]) -> DictConfig:
    """Return the config of `python -m rlhf.train <overrides>` as an OmegaConf node.

    Required values may be missing. During a run, Hydra's search path is used, which includes `--config-dir`.
    Otherwise `--config-dir` is read from the command line of this process.
    """
    if GlobalHydra.instance().is_initialized():
        return hydra.compose("config", overrides)
    with initialized() as search:
        return hydra.compose("config", [*search, *overrides])


@contextmanager
def initialized() -> Iterator[list[str]]:
    """Initialize Hydra with the folder conf/ during the block.

    Yields:
        Overrides that add the folders of `catalogue.conf_dirs` to the search path.
    """
    plugins.load()
    own = [f"file://{folder.resolve()}" for folder in catalogue.conf_dirs()[1:]]
    with hydra.initialize_config_dir(str(catalogue.conf_dir()), version_base="1.3"):
        yield [override("hydra.searchpath", own)] if own else []
