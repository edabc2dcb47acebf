"""Functions and classes named in a config: `<module>:<name>` or `<file>.py:<name>`.

`function_problem` and `class_problem` read the file, and execute nothing. Problems that only its execution
shows are found by `load_function` and `load_class`. This module imports no torch.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import shlex
import sys
import sysconfig
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, Literal

from rlhf.config import function_source
from rlhf.config.parameters import parameters_of
from rlhf.core.errors import UserError, one_line
from rlhf.core.pasting import setting
from rlhf.core.protection import protected

NAME = r"[^\W\d]\w*"
ONLY_HERE = "only_in_this_process"  # stands for the module of functions that were given as objects
LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})  # folders
_FORM = re.compile(rf"(?P<place>.+\.py|{NAME}(\.{NAME})*):(?P<name>{NAME})")
_LAST_NAME = re.compile(rf"(?P<place>.+?)(?:::|[:./#\\])(?P<name>{NAME})")  # after the last separator
_METHOD = re.compile(rf"(.+):({NAME})\.({NAME})")
_DEF = (ast.FunctionDef, ast.AsyncFunctionDef)
_TOOLS = "environment.functions"  # a list of functions and classes


def function_problem(key: str, path: object, arguments: tuple[str, ...] | None) -> str | None:
    """Return the error message for the address of a function; None if nothing is wrong with it.

    Args:
        key: the config key of the address.
        path: the address; None if the key is not set.
        arguments: names of the arguments that the function may receive by position; None: any.
    """
    several = addresses(path)
    match = _FORM.fullmatch(path) if isinstance(path, str) else None
    if match is not None and several and not Path(match["place"]).expanduser().is_file():
        match = None
    if not isinstance(path, str) or match is None:
        remedy = f"set {_assigned(key, 'my_module:my_function')}"
        if method := _METHOD.fullmatch(str(path)):
            place, owner, name = method.groups()
            remedy = f"write {name} = {owner}().{name} below the class and set {key}={place}:{name}"
            if key == _TOOLS:
                remedy = f"set {_assigned(key, f'{place}:{owner}')} (its methods are tools)"
        elif several:
            remedy = f"for several functions set {setting(key, several)}"
        elif close := _suggestion(str(path or "")):
            remedy = f"did you mean {_assigned(key, close)}?"
        return (
            f"{key} must be <module>:<function> or <file>.py:<function> (it names a Python function), got "
            f"{'null' if path is None else repr(path)}; {remedy}"
        )
    at = _Address(key, path)
    if at.place == ONLY_HERE and getattr(sys.modules.get(at.place), at.name, None) is None:
        return at.message(
            "name a function that this process has",
            "the Python process that started the run had it as an object",
            f"make the call Experiment(..., reward=<function>) again, or set {key}=<file>.py:<function>",
        )
    source = at.source()
    if source is None or isinstance(source, str):
        return source
    if at.place.endswith(".py") and (line := source.relative_import()):
        return at.relative_import(line)
    if found := source.missing_import():
        return at.missing_import(*found)
    if source.lacks(at.name):
        return at.absent([*source.functions, *(source.classes if key == _TOOLS else ())])
    definition = source.definition(at.name)
    if isinstance(definition, (*_DEF, ast.Lambda)):
        return at.arguments_problem(function_source.signature(definition.args), arguments)
    kind = "a class" if isinstance(definition, ast.ClassDef) and key != _TOOLS else None
    if isinstance(definition, ast.Constant):
        kind = f"of type {type(definition.value).__name__}"
    return at.no_function(kind, source.functions) if kind else None


def class_problem(key: str, path: str) -> str | None:
    """Return the error message for the address of a class; None if nothing is wrong with it.

    Args:
        key: the config key of the address.
        path: the address.
    """
    if _FORM.fullmatch(path) is None:
        return (
            f"{key} must be <module>:<Class> or <file>.py:<Class> (it names a Python class), got {path!r}; "
            f"set {_assigned(key, 'my_module:MyClass')}"
        )
    at = _Address(key, path, "class")
    source = at.source()
    if source is None or isinstance(source, str):
        return source
    return at.absent(source.classes) if source.lacks(at.name) else None


def load_function(key: str, path: str, arguments: tuple[str, ...] | None) -> Callable[..., Any]:
    """Import and return the function at an address of valid form.

    Args:
        key: the config key of the address.
        path: the address.
        arguments: names of the arguments that the function may receive by position; None: any.

    Raises:
        UserError: the module cannot be imported, or has no such function, or the function does not accept the
            arguments.
    """
    at = _Address(key, path)
    module = at.load()
    function = getattr(module, at.name, None)
    functions = at.own(module, *[FunctionType, *([type] if key == _TOOLS else [])])
    if function is None:
        raise UserError(at.absent(functions))
    kind = "a class" if inspect.isclass(function) and key != _TOOLS else None
    if not callable(function):
        kind = f"of type {type(function).__name__}"
    if kind is not None:
        raise UserError(at.no_function(kind, functions))
    if problem := at.arguments_problem(signature_of(function), arguments):
        raise UserError(problem)
    return function


def load_class(key: str, path: str) -> type:
    """Import and return the class at an address of valid form.

    Args:
        key: the config key of the list of addresses.
        path: the address.

    Raises:
        UserError: the module cannot be imported, or has no such class.
    """
    at = _Address(key, path, "class")
    module = at.load()
    found = getattr(module, at.name, None)
    if not isinstance(found, type):
        raise UserError(at.absent(at.own(module, type)))
    return found


def takes_lists(path: str) -> bool | None:
    """Return whether the parameters of the function at `path` show that it takes lists, or text (False).

    The result is None if neither a name nor an annotation shows it, or if there is no such function.
    """
    place, _, name = path.rpartition(":")
    source = _readable(place)
    definition = source.definition(name) if source is not None else None
    return function_source.takes_lists(definition.args) if isinstance(definition, _DEF) else None


def signature_of(function: Callable[..., Any]) -> inspect.Signature | None:
    """Return the signature of a function; None for some built-in functions."""
    try:
        return inspect.signature(function)
    except ValueError:
        return None


def _assigned(key: str, address: str) -> str:
    """Return the setting of an address, as it is typed in a shell."""
    return f"hooks=[{address}]" if key == "hooks" else setting(key, [address] if key == _TOOLS else address)


def addresses(value: object) -> list[str]:
    """Return the addresses in a value with several: a mapping, or a text with commas or blanks; else []."""
    texts = value.values() if isinstance(value, Mapping) else re.split(r"[\s,;]+", str(value or ""))
    found = [str(text) for text in texts]
    return found if len(found) > 1 and all(map(_FORM.fullmatch, found)) else []


@dataclass(frozen=True, slots=True)
class _Address:
    """An address of valid form, and the error messages about what it names.

    Args:
        key: the config key of the address.
        path: the address.
        kind: what the address names.
    """

    key: str
    path: str
    kind: Literal["function", "class"] = "function"

    @property
    def place(self) -> str:
        """The module, or the file."""
        return self.path.rpartition(":")[0]

    @property
    def name(self) -> str:
        """The name of the function or class."""
        return self.path.rpartition(":")[2]

    def message(self, rule: str, reason: object, remedy: str) -> str:
        return f"{self.key} must {rule} ({reason}), got {self.path!r}; {remedy}"

    def own(self, module: ModuleType, *kinds: type) -> list[str]:
        """Return the public names of objects of some kinds that a module defines, and does not import."""
        found = [(name, value) for name, value in vars(module).items() if isinstance(value, kinds)]
        return [name for name, value in found if value.__module__ == module.__name__ and name[0] != "_"]

    def source(self) -> function_source.Source | str | None:
        """Return the source of the module, or why it cannot be read; None: it is not a Python file."""
        try:
            return _read(self.place)
        except ModuleNotFoundError as error:
            other = f"<path of the file>.py:{self.name}"
            other = f"{self.key}={f'[{other}]' if self.key in ('hooks', _TOOLS) else other}"
            remedy = f"run the command in the folder that contains it, or set {other}"
            if self.kind == "function" and (close := _similar(self.place)):
                remedy = f"did you mean {_assigned(self.key, f'{close}:{self.name}')}?"
            return self.message(f"name a {self.kind} in an existing module or file", error, remedy)
        except OSError as error:
            remedy = f"check {_file_of(self.place)}"
            return self.message("name a file that can be read", error.strerror, remedy)
        except SyntaxError as error:
            return self.not_importable(error, str(_file_of(self.place)), error.lineno)

    def load(self) -> ModuleType:
        """Import and return the module or the file.

        Raises:
            UserError: it cannot be imported.
        """
        try:
            with protected():
                _working_directory_first()
                if self.place.endswith(".py"):
                    return _load_file(Path(self.place).expanduser())
                return importlib.import_module(self.place)
        except SyntaxError as error:
            raise UserError(self.not_importable(error, error.filename, error.lineno)) from None
        except (Exception, SystemExit) as error:  # the user's code may raise any exception
            where = _innermost(error, self.place)
            if "attempted relative import" in str(error) and self.place.endswith(".py"):
                raise UserError(self.relative_import(where.lineno)) from None
            raise UserError(self.not_importable(error, where.filename, where.lineno)) from None

    def not_importable(self, error: BaseException, file: str | None, line: int | None) -> str:
        """Return the message for a module whose import raises `error` at a line of a file."""
        raised = one_line(error)
        if isinstance(error, SyntaxError):  # its text repeats the place
            raised = f"{type(error).__name__}: {error.msg}"
        reason = f"importing it raised {raised}, in {file}, line {line}"
        return self.message("name a module that can be imported", reason, f"correct {file}")

    def relative_import(self, line: int | None) -> str:
        """Return the message for a file with a relative import, which only a module of a package can have."""
        file = Path(self.place).expanduser()
        parts, here = file.resolve().with_suffix("").parts, Path.cwd().parts
        inside = parts[: len(here)] == here and len(parts) > len(here) + 1
        module = ".".join(parts[len(here) :] if inside else parts[-2:])
        where = "" if inside else f" in {Path(*parts[:-2])}, and run the command there"
        return self.message(
            "be <package>.<module>:<function> for a file with relative imports",
            f"{f'line {line} of {file}' if line else file} has one",
            f"set {_assigned(self.key, f'{module}:{self.name}')}{where}",
        )

    def missing_import(self, line: int, module: str) -> str:
        """Return the message for a file that imports, at a line, a module that is not on the import path."""
        file, root = _file_of(self.place), module.partition(".")[0]
        assert file is not None, "its source was read"
        why, remedy = "is not installed", f"install {root}, or correct {file}"
        if (file.parent / f"{root}.py").is_file() or (file.parent / root).is_dir():
            why = "is beside it, but not on the import path"
            remedy = f"start the command with PYTHONPATH={shlex.quote(str(file.parent))}"
        reason = f"line {line} of {file} imports {module!r}, which {why}"
        return self.message("name a module that can be imported", reason, remedy)

    def absent(self, names: list[str]) -> str:
        """Return the message for a module that has these functions or classes, but nothing of this name."""
        wanted = f"class {self.name}" if self.kind == "class" else self.name
        has = f"there is no {wanted} in it" + (f", only {', '.join(names[:20])}" if names else "")
        return self.message(f"name a {self.kind} of {self.place}", has, self.other(names))

    def no_function(self, kind: str, functions: list[str]) -> str:
        """Return the message for a name that is of another kind than a function."""
        functions = [name for name in functions if name != self.name]
        return self.message("name a function", f"{self.name} is {kind}", self.other(functions))

    def other(self, names: list[str]) -> str:
        """Return the remedy for an address that must name another function or class of the module."""
        if not names:
            return f"write the {self.kind} in {self.place}"
        close = get_close_matches(self.name, names, n=1)
        other = _assigned(self.key, f"{self.place}:{(close or names)[0]}")
        return f"did you mean {other}?" if close or self.kind == "class" else f"set {other}"

    def arguments_problem(
        self, signature: inspect.Signature | None, arguments: tuple[str, ...] | None
    ) -> str | None:
        """Return the message for a function that cannot be called by name or by position; None: it can be."""
        try:
            parameters_of(signature if arguments else None)
        except TypeError as error:
            assert signature is not None and arguments is not None
            plain = signature.replace(
                parameters=[each.replace(annotation=each.empty) for each in signature.parameters.values()],
                return_annotation=signature.empty,
            )
            return self.message(
                f"name a function with a parameter {arguments[1]}, and others with the names {arguments[0]}, "
                f"{arguments[2]}, messages or of columns of the data",
                f"{self.name} takes {plain}: {error}",
                f"write def {self.name}({', '.join(arguments)})",
            )
        return None


# -- files -----------------------------------------------------------------------------------------


def _suggestion(path: str) -> str | None:
    """Return a valid address that `path`, whose form is wrong, probably means; or None."""
    bare = path.strip().removesuffix("()").removesuffix(":")
    guesses: list[tuple[str, str | None]] = [(bare, None), (f"{bare}.py", None)]
    if match := _LAST_NAME.fullmatch(bare):
        guesses = [(match["place"], match["name"]), (f"{match['place']}.py", match["name"]), *guesses]
    for place, name in guesses:
        source = _readable(place) if _FORM.fullmatch(f"{place}:f") else None
        if source is not None and name is not None and not source.lacks(name):
            return f"{place}:{name}"
        if source is not None and name is None and source.functions:
            return f"{place}:{source.functions[0]}"
    return None


def _similar(place: str) -> str | None:
    """Return the file or module beside `place` with the most similar name, in the same form; or None."""
    if place.endswith(".py"):
        file = Path(place)
        folder = file.parent.expanduser()
        names = [each.name for each in folder.glob("*.py")] if folder.is_dir() else []
        close = get_close_matches(file.name, names, n=1)
        return str(file.with_name(close[0])) if close else None
    close = get_close_matches(place, [file.stem for file in Path.cwd().glob("*.py")], n=1)
    return close[0] if close else None


def _readable(place: str) -> function_source.Source | None:
    """Return the source of a module or file; None: it is not a Python file that can be read."""
    try:
        return _read(place)
    except (ModuleNotFoundError, OSError, SyntaxError):
        return None


def _read(place: str) -> function_source.Source | None:
    """Return the source of a module or file; None: the module is not a Python file.

    Raises:
        ModuleNotFoundError: there is no such module or file.
        OSError: the file cannot be read.
        SyntaxError: Python cannot compile the file.
    """
    _working_directory_first()
    file = _file_of(place)
    return None if file is None else function_source.read(file)


def _file_of(place: str) -> Path | None:
    """Return the source file of a module or file; None: the module is not a Python file.

    Raises:
        ModuleNotFoundError: there is no such module or file.
    """
    if place.endswith(".py"):
        if not Path(place).expanduser().is_file():
            raise ModuleNotFoundError(f"no file {place!r} here")
        return Path(place).expanduser()
    spec = function_source.find_module(place)
    if spec.origin is None and not spec.has_location:
        raise ModuleNotFoundError(f"{place!r} is a folder")
    return Path(spec.origin).expanduser() if spec.origin and spec.origin.endswith(".py") else None


# -- imports ---------------------------------------------------------------------------------------


def _innermost(error: BaseException, place: str) -> traceback.FrameSummary:
    """Return the innermost frame of the user's code in the traceback of `error`; if none, of a library.

    An error before the first line of the code has no such frame; the result is the start of `place`.
    """
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<frozen") and frame.filename != __file__
    ]
    start = traceback.FrameSummary(place, 1, "")
    return ([frame for frame in frames if not frame.filename.startswith(LIBRARIES)] or frames or [start])[-1]


def _load_file(file: Path) -> ModuleType:
    """Import a Python file as a module that has the name of the file, or a unique name if that is taken.

    The folder of the file becomes the last of the import path, so that processes that the functions start
    find the module by its name. Imports in the file search the working directory first.
    """
    folder, name = str(file.resolve().parent), file.stem
    if folder not in sys.path:
        sys.path.append(folder)
        importlib.invalidate_caches()
    found = function_source.top_level_module(name) if name.isidentifier() else None
    if found is None or found.origin is None or Path(found.origin).resolve() != file.resolve():
        name = f"rlhf_scorer:{file.resolve()}".replace(".", "_")  # a name without a package
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None, "a file that ends in .py"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # a dataclass defined in the file looks up its module here
    writes, sys.dont_write_bytecode = sys.dont_write_bytecode, True  # no __pycache__ beside the file
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        sys.dont_write_bytecode = writes
    return module


def _working_directory_first() -> None:
    """Put the working directory first on the import path, if it is not on the path.

    `python -m` does so, but a console script does not.
    """
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
