"""Overrides as typed, and the config files that they select. This module imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from omegaconf import OmegaConf

from rlhf.config.catalogue import option_files
from rlhf.config.schema import ABSENT, value_at


@dataclass(frozen=True, slots=True)
class Override:
    """An override as typed, such as `+scorer@scorer.parts.a=facts`.

    Args:
        text: the whole override.
        sign: "", "+", "++" or "~".
        key: the key without the sign, with the section after `@`.
        value: the value without quotes around it.
    """

    text: str
    sign: str
    key: str
    value: str

    @property
    def typed(self) -> str:
        """The key with the sign."""
        return self.sign + self.key

    @property
    def group(self) -> str:
        """The key without the section after `@`."""
        return self.key.partition("@")[0]

    @property
    def options(self) -> list[str]:
        """The words of the value, which may be a list of options."""
        return re.split(r"[\[\],\s]+", self.value)


def read_overrides(overrides: Iterable[str]) -> list[Override]:
    """Return the overrides of a command line."""
    found = []
    for text in overrides:
        typed, _, value = text.partition("=")
        key = typed.lstrip("+~")
        value = value[1:-1] if re.fullmatch('"[^"]*"', value) else value
        found.append(Override(text, typed.removesuffix(key), key, value))
    return found


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """A file with an option of a group.

    Args:
        name: group and option, such as "experiment/mine".
        section: the dotted key of the section that the file sets; empty for the root.
        content: the settings, usually a dictionary.
    """

    name: str
    section: str
    content: Any

    @property
    def defaults(self) -> Iterator[tuple[str, str]]:
        """Group and option of each entry of the defaults list: "override /algo", "dpo" or "", "mine"."""
        for entry in self.content.get("defaults", ()) if isinstance(self.content, dict) else ():
            for group, value in entry.items() if isinstance(entry, dict) else [("", entry)]:
                for option in value if isinstance(value, list) else [value]:
                    yield str(group), str(option)

    def value_of(self, key: str) -> Any:
        """Return the value that the file sets for a dotted key; `ABSENT`: it sets none."""
        if key == self.section:
            return self.content
        return value_at(self.content, key.removeprefix(f"{self.section}.") if self.section else key)


def selected_files(overrides: Iterable[Override]) -> Iterator[ConfigFile]:
    """Yield the files of the options that overrides select, and of those in their defaults lists."""
    waiting = [
        (f"{each.group}/{option}", each.key.rpartition("@")[2])
        for each in overrides
        for option in each.options
    ]
    for name, section in waiting:  # the list grows
        group, _, option = name.removesuffix(".yaml").rpartition("/")
        if (path := option_files(group).get(option)) is None:
            continue
        package = re.search(r"^# *@package +(\S+)", path.read_text(encoding="utf-8"), re.M)
        at = package[1].replace("_global_", "") if package else section.replace("/", ".")
        file = ConfigFile(name, at, OmegaConf.to_container(OmegaConf.load(path), resolve=False))
        yield file
        for entry, other in file.defaults:
            own, _, place = entry.split(" ")[-1].partition("@")
            own = own[1:] if own.startswith("/") else f"{group}/{own}".rstrip("/")
            found = f"{own}/{other}", place or (section if own == group else own)
            waiting += [found] if found not in waiting else []


def files_that_set(key: str, overrides: Iterable[Override]) -> Iterator[tuple[str, Any]]:
    """Yield the name of each selected file that sets a dotted key, and the value."""
    for file in selected_files(overrides):
        if (value := file.value_of(key)) is not ABSENT:
            yield file.name, value
