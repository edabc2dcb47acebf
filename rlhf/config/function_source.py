"""Reading of a Python file without executing it: syntax, imports, and the functions that it defines.

What cannot be known without executing the file (decorators, star imports, names made at run time) is not
reported. This module imports no torch.
"""

from __future__ import annotations

import ast
import inspect
import sys
import warnings
from dataclasses import dataclass
from functools import lru_cache
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path

from rlhf.config.parameters import PLURAL, VALUES

_LISTS = ("list", "List", "Sequence", "Iterable", "Collection", "tuple", "Tuple")

# Words of files whose imports, or whose names, are known only after the file has run.
_CHANGES_IMPORTS = ("sys.path", "addsitedir", "meta_path", "sys.modules")
_DEFINES_AT_RUN_TIME = ("globals(", "exec(", "setattr(", "__getattr__", "sys.modules", "vars(", "import *")


@dataclass(frozen=True, slots=True)
class Source:
    """A Python file whose syntax is valid.

    Args:
        text: the content of the file.
        tree: the syntax tree of `text`.
        bound: see `_names_bound`.
    """

    text: str
    tree: ast.Module
    bound: list[str]

    @property
    def functions(self) -> list[str]:
        """The names of the public functions at the top level of the file."""
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
        return [node.name for node in self.tree.body if isinstance(node, kinds) and node.name[0] != "_"]

    @property
    def classes(self) -> list[str]:
        """The names of the public classes at the top level of the file."""
        found = (node.name for node in self.tree.body if isinstance(node, ast.ClassDef))
        return [name for name in found if name[0] != "_"]

    def lacks(self, name: str) -> bool:
        """Return whether the file certainly defines nothing called `name`."""
        return name not in self.bound and not any(word in self.text for word in _DEFINES_AT_RUN_TIME)

    def definition(self, name: str) -> ast.stmt | ast.expr | None:
        """Return what `name` certainly is: its `def` or `class` statement, or the expression assigned to it.

        The result is None if the definition has a decorator, is not unique, or is inside another statement.
        """
        if self.bound.count(name) != 1:
            return None
        for node in self.tree.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == name:
                return None if node.decorator_list or getattr(node, "keywords", None) else node
            if isinstance(node, ast.Assign) and [ast.unparse(each) for each in node.targets] == [name]:
                return node.value
        return None

    def relative_import(self) -> int | None:
        """Return the line of the first relative import that runs with the file, or None."""
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
        functions = (node for node in self.tree.body if isinstance(node, kinds))
        nodes = (*self.tree.body, *(inner for function in functions for inner in ast.walk(function)))
        found = (node.lineno for node in nodes if isinstance(node, ast.ImportFrom) and node.level)
        return next(found, None)

    def missing_import(self) -> tuple[int, str] | None:
        """Return line and name of the first module that the file imports and that is not installed."""
        if any(word in self.text for word in _CHANGES_IMPORTS):
            return None
        for node in self.tree.body:
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                names = [node.module]
            else:
                continue
            for name in names:
                root = name.partition(".")[0]
                if root not in sys.modules and top_level_module(root) is None:
                    return node.lineno, name
        return None


def read(file: Path) -> Source:
    """Return the source of a Python file after a check of its syntax.

    Raises:
        SyntaxError: Python cannot compile the file.
        OSError: the file cannot be read.
    """
    return _parsed(file.read_bytes(), str(file))


@lru_cache(maxsize=8)
def _parsed(content: bytes, file: str) -> Source:
    """Return the source with this content, which several rules read."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the import of the file shows its warnings
        try:
            tree = ast.parse(content, file)
            compile(tree, file, "exec", dont_inherit=True)
        except ValueError as error:  # null bytes, for some versions of Python
            raise SyntaxError(str(error), (file, 1, None, None)) from error
    return Source(content.decode(errors="replace"), tree, _names_bound(tree))


def top_level_module(name: str) -> ModuleSpec | None:
    """Return where the top-level module `name` is, without importing the module; None if it is not found."""
    try:
        return find_spec(name)
    except (ImportError, ValueError):  # ValueError: a loaded module, such as __main__, without a spec
        return None


def find_module(name: str) -> ModuleSpec:
    """Return where the module `name` is. Nothing is imported, not even the packages that contain the module.

    Raises:
        ModuleNotFoundError: there is no such module.
    """
    loaded = sys.modules.get(name)
    if loaded is not None and loaded.__spec__ is not None:
        return loaded.__spec__
    package = name.rpartition(".")[0]
    if package:
        folders = find_module(package).submodule_search_locations
        spec = None if folders is None else PathFinder.find_spec(name, folders)
    else:
        spec = top_level_module(name)
    if spec is None:
        raise ModuleNotFoundError(f"no module {name!r}")
    return spec


def _names_bound(tree: ast.Module) -> list[str]:
    """Return every name that the statements of a module bind, outside of functions and classes.

    A name that a function binds with `global` counts, too. A name that is bound twice is in the list twice.
    """
    names: list[str] = []

    def visit(node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names.append(child.name)
            elif isinstance(child, ast.Import | ast.ImportFrom):
                names.extend(alias.asname or alias.name.partition(".")[0] for alias in child.names)
            elif isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
                names.append(child.id)
            elif isinstance(child, ast.MatchAs | ast.MatchStar) and child.name:
                names.append(child.name)
            if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
                visit(child)

    visit(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            names += node.names
    return names


@dataclass(frozen=True, slots=True)
class _AsWritten:
    """A default value of an argument, shown as it is written in the file."""

    text: str

    def __repr__(self) -> str:
        return self.text


def signature(arguments: ast.arguments) -> inspect.Signature:
    """Return the signature of a function from the syntax tree of its arguments, without annotations."""
    kinds = inspect.Parameter
    by_position = [*arguments.posonlyargs, *arguments.args]
    written = (
        *zip(reversed(by_position), reversed(arguments.defaults), strict=False),
        *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
    )
    defaults = {each: _AsWritten(ast.unparse(value)) for each, value in written if value is not None}
    parameters = (
        *((each, kinds.POSITIONAL_ONLY) for each in arguments.posonlyargs),
        *((each, kinds.POSITIONAL_OR_KEYWORD) for each in arguments.args),
        (arguments.vararg, kinds.VAR_POSITIONAL),
        *((each, kinds.KEYWORD_ONLY) for each in arguments.kwonlyargs),
        (arguments.kwarg, kinds.VAR_KEYWORD),
    )
    return inspect.Signature(
        [kinds(each.arg, kind, default=defaults.get(each, kinds.empty)) for each, kind in parameters if each]
    )


def takes_lists(arguments: ast.arguments) -> bool | None:
    """Return whether the response of a reward function is a list (True) or text (False); None: unknown.

    Its annotation counts, otherwise its name (`responses` or `completions`). Without a parameter of such a
    name, the response is the second argument.
    """
    by_position = [*arguments.posonlyargs, *arguments.args]
    named = [each for each in (*by_position, *arguments.kwonlyargs) if VALUES.get(each.arg) == "response"]
    response = next(iter(named or by_position[1:2]), None)
    if response is None:
        return None
    if (annotation := response.annotation) is not None:
        written = annotation.value if isinstance(annotation, ast.Constant) else ast.unparse(annotation)
        name = str(written).partition("[")[0].rpartition(".")[2].strip()
        if name in _LISTS or name == "str":
            return name in _LISTS
    return True if response.arg in PLURAL else None
