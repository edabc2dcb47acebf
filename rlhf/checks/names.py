"""Rules for names: of sections, of `tuned` settings, of recipes, and of the user's files."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from rlhf.checks.rules import rule
from rlhf.config.catalogue import all_keys, option_files, options
from rlhf.config.mistakes import chosen_by, group_of, option_name
from rlhf.config.overrides import read_overrides
from rlhf.config.root import Config
from rlhf.config.schema import sections

COMMAND = re.compile(r"^# Command:\s*(python -m rlhf\.(\w+) .*)$", re.M)  # in the head of a recipe
# Imported by each run, directly or by transformers, with names that a file of the user may have.
LIBRARIES = (
    "accelerate",
    "datasets",
    "deepspeed",
    "mlflow",
    "peft",
    "tokenizers",
    "torch",
    "trackio",
    "transformers",
    "vllm",
    "wandb",
)
_NAMED = ("algo", "model", "task", "generator", "backend", "scorer", "gold")


@rule
def _names(cfg: Config) -> Iterator[str]:
    for key, section in sections(cfg):
        name, option = getattr(section, "name", None), option_name(type(section))
        if name is None or option is None:
            continue
        known = options("model") if key == "model" else [option]
        if name not in known:
            yield _wrong_name(key, name)


def typed_names(overrides: Sequence[str]) -> Iterator[str]:
    """Yield an error for each override that sets the name of a section, such as `algo.name=ppo`."""
    for each in read_overrides(overrides):
        at, dot, leaf = each.key.rpartition(".")
        if dot and leaf == "name" and (at in _NAMED or ".parts." in at):
            yield _wrong_name(at, each.value)


def removed(overrides: Sequence[str]) -> Iterator[str]:
    """Yield an error for each override that removes what every run has, such as `~seed`."""
    needed = [key for key in all_keys() if not key.startswith("logger.")]
    for each in read_overrides(overrides):
        if each.sign == "~" and any(key == each.key or key.startswith(f"{each.key}.") for key in needed):
            yield f"{each.key} must not be removed (every run has it), got {each.text}; leave {each.text} out"


def _wrong_name(at: str, name: str) -> str:
    """Return the message for a section `at` whose key `name` was set."""
    exists = name in options(group_of(at))
    remedy = f"set {chosen_by(at)}={name}" if exists else f"choose an option with {chosen_by(at)}=<option>"
    return f"{at}.name must not be set (the option of {chosen_by(at)} sets it), got {name}; {remedy}"


def unknown_tuning(overrides: Sequence[str]) -> list[str]:
    """Return an error for each `tuned=` that names no file.

    Hydra accepts an unknown `tuned=`, because the defaults list marks the group as optional.
    """
    names = [word.partition("=")[2] for word in overrides if word.lstrip("+").startswith("tuned=")]
    return [
        f"tuned must be one of {', '.join(options('tuned'))}, got {name!r}; write ~tuned for none"
        for name in names
        if name not in options("tuned")
    ]


def recipes_of_other_commands(overrides: Sequence[str]) -> Iterator[str]:
    """Yield an error for each `experiment=` of the overrides whose recipe is for `rlhf.relabel`."""
    for each in read_overrides(overrides):
        file = option_files("experiment").get(each.value) if each.key == "experiment" else None
        found = COMMAND.search(file.read_text(encoding="utf-8")) if file is not None else None
        if found is not None and found[2] == "relabel":
            yield (
                f"experiment must be a recipe that trains ({each.value} only labels pairs), got "
                f"{each.value}; run: {found[1]}"
            )


@rule
def _libraries_are_not_hidden(cfg: Config) -> Iterator[str]:
    for name in LIBRARIES:
        for file in (Path(f"{name}.py"), Path(name, "__init__.py")):
            if file.is_file() and _imports(name, file):
                yield (
                    f"{file} must not have the name of a library (Python imports it instead of {name}), got "
                    f"{file.absolute()}; rename it"
                )


def _imports(name: str, file: Path) -> bool:
    """Return whether `import <name>` would read `file`."""
    found = find_spec(name)
    return found is not None and found.origin is not None and file.samefile(found.origin)
