"""A YAML file as texts with line numbers, and the problems that are found in it.

Scalars stay texts: YAML 1.1 reads `1e-4` as a text, and `on` and `no` as booleans. So a value is parsed by
whoever knows its type; for an override this is the config.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

from rlhf.config.suggestions import closest
from rlhf.core.errors import UserError


class Document:
    """The content of a YAML file, and the problems that its readers found.

    Attributes:
        file: the file.
        tree: nested dictionaries and lists of texts.
        lines: line number of each key; keys inside of other keys have dots, elements of lists their number.
        problems: line and error message of each problem.

    Raises:
        UserError: the file cannot be read, or is not a YAML mapping.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.lines: dict[str, int] = {}
        self.problems: list[tuple[int, str]] = []
        try:
            node = yaml.compose(file.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
        except OSError as error:
            raise UserError(f"{file} must be a study file, got: {error.strerror}; fix the path") from error
        except (yaml.YAMLError, UnicodeError) as error:
            raise UserError(f"{file} must be YAML, got: {' '.join(str(error).split())}; fix it") from error
        if not isinstance(node, yaml.MappingNode):
            raise UserError(f"{file} must be a mapping of keys, as study: <name>; write at least methods:")
        self.tree: dict[str, Any] = self._plain(node, "")

    def _plain(self, node: yaml.Node, at: str) -> Any:
        """Return a node as texts, lists and dictionaries; `at` is its key."""
        if isinstance(node, yaml.SequenceNode):
            for place, each in enumerate(node.value):
                self.lines[_below(at, place)] = each.start_mark.line + 1
            return [self._plain(each, _below(at, place)) for place, each in enumerate(node.value)]
        if not isinstance(node, yaml.MappingNode):
            return node.value
        found: dict[str, Any] = {}
        for key, value in node.value:
            inner = _below(at, key.value)
            if key.value in found:
                self.wrong(
                    inner, "must be given once", f"it again in line {key.start_mark.line + 1}", "rename one"
                )
            self.lines[inner] = key.start_mark.line + 1
            found[key.value] = self._plain(value, inner)
        return found

    def wrong(self, key: str, rule: str, got: object, remedy: str) -> None:
        """Add a problem: a key, the rule that it breaks, its value and a remedy."""
        line = self.line(key)
        where = f"{self.file}, line {line}" if line else str(self.file)
        self.problems.append((line, f"{where}: {key} {rule}, got {got}; {remedy}"))

    def line(self, key: str) -> int:
        """Return the line of a key, or of the nearest key around it; 0 if there is none."""
        while key and key not in self.lines:
            key = key.rpartition(".")[0]
        return self.lines.get(key, 0)

    def check(self) -> None:
        """Raise UserError with all problems in the order of lines, if there are any."""
        if self.problems:
            raise UserError(*dict.fromkeys(text for _, text in sorted(self.problems)))

    # -- readers of values: if a value has another form, they add a problem and return an empty value ------

    def mapping(self, tree: Any, key: str, known: Collection[str] | None = None) -> dict[str, Any]:
        """Return a mapping, without keys that are not `known`; None: any keys."""
        if not isinstance(tree, dict):
            if tree not in ("", None):
                self.wrong(key, "must be a mapping", tree, f"write {key}: {{<name>: <value>}}")
            return {}
        if known is not None:
            for name in tree.keys() - set(known):
                guess = closest(name, known)
                remedy = f"did you mean {guess}?" if guess else "leave it out"
                self.wrong(_below(key, name), f"must be one of {', '.join(known)}", name, remedy)
        return {name: value for name, value in tree.items() if known is None or name in known}

    def texts(self, tree: Any, key: str) -> tuple[str, ...]:
        """Return a list of texts; one text is a list of one."""
        if isinstance(tree, str):
            return (tree,) if tree else ()
        if tree is None or (isinstance(tree, list) and all(isinstance(each, str) for each in tree)):
            return tuple(tree or ())
        self.wrong(key, "must be a list", tree, f"write {key}: [<a>, <b>]")
        return ()

    def overrides(self, tree: Any, key: str) -> tuple[str, ...]:
        """Return a list of overrides, with quotes around values that contain an interpolation."""
        found = self.texts(tree, key)
        for each in found:
            if not each.startswith("~") and "=" not in each:
                self.wrong(key, "must be a list of overrides", each, "write <key>=<value>, as algo=dpo")
        return tuple(map(_quoted, found))

    def number(self, tree: Any, key: str, default: float, kind: type[int] | type[float] = float) -> Any:
        """Return a number of at least 0."""
        if tree is None:
            return default
        try:
            value = kind(tree)
        except (TypeError, ValueError):
            value = -1
        if not 0 <= value < float("inf"):
            word = "a whole number" if kind is int else "a number"
            self.wrong(
                key, f"must be {word} of at least 0", tree, f"write {key.rpartition('.')[2]}: {default}"
            )
            return default
        return value

    def one_of(self, value: Any, key: str, choices: Iterable[str], what: str) -> str:
        """Return a text that is one of the choices; `what` says what the choices are."""
        known = list(choices)
        if isinstance(value, str) and value in known:
            return value
        guess = closest(value, known) if isinstance(value, str) else None
        remedy = f"did you mean {guess}?" if guess else "choose one of them"
        self.wrong(key, f"must be {what} ({', '.join(known) or 'there are none'})", value, remedy)
        return ""

    def some_of(self, tree: Any, key: str, choices: Sequence[str], what: str) -> tuple[str, ...]:
        """Return some of the choices, of a list or a single one; `all`: all of them."""
        if tree == "all":
            return tuple(choices)
        found = (self.one_of(each, key, choices, what) for each in self.texts(tree, key))
        return tuple(each for each in found if each)


def _below(key: str, name: object) -> str:
    return f"{key}.{name}" if key else str(name)


def _quoted(override: str) -> str:
    """Return an override with quotes around its value if that is an interpolation, which Hydra needs."""
    key, equals, value = override.partition("=")
    return f"{key}='{value}'" if equals and "${" in value and value[:1] not in "'\"" else override
