"""Construction of the part that a config section configures, from the address in the section's `option`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rlhf.config.schema import PARTS, Section

if TYPE_CHECKING:
    from rlhf.config.root import Config
    from rlhf.tasks.source import Source


def part(section: Section) -> Any:
    """Import and return the class or function at the address of the option of `section`.

    Raises:
        KeyError: the option declares no address. A section does not inherit the address of its base class.
    """
    module, _, name = PARTS[type(section)].partition(":")
    return getattr(import_module(module), name)


def make(section: Section, *context: object) -> Any:
    """Return the part that `section` configures, by calling its factory with `section` and `context`."""
    return part(section)(section, *context)


def build_source(cfg: Config) -> Source:
    """Return the source of the data of a run. With an environment, prompts that are texts become messages."""
    from rlhf.tasks.source import DialogueSource

    source: Source = make(cfg.task)
    return DialogueSource(source) if cfg.environment.answers and not source.conversational else source
