"""The command line of a run: the options of the groups, then the settings that differ from their values.

The command is derived from the config, so that it is complete for every run: of a recipe, a sweep, a stage of
a pipeline, or a longer run of `rlhf.extend`. This module imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from rlhf.config.compose import compose_node
from rlhf.config.identity import leave_out, not_in_name
from rlhf.config.mistakes import CONFIG_ERRORS, chosen_by, option_name
from rlhf.config.schema import sections
from rlhf.config.yaml_file import flat
from rlhf.core.pasting import override

if TYPE_CHECKING:
    from rlhf.config.root import Config

GROUPS = ("algo", "task", "model", "generator", "backend", "scorer", "gold")
_ROUNDS = 3  # a setting may follow another one (`${...}`), so that it differs only after the other is set


def settings(cfg: Config) -> dict[str, Any] | None:
    """Return overrides that compose `cfg`, by key: options, then settings; None if it cannot be composed.

    Settings that do not change the result (`not_in_name`) are left out. A config that was made in Python may
    have sections of no option, and cannot be composed.
    """
    found: dict[str, Any] = dict(options(cfg))
    wanted = values(cfg)
    if not found.keys() >= set(map(chosen_by, GROUPS)):
        return None
    try:
        node = compose_node([override(key, value) for key, value in found.items()])
        for _ in range(_ROUNDS):
            now = values(node)
            if now == wanted:
                return found
            for key, value in wanted.items():
                if key not in now or now[key] != value:
                    found[key if key in now else f"+{key}"] = value
                    OmegaConf.update(node, key, value, force_add=True)
    except CONFIG_ERRORS:
        return None
    return None


def options(cfg: Config) -> Iterator[tuple[str, str]]:
    """Yield the key and the value of each override that selects an option, in the order of `GROUPS`."""
    parts = dict(sections(cfg))
    for key in GROUPS:
        option = cfg.model.name if key == "model" else option_name(type(parts[key]))
        if option is not None:
            yield chosen_by(key), option
    for key, part in parts.items():
        if ".parts." in key and (option := option_name(type(part))) is not None:
            yield f"+{chosen_by(key)}", option


def values(cfg: Config | DictConfig) -> dict[str, Any]:
    """Return the settings that change the result of a run: dotted key -> value."""
    node = cfg if isinstance(cfg, DictConfig) else OmegaConf.structured(cfg)
    tree: Any = OmegaConf.to_container(node, resolve=True, enum_to_str=True)
    for dotted in not_in_name():
        leave_out(tree, dotted)
    return {key: value for key, value in flat(tree) if not key.endswith(".name")}
