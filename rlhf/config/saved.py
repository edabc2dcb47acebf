"""Loading of the config.yaml that a run saved."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig, OmegaConf

from rlhf.config.schema import SCHEMAS
from rlhf.core.errors import UserError

if TYPE_CHECKING:
    from rlhf.config.root import Config


def load_config(file: Path) -> Config:
    """Return the config in a file that `RunFolder.write_config` wrote, with the section classes of the run.

    Raises:
        UserError: the config has an option of a package that is not installed.
    """
    from rlhf.config.root import Config

    loaded = OmegaConf.to_object(load_node(file))
    assert isinstance(loaded, Config)
    return loaded


def load_node(file: Path) -> DictConfig:
    """Return the config in a file that `RunFolder.write_config` wrote, as a typed node that can be changed.

    Raises:
        UserError: the config has an option of a package that is not installed.
    """
    from rlhf.config.root import Config

    saved = OmegaConf.load(file)
    assert isinstance(saved, DictConfig)
    defaults = saved.pop("defaults")
    typed = OmegaConf.structured(Config)
    for entry in defaults:
        if isinstance(entry, DictConfig):
            ((key, option),) = entry.items()
            group, _, section = str(key).partition("@")
            if (stored := f"{group}/{option}") not in SCHEMAS:
                raise UserError(
                    f"{section} must be an option that is installed here ({file} was written with an option "
                    f"of another package), got {option}; install that package"
                )
            OmegaConf.update(typed, section, SCHEMAS[stored])
    merged = OmegaConf.merge(typed, saved)
    assert isinstance(merged, DictConfig)
    return merged
