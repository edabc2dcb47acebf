"""How a dataclass becomes a config option: the base of every section, and its registration with Hydra.

A section is a `@dataclass(kw_only=True, slots=True)`; slots make a key that was added with `+` an error: the
object has nowhere to put it. An option is registered as `schema/<group>/<name>`, which
`conf/<group>/<name>.yaml` names first in its defaults list. Nothing here imports torch, so `--help` and a bad
key answer at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, TypeVar

from hydra.core.config_store import ConfigStore

if TYPE_CHECKING:
    from rlhf.config.root import Config


T = TypeVar("T", bound=type)


SCHEMAS: dict[str, type] = {}  # "schema/<group>/<name>" -> the class registered under it


@dataclass(kw_only=True, slots=True)
class Section:
    """One part of the configuration."""

    def problems(self, cfg: Config) -> Iterator[str]:
        """Yield what is wrong with this section in `cfg`: key as typed, rule, reason, value, remedy."""
        return iter(())

    def warnings(self, cfg: Config) -> Iterator[str]:
        """Yield settings of this section that have no effect in `cfg`, or are allowed but doubtful."""
        return iter(())


def sections(section: Section, key: str = "") -> Iterator[tuple[str, Section]]:
    """Yield a section and all below it, each with its dotted key; that of `section` itself is `key`."""
    yield key, section
    for field in fields(section):
        value = getattr(section, field.name)
        at = f"{key}.{field.name}".lstrip(".")
        named = (
            {f"{at}.{name}": part for name, part in value.items()} if isinstance(value, dict) else {at: value}
        )
        for name, part in named.items():
            if isinstance(part, Section):
                yield from sections(part, name)


def option(group: str, name: str) -> Callable[[T], T]:
    """Register a section class as the option `name` of the config group `group`."""

    def store(cls: T) -> T:
        ConfigStore.instance().store(group=f"schema/{group}", name=name, node=cls)
        SCHEMAS[f"schema/{group}/{name}"] = cls
        return cls

    return store


def schema_of(cls: type) -> str | None:
    """Where `cls` is registered, as `schema/<group>/<name>`; None where it is no option."""
    return next((name for name, stored in SCHEMAS.items() if stored is cls), None)
