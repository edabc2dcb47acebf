"""Messages about command-line arguments that are no overrides, or that Hydra reads in another way.

Each message contains the argument as typed, the rule, and a remedy. This module imports no torch.
"""

from __future__ import annotations

import re
import shlex
import unicodedata
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import get_args

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from rlhf.config.address import addresses
from rlhf.config.catalogue import all_keys, declarations, groups, options, takes_list
from rlhf.config.foreign import OTHERS, WITHOUT, meaning
from rlhf.config.suggestions import (
    assigned,
    closest,
    key_or_group,
    keys_of_run,
    one_of,
    option_named,
    simple_key,
    suggestion,
)
from rlhf.core.errors import UserError
from rlhf.core.formatting import shortened
from rlhf.core.pasting import as_typed, override, setting, without_escapes

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
