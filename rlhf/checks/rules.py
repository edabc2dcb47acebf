"""Rules over the whole config. A rule is a row, if one key has a wrong value, or a function.

    # rules.yaml
    - {key: optim.optimizer, value: adamw, when: not backend.any_optimizer,
       because: its engine has no other optimizer}
    - {key: stages.members, value: 1, when: NO_MEMBERS, because: it is the number of these models}

    # inputs.py
    NO_MEMBERS = When("without reward models to make", lambda cfg: not _makes_members(cfg))

The first row yields "optim.optimizer must be adamw with backend=zero2 (its engine has no other optimizer),
got muon; set optim.optimizer=adamw". The values after "got" and for `{backend}` are those of the config. A
row does not apply to a config without its key. docs/reference/config.md lists the rows.

A function yields error messages (or, for `@doubt`, warnings). A plug-in may add rules of both forms in the
module that registers its options; its rows are `RULES += [must(...)]`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from operator import and_
from typing import Any

from rlhf.config.root import Config
from rlhf.config.schema import ABSENT, TERM, Section, data_file, meets, plain, value_at, values
from rlhf.core.errors import UserError
from rlhf.core.files import flat
from rlhf.core.formatting import NO_SECRET_VALUE, is_secret_key, secret_in
from rlhf.words.catalogue import read_overrides

_Rule = Callable[[Config], Iterator[str]]

_TABLE = data_file("rlhf.checks", "rules.yaml")
RULES: list[_Rule] = []  # rules for every run
TRAINING_RULES: list[_Rule] = []  # rules for a run that trains; evaluating a finished run skips them
DOUBTS: list[_Rule] = []  # rules that warn of settings without effect and of doubtful settings


def rule(check: _Rule) -> _Rule:
    """Add `check` to the rules for every run, whether the run trains or is only evaluated."""
    RULES.append(check)
    return check


def training_rule(check: _Rule) -> _Rule:
    """Add `check` to the rules for runs that train."""
    TRAINING_RULES.append(check)
    return check


def doubt(check: _Rule) -> _Rule:
    """Add `check` to the rules whose messages are warnings."""
    DOUBTS.append(check)
    return check


# -- rows ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class When:
    """The configs to which a row applies.

    Args:
        text: the condition in words, as it continues the message, such as "with generator={generator}".
        holds: whether the row applies to a config.
    """

    text: str
    holds: Callable[[Config], bool]

    def __and__(self, other: When) -> When:
        """Return the condition that both conditions hold."""
        added = other.text.removeprefix("with ")
        text = self.text if added in self.text else f"{self.text} and {added}"
        return When(text, lambda cfg: self.holds(cfg) and other.holds(cfg))


ALWAYS = When("", lambda cfg: True)


def condition(term: str) -> When:
    """Return the condition of a row that a term states.

    Args:
        term: `<key>=<value>|<value>` or `<key>!=<value>`, about a value; `<section>.<fact>` or `not
            <section>.<fact>`, about what a section says of its option.
    """
    if stated := TERM.fullmatch(term):
        key, sign, values = stated.groups()
        return When(f"with {term.removesuffix('!=null')}", lambda cfg: meets(chosen(cfg, key), sign, values))
    fact = term.removeprefix("not ")
    section, sign = fact.partition(".")[0], "!=" if fact == term else "="
    return When(f"with {section}={{{section}}}", lambda cfg: meets(chosen(cfg, fact), sign, "false|0|null"))


@dataclass(frozen=True, slots=True)
class Allowed:
    """The values that a row allows.

    Args:
        text: the rule in words, as it continues the message after "must", such as "be > 0".
        holds: whether a value is allowed.
    """

    text: str
    holds: Callable[[Any], bool]


def one_of(*values: Any) -> Allowed:
    """Allow only values that are typed like one of these; a section is typed as the name of its option."""
    allowed = [_typed(value) for value in values]
    return Allowed(f"be {' or '.join(allowed)}", lambda found: _typed(found) in allowed)


def other_than(value: Any) -> Allowed:
    """Allow every value that is typed in another way than `value`."""
    return Allowed(f"not be {_typed(value)}", lambda found: _typed(found) != _typed(value))


@dataclass(frozen=True, slots=True)
class Row:
    """A rule about the value of one key; see `must`."""

    key: str
    allowed: Allowed
    when: When
    because: str
    fix: str

    def __call__(self, cfg: Config) -> Iterator[str]:
        """Yield the error message if the config breaks the rule."""
        value = _read(cfg, self.key)
        if value is ABSENT or self.allowed.holds(value) or not self.when.holds(cfg):
            return
        rule = f"{self.key} must {self.allowed.text} {self.when.text}".rstrip()
        yield f"{_filled(f'{rule} ({self.because})', cfg)}, got {_typed(value)}; set {_filled(self.fix, cfg)}"


def must(key: str, allowed: Any, when: When, because: str, fix: str | None = None) -> Row:
    """Return the rule that a key must have a value, or one of the allowed values.

    Args:
        key: a config key, or a key that selects an option, such as "generator" or "scorer@gold".
        allowed: the only allowed value, a tuple of the allowed values, or an `Allowed`.
        when: the configs to which the rule applies.
        because: the reason.
        fix: overrides that make the config valid; None: the key with the first allowed value.
    """
    if not isinstance(allowed, Allowed):
        values = allowed if isinstance(allowed, tuple) else (allowed,)
        allowed, fix = one_of(*values), fix or f"{key}={_typed(values[0])}"
    assert fix is not None, key
    return Row(key, allowed, when, because, fix)


def add_rows(module: str, names: Mapping[str, Any]) -> None:
    """Add the rows of a module in rules.yaml to the rules.

    Args:
        module: the name of the module.
        names: the conditions (`When`) and the allowed values (`Allowed`) of the module, by their names.
    """

    def joined(row: dict[str, Any]) -> When:
        terms = row["when"].split(" & ") if "when" in row else ()
        return reduce(and_, [names[term] if term in names else condition(term) for term in terms] or [ALWAYS])

    for part, added in (("rules", RULES), ("training", TRAINING_RULES)):
        for row in _TABLE[module][part]:
            value = row["value"]
            if isinstance(value, dict):
                value = names[value["is"]] if "is" in value else other_than(value["not"])
            value = tuple(value) if isinstance(value, list) else value
            added.append(must(row["key"], value, joined(row), row["because"], row.get("fix")))
    DOUBTS.extend(partial(_doubtful, joined(row), row["says"]) for row in _TABLE[module]["doubts"])


def _doubtful(when: When, text: str, cfg: Config) -> Iterator[str]:
    if when.holds(cfg):
        yield _filled(text, cfg)


def chosen(cfg: Config, key: str) -> str:
    """Return the value of a key as text, as it is typed; empty if the config has no such key."""
    value = _read(cfg, key)
    return "" if value is ABSENT else _typed(value)


def is_set(cfg: Config, key: str) -> bool:
    """Return whether the config has a key, and its value is not null."""
    return _read(cfg, key) not in (ABSENT, None)


def _read(cfg: Config, key: str) -> Any:
    """Return the value of a key, which may be a section; `ABSENT`: the config has no such key."""
    return value_at(cfg, key.rpartition("@")[2])


def _typed(value: Any) -> str:
    return plain(value_at(value, "name") if isinstance(value, Section) else value)


def _filled(text: str, cfg: Config) -> str:
    """Return `text` with the value of a key in place of each `{<key>}`."""
    return re.sub(r"\{([\w.@]+)\}", lambda found: chosen(cfg, found[1]), text)


# Secrets must not be in the config: config.yaml, environment.json, logs and loggers would show them.


_REMEDY = "leave it out, and set it as an environment variable or log in to the service"


@rule
def _secrets(cfg: Config) -> Iterator[str]:
    """Yield an error for each value that is or contains a secret, without the value.

    `HttpScorerConfig.problems` reports the addresses of scoring services, with another remedy.
    """
    for key, value in flat(values(cfg)):
        for text in value if isinstance(value, list) else [value]:
            secret = secret_in(text) if isinstance(text, str) and not key.endswith(".url") else None
            if secret is not None:
                yield f"{key} must not contain {secret} (config.yaml would show it), got one; {_REMEDY}"


def check_arguments(arguments: Sequence[str]) -> None:
    """Check that no argument of a command sets a key that names a secret.

    Raises:
        UserError: an argument is like `+logger.wandb.api_key=...`; the error does not contain the value.
    """
    found = []
    for each in read_overrides(arguments):
        if is_secret_key(each.key) and not NO_SECRET_VALUE.fullmatch(each.value):
            found.append(
                f"{each.key} must not be set on the command line (files of the run and the list of processes "
                f"show the command line), got a value; {_REMEDY}"
            )
    if found:
        raise UserError(*found)
