"""Loading of the config.yaml that a run saved."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from rlhf.config.mistakes import explained
from rlhf.config.root import Config, to_config
from rlhf.config.schema import SCHEMAS
from rlhf.config.yaml_file import read_document
from rlhf.core.errors import UserError


def load_config(file: Path) -> Config:
    """Return the config in a file that `RunFolder.write_config` wrote, with the section classes of the run.

    Raises:
        UserError: the file is damaged, or has an option of a package that is not installed.
    """
    node = _load_node(file)
    try:
        return to_config(node)
    except OmegaConfBaseException as error:
        raise damaged(file, error) from None


def _load_node(file: Path) -> DictConfig:
    """Return the config in a file that `RunFolder.write_config` wrote, as a typed node that can be changed.

    Raises:
        UserError: the file is damaged, or has an option of a package that is not installed.
    """
    typed = OmegaConf.structured(Config)
    try:
        saved = read_document(file)
        for section, stored in options(saved.pop("defaults")):
            if stored not in SCHEMAS:
                raise UserError(
                    f"{section} must be an option that is installed here ({file} was written with an option "
                    f"of another package), got {stored.rpartition('/')[2]}; install that package"
                )
            OmegaConf.update(typed, section, SCHEMAS[stored])
        merged = OmegaConf.merge(typed, saved)
    except UserError:
        raise
    except (OSError, ValueError, TypeError, YAMLError, OmegaConfBaseException) as error:
        raise damaged(file, error) from None
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


def options(defaults: Iterable[Any]) -> Iterator[tuple[str, str]]:
    """Yield each section of a defaults list that has an option, and the name of the option's schema.

    Raises:
        ValueError, TypeError: the defaults list is not the list of a run.
    """
    for entry in defaults:
        if isinstance(entry, DictConfig):
            ((key, option),) = entry.items()
            group, _, section = str(key).partition("@")
            yield section, f"{group}/{option}"


def damaged(file: Path, error: Exception) -> UserError:
    """Return the error about a config.yaml that is not what a run wrote."""
    reason = " ".join(str(error).split("full_key:")[0].split())
    return UserError(
        f"{file} must be the config that a run wrote, got a file that cannot be read ({reason}); restore the "
        "file (environment.json beside it has the command of the run), or start the run again with "
        "resume=never"
    )
