"""YAML files whose problems are reported together, each with its line.

Scalars of YAML stay texts: YAML 1.1 reads `1e-4` as a text, and `on` and `no` as booleans. So a value is
parsed by whoever knows its type; for an override this is the config. This module imports no torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import yaml

from rlhf.config.address import function_problem
from rlhf.config.suggestions import closest
from rlhf.core.errors import UserError

_NAME, _RESERVED = r"[^\s,()=|`]{1,32}", ("all", "best", "same", "task", "method", "seed", "part", "from")
_WORDS = ", ".join(_RESERVED)


class Document:
    """The content of a YAML file, and the problems that its readers found.

    Args:
        file: the file.
        made_of: the file that it was made of, which messages then name, without lines.

    A value that has another form than a reader wants is a problem, and the reader returns an empty value.

    Attributes:
        values: texts, lists and dictionaries by key; keys inside of other keys have dots, elements of lists
            their number. The whole file has the key "".
        lines: line number of each key.
        problems: line and error message of each problem.

    Raises:
        UserError: the file cannot be read, or is not a YAML mapping.
    """

    def __init__(self, file: Path, made_of: Path | None = None) -> None:
        self.file, self.made_of = file, made_of
        self.values: dict[str, Any] = {}
        self.lines: dict[str, int] = {}
        self.problems: list[tuple[int, str]] = []
        try:
            node = yaml.compose(file.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
            if isinstance(node, yaml.MappingNode):
                self._plain(node, "")
        except OSError as error:
            raise UserError(f"{file} must be a study file, got: {error.strerror}; fix the path") from None
        except (yaml.YAMLError, UnicodeError, RecursionError) as error:
            mark, got = getattr(error, "problem_mark", None), getattr(error, "problem", None) or str(error)
            got = "an alias inside of what it names" if isinstance(error, RecursionError) else got
            at = f"{file}, line {mark.line + 1}:" if mark else f"{file}"
            remedy = "indent by spaces, close each bracket, quote texts with ': ' or '#'"
            raise UserError(f"{at} must be YAML, got: {' '.join(got.split())}; {remedy}") from None
        if not isinstance(node, yaml.MappingNode):
            raise UserError(f"{file} must be a mapping of keys, as study: <name>; write at least methods:")

    def _plain(self, node: yaml.Node, key: str) -> Any:
        def inner(name: object, at: yaml.Node, value: yaml.Node) -> Any:
            below, line = _below(key, name), at.start_mark.line + 1
            if below in self.lines:
                self.wrong(below, "must be given once", f"it again in line {line}", "rename one")
                return self.values[below]
            self.lines[below] = line
            return self._plain(value, below)

        found: Any = node.value
        if isinstance(node, yaml.SequenceNode):
            found = [inner(place, each, each) for place, each in enumerate(found)]
        elif isinstance(node, yaml.MappingNode):
            keys = [(_as_written(name), name, value) for name, value in found]
            found = {name: inner(name, at, value) for name, at, value in keys}
        self.values[key] = found
        return found

    def wrong(self, key: str, rule: str, got: object, remedy: str) -> None:
        """Add a problem: a key, the rule that it breaks, its value and a remedy."""
        self.add(key, f"{key} {rule}, got {got or 'nothing'}; {remedy}")

    def add(self, key: str, text: str) -> None:
        """Add the text of a problem."""
        line = self.line(key)
        where = str(self.made_of or self.file) + (f", line {line}" if line and not self.made_of else "")
        self.problems.append((line, f"{where}: {text}"))

    def line(self, key: str) -> int:
        """Return the line of a key, or of the nearest key around it; 0 if there is none."""
        while key and key not in self.lines:
            key = key.rpartition(".")[0]
        return self.lines.get(key, 0)

    def check(self) -> None:
        """Raise UserError with all problems in the order of lines, if there are any."""
        if self.problems:
            raise UserError(*dict.fromkeys(text for _, text in sorted(self.problems)))

    def mapping(self, key: str, known: Collection[str] | None = None) -> dict[str, Any]:
        """Return a mapping, without keys that are not `known`; None: any keys."""
        tree = self.values.get(key) or {}
        if not isinstance(tree, dict):
            self.wrong(key, "must be a mapping", tree, f"write {key}: {{<name>: <value>}}")
            return {}
        for name in tree.keys() - set(tree if known is None else known):
            guess = closest(name, known or ())
            remedy = f"did you mean {guess}?" if guess else "leave it out"
            self.wrong(_below(key, name), f"must be one of {', '.join(known or ())}", name, remedy)
        return {name: value for name, value in tree.items() if known is None or name in known}

    def items(self, key: str) -> dict[str, str]:
        """Return the texts of a list by their keys; one text is a list of one."""
        tree = self.values.get(key) or []
        if isinstance(tree, str):
            return {key: tree}
        if isinstance(tree, list) and all(isinstance(each, str) for each in tree):
            return {_below(key, place): each for place, each in enumerate(tree)}
        self.wrong(key, "must be a list", tree, f"write {key}: [<a>, <b>]")
        return {}

    def texts(self, key: str) -> tuple[str, ...]:
        """Return the texts of a list."""
        return tuple(self.items(key).values())

    def text(self, key: str, default: str = "", form: str = ".+", what: str = "a text") -> str:
        """Return a text; `form`: the regular expression that it has, and `what` says so."""
        value = self.values.get(key, default)
        if isinstance(value, str) and (key not in self.values or re.fullmatch(form, value, re.DOTALL)):
            return value
        self.wrong(key, f"must be {what}", value, f"write {key}: {default or '<text>'}")
        return default

    def named(self, key: str) -> dict[str, Any]:
        """Return a mapping from names: words that a claim, `--only` and a table can contain."""
        for name in (tree := self.mapping(key)):
            if not re.fullmatch(_NAME, name) or name in _RESERVED:
                rule = f"must be named by up to 32 characters without space and , ( ) = | `, and not {_WORDS}"
                self.wrong(_below(key, name), rule, name, "rename it")
        return tree

    def path(self, key: str, *form: str) -> Path:
        """Return a path, which is relative to the folder of the file; `form`: as of `text`."""
        return Path(os.path.normpath(self.file.parent / self.text(key, *form)))

    def address(self, key: str) -> str:
        """Return the address of a function, <module>:<function> or <file>.py:<function> with a `path`."""
        at = str(self.path(key)) if ".py:" in (text := self.text(key)) else text
        if problem := function_problem(key, at, None):
            self.add(key, problem)
        return text

    def overrides(self, key: str) -> tuple[str, ...]:
        """Return a list of overrides, with quotes around values that contain an interpolation, for Hydra."""
        found = []
        for each in self.texts(key):
            name, equals, value = each.partition("=")
            if not each.startswith("~") and not equals:
                self.wrong(key, "must be a list of overrides", each, "write <key>=<value>, as algo=dpo")
            found.append(f"{name}='{value}'" if "${" in value and value[0] not in "'\"" else each)
        return tuple(found)

    def number(self, key: str, default: Any, kind: type[int] | type[float] = float, least: int = 0) -> Any:
        """Return a number of at least `least`."""
        tree = self.values.get(key)
        if tree is None:
            return default
        try:
            value = kind(tree)
        except (TypeError, ValueError):
            value = -1
        if least <= value < float("inf"):
            return value
        word = "a whole number" if kind is int else "a number"
        good = 0.1 if default is None else default
        self.wrong(key, f"must be {word} of at least {least}", tree, f"write {good}")
        return default

    def one_of(self, key: str, choices: Iterable[str], what: str, value: object = None) -> str:
        """Return a value (None: that of the key) that is one of the choices; `what`: what the choices are."""
        known, value = list(choices), self.values.get(key) if value is None else value
        if isinstance(value, str) and value in known:
            return value
        guess = closest(value, known) if isinstance(value, str) else None
        remedy = f"did you mean {guess}?" if guess else "choose one of them"
        self.wrong(key, f"must be {what} ({', '.join(known) or 'there are none'})", value, remedy)
        return ""

    def some_of(self, key: str, choices: Iterable[str], what: str) -> tuple[str, ...]:
        """Return some of the choices, of a list or a single one; `all`: all of them."""
        if self.values.get(key) == "all":
            return tuple(choices)
        if key in self.values and not self.values[key]:
            self.wrong(key, f"must have {what}", "none", f"write {key}: all, or leave it out")
        found = (self.one_of(key, choices, what, each) for each in self.texts(key))
        return tuple(each for each in found if each)

    def seeds(self, key: str, default: tuple[int, ...] = ()) -> tuple[int, ...]:
        """Return the seeds: 1 to a number, or a list."""
        tree = self.values.get(key)
        if tree is None and default:
            return default
        if isinstance(tree, str) and re.fullmatch("[1-9][0-9]{0,3}", tree):
            return tuple(range(1, int(tree) + 1))
        texts = tree if isinstance(tree, list) else []
        found = tuple(int(each) for each in texts if re.fullmatch("[0-9]{1,9}", str(each)))
        if not found or len({*found}) < len(texts):
            rule = "must be a number of seeds (to 9999), or a list of different seeds (to 999999999)"
            self.wrong(key, rule, tree, "write 10, or [1, 2, 3]")
        return found


def _as_written(node: yaml.Node) -> str:
    """Return a key as text; a key that is a list or a mapping as it is written in the file."""
    start, end = node.start_mark, node.end_mark
    return node.value if isinstance(node, yaml.ScalarNode) else start.buffer[start.pointer : end.pointer]


def _below(key: str, name: object) -> str:
    return f"{key}.{name}" if key else str(name)
