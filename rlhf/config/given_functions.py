"""Reward functions that are given as objects in Python: each gets an address, as a config has it.

A function of a module that other processes find keeps its place: `<module>:<function>` or
`<file>.py:<function>`. Of any other function (of a notebook, of a script, a lambda, a function inside another
function) the source is written to a file, with the imports, constants and functions that it reads. An object
without such a source exists in this process only, as `only_in_this_process:<name>`. This module imports no
torch, and pickles nothing.
"""

from __future__ import annotations

import ast
import builtins
import dis
import inspect
import math
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from rlhf.config.address import LIBRARIES, NAME, ONLY_HERE
from rlhf.core.errors import UserError
from rlhf.core.files import digest, write_atomically
from rlhf.core.formatting import shortened

Function = Callable[..., Any]
_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda

_HEADER = (
    '"""A reward function that was given as an object in Python."""\n\nfrom __future__ import annotations\n\n'
)
_NUMBERS_AND_TEXTS = (int, float, str, bytes, bool, type(None))


class _NoSource(Exception):
    """The reason why the source of a function cannot be stored."""


class GivenFunctions:
    """The addresses of reward functions that are given as objects.

    Args:
        reward: a function, or a list of functions.
        folder: the folder for files with the source of functions; it is made if it is needed.

    Attributes:
        paths: the address of each function.
        only_here: the functions that exist only in this process, by the name in their address.
        reasons: why the source of each function of `only_here` is not stored.

    Raises:
        UserError: an object is not a function, or the folder cannot be written.
    """

    def __init__(self, reward: Function | Sequence[Function], folder: Path) -> None:
        self.only_here: dict[str, Function] = {}
        self.reasons: dict[str, str] = {}
        functions: list[Any] = list(reward) if isinstance(reward, list | tuple) else [reward]
        if not functions:
            raise UserError(
                "reward must be a function or a list of functions, got []; write reward=<function>"
            )
        for function in functions:
            _check_function(function)
        self.paths = [self.address(function, folder) for function in functions]

    def address(self, function: Function, folder: Path) -> str:
        """Return the address of a function; write its source to `folder` if it has no place of its own."""
        if (place := _place_of(function)) is not None:
            return f"{place}:{function.__name__}"
        name = _name_of(function)
        try:
            text = _source_of(function, name)
        except _NoSource as reason:
            while name in self.only_here:
                name += "_"
            self.only_here[name], self.reasons[name] = function, str(reason)
            return f"{ONLY_HERE}:{name}"
        file = folder / f"{name}_{digest(text)}.py"
        if not file.is_file() or file.read_text(encoding="utf-8") != text:
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(file, text)
        return f"{file}:{name}"

    def provide(self) -> None:
        """Make the functions of `only_here`, if any, those that addresses in this process name."""
        if self.only_here:
            module = ModuleType(ONLY_HERE)
            module.__spec__ = ModuleSpec(ONLY_HERE, None, origin="this process")
            vars(module).update(self.only_here)
            sys.modules[ONLY_HERE] = module

    def warnings(self) -> Iterator[str]:
        """Yield a warning for each function that exists only in this process."""
        for name, reason in self.reasons.items():
            yield (
                f"the reward function {name} exists only in this process ({reason}): only the same call in "
                "Python resumes the run, and the name of the run does not depend on what the function does; "
                "write it as a function of a module to have both"
            )


def _check_function(function: object) -> None:
    """Raise UserError if an object cannot be a reward function."""
    rule, got = "reward must be a function or a list of functions", shortened(repr(function), 80)
    if isinstance(function, str):
        raise UserError(
            f"{rule}, got the text {got}; for the address of a function set scorer=function "
            "scorer.path=<file>.py:<function>, for a model set scorer=reward_model model.reward=<model>"
        )
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(function, torch.nn.Module):
        raise UserError(
            f"{rule}, got a model ({type(function).__name__}); save it to a folder, and set "
            "scorer=reward_model model.reward=<folder>"
        )
    if isinstance(function, type):
        raise UserError(f"{rule}, got the class {function.__name__}; write an object of it, or a function")
    if not callable(function):
        raise UserError(f"{rule}, got {got} of type {type(function).__name__}; write reward=<function>")


def _name_of(function: Function) -> str:
    """Return the name of a function in its address: its own, that of its class, or `reward` for a lambda."""
    name = getattr(function, "__name__", type(function).__name__)
    return name if re.fullmatch(NAME, name) else "reward"


# -- functions of modules --------------------------------------------------------------------------


def _place_of(function: Any) -> str | None:
    """Return the module or the file that defines a function, for an address; None: no place of its own."""
    module = _module_of(function)
    if module is None or function.__qualname__ != function.__name__:
        return None
    if is_found(module):
        return module
    file = sys.modules[module].__file__
    return file if file is not None and file.endswith(".py") and "." not in module else None


def _module_of(value: Any) -> str | None:
    """Return the module that other processes may import and that has `value` under its own name, or None."""
    name = getattr(value, "__module__", None)
    module = sys.modules.get(name) if isinstance(name, str) else None
    if module is None or name == "__main__" or module.__spec__ is None:
        return None
    found: Any = module
    for part in str(getattr(value, "__qualname__", "<none>")).split("."):
        found = getattr(found, part, None)
    return name if found is value else None


def is_found(module: str) -> bool:
    """Return whether a new process in the working directory finds a module, by its root package."""
    root = module.partition(".")[0]
    spec = sys.modules[root].__spec__ if root in sys.modules else None
    if spec is None or spec.origin is None or not spec.has_location:
        return spec is not None and root != ONLY_HERE
    file = Path(spec.origin).resolve()
    if any(file.is_relative_to(Path(each).resolve()) for each in LIBRARIES):
        return True
    here = PathFinder.find_spec(root, [str(Path.cwd())])
    if here is not None and here.origin and here.has_location:
        return file == Path(here.origin).resolve()
    return file == origin_elsewhere(root)


@cache
def origin_elsewhere(root: str) -> Path | None:
    """Return the file of a top-level module that a new process finds in another folder than here, or None.

    A package that is installed in place is found by the settings of the interpreter, not by the paths of this
    process, which a notebook may have changed.
    """
    code = f"from importlib.util import find_spec; print(find_spec({root!r}).origin)"
    asked = subprocess.run([sys.executable, "-c", code], cwd="/", capture_output=True, text=True)
    return Path(asked.stdout.strip()).resolve() if asked.returncode == 0 else None


# -- sources of other functions --------------------------------------------------------------------


def _source_of(function: Function, name: str) -> str:
    """Return the text of a module that defines a function as `name`, with all that the function reads.

    Comments are left out. The text is valid for equal values of the constants that the function reads.

    Raises:
        _NoSource: the source is not known, or the function reads something that has no source.
    """
    reader = _Reader()
    reader.add(function, name)
    text = _HEADER + reader.text()
    try:
        compile(text, name, "exec", dont_inherit=True)
    except SyntaxError as error:
        raise _NoSource("it changes a variable of the function around it") from error
    return text


class _Reader:
    """A collection of the functions of a stored module, and of all that they read."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}  # name -> value in the module
        self.imports: set[str] = set()
        self.constants: list[str] = []
        self.functions: list[str] = []

    def text(self) -> str:
        """Return the statements of the module."""
        parts = ["\n".join(sorted(self.imports)), "\n".join(self.constants), *self.functions]
        return "\n\n\n".join(filter(None, parts)) + "\n"

    def add(self, function: Any, name: str) -> None:
        """Add a function under a name, and what it reads.

        Raises:
            _NoSource: it has no source, or reads something that has none.
        """
        if not isinstance(function, FunctionType):
            raise _NoSource(f"it is an object of type {type(function).__name__}")
        if self.known(name, function):
            return
        node = _definition(function)
        values = {**function.__globals__, **_variables_around(function)}
        for read in _names_read(function.__code__):
            if read in values:
                self.read(read, values[read], node)
            elif not hasattr(builtins, read):
                raise _NoSource(f"it reads {read}, which is not defined")
        self.functions.append(ast.unparse(_as_def(node, name, function)))

    def known(self, name: str, value: Any) -> bool:
        """Return whether the module has this value under this name; otherwise reserve the name for it.

        Raises:
            _NoSource: the name has another value.
        """
        if name in self.values:
            if self.values[name] is not value:
                raise _NoSource(f"{name} has two meanings")
            return True
        self.values[name] = value
        return False

    def read(self, name: str, value: Any, node: ast.AST) -> None:
        """Add a value that a function reads under a name; `node` is the definition of the function."""
        if isinstance(value, ModuleType):
            self.add_module(name, value, node)
        elif isinstance(value, FunctionType) and not ((module := _module_of(value)) and is_found(module)):
            self.add(value, name)
        elif self.known(name, value):
            return
        elif (text := literal(value)) is not None:
            self.constants.append(f"{name} = {text}")
        elif isinstance(value, re.Pattern):
            self.imports.add("import re")
            self.constants.append(f"{name} = re.compile({value.pattern!r}, {value.flags})")
        elif (module := _module_of(value)) and is_found(module) and "." not in value.__qualname__:
            same = value.__qualname__ == name
            self.imports.add(f"from {module} import {value.__qualname__}" + ("" if same else f" as {name}"))
        else:
            raise _NoSource(f"it reads {name}, an object of type {type(value).__name__}")

    def add_module(self, name: str, module: ModuleType, node: ast.AST) -> None:
        """Add the import of a module, and of its modules that a function reads as attributes."""
        if not is_found(module.__name__):
            raise _NoSource(f"it reads the module {module.__name__}, which other processes do not find")
        if not self.known(name, module):
            same = module.__name__ == name
            self.imports.add(f"import {module.__name__}" + ("" if same else f" as {name}"))
        for each in ast.walk(node):
            if isinstance(each, ast.Attribute) and (chain := ast.unparse(each)).startswith(f"{name}."):
                inner = module.__name__ + chain.removeprefix(name)
                if isinstance(sys.modules.get(inner), ModuleType):
                    self.imports.add(f"import {inner}")


def _definition(function: FunctionType) -> _Definition:
    """Return the syntax tree of a function.

    Raises:
        _NoSource: the source is not known, is not that of the function (a file may have changed since it was
            imported), or has a decorator.
    """
    code = function.__code__
    kind = ast.Lambda if code.co_name == "<lambda>" else (ast.FunctionDef, ast.AsyncFunctionDef)
    try:
        text = "".join(inspect.findsource(code)[0])
        tree, made = ast.parse(text), compile(text, "<source>", "exec", dont_inherit=True)
    except (OSError, SyntaxError, TypeError) as error:
        raise _NoSource("its source is not known") from error
    nodes = [node for node in ast.walk(tree) if isinstance(node, kind) and _begins(node, code)]
    if len(nodes) != 1 or _content(code) not in map(_content, _codes(made)):
        raise _NoSource("its source is not known")
    if getattr(nodes[0], "decorator_list", None):
        raise _NoSource("it has a decorator")
    return nodes[0]


def _begins(node: _Definition, code: CodeType) -> bool:
    """Return whether a definition is at the place of a code object."""
    if isinstance(node, ast.Lambda):  # a line may have several
        body = node.body
        place = body.lineno, body.end_lineno, body.col_offset, body.end_col_offset
        return node.lineno == code.co_firstlineno and place in code.co_positions()
    return min([node.lineno, *(each.lineno for each in node.decorator_list)]) == code.co_firstlineno


def _content(code: CodeType) -> tuple[object, ...]:
    """Return the name, the line and the instructions of a code object."""
    constants = [each for each in code.co_consts if not isinstance(each, CodeType)]
    instructions = (code.co_code, code.co_names, code.co_varnames, repr(constants))
    return code.co_name, code.co_firstlineno, *instructions


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yield a code object, and those of the functions inside."""
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _codes(each)


def _names_read(code: CodeType) -> list[str]:
    """Return the global names, and the variables of functions around it, that a function reads."""
    found = list(code.co_freevars)
    for each in _codes(code):
        for step in dis.get_instructions(each):
            if step.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"):
                found.append(step.argval)
    own = {"__name__", "__module__", "__qualname__"}  # a class inside reads the first and binds the others
    return [name for name in dict.fromkeys(found) if name not in own]


def _variables_around(function: FunctionType) -> dict[str, Any]:
    """Return the variables of the functions around a function that it reads."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    try:
        return {name: cell.cell_contents for name, cell in cells}
    except ValueError as error:
        raise _NoSource("it reads a variable that is not set") from error


def _as_def(node: _Definition, name: str, function: FunctionType) -> ast.stmt:
    """Return a definition under another name, with the values of its defaults.

    Raises:
        _NoSource: a default is an object without a source.
    """
    (made,) = ast.parse(f"{'async ' * isinstance(node, ast.AsyncFunctionDef)}def {name}(): pass").body
    assert isinstance(made, ast.FunctionDef | ast.AsyncFunctionDef)
    made.args = node.args
    made.body = [ast.Return(node.body)] if isinstance(node, ast.Lambda) else node.body
    if not isinstance(node, ast.Lambda):
        made.returns = node.returns
    by_name: Mapping[str, Any] = function.__kwdefaults__ or {}
    made.args.defaults = [_as_literal(value) for value in function.__defaults__ or ()]
    made.args.kw_defaults = [
        _as_literal(by_name[each.arg]) if each.arg in by_name else None for each in made.args.kwonlyargs
    ]
    return ast.fix_missing_locations(made)


def _as_literal(value: Any) -> ast.expr:
    """Return a default value of a parameter as source.

    Raises:
        _NoSource: the value is no literal.
    """
    if (text := literal(value)) is None:
        raise _NoSource(f"it has a parameter whose default is an object of type {type(value).__name__}")
    return ast.parse(text, mode="eval").body


def literal(value: Any) -> str | None:
    """Return a number, a text or a collection of such as source; None: another value.

    The source is the same in every process: the items of a set are sorted.
    """
    kind = type(value)
    if kind in _NUMBERS_AND_TEXTS:
        return None if kind is float and not math.isfinite(value) else repr(value)
    if kind is dict:
        pairs = [(literal(key), literal(each)) for key, each in value.items()]
        known = all(None not in pair for pair in pairs)
        return f"{{{', '.join(f'{key}: {each}' for key, each in pairs)}}}" if known else None
    if kind not in (list, tuple, set):
        return None
    parts = [text for each in value if (text := literal(each)) is not None]
    if len(parts) != len(value):
        return None
    inner = f"[{', '.join(sorted(parts) if kind is set else parts)}]"
    return inner if kind is list else f"{kind.__name__}({inner})"
