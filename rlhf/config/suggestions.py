"""Suggestions for misspelled options, groups and keys. This module imports no torch."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import fields
from difflib import get_close_matches

from rlhf.config.algo import AlgoConfig
from rlhf.config.catalogue import all_keys, groups, options, takes_list
from rlhf.config.foreign import WITHOUT, Foreign, meaning
from rlhf.config.schema import SCHEMAS
from rlhf.core.pasting import as_typed, setting

_MANY = 20  # with more options, a message refers to --help instead of listing them

_USUAL = ("grpo", "vllm", "local", "tldr", "function", "tools")  # options that a remedy prefers
_ALIASES = {  # values of other programs -> values of this project
    **{"fp16": "float16", "half": "float16", "f16": "float16"},
    **{"bf16": "bfloat16", "fp32": "float32", "f32": "float32", "float": "float32"},
    **{"reinforce": "rloo", "reinforce++": "rloo", "group_norm": "grpo", "gae": "ppo", "online_dpo": "dpo"},
    **{"best_of_n": "bok", "raft": "bok"},
}


def closest(word: str, choices: Iterable[str]) -> str | None:
    """Return the choice that is most similar to `word`, or None. Case, and - or _, make no difference.

    Of a dotted choice, the whole and the part after the last dot are compared. If exactly one choice begins
    with `word`, the result is that choice.
    """
    known = list(dict.fromkeys(choices))
    if (meant := _ALIASES.get(word.lower())) in known:
        return meant
    by_leaf = {simple(choice.rpartition(".")[2]): choice for choice in known}
    by_name = {**by_leaf, **{simple(choice): choice for choice in known}}
    longer = [name for name in by_leaf if name.startswith(simple(word))] if word else []
    if simple(word) not in by_name and len(longer) == 1:
        return by_leaf[longer[0]]
    for cutoff in (1.0, 0.6):
        if found := get_close_matches(simple(word), by_name, n=1, cutoff=cutoff):
            return by_name[found[0]]
    return None


def suggestion(word: str, choices: Iterable[str], form: str, *first: str) -> str:
    """Return `form`, filled with `first` and the choice closest to `word`; empty if no choice is close."""
    found = closest(word, choices)
    return form.format(*first, found) if found is not None else ""


def one_of(key: str, value: str, choices: Iterable[str], note: str = "") -> str:
    """Return the message for a value that is not among the choices of `key`; `note` follows the value."""
    choices = list(choices)
    if not choices:
        return f"{key} must be a group with options, got {key}={value}{note}; see --help"
    listed, remedy = ", ".join(choices), "choose one of them"
    if len(choices) > _MANY and key in groups():
        listed, remedy = f"its {len(choices)} options", f"list them with --help {key}"
    elif len(choices) == 1:
        remedy = f"set {key}={choices[0]}"
    guess, own = suggestion(value, choices, "did you mean {}={}?", key), own_value(key, value)
    remedies = (own, guess) if re.search("[/.:]", value) else (guess, own)
    remedy = next(filter(None, remedies), remedy)
    return f"{key} must be one of {listed}, got {value!r}{note}; {remedy}"


def own_value(key: str, value: str) -> str | None:
    """Return the remedy for a file, a folder or a hub name in place of an option; None: it is neither.

    Args:
        key: the key of a group, such as `task` or `scorer@gold`.
        value: the value as typed.
    """
    group, _, section = key.partition("@")
    at = section or group
    if group == "model" and value and not value.isdigit():
        return f"for a folder or a name of the hub set {setting('model.policy', value)} (for SFT model.base)"
    if group == "task" and re.search(r"[/.]", value) and not value.endswith((".yaml", ".yml")):
        return f"for your own data set task=local {setting('task.path', value)}"
    if group == "scorer" and re.match("https?://", value):
        return f"for a service set {key}=http {setting(f'{at}.url', value)}"
    if group == "scorer" and re.search(r":|\.py$", value):
        functions = value[1:-1].split(",") if value.startswith("[") else value
        return f"for a Python function set {key}=function {setting(f'{at}.path', functions)}"
    if group == "scorer" and "/" in value:
        return f"for a reward model set {key}=reward_model {setting(f'{at}.path', value)}"
    return None


def key_or_group(word: str) -> str | None:
    """Return the group or the dotted key that `word` most probably means; None: nothing is similar."""
    return simple_key(word) or closest(word, groups()) or closest(word, all_keys())


def simple_key(word: str, known: Iterable[str] | None = None) -> str | None:
    """Return the group or the key with the name `word`, or with this last part; None: there is none.

    Args:
        word: the name as typed.
        known: the keys to search; None: all.
    """
    names = [*groups(), *(all_keys() if known is None else known)]
    same = [name for name in names if simple(name) == simple(word)]
    same += [name for name in names if simple(name.rpartition(".")[2]) == simple(word)]
    return same[0] if same else None


def translated(
    word: str, value: str = "", known: Collection[str] = (), words: Iterable[str] = ()
) -> str | None:
    """Return the remedy for a name of TRL, OpenRLHF or verl; None: no such project has the name.

    Args:
        word: the key as typed.
        value: the value as typed.
        known: the keys that the config has, for a name with several meanings; empty: any.
        words: the arguments of the command.
    """
    if (found := meaning(word, known)) is None:
        return None
    row, name, project = found
    if row.key == WITHOUT:
        return f"{name} of {project} has no key here: {row.note}"
    return f"set {assigned(row, value, words)} ({name} in {project}{row.note and '; ' + row.note})"


def assigned(row: Foreign, value: str, words: Iterable[str] = ()) -> str:
    """Return the arguments here for a setting of another project and its value there.

    They select the option that has the key, unless the arguments `words` of the command, or the default, do.
    """
    if value and value in options(row.key):
        return as_typed(row.key, value)
    if row.key == "scorer.path" and re.match("https?://", value):
        return f"scorer=http {setting('scorer.url', value)}"
    if row.key == "scorer.path" and ":" in value:
        return f"scorer=function {as_typed(row.key, value)}"
    if value and value[0] != "[" and f"{value}: " not in row.note and takes_list(row.key):
        value = f"[{value}]"
    typed = setting(row.key, value) if row.key == "task.path" and value else row.setting(value)
    return f"{_chosen(row.key, words)}{typed}"


def _chosen(key: str, words: Iterable[str]) -> str:
    """Return the choice of an option that has a key, with a blank; empty if the config has the key."""
    group, _, inside = key.partition(".")
    leaf = inside.partition(".")[0]
    own = {
        name.rpartition("/")[2]: cls for name, cls in SCHEMAS.items() if name.startswith(f"schema/{group}/")
    }
    having = [name for name, cls in own.items() if leaf in {each.name for each in fields(cls)}]
    default = {"algo": "dpo"}.get(group, "")
    chosen = next((word.partition("=")[2] for word in words if word.startswith(f"{group}=")), default)
    if group == "logger":
        return "" if not inside or leaf in chosen else f"logger={leaf} "
    everywhere = len(having) in (0, len(own)) and key != "task.path"  # embedded tasks have data of their own
    if everywhere or chosen in having or (chosen and chosen not in own):
        return ""
    return f"{group}={next((name for name in _USUAL if name in having), having[0])} "


def option_named(word: str) -> str | None:
    """Return `<group>=<word>` for the first group that has an option `word`; None: no group has it."""
    return next((f"{group}={word}" for group in groups() if word in options(group)), None)


def keys_of_run(overrides: Iterable[str], algo: str = "dpo") -> list[str]:
    """Return all keys but those of other algorithms than that of the overrides; `algo` is the default."""
    chosen = next((each[5:] for each in overrides if each.startswith("algo=")), algo)
    own = {f"algo.{each.name}" for each in fields(SCHEMAS.get(f"schema/algo/{chosen}", AlgoConfig))}
    return [key for key in all_keys() if not key.startswith("algo.") or key in own]


def simple(word: str) -> str:
    """Return a word in lower case, with `_` in place of `-`, and without .yaml at its end."""
    return re.sub(r"\.ya?ml$", "", word.lower()).replace("-", "_")
