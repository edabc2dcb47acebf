"""Compose a config from overrides, as the command line does. Imports no torch."""

from __future__ import annotations

import hydra
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from rlhf.config import catalogue as options
from rlhf.config import plugins
from rlhf.config.mistakes import CONFIG_ERRORS, explain
from rlhf.config.root import Config
from rlhf.core.errors import UserError


def compose(overrides: list[str]) -> Config:
    """The config of `python -m rlhf.train <overrides>`."""
    made = OmegaConf.to_object(compose_node(overrides))
    assert isinstance(made, Config)
    return made


def compose_node(overrides: list[str]) -> DictConfig:
    """The same before it is turned into objects: the values may still be wrong together, or missing.

    Inside a run the search path is that of its command line, so a user's `--config-dir` counts here too;
    elsewhere it is read from the command line of this process.
    """
    if GlobalHydra.instance().is_initialized():
        return hydra.compose("config", overrides)
    plugins.load()
    own = ",".join(f"file://{folder.resolve()}" for folder in options.conf_dirs()[1:])
    search = [f"hydra.searchpath=[{own}]"] if own else []
    with hydra.initialize_config_dir(str(options.conf_dir()), version_base="1.3"):
        return hydra.compose("config", [*search, *overrides])


def composed(words: list[str]) -> DictConfig:
    """`compose_node` of the words that a user typed.

    Raises:
        UserError: the words do not compose.
    """
    try:
        return compose_node(words)
    except CONFIG_ERRORS as error:
        raise UserError(explain(error, words)) from error
