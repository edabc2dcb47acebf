"""Composition of a config from overrides, and from the config.yaml that a run saved. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from rlhf.config.environments import default_scorer
from rlhf.config.root import Config, to_config
from rlhf.config.schema import SCHEMAS
from rlhf.core.errors import UserError, override
from rlhf.core.files import read_document
from rlhf.words import catalogue
from rlhf.words.catalogue import length_of, tuned_of
from rlhf.words.mistakes import explained

# Composition of a config from overrides, as on the command line.


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
    catalogue.load_plugins()
    own = [f"file://{folder.resolve()}" for folder in catalogue.conf_dirs()[1:]]
    with hydra.initialize_config_dir(str(catalogue.conf_dir()), version_base="1.3"):
        yield [override("hydra.searchpath", own)] if own else []


# Loading of the config.yaml that a run saved.


def load_config(file: Path) -> Config:
    """Return the config in a file that `RunFolder.write_config` wrote, with the section classes of the run.

    Raises:
        UserError: the file is damaged, or has an option of a package that is not installed.
    """
    node = _load_node(file)
    try:
        return to_config(node)
    except OmegaConfBaseException as error:
        raise _damaged(file, error) from None


def _load_node(file: Path) -> DictConfig:
    """Return the config in a file that `RunFolder.write_config` wrote, as a typed node that can be changed.

    Raises:
        UserError: the file is damaged, or has an option of a package that is not installed.
    """
    typed = OmegaConf.structured(Config)
    try:
        saved = read_document(file)
        chosen = [
            pair for entry in saved.pop("defaults") if isinstance(entry, DictConfig) for pair in entry.items()
        ]
        for key, option in chosen:
            group, _, section = str(key).partition("@")
            stored = f"{group}/{option}"
            if stored not in SCHEMAS:
                raise UserError(
                    f"{section} must be an option that is installed here ({file} was written with an option "
                    f"of another package), got {option}; install that package"
                )
            OmegaConf.update(typed, section, SCHEMAS[stored])
        merged = OmegaConf.merge(typed, saved)
    except UserError:
        raise
    except (OSError, ValueError, TypeError, YAMLError, OmegaConfBaseException) as error:
        raise _damaged(file, error) from None
    assert isinstance(merged, DictConfig)
    return merged


def overridden(
    file: Path, overrides: Sequence[str], why_one: str, apply: Callable[[DictConfig, list[Override]], None]
) -> Config:
    """Return the config in a file that `RunFolder.write_config` wrote, changed by overrides.

    Args:
        file: the file.
        overrides: overrides of the command line, each `key=value`.
        why_one: text with `{}` for the override, about a key that is not set to one value.
        apply: function that applies the parsed overrides to the config, or raises UserError.

    Raises:
        UserError: an override is invalid or is refused, or the file is damaged.
    """
    node = _load_node(file)
    OmegaConf.set_struct(node, True)
    with explained(overrides):
        parsed = OverridesParser.create().parse_overrides(list(overrides))
        for each in parsed:
            if str(each.input_line).startswith(("+", "~")) or each.is_sweep_override():
                raise UserError(f"{key_of(each)} must be set to one value{why_one.format(each.input_line)}")
        apply(node, parsed)
        return to_config(node)


def key_of(override: Override) -> str:
    """Return the key of a parsed override, with the package after `@`."""
    return str(override.input_line).partition("=")[0]


def _damaged(file: Path, error: Exception) -> UserError:
    """Return the error about a config.yaml that is not what a run wrote."""
    reason = " ".join(str(error).split("full_key:")[0].split())
    return UserError(
        f"{file} must be the config that a run wrote, got a file that cannot be read ({reason}); restore the "
        "file (environment.json beside it has the command of the run), or start the run again with "
        "resume=never"
    )
