"""Compose a config from overrides, as the command line does."""

from __future__ import annotations

import hydra
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from rlhf.config import Config


def compose(overrides: list[str]) -> Config:
    """The config of `python -m rlhf.train <overrides>`.

    Inside a run the search path is that of its command line, so a user's `--config-dir` counts here too.
    """
    if GlobalHydra.instance().is_initialized():
        composed = hydra.compose("config", overrides)
    else:
        from rlhf.options import conf_dir

        with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
            composed = hydra.compose("config", overrides)
    made = OmegaConf.to_object(composed)
    assert isinstance(made, Config)
    return made
