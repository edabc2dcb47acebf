"""Messages about invalid configs, made from errors of Hydra and OmegaConf.

Each message contains the key as typed, the rule, the value and a remedy. This module imports no torch.
"""

from __future__ import annotations

import re
import types
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from enum import Enum
from typing import Any, Union, get_args, get_origin, get_type_hints

import yaml
from hydra.errors import HydraException, MissingConfigException, OverrideParseException, SearchPathException
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException, ValidationError

from rlhf.config.catalogue import all_keys, groups, options
from rlhf.config.schema import SCHEMAS, schema_of

# Exceptions of an invalid config. For some uses of null, Hydra and OmegaConf raise the last two types.
CONFIG_ERRORS = (HydraException, OmegaConfBaseException, yaml.YAMLError, AssertionError, ValueError)

OPTIONAL_GROUPS = ("tuned", "experiment", "debug")

TYPE_NAMES = {float: "a number", int: "a whole number", bool: "true or false", str: "text"}


def explain(error: Exception, overrides: Sequence[str]) -> str:
    """Return the message for an error that composing a config raised.

    Args:
        error: one of `CONFIG_ERRORS`.
        overrides: the overrides of the command line.
    """
    if isinstance(error, OverrideParseException):
        return unreadable(error.override)
    if isinstance(error, MissingConfigException):
        return missing_file(error, overrides)
    if isinstance(error, SearchPathException):
        folder = str(error).partition("'")[2].rpartition("'")[0]
        return f"--config-dir must name a folder laid out like conf/, got {folder}; fix the path"
    if isinstance(error, yaml.YAMLError):
        return f"a config file is not YAML: {' '.join(str(error).split())}; fix the file"
    cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__ or error.__context__
    text = str(error)
    where = match[1] if (match := re.match(r"In '([^']+)': \w+ raised while composing", text)) else None
    if isinstance(cause, ConfigAttributeError | ConfigKeyError) and is_dataclass(cause.object_type):
        match = re.match(r"Could not override '([^']+)'", text)
        typed = match[1] if match else str(cause.full_key)
        return unknown_key(typed, str(cause.full_key), cause.object_type, overrides, where)
    if isinstance(cause, ValidationError) and is_dataclass(cause.object_type):
        return bad_value(cause, overrides, where)
    if match := re.match(r"(?:In '([^']+)': )?Could not override '([^']+)'. No match in the defaults", text):
        return unknown_group(match[2], match[1])
    if match := re.match(r"Ambiguous value for argument '([^=]+)=(.*)'", text):
        key, value = match.groups()
        remedy = f"add -m to run each, or write {key}=[{value}] for a list"
        return f"{key} must have one value in a single run, got {value}; {remedy}"
    if match := re.match(r"Multiple values for (?:schema/\w+@)?([\w@/]+)", text):
        group = match[1]
        return (
            f"{group} must have one option, got more than one; write {group}=<option>, without + or brackets"
        )
    if match := re.match(r"Could not delete from config. '([^']+)' does not exist", text):
        return f"~{match[1]} must name an existing key, got {match[1]}; list the keys with --cfg job"
    if match := re.match(
        r"(?:Could not|Error merging) override '?\+?(?:scorer@)?((?:scorer|gold)\.parts\.\w+)", text
    ):
        at, why = match[1], "the parts of a weighted scorer are scorers, under names of your choice"
        got = next((override for override in overrides if at in override), at)
        remedy = f"choose it by {chosen_by(at)}=<scorer>, with + in front if it is new"
        return f"{at} must be chosen before it is set ({why}), got {got}; {remedy}"
    if match := re.match(r"Could not override '([^']+)'\.\s+To append to your config use (\+.+)", text):
        key, remedy = match.groups()
        return f"{key} must be added with + (the config has no such key), got {remedy[1:]}; write '{remedy}'"
    for key, value in map(split, overrides):
        section, _, rest = key.lstrip("+").partition(".")
        if section == "logger" and "." in rest:
            name = rest.partition(".")[0]
            why = "a logger that is off has no settings"
            return f"{key} needs the logger {name} ({why}), got {value}; add logger={name}"
        if key.startswith("~") or (value == "null" and "." not in key):
            group = key.lstrip("~")
            if group in OPTIONAL_GROUPS:
                return f"{key} must be an option, got {value}; write ~{group} to leave it out"
            got = f"{key}={value}" if value else key
            return f"{group} must be chosen (every run has one), got {got}; set {group}=<option>"
    lines = [line.strip() for line in text.splitlines() if not re.search("full_key|_type=", line)]
    return (f"{error.full_key}: " if isinstance(error, OmegaConfBaseException) else "") + " ".join(lines)


def unreadable(override: str) -> str:
    """Return the message for a command-line argument that is not an override."""
    if "=" not in override:
        if override in groups():
            remedy = f"write {override}=<option> ({', '.join(options(override))})"
        else:
            group = next((group for group in groups() if override in options(group)), None)
            remedy = (
                f"did you mean {group}={override}?"
                if group
                else suggestion(override, groups(), "did you mean {}=<option>?") or "write key=value"
            )
        return f"{override} must read key=value or group=option (it has no '='), got {override}; {remedy}"
    key, value = split(override)
    return (
        f"{key} must have a value that Hydra can read (brackets and quotes are syntax), got {value!r}; "
        f"quote the value for Hydra, and the whole argument for the shell: '{key}=\"<value>\"'"
    )


def missing_file(error: MissingConfigException, overrides: Sequence[str]) -> str:
    """Return the message for an option that does not exist in its group, or a group that does not exist."""
    match = re.search(r"Could not (?:find|load) '([^']+)'", str(error))
    wanted = error.missing_cfg_file or (match[1] if match else "")
    group, _, name = wanted.rpartition("/")
    if not group:
        return f"--config-name must name a file of the config folder, got {wanted}; leave it out"
    choices = [option for option in error.options or () if option] or list(options(group))
    typed = group
    for key, value in map(split, overrides):
        if key.lstrip("+~").partition("@")[0] == group and name in re.split(r"[\[\],\s]+", value):
            typed = key.lstrip("+~")
            break
    else:
        where = next((f"{k}={v}" for k, v in map(split, overrides) if k.lstrip("+") == "experiment"), None)
        return one_of(typed, name, choices, f" (chosen by {where})" if where else "")
    return one_of(typed, name, choices)


def one_of(key: str, value: str, choices: Iterable[str], note: str = "") -> str:
    """Return the message for a value that is not among the choices of `key`; `note` follows the value."""
    choices = list(choices)
    if not choices:
        return f"{key} must be a group with options, got {key}={value}{note}; see --help"
    guess = suggestion(value, choices, "did you mean {}={}?", key) or "choose one of them"
    return f"{key} must be one of {', '.join(choices)}, got {value!r}{note}; {guess}"


def unknown_group(name: str, where: str | None) -> str:
    """Return the message for a group `name` that does not exist; `where` is the config file that names it."""
    place = f" in {where}.yaml" if where else ""
    return f"{name} must be a group{place} (one of {', '.join(groups())}), got {name}; " + (
        suggestion(name, groups(), "did you mean {}?") or "see --help"
    )


def unknown_key(
    typed: str, full_key: str, section: type, overrides: Sequence[str] = (), where: str | None = None
) -> str:
    """Return the message for a key that its section does not have.

    Args:
        typed: the key as typed.
        full_key: the dotted key from the root of the config.
        section: class of the section.
        overrides: the overrides of the command line.
        where: the config file that sets the key; None for the command line.
    """
    parent, _, leaf = full_key.rpartition(".")
    known = [f.name for f in fields(section) if f.name != "name"]
    got = next((override for override in overrides if split(override)[0].lstrip("+~") == typed), typed)
    place = f" in {where}.yaml" if where else ""
    if not parent:
        known = sorted({*known, *groups()})
        guess = suggestion(leaf, known, "did you mean {}?") or suggestion(
            typed.rpartition(".")[2], all_keys(), "did you mean {}?"
        )
        rule = f"{typed} must be a setting or a group{place} (there is no {leaf})"
        return f"{rule}, got {got}; {guess or 'see --help'}"
    option = option_name(section)
    owner = f"{chosen_by(parent)}={option}" if option else parent
    elsewhere = [other for other in owners(parent, leaf) if other != option]
    if elsewhere:
        belongs = ", ".join(f"{chosen_by(parent)}={other}" for other in elsewhere)
        guess = f"it belongs to {belongs}: choose that option, or leave it out"
    else:
        guess = suggestion(leaf, known, f"did you mean {parent}.{{}}?") or suggestion(
            leaf, all_keys(), "did you mean {}?"
        )
    return (
        f"{typed} must be a setting of {owner}{place} ({', '.join(known) or 'it has none'}), got {got}; "
        f"{guess or 'leave it out'}"
    )


def bad_value(error: OmegaConfBaseException, overrides: Sequence[str], where: str | None) -> str:
    """Return the message for a value of the wrong type.

    Args:
        error: the error of OmegaConf.
        overrides: the overrides of the command line.
        where: the config file that sets the value; None for the command line.
    """
    key = str(error.full_key)
    section = error.object_type
    assert section is not None
    leaf = str(error.key)
    hint = get_type_hints(section).get(leaf)
    typed, got = next(((k, v) for k, v in map(split, overrides) if k.lstrip("+") == key), (key, None))
    value = got if got is not None else shown(error.value)
    if inner := next((o for o in overrides if split(o)[0].lstrip("+").startswith(f"{key}.")), None):
        return f"{key} must be {allowed(hint)}, with nothing inside it, got {inner}; leave {inner} out"
    place = f" in {where}.yaml" if where else ""
    if is_dataclass(hint):
        if (group := group_of(key)) in groups():
            at = chosen_by(key)
            choices = ", ".join(options(group))
            return f"{at} chooses what {key} is ({choices}), got {key}={value}; set {at}={value}"
        names = ", ".join(f"{key}.{f.name}" for f in fields(hint))
        return f"{key} is a section of settings ({names}), got {key}={value}; set one of them"
    default = next((f.default for f in fields(section) if f.name == leaf), NO_DEFAULT)
    remedy = "see --help" if default in (NO_DEFAULT, MISSING) else f"set {key}={shown(default)}"
    if isinstance(hint, type) and issubclass(hint, Enum):
        remedy = suggestion(value, [member.name for member in hint], "did you mean {}={}?", key) or remedy
    return f"{typed.lstrip('+')} must be {allowed(hint)}{place}, got {value!r}; {remedy}"


def undefined(cfg: DictConfig, prefix: str = "") -> Iterator[tuple[str, type]]:
    """Yield each key that `+` added to a section without such a key, with the class of the section.

    Args:
        cfg: the config, or a section of the config.
        prefix: the dotted key of `cfg` with a dot at its end; empty for the root.
    """
    section = OmegaConf.get_type(cfg)
    known = {f.name for f in fields(section)} if is_dataclass(section) else None
    for key in map(str, cfg):
        if known is not None and key not in known:
            assert section is not None
            yield f"{prefix}{key}", section
        elif isinstance(child := cfg._get_node(key), DictConfig) and child._content.__class__ is dict:
            yield from undefined(child, f"{prefix}{key}.")


def split(override: str) -> tuple[str, str]:
    """Return the key and the value of an override."""
    key, _, value = override.partition("=")
    return key, value


def shown(value: Any) -> str:
    """Format a value as a user types it on the command line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return f"[{','.join(map(shown, value))}]"
    return value.name if isinstance(value, Enum) else str(value)


def allowed(hint: Any) -> str:
    """Return a description of the values that a type hint allows."""
    if get_origin(hint) in (Union, types.UnionType):
        parts = [allowed(part) for part in get_args(hint) if part is not type(None)]
        return " or ".join([*parts, "null"] if type(None) in get_args(hint) else parts)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return f"one of {', '.join(member.name for member in hint)}"
    if get_origin(hint) in (tuple, list):
        return "a list of numbers, as [a,b]"
    return TYPE_NAMES.get(hint, str(hint))


def suggestion(word: str, choices: Iterable[str], form: str, *first: str) -> str:
    """Return `form`, filled with `first` and the choice closest to `word`; empty if no choice is close."""
    by_leaf = {choice.rpartition(".")[2]: choice for choice in choices}
    close = get_close_matches(word, by_leaf, n=1, cutoff=0.6)
    return form.format(*first, by_leaf[close[0]]) if close else ""


def option_name(section: type) -> str | None:
    """Return the name of the option that has the section class `section`; None if no option has it."""
    stored = schema_of(section)
    return stored and stored.rpartition("/")[2]


def group_of(section: str) -> str:
    """Return the config group of a section key: `scorer` for `gold` and for parts of a weighted scorer."""
    return "scorer" if section == "gold" or ".parts." in section else section


def chosen_by(section: str) -> str:
    """Return the key that selects the option of a section key, for example `scorer@gold` for `gold`."""
    group = group_of(section)
    return section if group == section else f"{group}@{section}"


def owners(section: str, leaf: str) -> list[str]:
    """Return the options that have a key `leaf`, in the group of the section key `section`."""
    prefix = f"schema/{group_of(section)}/"
    return [
        name.removeprefix(prefix)
        for name, cls in SCHEMAS.items()
        if name.startswith(prefix) and leaf in {f.name for f in fields(cls)}
    ]
