"""Suggestions for misspelled or foreign names of options, groups and keys. This module imports no torch."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, fields
from difflib import get_close_matches
from importlib.resources import files
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

from rlhf.config.algorithms import AlgoConfig, Trains
from rlhf.config.schema import PARTS, SCHEMAS, sections
from rlhf.core.errors import as_typed, setting
from rlhf.words.catalogue import all_keys, chosen_by, groups, options, owners, takes_list

if TYPE_CHECKING:
    from rlhf.config.root import Config


PROJECTS = ("TRL", "OpenRLHF", "verl")  # TRL 1.16, OpenRLHF 0.11, verl 0.9, and names of earlier versions
OTHERS = "other programs"
WITHOUT = "-"  # in place of a key: this project has no such setting

_MANY = 20  # with more options, a message refers to --help instead of listing them
_SIMILAR = 0.6  # of a misspelled word to the word that is meant
_USUAL = ("grpo", "vllm", "local", "tldr", "function", "tools")  # options that a remedy prefers
_ALIASES = {  # values of other programs -> values of this project
    **{"fp16": "float16", "half": "float16", "f16": "float16"},
    **{"bf16": "bfloat16", "fp32": "float32", "f32": "float32", "float": "float32"},
    **{"reinforce": "rloo", "reinforce++": "rloo", "group_norm": "grpo", "gae": "ppo", "online_dpo": "dpo"},
    **{"best_of_n": "bok", "raft": "bok"},
}


# A word that is similar to a known one


def _simple(word: str) -> str:
    """Return a word in lower case, with `_` in place of `-`, and without .yaml at its end."""
    return re.sub(r"\.ya?ml$", "", word.lower()).replace("-", "_")


def _leaf(key: str) -> str:
    """Return the part of a word after its last dot, as `_simple` returns it."""
    return _simple(key).rpartition(".")[2]


def closest(word: str, choices: Iterable[str]) -> str | None:
    """Return the choice that is most similar to `word`, or None. Case, and - or _, make no difference.

    Of a dotted choice, the whole and the part after the last dot are compared. If exactly one choice begins
    with `word`, the result is that choice.
    """
    known = list(dict.fromkeys(choices))
    if (meant := _ALIASES.get(word.lower())) in known:
        return meant
    by_leaf = {_leaf(choice): choice for choice in known}
    by_name = {**by_leaf, **{_simple(choice): choice for choice in known}}
    longer = [name for name in by_leaf if name.startswith(_simple(word))] if word else []
    if _simple(word) not in by_name and len(longer) == 1:
        return by_leaf[longer[0]]
    for cutoff in (1.0, _SIMILAR):
        if found := get_close_matches(_simple(word), by_name, n=1, cutoff=cutoff):
            return by_name[found[0]]
    return None


def suggestion(word: str, choices: Iterable[str], form: str) -> str:
    """Return `form`, filled with the choice closest to `word`; empty if no choice is close."""
    found = closest(word, choices)
    return form.format(found) if found is not None else ""


def one_of(key: str, value: str, choices: Iterable[str], note: str = "") -> str:
    """Return the message for a value that is not among the choices of `key`; `note` follows the value."""
    choices = list(choices)
    listed, remedy = ", ".join(choices), "choose one of them"
    if len(choices) > _MANY and key in groups():
        listed, remedy = f"its {len(choices)} options", f"list them with --help {key}"
    elif len(choices) == 1:
        remedy = f"set {key}={choices[0]}"
    guess, own = suggestion(value, choices, f"did you mean {key}={{}}?"), own_value(key, value)
    remedies = (own, guess) if re.search("[/.:]", value) else (guess, own)
    return f"{key} must be one of {listed}, got {value!r}{note}; {next(filter(None, remedies), remedy)}"


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


# A setting of another project


@dataclass(frozen=True, slots=True)
class _Foreign:
    """A setting of other projects.

    Attributes:
        key: the key or group of this project; `WITHOUT`: there is none, and `note` says what to do.
        names: the names in each of `PROJECTS` and in `OTHERS`, with blanks between them; the first is the
            current name.
        value: the value here; empty: the value there; `<value>`: it must be converted.
        note: what differs; `<value there>: <value here>` for values that differ.
    """

    key: str
    names: tuple[str, ...]
    value: str
    note: str

    def named(self) -> Iterator[tuple[str, str]]:
        """Yield each name with the project that uses it."""
        for project, names in zip((*PROJECTS, OTHERS), self.names, strict=True):
            for name in names.split():
                yield name, project


def _table() -> Iterator[_Foreign]:
    """Yield the rows of foreign.txt."""
    text = (files("rlhf.words") / "foreign.txt").read_text(encoding="utf-8")
    for line in re.sub(r"\n +", " ", text).splitlines():
        if not line.startswith("#"):
            key, *names, value, note = (
                cell.strip() for cell in f"{line}{'|' * (6 - line.count('|'))}".split("|")
            )
            yield _Foreign(key, tuple(names), value, note)


TABLE = tuple(_table())


def meaning(word: str, known: Collection[str] = ()) -> tuple[_Foreign, str, str] | None:
    """Return the row, the name and the project of a setting of another project; None: no project has it.

    Args:
        word: the name as typed, with or without the sections before it.
        known: keys of this project that the config has, for a name with several meanings; empty: any.
    """
    wanted = _simple(word)
    matches = []  # the longest name, which has the most sections, is meant
    for row in TABLE:
        for name, project in row.named():
            whole = f".{wanted}".endswith(f".{_simple(name)}")
            if whole or _leaf(name) == _leaf(wanted):
                matches.append((len(name) if whole else 0, row, name, project))
    longest = [match for match in matches if match[0] == max(matches, key=itemgetter(0))[0]]
    found = next((match for match in longest if match[1].key in known), longest[0] if longest else None)
    return found and found[1:]


def assigned(row: _Foreign, value: str, words: Iterable[str] = ()) -> str:
    """Return the arguments here for a setting of another project and its value there.

    They select the option that has the key, unless the arguments `words` of the command, or the default, do.
    """
    if value and value in options(row.key):
        return as_typed(row.key, value)
    group = row.key.partition(".")[0]
    if row.key in ("scorer.path", "task.path") and (own := own_value(group, value)):
        return own.partition(" set ")[2]
    meant = dict(re.findall(r"([\w-]+): ([\w-]+)", row.note)).get(value) or row.value
    if value and not meant and value[0] != "[" and takes_list(row.key):
        meant = f"[{value}]"
    return f"{_chosen(row.key, words)}{as_typed(row.key, meant or value or '<value>')}"


def _chosen(key: str, words: Iterable[str]) -> str:
    """Return the choice of an option that has a key, with a blank; empty if the config has the key."""
    group, _, inside = key.partition(".")
    leaf = inside.partition(".")[0]
    having = owners(group, leaf)
    every = [name.rpartition("/")[2] for name in SCHEMAS if name.startswith(f"schema/{group}/")]
    default = {"algo": "dpo"}.get(group, "")
    chosen = next((word.partition("=")[2] for word in words if word.startswith(f"{group}=")), default)
    if group == "logger":
        return "" if not inside or leaf in chosen else f"logger={leaf} "
    everywhere = (
        len(having) in (0, len(every)) and key != "task.path"
    )  # embedded tasks have data of their own
    if everywhere or chosen in having or (chosen and chosen not in every):
        return ""
    return f"{group}={next((name for name in _USUAL if name in having), having[0])} "


# What a wrong name means


class _Guess(NamedTuple):
    """What a wrong name probably means.

    Attributes:
        remedy: the remedy of a message.
        key: the key or group that is meant; empty: there is none.
        words: the arguments to type, with the value.
        note: what differs from another project.
    """

    remedy: str
    key: str = ""
    words: str = ""
    note: str = ""


def guess(
    word: str, value: str = "", keys: Collection[str] = (), typed: Collection[str] = ()
) -> _Guess | None:
    """Return what a wrong name of a key, a group, an option or a flag means; None: nothing is similar.

    In this order: the name of a key or group here, or its last part; a setting of another project; an
    option; a similar name.

    Args:
        word: the name as typed.
        value: the value as typed; empty: there is none.
        keys: the keys that may be meant.
        typed: the arguments of the command.
    """
    names = [*groups(), *keys]
    parts = (_leaf(word), _simple(word).replace(".", "_"))  # `eval.every` is schedule.eval_every
    same = [name for name in names if _simple(name) == _simple(word)]
    same += [name for name in names if _leaf(name) in parts and not name.startswith("stages.")]
    if (found := meaning(word, keys)) is not None:
        row, name, project = found
        if not same or (row.key not in same and "." in same[0]):
            if row.key == WITHOUT:
                return _Guess(f"{name} of {project} has no key here: {row.note}", note=row.note)
            words = assigned(row, value, typed)
            note = f"{name} in {project}{row.note and '; ' + row.note}"
            return _Guess(f"set {words} ({note})", row.key, words, row.note)
    near = same[0] if same else None
    if near is None and (option := next((each for each in groups() if word in options(each)), None)):
        return _Guess(f"did you mean {option}={word}?", option, f"{option}={word}")
    if near is None:
        beside = [key for key in all_keys() if key.rpartition(".")[0] == word.rpartition(".")[0] != ""]
        near = closest(_leaf(word), beside) or closest(word, names) or closest(_leaf(word), names)
    if near is None:
        return None
    section, _, name = near.rpartition(".")
    having = (
        "" if near in names else ", ".join(f"{chosen_by(section)}={each}" for each in owners(section, name))
    )
    return _Guess(
        f"did you mean {near}{having and ', a setting of '}{having}?",
        near,
        as_typed(near, value or "<value>"),
    )


def keys_of_run(overrides: Iterable[str], algo: str = "dpo") -> list[str]:
    """Return all keys but those of other algorithms than that of the overrides; `algo` is the default."""
    chosen = next((each[5:] for each in overrides if each.startswith("algo=")), algo)
    own = {f"algo.{each.name}" for each in fields(SCHEMAS.get(f"schema/algo/{chosen}", AlgoConfig))}
    return [key for key in all_keys() if ".".join(key.split(".")[:2]) in own or not key.startswith("algo.")]


# Names of metrics that a study or a sweep may name: those of docs/reference/metrics.md.


_FAMILIES = re.split("; |\n", (files("rlhf.words") / "metrics.txt").read_text(encoding="utf-8").strip())
KNOWN = [
    f"{family}/{name}" for family, names in (each.split(": ") for each in _FAMILIES) for name in names.split()
]
_EPISODES = "turns token_share tool_errors step_errors out_of_turns cut no_room"
_OF_EPISODES = [f"environment/{name}" for name in _EPISODES.split()]
# Figures of environments, scorers and tasks with names of the user.
_OPEN = re.compile(
    r"(eval/)?environment/\w+|objective/scores/.+|part/[^/]+/(prompts|scores|response_tokens|eos_rate)"
    r"|eval/part/[^/]+/(score|gold_score|win_rate|response_tokens)"
)
_NEAR = 0.9  # similarity of a misspelled name


def is_own(name: str) -> bool:
    """Return whether only code of the user can measure a metric."""
    return name not in KNOWN and not _OPEN.fullmatch(name)


def lacking(name: str, cfg: Config, code: bool = False) -> tuple[str, str] | None:
    """Return rule and remedy for a metric that a run does not have; None if the run may have the metric.

    A plug-in may add any metric, other code of the user a family of metrics. A name that is almost one of
    this project is misspelled nevertheless.

    Args:
        name: the metric.
        cfg: the config of the run.
        code: whether the run calls functions or classes of the user.
    """
    name = re.sub("_(low|high)$", "", name) if name.startswith("eval/") else name
    family, kind, may = name.partition("/")[0], name.removeprefix("eval/").partition("/")[0], True
    if kind == "environment":
        may = cfg.environment.name != "none"
    elif is_own(name):
        plugged = any(not PARTS.get(type(each), "rlhf.").startswith("rlhf.") for _, each in sections(cfg))
        may = plugged or (code and not any(known.startswith(f"{family}/") for known in KNOWN))
    elif kind == "part":
        may = name.split("/")[-2] in cfg.task.shares
    every = [*KNOWN, *_OF_EPISODES]
    alike = [known for known in every if known.count("/") == name.count("/")]
    if not may or (name not in every and get_close_matches(name, alike, cutoff=_NEAR)):
        guess = "" if name in every else suggestion(name, every, "did you mean {}?")
        return "name a metric that rows keep (see docs/reference/metrics.md)", guess or "choose another one"
    rewards, remedy = cfg.algo.trains is Trains.reward, ""
    if name in ("eval/win_rate", "eval/tie_rate", "eval/gold_score", "eval/norm_reward"):
        remedy = "choose another one" if rewards else "set scorer@gold or choose another one"
        remedy = remedy if rewards or cfg.gold.name == "none" else ""
    elif name in ("eval/win_rate_vs_initial", "eval/score") and (rewards or not cfg.scores_completions):
        remedy = "choose another one"
    return ("be a metric that the runs have", remedy) if remedy else None
