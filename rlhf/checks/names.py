"""Names that become part of paths: names of sections (algorithm, task, model and so on) and of splits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rlhf.checks.rules import rule
from rlhf.config.catalogue import options
from rlhf.config.mistakes import chosen_by, group_of, option_name, split
from rlhf.config.root import Config
from rlhf.config.schema import sections

NAMED = ("algo", "model", "task", "generator", "backend", "scorer", "gold")


@rule
def names(cfg: Config) -> Iterator[str]:
    """Yield an error for each section whose name is not that of its option, for example in a recipe."""
    for key, section in sections(cfg):
        name, option = getattr(section, "name", None), option_name(type(section))
        if name is None or option is None:
            continue
        known = options("model") if key == "model" else [option]
        if name not in known:
            yield wrong_name(key, name)


@rule
def splits(cfg: Config) -> Iterator[str]:
    """Yield an error if the name of a split leads out of a folder: files of stand-ins have its name."""
    split = getattr(cfg.task, "validation_split", "validation")
    if not split or split.startswith(".") or "/" in split or "\0" in split:
        yield (
            "task.validation_split must be the name of a split (files have its name), got "
            f"{split!r}; set task.validation_split=test"
        )


def typed_names(overrides: Sequence[str]) -> Iterator[str]:
    """Yield an error for each override that sets the name of a section, such as `algo.name=ppo`."""
    for key, value in map(split, overrides):
        at, dot, leaf = key.lstrip("+").rpartition(".")
        if dot and leaf == "name" and (at in NAMED or ".parts." in at):
            yield wrong_name(at, value)


def wrong_name(at: str, name: str) -> str:
    """Return the message for a section `at` whose key `name` was set."""
    exists = name in options(group_of(at))
    remedy = f"set {chosen_by(at)}={name}" if exists else f"choose an option with {chosen_by(at)}=<option>"
    return f"{at}.name must not be set (the option of {chosen_by(at)} sets it), got {name}; {remedy}"
