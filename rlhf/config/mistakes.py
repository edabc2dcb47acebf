"""Messages about invalid configs, made from errors of Hydra and OmegaConf.

Each message contains the key as typed, the rule, the value and a remedy. This module imports no torch.
"""

from __future__ import annotations

import math
import re
import types
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, Union, get_args, get_origin, get_type_hints

import yaml
from hydra.errors import HydraException, MissingConfigException, OverrideParseException, SearchPathException
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    InterpolationKeyError,
    OmegaConfBaseException,
    ValidationError,
)

from rlhf.config.arguments import in_ascii, several_values, unreadable
from rlhf.config.catalogue import all_keys, declarations, groups, options
from rlhf.config.foreign import OTHERS, meaning
from rlhf.config.schema import SCHEMAS, fact, schema_of
from rlhf.config.suggestions import (
    closest,
    keys_of_run,
    one_of,
    option_named,
    own_value,
    simple,
    suggestion,
    translated,
)
from rlhf.core.pasting import setting

# Exceptions of an invalid config. For some uses of null, Hydra and OmegaConf raise the last two types.
CONFIG_ERRORS = (HydraException, OmegaConfBaseException, yaml.YAMLError, AssertionError, ValueError)

_OPTIONAL_GROUPS = ("tuned", "length", "experiment", "debug")

_TYPE_NAMES = {float: "a number", int: "a whole number", bool: "true or false", str: "text"}


def explain(error: Exception, overrides: Sequence[str]) -> str:
    """Return the message for an error that composing a config raised.

    Args:
        error: one of `CONFIG_ERRORS`.
        overrides: the overrides of the command line.
    """
    if isinstance(error, OverrideParseException):
        return unreadable(error.override, overrides)
    if isinstance(error, MissingConfigException):
        return _missing_file(error, overrides)
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
    if isinstance(cause, InterpolationKeyError) and cause.full_key != "_dummy_":  # a key of the defaults list
        return _unknown_reference(cause, overrides)
    if isinstance(cause, ValidationError) and is_dataclass(cause.object_type):
        return _bad_value(cause, overrides, where)
    parts = r"(?:Could not|Error merging) override '?\+?(?:\S+@)?((?:scorer|gold|task)\.parts\.\w+)"
    if match := re.match(rf"(?:In '\S+': )?{parts}", text):
        at = match[1]
        kind = "task" if at.startswith("task.") else "scorer"
        why = f"the parts of a {kind} are {kind}s, under names of your choice"
        got = next((override for override in overrides if at in override), at)
        remedy = f"choose it by {chosen_by(at)}=<{kind}>, with + in front if it is new"
        return f"{at} must be chosen before it is set ({why}), got {got}; {remedy}"
    no_match = r"(?:In '([^']+)': )?Could not override '([^']+)'\.\s+(?:No match|Did you mean to)"
    if match := re.match(no_match, text):
        return _unknown_group(match[2], match[1])
    if match := re.match(r"Ambiguous value for argument '([^=]+)=(.*)'", text):
        return several_values(*match.groups())
    for twice in (r"Multiple values for (?:schema/\w+@)?([\w@/]+)", r"(?:schema/)?(\w+)\S* appears more"):
        if match := re.match(twice, text):
            rule = f"{match[1]} must have one option, got more than one"
            return f"{rule}; write {match[1]}=<option>, without + or brackets"
    if match := re.match(r"Could not delete from config. '([^']+)' does not exist", text):
        return f"~{match[1]} must name an existing key, got {match[1]}; list the keys with --cfg job"
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
            if group in _OPTIONAL_GROUPS:
                return f"{key} must be an option, got {value}; write ~{group} to leave it out"
            got = f"{key}={value}" if value else key
            listed = f" ({', '.join(options(group))})" if options(group) else ""
            return f"{group} must be chosen (every run has one), got {got}; set {group}=<option>{listed}"
        group = key.lstrip("+").partition("@")[0]
        if isinstance(error, ValueError) and group in groups() and value not in options(group):
            return one_of(key.lstrip("+"), value, options(group))  # for example a number, or true
    if match := re.match(r"Error merging override \+*([\w.]+)=", text):
        return _bad_list(match[1], overrides)
    lines = [line.strip() for line in text.splitlines() if not re.search("full_key|_type=", line)]
    return (f"{error.full_key}: " if isinstance(error, OmegaConfBaseException) else "") + " ".join(lines)


def _missing_file(error: MissingConfigException, overrides: Sequence[str]) -> str:
    """Return the message for an option that does not exist in its group, or a group that does not exist."""
    match = re.search(r"Could not (?:find|load) '([^']+)'", str(error))
    wanted = error.missing_cfg_file or (match[1] if match else "")
    group, _, name = wanted.rpartition("/")
    if not group:
        return f"--config-name must name a file of the config folder, got {wanted}; leave it out"
    for key, value in map(split, overrides):
        at = key.lstrip("+~").partition("@")[0]
        if wanted in [f"{at}/{option}" for option in re.split(r"[\[\],\s]+", value)]:
            named = options(at.removeprefix("schema/"))
            return one_of(key.lstrip("+~"), wanted.removeprefix(f"{at}/"), named)
    choices = [option for option in error.options or () if option] or list(options(group))
    where = next((f"{k}={v}" for k, v in map(split, overrides) if k.lstrip("+") == "experiment"), None)
    return one_of(group, name, choices, f" (chosen by {where})" if where else "")


def _unknown_group(name: str, where: str | None) -> str:
    """Return the message for a group `name` that does not exist; `where` is the config file that names it."""
    place = f" in {where}.yaml" if where else ""
    group, _, section = name.partition("@")
    if section and group in groups():
        guess = "did you mean scorer@gold?" if group == "scorer" else f"choose by {group}=<option>"
        rule = f"{name} must name a section with options of {group}{place} (there is no {section})"
        return f"{rule}, got {name}; {guess}"
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
    value = got.partition("=")[2]
    place = f" in {where}.yaml" if where else ""
    if where and not parent and where.startswith(f"{leaf}/"):
        return (
            f"{where}.yaml must begin with # @package _global_ (its settings belong to several sections), "
            f"got settings of {leaf}; add the line"
        )
    if not parent:
        known = sorted({*known, *groups()})
        full = next(
            (key for key, _ in map(split, overrides) if key.lstrip("+").startswith(f"{typed}.")), typed
        )
        guess = _top_level(full.lstrip("+"), value, known, keys_of_run(overrides))
        rule = f"{typed} must be a setting or a group{place} (there is no {leaf})"
        return f"{rule}, got {got}; {guess or 'see --help'}"
    option = option_name(section)
    if option not in options(group_of(parent)):
        option = None  # a schema that several options share
    owner = f"{chosen_by(parent)}={option}" if option else parent
    own = [f"{parent}.{key}" for key in known]
    elsewhere = [other for other in _owners(parent, leaf) if other != option]
    found = meaning(full_key, own)
    if found and (found[0].key in own or value in options(found[0].key) or not _same_leaf(leaf)):
        guess = translated(full_key, value, own)
    elif value in options(group_of(parent)):
        guess = f"set {chosen_by(parent)}={value}"
    elif elsewhere:
        belongs = ", ".join(f"{chosen_by(parent)}={other}" for other in elsewhere)
        guess = f"it belongs to {belongs}: choose that option, or leave it out"
    elif found and found[2] == OTHERS:
        guess = translated(full_key, value, own)
    else:
        guess = _similar_key(parent, (leaf, typed.rpartition(".")[2]), known)
    return (
        f"{typed} must be a setting of {owner}{place} ({', '.join(known) or 'it has none'}), got {got}; "
        f"{guess or 'leave it out'}"
    )


def _top_level(typed: str, value: str, known: Sequence[str], keys: Sequence[str]) -> str | None:
    """Return the remedy for a name that no setting or group has, or None.

    Args:
        typed: the name, perhaps with sections before it that do not exist.
        value: its value as typed.
        known: the settings and groups of the root.
        keys: the keys that the run has.
    """
    leaf = simple(typed.rpartition(".")[2])
    found = meaning(typed, keys)
    if same := [key for key in keys if simple(key) == simple(typed)]:
        return f"did you mean {same[0]}?"
    if "." not in typed and not (found and found[1] == leaf):
        same = [
            key for key in keys if simple(key.rpartition(".")[2]) == leaf and not key.startswith("stages.")
        ]
        if same or (named := option_named(typed)):
            return f"did you mean {' or '.join(same[:2]) or named}?"
    return (
        translated(typed, value, keys)
        or suggestion(typed, all_keys() if "." in typed else known, "did you mean {}?")
        or suggestion(leaf, known, "did you mean {}?")
        or suggestion(leaf, all_keys(), "did you mean {}?")
    )


def _same_leaf(word: str) -> str | None:
    """Return the key of this project whose last part is the last part of `word`; None: there is none."""
    leaf = simple(word.rpartition(".")[2])
    return next((key for key in all_keys() if simple(key.rpartition(".")[2]) == leaf), None)


def _similar_key(parent: str, words: Iterable[str], known: Sequence[str]) -> str | None:
    """Return a question about the key that is meant: of the section, another section or another option.

    Args:
        parent: the dotted key of the section.
        words: the key without its section, as read and as typed.
        known: the keys of the section.
    """
    for word in words:
        if joined := _same_leaf(f"{parent}_{word}"):
            return f"did you mean {joined}?"
        if guess := suggestion(word, known, f"did you mean {parent}.{{}}?"):
            return guess
        if same := _same_leaf(word):
            return f"did you mean {same}?"
        leaves = [key.rpartition(".")[2] for key in all_keys() if key.rpartition(".")[0] == group_of(parent)]
        if near := closest(word, leaves):
            belongs = ", ".join(f"{chosen_by(parent)}={other}" for other in _owners(parent, near))
            return f"did you mean {parent}.{near}, a setting of {belongs}?"
    return None


def _bad_value(error: OmegaConfBaseException, overrides: Sequence[str], where: str | None) -> str:
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
    remedy = _value_remedy(section, leaf, key, hint, value)
    return f"{typed.lstrip('+')} must be {allowed(hint)}{place}, got {value!r}; {remedy}"


def _bad_list(key: str, overrides: Sequence[str]) -> str:
    """Return the message for a list with a wrong element, such as `optim.betas=[a,b]`."""
    value = next((value for typed, value in map(split, overrides) if typed.lstrip("+") == key), "")
    for section, hint in declarations(key):
        remedy = _value_remedy(section, key.rpartition(".")[2], key, hint, value)
        return f"{key} must be {allowed(hint)}, got {value!r}; {remedy}"
    return f"{key} must have a value of another type, got {value!r}; see --help keys"


def _value_remedy(section: type, leaf: str, key: str, hint: Any, value: str) -> str:
    """Return the remedy for a value of the wrong type.

    Args:
        section: class of the section.
        leaf: name of the field.
        key: dotted key of the field.
        hint: type of the field.
        value: the value as typed.
    """
    at = key.rpartition(".")[0]
    if leaf == "path" and group_of(at) == "scorer" and (own := own_value(chosen_by(at), value)):
        return own
    alternatives = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    for choices in alternatives:
        if isinstance(choices, type) and issubclass(choices, Enum):
            names = [member.name for member in choices]
            if guess := suggestion(value, names, "did you mean {}={}?", key):
                return guess
    if list[str] in alternatives and re.fullmatch(r"[^\[\]{}]+", value):
        return f"set {setting(key, [part.strip() for part in value.split(',')])}"
    if str in alternatives and re.fullmatch(r"\[.+\]", value):
        whole = "; files of one data set belong in a folder" if key == "task.path" else ""
        return f"set {setting(key, value[1:-1].split(',')[0].strip())}, one text{whole}"
    number = _as_number(value)
    if number is not None and float in alternatives:
        return f"set {key}={in_ascii(value)}"
    if number is not None and int in alternatives and number.is_integer():
        return f"set {key}={int(number)}"
    bound = fact(section, leaf, "bound")
    default = next((f.default for f in fields(section) if f.name == leaf), NO_DEFAULT)
    if bound is not None and bound.remedy is not None:
        return f"set {key}={bound.remedy}"
    return f"set {key}={'<value>' if default in (NO_DEFAULT, MISSING) else shown(default)}"


def _as_number(value: str) -> float | None:
    """Return the finite number that a text means, with signs in place of ASCII signs; None: no number."""
    try:
        number = float(in_ascii(value))
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _unknown_reference(error: InterpolationKeyError, overrides: Sequence[str]) -> str:
    """Return the message for a value that refers to a key that does not exist, such as `${nope}`."""
    match = re.search(r"Interpolation key '([^']*)'", str(error))
    name = match[1] if match else ""
    key = str(error.full_key)
    got = next((value for typed, value in map(split, overrides) if typed.lstrip("+") == key), f"${{{name}}}")
    guess = suggestion(name, all_keys(), "did you mean ${{{}}}?") or f"set {key}=<value>"
    return f"{key} must refer to a key of the config (there is no {name}), got {got}; {guess}"


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
    """Return the key and the value of an override, without quotes around the value."""
    key, _, value = override.partition("=")
    return key, value[1:-1] if re.fullmatch('"[^"]*"', value) else value


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
        return f"a list of {'texts' if str in get_args(hint) else 'numbers'}, as [a,b]"
    return _TYPE_NAMES.get(hint, str(hint))


def option_name(section: type) -> str | None:
    """Return the name of the option that has the section class `section`; None if no option has it."""
    stored = schema_of(section)
    return stored and stored.rpartition("/")[2]


def group_of(section: str) -> str:
    """Return the config group of a section key: `scorer` for `gold` and for parts of a scorer.

    A part of a mixture of tasks is chosen in the group of the schemas, because the options of `task` also set
    keys of other sections.
    """
    if section.startswith("task.parts."):
        return "schema/task"
    return "scorer" if section == "gold" or ".parts." in section else section


def chosen_by(section: str) -> str:
    """Return the key that selects the option of a section key, for example `scorer@gold` for `gold`."""
    group = group_of(section)
    return section if group == section else f"{group}@{section}"


def _owners(section: str, leaf: str) -> list[str]:
    """Return the options that have a key `leaf`, in the group of the section key `section`."""
    prefix = f"schema/{group_of(section).removeprefix('schema/')}/"
    return [
        name.removeprefix(prefix)
        for name, cls in SCHEMAS.items()
        if name.startswith(prefix) and leaf in {f.name for f in fields(cls)}
    ]
