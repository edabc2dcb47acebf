"""Messages about invalid configs and command lines: which word is wrong, why, and what to write instead.

A message is `<key> must <rule>, got <value>; <remedy>`. The remedy comes from the names of this project, of
other projects, and from similar words (`guess`). This module imports no torch.
"""

from __future__ import annotations

import re
import types
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import dataclass, fields, is_dataclass
from difflib import get_close_matches
from enum import Enum
from importlib.resources import files
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Union, get_args, get_origin, get_type_hints

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException
from omegaconf import MISSING, DictConfig, OmegaConf, errors
from omegaconf.errors import OmegaConfBaseException

from rlhf.config.algorithms import AlgoConfig, Trains
from rlhf.config.schema import ABSENT, PARTS, SCHEMAS, data_file, fact, plain, sections, value_at
from rlhf.core.errors import UserError, as_typed, override, setting, without_escapes
from rlhf.core.formatting import shortened
from rlhf.usercode.address import addresses
from rlhf.words import catalogue
from rlhf.words.catalogue import Override, all_keys, chosen_by, group_of, groups, options, owners

if TYPE_CHECKING:
    from rlhf.config.root import Config


PROJECTS = ("TRL", "OpenRLHF", "verl")  # TRL 1.16, OpenRLHF 0.11, verl 0.9, and names of earlier versions
OTHERS = "other programs"
WITHOUT = "-"  # in place of a key: this project has no such setting

_MANY = 20  # with more options, a message refers to --help instead of listing them
_SIMILAR = 0.6  # of a misspelled word to the word that is meant
_USUAL = ("grpo", "vllm", "local", "tldr", "function", "tools")  # options that a remedy prefers
_ALIASES: dict[str, str] = data_file("rlhf.words", "values.yaml")


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
    guess, own = suggestion(value, choices, f"did you mean {key}={{}}?"), _own_value(key, value)
    remedies = (own, guess) if re.search("[/.:]", value) else (guess, own)
    return f"{key} must be one of {listed}, got {value!r}{note}; {next(filter(None, remedies), remedy)}"


def _own_value(key: str, value: str) -> str | None:
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
            cells = [cell.strip() for cell in f"{line}{'|' * (6 - line.count('|'))}".split("|")]
            yield _Foreign(cells[0], tuple(cells[1:5]), *cells[5:])


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
                matches.append((len(name) if whole else 0, row.key in known, row, name, project))
    return max(matches, key=itemgetter(0, 1))[2:] if matches else None


def assigned(row: _Foreign, value: str, words: Iterable[str] = ()) -> str:
    """Return the arguments here for a setting of another project and its value there.

    They select the option that has the key, unless the arguments `words` of the command, or the default, do.
    """
    if value and value in options(row.key):
        return as_typed(row.key, value)
    group, _, inside = row.key.partition(".")
    if row.key in ("scorer.path", "task.path") and (own := _own_value(group, value)):
        return own.partition(" set ")[2]
    meant = dict(re.findall(r"([\w-]+): ([\w-]+)", row.note)).get(value) or row.value
    if value and not meant and value[0] != "[" and catalogue.takes_list(row.key):
        meant = f"[{value}]"
    typed = as_typed(row.key, meant or value or "<value>")
    leaf = inside.partition(".")[0]
    default = "dpo" if group == "algo" else ""
    chosen = next((word.partition("=")[2] for word in words if word.startswith(f"{group}=")), default)
    picked = set(re.findall(r"\w+", chosen))
    having = owners(group, leaf) if group != "logger" else [leaf] if inside else []
    every = [name.rpartition("/")[2] for name in SCHEMAS if name.startswith(f"schema/{group}/")]
    # all options have the key, but embedded tasks have data of their own
    everywhere = len(having) in (0, len(every)) and row.key != "task.path"
    if everywhere or picked & {*having} or (picked and not picked & {*every}):
        return typed
    return f"{group}={next((name for name in _USUAL if name in having), having[0])} {typed}"


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
    parts = (_simple(word).replace(".", "_"), _leaf(word))  # `eval.every` is schedule.eval_every
    same = [name for name in names if _simple(name) == _simple(word)]
    named = [name for name in names if not name.startswith("stages.")]
    same += [name for part in parts for name in named if _leaf(name) == part]
    found = meaning(word, keys)
    if found is not None and (not same or (found[0].key not in same and "." in same[0])):
        row, name, project = found
        if row.key == WITHOUT:
            return _Guess(f"{name} of {project} has no key here: {row.note}", note=row.note)
        words = assigned(row, value, typed)
        note = f"{name} in {project}{row.note and '; ' + row.note}"
        return _Guess(f"set {words} ({note})", row.key, words, row.note)
    if not same and (option := next((each for each in groups() if word in options(each)), None)):
        return _Guess(f"did you mean {option}={word}?", option, f"{option}={word}")
    beside = [key for key in all_keys() if key.rpartition(".")[0] == word.rpartition(".")[0] != ""]
    near = same[0] if same else closest(_leaf(word), beside) or closest(word, names)
    if (near := near or closest(_leaf(word), names)) is None:
        return None
    section, _, name = near.rpartition(".")
    having = [f"{chosen_by(section)}={each}" for each in owners(section, name) if near not in names]
    belongs = f", a setting of {', '.join(having)}" if having else ""
    typed_again = f" set {as_typed(near, value)}" if value and not belongs else ""
    return _Guess(f"did you mean {near}{belongs}?{typed_again}", near, as_typed(near, value or "<value>"))


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
    r"|eval/part/[^/]+/(score|gold_score|win_rate|response_tokens)|eval/pass_at_\d+|(eval/)?judge/met/\d+"
)
_OF_JUDGES = [f"eval/{name}" for name in ("win_rate", "win_rate_lc", "tie_rate", "gold_score", "norm_reward")]
_NEAR = 0.9  # similarity of a misspelled name


def is_own(name: str) -> bool:
    """Return whether only code of the user can measure a metric."""
    return name not in KNOWN and not _OPEN.fullmatch(name)


def lacking(name: str, cfg: Config, code: bool = False) -> tuple[str, str] | None:
    """Return rule and remedy for a metric that a run does not have; None if the run may have the metric.

    A plug-in may add any metric, other code a family of metrics. A name that is almost known is misspelled.

    Args:
        name: the metric.
        cfg: the config of the run.
        code: whether the run calls functions or classes of the user.
    """
    name = re.sub("_(low|high)$", "", name) if name.startswith("eval/") else name
    family, kind, may = name.partition("/")[0], name.removeprefix("eval/").partition("/")[0], True
    if kind == "environment":
        may = cfg.environment.name != "none"
    elif kind.startswith("pass_at_"):
        may = kind in cfg.eval.passes
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
    rewards, remedy, judge = cfg.algo.trains is Trains.reward, "", cfg.scorer if "/s" in name else cfg.gold
    if judge.compares and name in ("eval/score", "eval/gold_score", "eval/norm_reward"):
        remedy = "choose eval/win_rate or eval/win_rate_vs_initial"
    elif name in _OF_JUDGES and (rewards or cfg.gold.name == "none"):
        remedy = "choose another one" if rewards else "set scorer@gold or choose another one"
    elif name in ("eval/win_rate_vs_initial", "eval/score") and (rewards or not cfg.scores_completions):
        remedy = "choose another one"
    return ("be a metric that the runs have", remedy) if remedy else None


# Errors of composing a config. Each override is judged by itself first, then the key that OmegaConf names,
# then the files that the overrides select.


# Exceptions of an invalid config. For some uses of null, Hydra and OmegaConf raise the last two types.
CONFIG_ERRORS = (HydraException, OmegaConfBaseException, yaml.YAMLError, AssertionError, ValueError)
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

    The texts of Hydra and OmegaConf appear only if no mistake is found.

    Args:
        error: one of `CONFIG_ERRORS`.
        overrides: the overrides of the command line.
        sweep: whether commas in overrides separate the values of a sweep.
    """
    if isinstance(error, yaml.YAMLError):
        return f"a config file is not YAML: {' '.join(str(error).split())}; fix the file"
    typed = catalogue.read_overrides(overrides)
    for number, each in enumerate(typed):
        if found := _wrong_word(each, overrides[number + 1 :], sweep):
            return found
    cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__ or error.__context__
    if isinstance(cause, OmegaConfBaseException) and (found := _wrong_setting(cause, typed)):
        return found
    if found := next(_not_there(typed), None) or next(_wrong_defaults(typed), None):
        return found
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, name = error.missing_cfg_file.rpartition("/")
        if not group:
            return f"--config-name must name a file of the config folder, got {name}; leave it out"
        key = next((each.key for each in typed if each.group == group), group)
        return one_of(key, name, filter(None, error.options or ()))
    lines = [line.strip() for line in str(error).splitlines() if not re.search("full_key|_type=", line)]
    return (f"{error.full_key}: " if isinstance(error, OmegaConfBaseException) else "") + " ".join(lines)


# -- an override by itself -------------------------------------------------------------------------


def _wrong_word(each: Override, following: Sequence[str], sweep: bool) -> str | None:
    """Return the message for an override that is wrong by itself; None: it may be right.

    Args:
        each: the override.
        following: the arguments after it, which may be the rest of a value with blanks.
        sweep: whether commas separate the values of a sweep.
    """
    key, value = each.key, each.value
    blanks = re.match(r"[\w.@/+~]+(= | =(?! )| = )[^\s=]+(?= |$)", " ".join([each.text, *following]))
    if blanks and "=" not in each.text.strip("="):
        whole = blanks[0].replace(" ", "")
        rule = f"{whole.partition('=')[0]} must have no blanks around '=' (they end an argument)"
        return f"{rule}, got {blanks[0]}; write {whole}"
    if "=" not in each.text and each.sign != "~":
        name, colon, option = key.partition(":")
        value = option if colon else next((word for word in following[:1] if "=" not in word), "<value>")
        known = name in [*groups(), *all_keys()] and name
        meant = None if known else guess(key, keys=all_keys())
        remedy = f"write {as_typed(known, value)}" if known else meant.remedy if meant else "write key=value"
        return f"{key} must read key=value or group=option (it has no '='), got {each.text}; {remedy}"
    parsed = _parsed(each.text)
    if parsed is None:
        if each.group in groups():
            return one_of(key, value, options(each.group))
        rule = f"{key} must have a value that Hydra can read (brackets, quotes, commas and blanks are syntax)"
        return f"{rule}, got {value!r}; write {_readable_form(key, value, following)}"
    if parsed.is_sweep_override():
        return None if sweep else _several_values(key, value)
    if each.group in groups():
        return _wrong_choice(each)
    chooses = ("@" in key or "/" in key) and not key.startswith("hydra/")
    if chooses and chosen_by(key.partition("@")[2]) != key:
        remedy = suggestion(key, [*groups(), "scorer@gold"], "did you mean {}?") or "see --help"
        return f"{key} must be a group (one of {', '.join(groups())}), got {key}; {remedy}"
    return None


def _parsed(text: str) -> Any:
    """Return an override as Hydra reads it; None: Hydra cannot read it."""
    try:
        return OverridesParser.create().parse_override(text)
    except HydraException:
        return None


def _readable_form(key: str, value: str, following: Sequence[str]) -> str:
    """Return the override with the first similar value that Hydra reads."""
    whole = ["".join([value, *following[:count]]) for count in (1, 2, 3)]  # blanks divided the value
    inside = value.strip("()[],")
    for each in (*whole, inside, f"[{inside}]"):
        parsed = _parsed(f"{key}={each}") if each != value and "=" not in each else None
        if parsed is not None and not parsed.is_sweep_override():
            return as_typed(key, each)
    return setting(key, value.strip("\"'\\"))


def _several_values(key: str, value: str) -> str:
    """Return the message for a value with commas, which is a sweep, in a single run."""
    rule = f"{key} must have one value in a single run (commas separate the values of a sweep), got {value}"
    remedy = "add -m to run each"
    if key == "logger" or (catalogue.takes_list(key) and key not in groups()) or addresses(value):
        remedy += f", or write {as_typed(key, f'[{value}]')} for a list"
    elif str in catalogue.types_of(key) and key not in groups():
        remedy += f", or write {setting(key, value)} for one text"
    return f"{rule}; {remedy}"


def _wrong_choice(each: Override) -> str | None:
    """Return the message for an override that chooses no option of its group; None: it chooses one."""
    key, group, section = each.key, each.group, each.key.partition("@")[2]
    if section and chosen_by(section) != key:
        remedy = "did you mean scorer@gold?" if group == "scorer" else f"choose by {group}=<option>"
        rule = f"{key} must name a section with options of {group} (there is no {section})"
        return f"{rule}, got {each.text}; {remedy}"
    optional = group not in _SECTIONS
    if each.value.startswith("{") or (each.sign == "~" and not each.value and optional):
        return None
    several = each.value.startswith("[") and (not optional or not each.options)
    if (each.sign and ".parts." not in key) or several or each.value in ("", "null"):
        rule = f"{key} must have one option ({', '.join(options(group))})"
        remedy = f"write {key}=<option>, without a sign or brackets"
        return f"{rule}, got {each.text}; {remedy}{', or leave it out' if optional else ''}"
    wrong = next((option for option in each.options if not _exists(group, option)), None)
    return wrong and one_of(key, wrong if group == "logger" else each.value, options(group))


def _exists(group: str, option: str) -> bool:
    """Return whether a group has an option, as Hydra finds it."""
    name = f"{group}/{option.removesuffix('.yaml')}"
    return name in SCHEMAS or any((folder / f"{name}.yaml").is_file() for folder in catalogue.conf_dirs())


# -- a key or a value that its section refuses -----------------------------------------------------


def _wrong_setting(error: OmegaConfBaseException, overrides: Sequence[Override]) -> str | None:
    """Return the message for a key, value or reference that OmegaConf refuses; None: of no section."""
    key = str(error.full_key).partition("[")[0]  # of a list, if an element is wrong
    section: Any = error.object_type
    if not is_dataclass(section):
        section = next((each.section for each in catalogue.declared_keys() if each.key == key), None)
    if section is None or not key:
        return None
    in_files = ((each.name, value_at(each.content, key)) for each in catalogue.selected_files(overrides))
    file, value = next((each for each in in_files if each[1] is not ABSENT), (None, error.value))
    if isinstance(error, errors.ConfigAttributeError | errors.ConfigKeyError):
        return _unknown_key(key, section, overrides, file)
    own = next((each for each in overrides if f"{each.key}.".startswith(f"{key}.")), None)
    value, place = (own.value, "") if own else (plain(value), f" in {file}.yaml" if file else "")
    hint = get_type_hints(section).get(key.rpartition(".")[2], section)
    if own and own.key != key:
        return f"{key} must be {_allowed(hint)}, with nothing inside it, got {own.text}; leave {own.text} out"
    if isinstance(error, errors.InterpolationKeyError):
        wrong = next((name for name in re.findall(r"\$\{([\w.]+)", value) if name not in all_keys()), value)
        remedy = suggestion(wrong, all_keys(), "did you mean ${{{}}}?") or f"set {key}=<value>"
        return f"{key} must refer to a key of the config{place} (there is no {wrong}), got {value}; {remedy}"
    if is_dataclass(hint) and group_of(key) in groups():
        at, choices = chosen_by(key), ", ".join(options(group_of(key)))
        return f"{at} must choose what {key} is ({choices}){place}, got {key}={value}; set {at}={value}"
    if is_dataclass(hint):
        names = ", ".join(f"{key}.{each.name}" for each in fields(hint))
        rule = f"{key} must not be set (it is a section of settings: {names}){place}"
        return f"{rule}, got {key}={value}; set one of them"
    return f"{key} must be {_allowed(hint)}{place}, got {value!r}; {_remedy(section, key, hint, value)}"


def _remedy(section: type, key: str, hint: Any, value: str) -> str:
    """Return the remedy for a value of the wrong type."""
    at, _, leaf = key.rpartition(".")
    if leaf == "path" and group_of(at) == "scorer" and (own := _own_value(chosen_by(at), value)):
        return own
    kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    choices = [
        each.name for kind in kinds if isinstance(kind, type) and issubclass(kind, Enum) for each in kind
    ]
    if found := closest(value, choices):
        return f"did you mean {key}={found}?"
    if list[str] in kinds and re.fullmatch(r"[^\[\]{}]+", value):
        return f"set {setting(key, [part.strip() for part in value.split(',')])}"
    if str in kinds and re.fullmatch(r"\[.+\]", value):
        return f"set {setting(key, value[1:-1].split(',')[0].strip())}, one text"
    with suppress(ValueError, OverflowError):
        if int in kinds and float(value).is_integer():
            return f"set {key}={int(float(value))}"
    bound = fact(section, leaf, "bound")
    default = next((each.default for each in fields(section) if each.name == leaf), NO_DEFAULT)
    if bound is not None and bound.remedy is not None:
        return f"set {key}={bound.remedy}"
    return f"set {key}={'<value>' if default in (NO_DEFAULT, MISSING) else plain(default)}"


def unknown_keys(config: DictConfig, overrides: Iterable[str]) -> list[str]:
    """Return a message for each key that `+` added to a section without such a key."""
    found, typed, nodes = [], catalogue.read_overrides(overrides), [("", config)]
    for prefix, node in nodes:  # the list grows
        section: Any = OmegaConf.get_type(node)
        known = {each.name for each in fields(section)} if is_dataclass(section) else None
        for key in map(str, node):
            if known is not None and key not in known:
                found.append(_unknown_key(f"{prefix}{key}", section, typed))
            elif isinstance(child := node._get_node(key), DictConfig) and child._content.__class__ is dict:
                nodes.append((f"{prefix}{key}.", child))
    return found


def _unknown_key(key: str, section: type, overrides: Sequence[Override], file: str | None = None) -> str:
    """Return the message for a key that its section does not have; `file`: the option file that sets it."""
    parent, _, leaf = key.rpartition(".")
    if file and not parent and file.startswith(f"{leaf}/"):
        rule = "must begin with # @package _global_ (its settings belong to several sections)"
        return f"{file}.yaml {rule}, got settings of {leaf}; add the line"
    known = [each.name for each in fields(section) if each.name != "name"]
    given = [each for each in overrides if f"{each.key}.".startswith(f"{key}.") and not file]
    typed, got, value = (given[0].key, given[0].text, given[0].value) if given else (key, key, "")
    place = f" in {file}.yaml" if file else ""
    option = catalogue.option_name(section)
    owner = f"{chosen_by(parent)}={option}" if option in options(group_of(parent)) else parent
    rule = f"a setting of {owner}{place} ({', '.join(known) or 'it has none'})"
    rule = rule if parent else f"a setting or a group{place} (there is no {leaf})"
    own = [f"{parent}.{name}" for name in known if parent]
    others = [f"{chosen_by(parent)}={each}" for each in owners(parent, leaf) if each != option]
    foreign = meaning(key, own)
    if parent and value in options(group_of(parent)):
        remedy = f"set {chosen_by(parent)}={value}"
    elif parent and others and not (foreign and foreign[0].key in own):
        remedy = f"it belongs to {', '.join(others)}: choose that option, or leave it out"
    else:
        words = [each.text for each in overrides]
        meant = guess(typed, value, [*own, *keys_of_run(words)], words)
        remedy = meant.remedy if meant else "leave it out, or see --help"
    return f"{typed} must be {rule}, got {got}; {remedy}"


# -- what the config does not have, and the files of options ---------------------------------------


def _not_there(overrides: Sequence[Override]) -> Iterator[str]:
    """Yield a message for each override of something that must be chosen, added or exist before."""
    new = {each.key for each in overrides if each.sign == "+"}
    for each in overrides:
        part = re.match(r"(?:\S+@)?((?:scorer|gold|task)\.parts\.\w+)", each.key)
        if part and chosen_by(part[1]) not in new:
            kind = "task" if part[1].startswith("task.") else "scorer"
            why = f"the parts of a {kind} are {kind}s, under names of your choice"
            remedy = f"choose it by {chosen_by(part[1])}=<{kind}>, with + in front if it is new"
            yield f"{part[1]} must be chosen before it is set ({why}), got {each.text}; {remedy}"
        elif logger := re.match(r"logger\.(\w+)\.", each.key):
            rule = f"needs the logger {logger[1]} (a logger that is off has no settings)"
            yield f"{each.key} {rule}, got {each.text}; add logger={logger[1]}"
        elif each.sign == "~":
            yield f"{each.key} must name an existing key, got {each.text}; list the keys with --cfg job"
        elif not each.sign and (each.key.startswith("hydra.") or _is_free(each.key.rpartition(".")[0])):
            rule = "must be added with + (the config has no such key)"
            yield f"{each.key} {rule}, got {each.text}; write '+{each.text}'"


def _is_free(key: str) -> bool:
    """Return whether a key, or one that contains it, has keys of the user's choice, such as DeepSpeed's."""
    above = key.rpartition(".")[0]
    free = any(get_origin(each) is dict for each in catalogue.types_of(key)) and not key.endswith(".parts")
    return free or (bool(above) and _is_free(above))


def _wrong_defaults(overrides: Sequence[Override]) -> Iterator[str]:
    """Yield a message for each entry of the defaults list of a selected file that Hydra cannot follow."""
    for file in catalogue.selected_files(overrides):
        for entry, option in file.defaults:
            group = entry.split(" ")[-1].removeprefix("/").partition("@")[0]
            if group in _SECTIONS and not entry.startswith("override ") and "@" not in entry:
                rule = f"{group} must have one option, got another one in {file.name}.yaml"
                yield f"{rule}; write override /{group}: <option>"
            elif entry.startswith("override ") and group not in groups() and "/" not in group:
                remedy = suggestion(group, groups(), "did you mean {}?") or "see --help"
                yield f"{group} must be a group in {file.name}.yaml, got {group}; {remedy}"
            elif group in groups() and option not in ("None", "null") and not _exists(group, option):
                yield one_of(group, option, options(group), f" in {file.name}.yaml")


# -- flags, and words that are no overrides --------------------------------------------------------


def flag_problem(arguments: Sequence[str], flags: Collection[str], own: Collection[str] = ()) -> str | None:
    """Return the message for the first flag that does not exist; None: all flags exist.

    If the flag is a setting here or in another project, the remedy has all such flags of the command.

    Args:
        arguments: the command line without the name of the command.
        flags: the flags that the command has, such as `--cfg`. An abbreviation of a flag is accepted.
        own: names of the command's own arguments, such as `run` for `run=<folder>`.
    """
    unknown: list[tuple[str, str, str]] = []  # flag, value, and both as typed
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=False):
        flag, equals, value = argument.partition("=")
        if not re.match(r"--?[A-Za-z]", flag):
            continue
        if not equals and "=" not in following and not following.startswith("--"):
            value = following
        got = argument if equals or not value else f"{flag} {value}"
        if flag in ("--config-path", "-cp"):
            rule = "--config-path must not be given (it would replace the configs of this project)"
            return f"{rule}, got {got}; --config-dir <folder> adds options of your own"
        if flag in ("--cfg", "-c") and flag in flags:
            if value not in ("job", "hydra", "all"):
                rule = f"{flag} must be followed by job, hydra, all (the config to print)"
                return f"{rule}, got {got}; write {flag} job"
        elif flag not in flags and sum(each.startswith(flag) for each in flags if each[:2] == "--") != 1:
            unknown.append((flag, value, got))
    if not unknown:
        return None
    flag, _, got = unknown[0]
    if remedy := _as_settings(unknown, arguments, own):
        rule = "must be written without dashes, as key=value or group=option (there is no such flag)"
        return f"{flag} {rule}, got {got}; {remedy}"
    remedy = suggestion(flag, flags, "did you mean {}?") or "leave it out, or see --help"
    return f"{flag} must be a flag of this command ({', '.join(sorted(flags))}), got {got}; {remedy}"


def _as_settings(
    unknown: Sequence[tuple[str, str, str]], arguments: Sequence[str], own: Collection[str]
) -> str | None:
    """Return the remedy for flags that are settings; None: the first of them is no setting.

    Without an algorithm, a number of samples means one that samples. Then `beta` is the KL coefficient.

    Args:
        unknown: name and value of each flag, and both as typed.
        arguments: the command line.
        own: names of the command's own arguments.
    """
    samples = [found for flag, _, _ in unknown if (found := meaning(flag.lstrip("-")))]
    online = any(row.key == "algo.samples_per_prompt" for row, _, _ in samples)
    keys = [*own, *keys_of_run(arguments, "grpo" if online else "dpo")]
    words: dict[str, str] = {}  # by key
    notes: list[str] = []
    for flag, value, _ in unknown:
        name = flag.lstrip("-")
        negated = not value and name.startswith("no_") and meaning(name) is None
        name = name[3:] if negated else name
        meant = guess(name, value, keys, arguments) if len(name) > 1 else None
        if meant and not value and bool in catalogue.types_of(meant.key):
            meant = meant._replace(words=f"{meant.key}={str(not negated).lower()}")
        if meant is None:
            if not words and not notes:
                return None
        elif not meant.key:
            notes.append(f"leave {name} out ({meant.note})")
        else:
            notes += [f"{name}: {meant.note}"] if meant.note else []
            words[meant.key] = words.get(meant.key, meant.words) if "<value>" in meant.words else meant.words
    once = dict.fromkeys(" ".join(words.values()).split(" "))  # several settings may need the same option
    ordered = " ".join(sorted(once, key=lambda word: word.partition("=")[0] not in groups()))
    return "; ".join([*([f"write {ordered}"] if words else []), *dict.fromkeys(notes)])


def readable(arguments: Sequence[str]) -> list[str]:
    """Return the arguments, with quotes around each value that Hydra reads only in quotes.

    Examples are `model.pad_token=<|pad|>`, a path with an umlaut, and the path of an existing file whose name
    contains commas. Another value with signs that have a meaning for Hydra (quotes, brackets, commas,
    backslashes, interpolations) stays as it is.
    """
    found = []
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if equals and not argument.startswith("-"):
            if _names_file(value):
                argument = override(key, value)
            elif not re.search(r"[\"'\\,\[\]{}()$]", value) and _parsed(argument) is None:
                argument = f'{key}="{value}"'
        found.append(argument)
    return found


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
    parsed = _parsed(f"x=[{inner}]")
    found = parsed and parsed.value()
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


# -- values and types in words ---------------------------------------------------------------------


def _allowed(hint: Any) -> str:
    """Return a description of the values that a type hint allows."""
    if get_origin(hint) in (Union, types.UnionType):
        parts = [_allowed(part) for part in get_args(hint) if part is not type(None)]
        return " or ".join([*parts, "null"] if type(None) in get_args(hint) else parts)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return f"one of {', '.join(member.name for member in hint)}"
    if get_origin(hint) in (tuple, list):
        return f"a list of {'texts' if str in get_args(hint) else 'numbers'}, as [a,b]"
    return _TYPE_NAMES.get(hint, str(hint))
