"""Messages about invalid configs and command lines: which word is wrong, and why."""

from __future__ import annotations

import math
import re
import shlex
import types
import unicodedata
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    ConfigTypeError,
    InterpolationKeyError,
    OmegaConfBaseException,
    ValidationError,
)

from rlhf.config.schema import SCHEMAS, fact, schema_of
from rlhf.core.errors import UserError, as_typed, override, setting, without_escapes
from rlhf.core.formatting import shortened
from rlhf.usercode.address import addresses
from rlhf.words.catalogue import (
    Override,
    all_keys,
    declarations,
    declared_keys,
    files_that_set,
    groups,
    options,
    read_overrides,
    selected_files,
    takes_list,
)
from rlhf.words.suggestions import (
    OTHERS,
    WITHOUT,
    assigned,
    closest,
    key_or_group,
    keys_of_run,
    meaning,
    one_of,
    option_named,
    own_value,
    simple,
    simple_key,
    suggestion,
    translated,
)

# Messages about invalid configs: which override, or which key of a config file, is wrong, and why.
#
# Each message contains the key as typed, the rule, the value and a remedy. This module imports no torch.


# Exceptions of an invalid config. For some uses of null, Hydra and OmegaConf raise the last two types.
CONFIG_ERRORS = (HydraException, OmegaConfBaseException, yaml.YAMLError, AssertionError, ValueError)

_OPTIONAL_GROUPS = ("tuned", "length", "experiment", "debug")

_SECTIONS = ("algo", "model", "task", "generator", "backend", "scorer")  # groups that take no list

_TYPE_NAMES = {float: "a number", int: "a whole number", bool: "true or false", str: "text"}


@contextmanager
def explained(overrides: Sequence[str], sweep: bool = False) -> Iterator[None]:
    """Raise UserError with the message of `explain` for an error of the block that composes a config."""
    try:
        yield
    except UserError:
        raise
    except CONFIG_ERRORS as error:
        raise UserError(explain(error, overrides, sweep)) from None


def explain(error: Exception, overrides: Sequence[str], sweep: bool = False) -> str:
    """Return the message for an error that composing a config raised.

    The mistake is searched in the overrides, and in the config files that they select. The texts of Hydra and
    OmegaConf appear only if no mistake is found.

    Args:
        error: one of `CONFIG_ERRORS`.
        overrides: the overrides of the command line.
        sweep: whether commas in overrides separate the values of a sweep.
    """
    if isinstance(error, OverrideParseException):
        return unreadable(error.override, overrides)
    typed = read_overrides(overrides)
    if isinstance(error, MissingConfigException):
        return _missing_file(error, typed)
    if isinstance(error, yaml.YAMLError):
        return f"a config file is not YAML: {' '.join(str(error).split())}; fix the file"
    cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__ or error.__context__
    found = _wrong_setting(cause, typed) if isinstance(cause, OmegaConfBaseException) else None
    if found := found or next(_wrong_choices(typed, sweep), None):
        return found
    lines = [line.strip() for line in str(error).splitlines() if not re.search("full_key|_type=", line)]
    return (f"{error.full_key}: " if isinstance(error, OmegaConfBaseException) else "") + " ".join(lines)


def _missing_file(error: MissingConfigException, overrides: Sequence[Override]) -> str:
    """Return the message for an option that does not exist in its group."""
    wanted = error.missing_cfg_file or ""
    group, _, name = wanted.rpartition("/")
    if not group:
        return f"--config-name must name a file of the config folder, got {wanted}; leave it out"
    for each in overrides:
        if wanted in [f"{each.group}/{option}" for option in each.options]:
            known = options(each.group.removeprefix("schema/"))
            return one_of(each.key, wanted.removeprefix(f"{each.group}/"), known)
    choices = [option for option in error.options or () if option] or list(options(group))
    where = next((each.text.lstrip("+") for each in overrides if each.key == "experiment"), None)
    return one_of(group, name, choices, f" (chosen by {where})" if where else "")


def _wrong_setting(error: OmegaConfBaseException, overrides: Sequence[Override]) -> str | None:
    """Return the message for a key, value or reference that OmegaConf refuses; None: of no section."""
    key = str(error.full_key).partition("[")[0]  # of a list, if an element is wrong
    section = error.object_type
    unknown = isinstance(error, ConfigAttributeError | ConfigKeyError)
    if unknown and section is dict and ".parts." not in key:
        added = (each.text for each in overrides if each.key == key)
        why = "the config has no such key"
        return next(
            (f"{key} must be added with + ({why}), got {text}; write '+{text}'" for text in added), None
        )
    if not is_dataclass(section):
        section = next((each.section for each in declared_keys() if each.key == key), None)
    if section is None or not key:
        return None
    if unknown:
        where = next((name for name, _ in files_that_set(key, overrides)), None)
        return _unknown_key(key, section, overrides, where)
    if isinstance(error, InterpolationKeyError):
        return _unknown_reference(key, overrides)
    if isinstance(error, ValidationError | ConfigTypeError):
        return _bad_value(error, key, section, overrides)
    return None


def _wrong_choices(overrides: Sequence[Override], sweep: bool) -> Iterator[str]:
    """Yield a message for each override, or entry of a defaults list, that chooses no option of a group."""
    for each in overrides:
        if not sweep and OverridesParser.create().parse_override(each.text).is_sweep_override():
            yield several_values(each.key, each.value)
    chosen = {each.key for each in overrides if each.sign == "+"}
    for each in overrides:
        yield from _wrong_choice(each, chosen)
    for file in selected_files(overrides):
        for entry, _ in file.defaults:
            group = entry.split(" ")[-1].removeprefix("/")
            if entry.startswith("override "):
                yield from _unknown_group(group, f" in {file.name}.yaml")
            elif group in _SECTIONS:
                rule = f"{group} must have one option, got another one in {file.name}.yaml"
                yield f"{rule}; write override /{group}: <option>"


def _wrong_choice(override: Override, chosen: Collection[str]) -> Iterator[str]:
    """Yield a message if an override chooses no option of a group; `chosen`: the keys that `+` adds."""
    key, group, value, typed = override.key, override.group, override.value, override.typed
    several = value[:1] == "[" and (group in _SECTIONS or len({*override.options}) < len(override.options))
    part = re.match(r"(?:\S+@)?((?:scorer|gold|task)\.parts\.\w+)", key)
    if part and chosen_by(part[1]) not in chosen:
        kind = "task" if part[1].startswith("task.") else "scorer"
        why = f"the parts of a {kind} are {kind}s, under names of your choice"
        remedy = f"choose it by {chosen_by(part[1])}=<{kind}>, with + in front if it is new"
        yield f"{part[1]} must be chosen before it is set ({why}), got {override.text}; {remedy}"
    elif re.match(r"logger\.\w+\.", key):
        name, why = key.split(".")[1], "a logger that is off has no settings"
        yield f"{typed} needs the logger {name} ({why}), got {value}; add logger={name}"
    elif group in _OPTIONAL_GROUPS and (override.sign == "~" or value == "null"):
        yield f"{typed} must be an option, got {value}; write ~{group} to leave it out"
    elif options(group) and (override.sign == "~" or value == "null"):
        got, listed = f"{typed}={value}" if value else typed, ", ".join(options(group))
        yield f"{key} must be chosen (every run has one), got {got}; set {key}=<option> ({listed})"
    elif override.sign == "~":
        yield f"{typed} must name an existing key, got {key}; list the keys with --cfg job"
    elif group in groups() and not part and (override.sign or several):
        yield f"{key} must have one option, got more than one; write {key}=<option>, without + or brackets"
    elif group in groups() and not {*override.options} <= {*options(group), ""}:
        yield one_of(key, value, options(group))  # for example a number, or true
    elif "@" in key or "/" in key:
        yield from _unknown_group(key)


def _unknown_group(name: str, place: str = "") -> Iterator[str]:
    """Yield a message if there is no group, or no section, of a name such as `scorer@gold`."""
    group, _, section = name.partition("@")
    if name in groups() or (section and chosen_by(section) == name):
        return
    if section and group in groups():
        guess = "did you mean scorer@gold?" if group == "scorer" else f"choose by {group}=<option>"
        rule = f"{name} must name a section with options of {group}{place} (there is no {section})"
        yield f"{rule}, got {name}; {guess}"
    else:
        guess = suggestion(name, groups(), "did you mean {}?") or "see --help"
        yield f"{name} must be a group{place} (one of {', '.join(groups())}), got {name}; {guess}"


def unknown_keys(config: DictConfig, overrides: Iterable[str]) -> list[str]:
    """Return a message for each key that `+` added to a section without such a key."""
    typed = read_overrides(overrides)
    return [_unknown_key(key, section, typed) for key, section in _undefined(config)]


def _unknown_key(key: str, section: type, overrides: Sequence[Override], where: str | None = None) -> str:
    """Return the message for a key that its section does not have."""
    parent, _, leaf = key.rpartition(".")
    known = [f.name for f in fields(section) if f.name != "name"]
    place = f" in {where}.yaml" if where else ""
    typed = got = key
    for each in () if where else overrides:
        if f"{each.key}.".startswith(f"{key}."):
            typed, got = each.key, each.text
            break
    value = got.partition("=")[2]
    if where and not parent and where.startswith(f"{leaf}/"):
        return (
            f"{where}.yaml must begin with # @package _global_ (its settings belong to several sections), "
            f"got settings of {leaf}; add the line"
        )
    if not parent:
        known = sorted({*known, *groups()})
        guess = _top_level(typed, value, known, [each.text for each in overrides])
        rule = f"{typed} must be a setting or a group{place} (there is no {leaf})"
        return f"{rule}, got {got}; {guess or 'see --help'}"
    option = option_name(section)
    if option not in options(group_of(parent)):
        option = None  # a schema that several options share
    owner = f"{chosen_by(parent)}={option}" if option else parent
    own = [f"{parent}.{name}" for name in known]
    elsewhere = [other for other in _owners(parent, leaf) if other != option]
    found = meaning(key, own)
    if found and (found[0].key in own or value in options(found[0].key) or not _same_leaf(leaf)):
        guess = translated(key, value, own, [each.text for each in overrides])
    elif value in options(group_of(parent)):
        guess = f"set {chosen_by(parent)}={value}"
    elif elsewhere:
        belongs = ", ".join(f"{chosen_by(parent)}={other}" for other in elsewhere)
        guess = f"it belongs to {belongs}: choose that option, or leave it out"
    elif found and found[2] == OTHERS:
        guess = translated(key, value, own, [each.text for each in overrides])
    else:
        guess = _similar_key(parent, (leaf, typed.rpartition(".")[2]), known)
    return (
        f"{typed} must be a setting of {owner}{place} ({', '.join(known) or 'it has none'}), got {got}; "
        f"{guess or 'leave it out'}"
    )


def _top_level(typed: str, value: str, known: Sequence[str], words: Sequence[str]) -> str | None:
    """Return the remedy for a name that no setting or group has, or None."""
    leaf, keys = simple(typed.rpartition(".")[2]), keys_of_run(words)
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
        translated(typed, value, keys, words)
        or suggestion(typed, all_keys() if "." in typed else known, "did you mean {}?")
        or suggestion(leaf, known, "did you mean {}?")
        or suggestion(leaf, all_keys(), "did you mean {}?")
    )


def _same_leaf(word: str) -> str | None:
    """Return the key of this project whose last part is the last part of `word`; None: there is none."""
    leaf = simple(word.rpartition(".")[2])
    return next((key for key in all_keys() if simple(key.rpartition(".")[2]) == leaf), None)


def _similar_key(parent: str, words: Iterable[str], known: Sequence[str]) -> str | None:
    """Return a question about the key that is meant: of the section, another section or another option."""
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


def _bad_value(error: OmegaConfBaseException, key: str, section: type, overrides: Sequence[Override]) -> str:
    """Return the message for a value of the wrong type."""
    leaf = key.rpartition(".")[2]
    hint = get_type_hints(section).get(leaf, section)
    files = files_that_set(key, overrides)
    wrong = (name for name, found in files if error.value in [found, *(found if type(found) is list else ())])
    where = next(wrong, None)
    place = f" in {where}.yaml" if where else ""
    value = next((each.value for each in overrides if each.key == key and not where), shown(error.value))
    if inner := next((each.text for each in overrides if each.key.startswith(f"{key}.")), None):
        return f"{key} must be {allowed(hint)}, with nothing inside it, got {inner}; leave {inner} out"
    if is_dataclass(hint):
        if (group := group_of(key)) in groups():
            at, choices = chosen_by(key), ", ".join(options(group))
            return f"{at} chooses what {key} is ({choices}){place}, got {key}={value}; set {at}={value}"
        names = ", ".join(f"{key}.{f.name}" for f in fields(hint))
        return f"{key} is a section of settings{place} ({names}), got {key}={value}; set one of them"
    remedy = _value_remedy(section, leaf, key, hint, value)
    return f"{key} must be {allowed(hint)}{place}, got {value!r}; {remedy}"


def _value_remedy(section: type, leaf: str, key: str, hint: Any, value: str) -> str:
    """Return the remedy for a value of the wrong type."""
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


def _unknown_reference(key: str, overrides: Sequence[Override]) -> str | None:
    """Return the message for a value that refers to a key that does not exist, such as `${nope}`."""
    typed = [each.value for each in overrides if each.key == key]
    for value in map(str, [*typed, *(found for _, found in files_that_set(key, overrides))]):
        for name in re.findall(r"\$\{([\w.]+)", value.replace("\\", "")):
            if name not in all_keys():
                guess = suggestion(name, all_keys(), "did you mean ${{{}}}?") or f"set {key}=<value>"
                return f"{key} must refer to a key of the config (there is no {name}), got {value}; {guess}"
    return None


def _undefined(cfg: DictConfig, prefix: str = "") -> Iterator[tuple[str, type]]:
    """Yield each key that `+` added to a section without such a key, with the class of the section."""
    section = OmegaConf.get_type(cfg)
    known = {f.name for f in fields(section)} if is_dataclass(section) else None
    for key in map(str, cfg):
        if known is not None and key not in known:
            assert section is not None
            yield f"{prefix}{key}", section
        elif isinstance(child := cfg._get_node(key), DictConfig) and child._content.__class__ is dict:
            yield from _undefined(child, f"{prefix}{key}.")


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


# Messages about command-line arguments that are no overrides, or that Hydra reads in another way.
#
# Each message contains the argument as typed, the rule, and a remedy. This module imports no torch.


SAMPLES = "algo.samples_per_prompt"
_PRINTED = ("job", "hydra", "all")  # values of --cfg
_OWN_CONFIGS = "--config-dir <folder> adds options of your own"
_STRANGE = re.compile(r"[^\w.+\-/:=\s]|[^\x00-\x7f]")  # signs that Hydra may not read without quotes
# Signs that word processors and web pages use in place of an ASCII sign
ASCII = {
    "\u2212": "-",
    "\u2013": "-",
    "\u2010": "-",
    "\u201c": '"',
    "\u201d": '"',
    "\u2018": "'",
    "\u2019": "'",
}


def in_ascii(text: str) -> str:
    """Return a text with ASCII signs in place of full-width digits, a minus sign, curly quotes and so on."""
    return "".join(ASCII.get(sign, sign) for sign in unicodedata.normalize("NFKC", text))


def readable(arguments: Sequence[str]) -> list[str]:
    """Return the arguments, with quotes around each value that Hydra reads only in quotes.

    Examples are `model.pad_token=<|pad|>`, a path with an umlaut, and the path of an existing file whose name
    contains commas. Another value with signs that have a meaning for Hydra (quotes, brackets, commas,
    backslashes, interpolations) stays as it is.
    """
    return [_quoted(argument) if _STRANGE.search(argument) else argument for argument in arguments]


def listed(overrides: Iterable[str | Iterable[str]]) -> list[str]:
    """Return the overrides of a call in Python, which are texts, or lists of texts.

    Raises:
        UserError: an override is neither a text nor a list of texts.
    """
    found: list[str] = []
    for each in overrides:
        words = [each] if isinstance(each, str) else list(each) if isinstance(each, list | tuple) else None
        if words is None or not all(isinstance(word, str) for word in words):
            raise UserError(
                "overrides must be texts, or a list of texts (they are those of the command line), got "
                f"{shortened(repr(each), 80)}; write 'algo=dpo', 'seed=1'"
            )
        found += words
    return found


def _quoted(argument: str) -> str:
    """Return the override with quotes around its value, if Hydra reads the override only with quotes."""
    key, equals, value = argument.partition("=")
    if not equals or argument.startswith("-"):
        return argument
    if _names_file(value):
        return override(key, value)
    if re.search(r"[\"'\\,\[\]{}()$]", value):
        return argument
    try:
        OverridesParser.create().parse_override(argument)
    except HydraException:
        return f'{key}="{value}"'
    return argument


def _names_file(value: str) -> bool:
    """Return whether a value is the path of an existing file or folder, or of a function in a file."""
    place = value.rpartition(":")[0] if ".py:" in value else value
    try:
        return "/" in place and Path(place).expanduser().exists()
    except (OSError, ValueError, RuntimeError):  # too long, a null byte, or a user that does not exist
        return False


def texts(value: str) -> list[str]:
    """Return the texts in the value of a command's own argument, such as `models=`.

    Several texts have commas between them, with or without brackets around all. A text in quotes, and the
    path of an existing file, may contain commas.
    """
    if _names_file(value):
        return [value]
    inner = value[1:-1] if re.fullmatch(r"\[.*\]", value, re.S) else value
    try:
        found = OverridesParser.create().parse_override(f"x=[{inner}]").value()
    except HydraException:
        found = None
    if isinstance(found, list) and all(isinstance(each, str) for each in found):
        return [text for each in found if (text := without_escapes(each))]
    return [each for each in inner.split(",") if each]


def repeated(overrides: Sequence[str]) -> list[str]:
    """Return a warning for each key that several overrides set to different values."""
    values: dict[str, list[str]] = {}
    for argument in overrides:
        key, _, value = argument.partition("=")
        values.setdefault(key.lstrip("+"), []).append(value)
    times = {2: "twice"}
    return [
        f"{key} is given {times.get(len(each), 'several times')} ({', '.join(each)}); the last value counts"
        for key, each in values.items()
        if len(set(each)) > 1
    ]


def flag_problem(arguments: Sequence[str], flags: Collection[str], own: Collection[str] = ()) -> str | None:
    """Return the message for the first flag that does not exist; None: all flags exist.

    Args:
        arguments: the command line without the name of the command.
        flags: the flags that the command has, such as `--cfg`. An abbreviation of a flag is accepted.
        own: names of the command's own arguments, such as `run` for `run=<folder>`.
    """
    for place, argument in enumerate(arguments):
        flag, equals, value = argument.partition("=")
        if not re.match(r"--?[A-Za-z]", flag):
            continue
        if flag in ("--config-path", "-cp"):
            got = argument if equals else " ".join(arguments[place : place + 2])
            why = "it would replace the configs of this project"
            return f"--config-path must not be given ({why}), got {got}; {_OWN_CONFIGS}"
        if flag in ("--cfg", "-c") and flag in flags:
            if (value or "".join(arguments[place + 1 : place + 2])) not in _PRINTED:
                got = argument if equals else " ".join(arguments[place : place + 2])
                rule = f"{flag} must be followed by {', '.join(_PRINTED)} (the config to print)"
                return f"{rule}, got {got}; write {flag} job"
            continue
        longer = [known for known in flags if flag.startswith("--") and known.startswith(flag)]
        if flag in flags or len(longer) == 1:
            continue
        value = _value_of(arguments, place)
        got = f"{flag} {value}" if value and not equals else argument
        if remedy := _as_settings(arguments, place, own):
            rule = (
                f"{flag} must be written without dashes, as key=value or group=option (there is no such flag)"
            )
            return f"{rule}, got {got}; {remedy}"
        similar = closest(flag, flags)
        guess = f"did you mean {similar}?" if similar else "leave it out, or see --help"
        return f"{flag} must be a flag of this command ({', '.join(sorted(flags))}), got {got}; {guess}"
    return None


def _value_of(arguments: Sequence[str], place: int) -> str:
    """Return the value of the flag at `place`: behind its `=`, or the next argument; empty: it has none."""
    _, equals, value = arguments[place].partition("=")
    following = arguments[place + 1 : place + 2]
    if not equals and following and "=" not in following[0] and not following[0].startswith("--"):
        return following[0]
    return value


def _as_settings(arguments: Sequence[str], place: int, own: Collection[str]) -> str | None:
    """Return the remedy for flags that are settings; None: the first of them is no setting.

    Names of other projects are translated, and all flags of a command of such a project are written
    together. `beta` is the KL coefficient, except for algorithms that have a key `algo.beta`.

    Args:
        arguments: the command line.
        place: place of the first flag.
        own: names of the command's own arguments.
    """
    flags = []  # name and value of each flag
    for number, argument in enumerate(arguments):
        name = argument.partition("=")[0].lstrip("-")
        if number >= place and re.match(r"--?[A-Za-z]", argument) and len(name) > 1:
            flags.append((name, _value_of(arguments, number)))
    if not flags:
        return None
    online = any((found := meaning(name)) and found[0].key == SAMPLES for name, _ in flags)
    known = keys_of_run(arguments, "grpo" if online else "dpo")
    words: dict[str, str] = {}  # by key; a value that must be converted gives way to another one
    notes: list[str] = []
    for name, value in flags:
        exact = name if name in own else simple_key(name, known)
        found = None if exact and exact.rpartition(".")[2] == exact else meaning(name, known)
        if found and (exact is None or found[2] != OTHERS):
            row = found[0]
            if row.key != WITHOUT:
                word = assigned(row, value or _switched(row.key, name), arguments)
                words[row.key] = word if "<value>" not in word else words.get(row.key, word)
            note = f"{name}: {row.note}" if row.key != WITHOUT else f"leave {name} out ({row.note})"
            notes += [note] if row.note else []
        elif meant := exact or key_or_group(name.removeprefix("no_")):
            words[meant] = as_typed(meant, value or _switched(meant, name) or "<value>")
        elif (name, value) == flags[0]:
            return None
    once = dict.fromkeys(" ".join(words.values()).split(" "))  # several settings may need the same option
    ordered = " ".join(sorted(once, key=lambda word: word.partition("=")[0] not in groups()))
    return "; ".join([*([f"write {ordered}"] if words else []), *dict.fromkeys(notes)])


def _switched(key: str, flag: str) -> str:
    """Return the value of a flag without a value: true or false; empty if the key is no switch."""
    if not any(hint is bool for _, hint in declarations(key)):
        return ""
    return str(not flag.startswith("no_")).lower()


def unreadable(override: str, arguments: Sequence[str] = ()) -> str:
    """Return the message for a command-line argument that is not an override.

    Args:
        override: the argument.
        arguments: the whole command line.
    """
    key, equals, value = override.partition("=")
    if not equals:
        return _without_equals(override, arguments)
    if in_ascii(value) != value and in_ascii(value).isascii():
        strange = ", ".join(dict.fromkeys(repr(sign) for sign in value if not sign.isascii()))
        rule = f"{key} must be written with ASCII signs (not {strange})"
        return f"{rule}, got {value}; write {key}={in_ascii(value)}"
    if key.lstrip("+").partition("@")[0] in groups():
        return one_of(key, value, options(key.lstrip("+").partition("@")[0]))
    for opening, closing in ("[]", "{}", "()"):
        if value.count(opening) != value.count(closing):
            rule = f"{key} must have a {closing} for each {opening}"
            following = arguments[arguments.index(override) + 1 :] if override in arguments else ()
            for count in range(1, len(following) + 1):
                whole = "".join([value, *following[:count]])
                if whole.count(opening) == whole.count(closing):  # blanks divided the value
                    return f"{rule} (blanks end an argument), got {value}; write '{key}={whole}'"
            return f"{rule}, got {value}; write '{key}={opening}<values>{closing}'"
    if value.strip(",") != value:
        return f"{key} must have no comma at its ends, got {value}; write {key}={value.strip(',')}"
    if re.fullmatch(r"\(.*\)", value):
        return f"{key} must be a list in square brackets, got {value}; write '{key}=[{value[1:-1]}]'"
    remedy = setting(key, "<value>" if re.search(r"^[\"']|[\"'\\]$", value) else value)
    return (
        f"{key} must have a value that Hydra can read (brackets, quotes and some signs are syntax), got "
        f"{value!r}; quote the value for Hydra, and the whole argument for the shell: {remedy}"
    )


def _without_equals(argument: str, arguments: Sequence[str] = ()) -> str:
    """Return the message for an argument without `=`.

    Args:
        argument: the argument.
        arguments: the whole command line.
    """
    place = arguments.index(argument) if argument in arguments else len(arguments)
    before, after = arguments[max(place - 1, 0) : place], arguments[place + 1 : place + 3]
    if before and before[0].endswith("="):
        return _with_blanks([*before, argument])
    if after and after[0].startswith("="):
        return _with_blanks([argument, *(after if after[0] == "=" else after[:1])])
    value = after[0] if after and "=" not in after[0] else None
    if argument in groups():
        remedy = f"write {argument}=<option> ({', '.join(options(argument))})"
        if value in options(argument):
            remedy = f"write {argument}={value}"
    elif (key := argument.partition(":")[0]) in groups() and ":" in argument:
        remedy = f"write {key}={argument.partition(':')[2]}"
    elif argument in all_keys():
        remedy = f"write {argument}={value or '<value>'}"
    else:
        named = option_named(argument)
        remedy = (
            f"did you mean {named}?"
            if named
            else suggestion(argument, groups(), "did you mean {}=<option>?") or "write key=value"
        )
    return f"{argument} must read key=value or group=option (it has no '='), got {argument}; {remedy}"


def _with_blanks(parts: Sequence[str]) -> str:
    """Return the message for an override that blanks divide into several arguments."""
    override = "".join(parts)
    rule = f"{override.partition('=')[0]} must have no blanks around '=' (they end an argument)"
    return f"{rule}, got {' '.join(parts)}; write {override}"


def several_values(key: str, value: str) -> str:
    """Return the message for a value with commas, which is a sweep, in a single run."""
    rule = f"{key} must have one value in a single run (commas separate the values of a sweep), got {value}"
    if re.fullmatch(r"[+-]?\d{1,3}(,\d{3})+(\.\d+)?", value) and not value.startswith("0"):
        return f"{rule}; set {key}={value.replace(',', '')}, or add -m to run each"
    if re.fullmatch(r"[+-]?\d+,\d+(e[+-]?\d+)?", value):
        return f"{rule}; set {key}={value.replace(',', '.')}, or add -m to run each"
    functions = addresses(value) if key.rpartition(".")[2] == "path" else []
    if functions:
        return f"{rule}; write {setting(key, functions)} for several functions, or add -m to run each"
    if key == "logger" or (takes_list(key) and key not in groups()):
        return f"{rule}; write {shlex.quote(f'{key}=[{value}]')} for a list, or add -m to run each"
    text = any(str in (hint, *get_args(hint)) for _, hint in declarations(key)) and key not in groups()
    return f"{rule}; add -m to run each" + (f", or write {setting(key, value)} for one text" if text else "")
