"""Config sections: how a dataclass becomes a config option, checks of its fields, missing packages."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from enum import Enum
from functools import cache
from importlib.resources import files
from operator import ge, gt, le, lt
from typing import Any, Self, TypeVar, dataclass_transform, get_args, get_origin, get_type_hints

import yaml
from hydra.core.config_store import ConfigStore

# Config sections: how a dataclass becomes a config option, and how its fields are checked.
#
# A section is a `@dataclass(kw_only=True, slots=True)`. Because of the slots, OmegaConf cannot store an
# unknown key (also a key added with `+`), so a typo is an error. `@option` makes the dataclass and registers
# it with Hydra as `schema/<group>/<name>`; `conf/<group>/<name>.yaml` names that schema first in its defaults
# list.
#
# A field declares its key: the type, the default, the bounds of a number, when the key has an effect, and
# what of a run it affects (`entry`, `number`). A short meaning of the key is an argument of `entry`, a long
# one the docstring below the field. `rules` and `doubts` check what concerns several fields.
#
# `option` registers the address (`module:name`) of the part that a section configures. Sections never import
# parts, and this module imports no torch, so that `--help` and error messages appear quickly.


T = TypeVar("T", bound=type)

ABSENT = object()  # the value of a key that a config does not have
_REQUIRED = "???"  # the value of a key that a config must set, in OmegaConf
TERM = re.compile(r"([\w.@]+)(!?=)(\S+)")  # key, sign and values of a condition
SCHEMAS: dict[str, type] = {}  # "schema/<group>/<name>" -> the section class registered under that name
PARTS: dict[type, str] = {}  # section class -> address of the part that it configures, "module:name"


def data_file(package: str, name: str) -> Any:
    """Return the content of the YAML file `name` in the folder of `package`."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast
    return yaml.load((files(package) / name).read_text(encoding="utf-8"), loader)


class Affects(Enum):
    """What depends on a key. Only keys that affect the result are part of the name of a run."""

    result = "weights or metrics"
    speed = "speed, memory, waiting times"
    nothing = "display, files, logging"


@dataclass(kw_only=True, slots=True)
class Section:
    """One section of the configuration.

    A class may have a variable `affects`: what of a run depends on the keys that it declares by `entry`.
    """

    def problems(self, at: str) -> Iterator[str]:
        """Yield an error message for each number out of its bounds, and for each rule that is broken.

        A class states rules as a method `rules(self, at)` that yields messages; all bases' rules apply.

        Args:
            at: the dotted key of this section in the config; empty for the root.
        """
        for each in fields(self):
            bound, value = fact(type(self), each.name, "bound"), getattr(self, each.name)
            if bound is not None and value is not None and (rule := bound.broken(value)) is not None:
                whole = round(value) if rule.startswith("be whole") else ABSENT
                yield self.refused(at, each.name, rule, fact(type(self), each.name, "means"), whole)
        for cls in reversed(type(self).__mro__):
            if "rules" in vars(cls):
                yield from vars(cls)["rules"](self, at)

    def refused(
        self, at: str, name: str, rule: str, because: str = "", instead: Any = ABSENT, remedy: str = ""
    ) -> str:
        """Return the error message for the value of a field.

        Args:
            at: the dotted key of this section.
            name: the field, or the dotted key of one below this section.
            rule: the rule, as it follows "must", such as "be > 0 with algo.kl_target".
            because: the reason of the rule.
            instead: a valid value, or a placeholder for one; by default that of the field.
            remedy: what to do, if it is not to set the key to `instead`.
        """
        key = dotted(at, name)
        if instead is ABSENT:
            bound = fact(type(self), name, "bound")
            default = value_at(type(self)(), name)
            instead = bound and bound.remedy or ("<value>" if default == MISSING else default)
        reason = because and f" ({because})"
        remedy = remedy or f"set {key}={instead if isinstance(instead, str) else plain(instead)}"
        return f"{key} must {rule}{reason}, got {plain(value_at(self, name))}; {remedy}"

    def warnings(self, at: str) -> Iterator[str]:
        """Yield a warning for each setting of this section that has no effect, or is allowed but doubtful."""
        cls: type = type(self)
        default = cls()
        for name, conditions in used(cls).items():
            if getattr(self, name) == getattr(default, name):
                continue
            for condition in conditions:
                states = [(*each, plain(getattr(self, each[0]))) for each in TERM.findall(condition)]
                if not any(meets(now, sign, values) for _, sign, values, now in states):
                    key, sign, values, now = states[-1]
                    owner = f" (it belongs to {values.replace('|', ' and ')})" if sign == "=" else ""
                    yield f"{dotted(at, name)} has no effect with {dotted(at, key)}={now}{owner}"
                    break
        for base in reversed(cls.__mro__):
            if "doubts" in vars(base):
                yield from vars(base)["doubts"](self, at)

    def job_problems(self, at: str) -> Iterator[str]:
        """Yield an error for each value that fails in the process of a job.

        The user's code is imported there, and the machine may be another than that of the command.
        """
        return iter(())

    def with_(self, changes: Mapping[str, Any]) -> Self:
        """Return a copy with other values, for example `cfg.with_({"model.policy": path, "seed": 2})`.

        Args:
            changes: dotted key, relative to this section -> value. A change of a section replaces it first.
        """
        own = {key: value for key, value in changes.items() if "." not in key}
        below: dict[str, dict[str, Any]] = {}
        for key, value in changes.items():
            name, _, rest = key.partition(".")
            if rest:
                below.setdefault(name, {})[rest] = value
        parts = {name: own.get(name, getattr(self, name)).with_(part) for name, part in below.items()}
        return replace(self, **{**own, **parts})


class Choice(Enum):
    """The values of a key, each with its meaning: `never = "never", "move the folder aside"`."""

    means: str

    def __new__(cls, value: str, means: str = "") -> Self:
        """Return the member with the value `value`."""
        member = object.__new__(cls)
        member._value_ = value
        member.means = means
        return member


def sections(section: Section, key: str = "") -> Iterator[tuple[str, Section]]:
    """Yield `section` and every section below it, each with its dotted key.

    Args:
        section: the section to start from.
        key: the dotted key of `section`; empty for the root.
    """
    yield key, section
    for each in fields(section):
        at, value = dotted(key, each.name), getattr(section, each.name)
        for name, part in value.items() if isinstance(value, dict) else [("", value)]:
            if isinstance(part, Section):
                yield from sections(part, f"{at}.{name}" if name else at)


def dotted(at: str, name: str) -> str:
    """Return the dotted key of the field `name` of the section with the dotted key `at`."""
    return f"{at}.{name}" if at else name


def meets(now: str, sign: str, values: str) -> bool:
    """Return whether a condition holds.

    Args:
        now: the value of the key, as it is typed; empty: there is no such key, and no condition holds.
        sign: `=` or `!=`.
        values: a value, or several with `|` between them, of which `now` is one (`=`) or none (`!=`).
    """
    return bool(now) and (now in values.split("|")) == (sign == "=")


@cache
def used(cls: type) -> dict[str, tuple[str, ...]]:
    """Return the conditions under which fields of a section class have an effect, by the names of fields."""
    found = {each.name: fact(cls, each.name, "when") for each in fields(cls)}
    return {name: (when,) if isinstance(when, str) else when for name, when in found.items() if when}


def value_at(value: Any, key: str) -> Any:
    """Return the value of the dotted key `key` in a section or dictionary; `ABSENT`: there is no such key."""
    for name in key.split("."):
        value = value.get(name, ABSENT) if isinstance(value, dict) else getattr(value, name, ABSENT)
    return value


def values(section: Section) -> dict[str, Any]:
    """Return the values of a section as nested dictionaries and lists; an enum becomes its name.

    The result is that of OmegaConf, which takes 40 times as long:
    `OmegaConf.to_container(OmegaConf.structured(section), enum_to_str=True)`.
    """
    cls: type = type(section)
    floats = _float_fields(cls)
    return {each.name: content(getattr(section, each.name), each.name in floats) for each in fields(section)}


def content(value: Any, floats: bool) -> Any:
    """Return a value of a field as plain Python; in a field of `floats`, a whole number becomes a float."""
    if isinstance(value, Section):
        return values(value)
    if isinstance(value, dict):
        return {key: content(each, floats) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [content(each, floats) for each in value]
    if isinstance(value, Enum):
        return value.name
    return float(value) if floats and type(value) is int else value


@cache
def _float_fields(cls: type) -> frozenset[str]:
    """Return the names of the fields whose numbers are floats, such as `float | None` and `list[float]`."""
    found = {name: set(leaves(hint)) for name, hint in get_type_hints(cls).items()}
    return frozenset(name for name, types in found.items() if float in types and int not in types)


def leaves(hint: Any) -> Iterator[Any]:
    """Yield the types of which a type hint consists."""
    if arguments := get_args(hint):
        for each in arguments:
            yield from leaves(each)
    else:
        yield hint


def section_class(hint: Any) -> type[Section] | None:
    """Return the section class of a field that is a section or may be null; None for any other type."""
    found = () if get_origin(hint) is dict else leaves(hint)
    return next((each for each in found if isinstance(each, type) and issubclass(each, Section)), None)


@dataclass_transform(kw_only_default=True, field_specifiers=(field,))
def option(group: str, name: str, part: str | None = None) -> Callable[[T], T]:
    """Register a section class as the option `name` of the config group `group`.

    The class becomes a keyword-only dataclass with slots, unless it is a dataclass already. The default of
    its key `name`, if a base class has this key, is the name of the option.

    Args:
        group: the config group, for example "algo".
        name: the option, for example "grpo".
        part: the address of the class or function that makes the part, "module:name"; None: the section
            configures no part. Subclasses do not inherit the address.

    Raises:
        TypeError: the class is a dataclass with positional arguments, or without slots: a key that is added
            with `+` would be accepted silently.
    """

    def store(cls: T) -> T:
        section: Any = cls
        if "__dataclass_fields__" not in vars(cls):
            if "name" in getattr(cls, "__dataclass_fields__", ()) and "name" not in vars(cls):
                section.__annotations__ = {**section.__annotations__, "name": "str"}
                section.name = name
            section = dataclass(kw_only=True, slots=True)(section)
        if "__slots__" not in vars(section) or not all(each.kw_only for each in fields(section)):
            raise TypeError(f"{cls.__name__} must be a @dataclass(kw_only=True, slots=True)")
        ConfigStore.instance().store(group=f"schema/{group}", name=name, node=section)
        SCHEMAS[f"schema/{group}/{name}"] = section
        if part is not None:
            PARTS[section] = part
        return section

    return store


def schema_of(cls: type) -> str | None:
    """Return the name `schema/<group>/<name>` under which `cls` is registered, or None."""
    return next((name for name, stored in SCHEMAS.items() if stored is cls), None)


# -- numbers with a bound --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """The rule of a numeric field.

    The value None passes every rule, because the type of the field determines whether None is allowed.

    Args:
        least: the value must be >= this.
        above: the value must be > this.
        most: the value must be <= this.
        below: the value must be < this.
        counts: for a number whose values below 1 are fractions of the run: the unit of values from 1 on, for
            example "updates". Values from 1 on must be whole.
        remedy: a valid value, for messages; None: the default of the field.
    """

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
    counts: str | None = None
    remedy: str | None = None

    def broken(self, value: float) -> str | None:
        """Return the text of the rule that `value` breaks, such as "be >= 1"; None if it breaks no rule."""
        rules = (self.least, ">=", ge), (self.above, ">", gt), (self.most, "<=", le), (self.below, "<", lt)
        stated = [(bound, sign, holds) for bound, sign, holds in rules if bound is not None]
        text = " and ".join(f"{sign} {plain(bound)}" for bound, sign, _ in stated)
        if not math.isfinite(value):
            return f"be finite and {text}" if text else "be finite"
        if not all(holds(value, bound) for bound, _, holds in stated):
            return f"be {text}"
        if self.counts and value > 1 and value != int(value):
            return f"be whole if it is 1 or more: then it counts {self.counts}"
        return None


def entry(
    default: Any = _REQUIRED,
    means: str = "",
    when: str | tuple[str, ...] = (),
    *,
    affects: Affects | None = None,
    added: bool = False,
    bound: Bound | None = None,
) -> Any:
    """Declare a field of a section with the facts about its key.

    A subclass may declare the field again with only another default; the facts of the base class remain.

    Args:
        default: the value of a config that does not set the key; or a function that makes it, such as `list`.
        means: the meaning of the key, for `--help`, docs/reference/config.md and error messages; by default
            the docstring below the field.
        when: the conditions under which the key has an effect, about other keys of its section, such as
            `kind=mask`, `kind=truncate|mask`, `kind!=none` or `reject=m2 or reject_by!=k1`. Without an
            effect, a value that is not the default gives a warning.
        affects: what of a run depends on the key; None: see `Section`.
        added: an earlier version has no such key, and does what the default says. A key with its default is
            then not part of the name of a run, so that earlier runs keep their names.
        bound: the rule of a number; see `number`.
    """
    facts = {"means": means, "when": when, "affects": affects, "added": added, "declared": default}
    if callable(default):
        return field(default_factory=default, metadata={**facts, "declared": _REQUIRED})
    return field(default=default, metadata={**facts, "bound": bound} if bound else facts)


def number(default: Any, means: str = "", when: str | tuple[str, ...] = (), **facts: Any) -> Any:
    """Declare a numeric field: the facts of its key as in `entry`, its rule as in `Bound`."""
    rule = {name: facts.pop(name) for name in Bound.__slots__ if name in facts}
    return entry(default, means, when, bound=Bound(**rule), **facts)


@cache
def _docstrings(module: str) -> dict[tuple[str, str], str]:
    """Return the docstrings of the fields in a module, by the names of class and field."""
    found = {}
    with suppress(OSError, TypeError):  # no source
        every = ast.parse(inspect.getsource(sys.modules[module])).body
        for each in (node for node in every if isinstance(node, ast.ClassDef)):
            for node, text in zip(each.body, each.body[1:], strict=False):
                if isinstance(node, ast.AnnAssign) and isinstance(text, ast.Expr):
                    words = ast.literal_eval(text.value).split()
                    found[each.name, str(getattr(node.target, "id", ""))] = " ".join(words)
    return found


def fact(cls: type, name: str, kind: str) -> Any:
    """Return a fact about the key `name` of a section class, from the nearest class that declares it.

    Args:
        cls: the section class.
        name: the field of the key.
        kind: "means", "when", "affects", "added", "declared" (the default in this class) or "bound".

    Returns:
        The fact. None: no class declares it.
    """
    fields_of = [(each, vars(each).get("__dataclass_fields__", {}).get(name)) for each in cls.__mro__]
    declared: Field[Any] | None = next(
        (f for _, f in fields_of if f is not None and kind in f.metadata), None
    )
    found = None if declared is None else declared.metadata[kind]
    owner: Any = [each for each, field in fields_of if field is declared][-1]  # others inherit the field
    if kind == "affects" and declared is not None and found is None:
        return vars(owner).get("affects", Affects.result)
    if kind == "means" and not found:
        return _docstrings(owner.__module__).get((owner.__name__, name), "")
    return found


def plain(value: Any) -> str:
    """Format a value as a user types it on the command line; None is `null`."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case Enum():
            return str(value.value)
        case float():
            return f"{value:g}"
        case str() if value.split() != [value]:  # empty, or with spaces
            return repr(value)
        case list() | tuple():
            return f"[{','.join(map(plain, value))}]"
    return str(value)


# Errors for packages that an option needs and that are not installed.


def missing_package(
    option: str, module: str, extra: str, package: str = "", otherwise: str = ""
) -> Iterator[str]:
    """Yield an error if a module cannot be found.

    Args:
        option: the setting that needs the module, as it is typed.
        module: the module.
        extra: the extra of this project that installs it.
        package: the name of the package, if it is not that of the module.
        otherwise: a setting that does without, such as "set backend=torch".
    """
    if importlib.util.find_spec(module) is None:
        yield (
            f"{option} needs the package {package or module}, which is not installed; "
            f"run: pip install -e '.[{extra}]'{otherwise and f', or {otherwise}'}"
        )
