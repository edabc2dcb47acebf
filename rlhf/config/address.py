"""Python functions named in a config: `<module>:<function>` or `<file>.py:<function>`.

This module imports no torch.
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
from difflib import get_close_matches
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from rlhf.config import function_source
from rlhf.config.parameters import parameters_of
from rlhf.core.errors import UserError
from rlhf.core.pasting import setting
from rlhf.core.protection import protected

NAME = r"[^\W\d]\w*"
FORM = re.compile(rf"(?P<place>.+\.py|{NAME}(\.{NAME})*):(?P<function>{NAME})")
ONLY_HERE = "only_in_this_process"  # stands for the module of functions that were given as objects
_CLASS = "a class"
_ASYNC = "an async function, whose result must be awaited"
_RULE = "must be <module>:<function> or <file>.py:<function> (it names a Python function)"
LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})  # folders
_LAST_NAME = re.compile(rf"(?P<place>.+?)(?:::|[:./#\\])(?P<function>{NAME})")  # after the last separator


def function_problem(key: str, path: object, arguments: tuple[str, ...]) -> str | None:
    """Return the error message for the address of a function; None if nothing is wrong with it.

    The file of the function is read, not executed. Problems that only its execution shows are found by
    `load_function`.

    Args:
        key: the config key of the address.
        path: the address; None if the key is not set.
        arguments: names of the arguments that the function may receive by position.
    """
    match = FORM.fullmatch(path) if isinstance(path, str) else None
    several = addresses(path)
    if match is not None and several and missing(match["place"]):
        match = None
    if not isinstance(path, str) or match is None:
        got, remedy = "null" if path is None else repr(path), suggestion(str(path or ""))
        remedy = f"did you mean {setting(key, remedy)}?" if remedy else f"set {key}=my_module:my_function"
        if several:
            remedy = f"for several functions set {setting(key, several)}"
        return f"{key} {_RULE}, got {got}; {remedy}"
    place, name = match["place"], match["function"]
    if place == ONLY_HERE and getattr(sys.modules.get(place), name, None) is None:
        return (
            f"{key} must name a function that this process has (the Python process that started the run had "
            f"it as an object), got {path!r}; make the call Experiment(..., reward=<function>) again, or set "
            f"{key}=<file>.py:<function>"
        )
    if reason := missing(place):
        close = similar(place)
        remedy = (
            f"did you mean {setting(key, f'{close}:{name}')}?"
            if close
            else f"run the command in the folder that contains it, or set {key}=<path of the file>.py:{name}"
        )
        return f"{key} must name a function in an existing module or file ({reason}), got {path!r}; {remedy}"
    file = file_of(place)
    return None if file is None else _source_problem(key, path, file, arguments)


def addresses(value: object) -> list[str]:
    """Return the addresses in a value with several: a mapping, or a text with commas or blanks; else []."""
    texts = value.values() if isinstance(value, Mapping) else re.split(r"[\s,;]+", str(value or ""))
    found = [str(text) for text in texts]
    return found if len(found) > 1 and all(map(FORM.fullmatch, found)) else []


def _source_problem(key: str, path: str, file: Path, arguments: tuple[str, ...]) -> str | None:
    """Return the error message for the function at the address `path`, from the source in `file`; or None.

    Args:
        key: the config key of the address.
        path: the address, of valid form.
        file: the file of the module.
        arguments: names of the arguments that the function may receive by position.
    """
    name = path.rpartition(":")[2]
    _working_directory_first()
    source = readable_source(key, path, file)
    if isinstance(source, str):
        return source
    if path.rpartition(":")[0].endswith(".py") and (line := source.relative_import()):
        return relative(key, path, file, line)
    if found := source.missing_import():
        line, module = found
        root = module.partition(".")[0]
        if (file.parent / f"{root}.py").is_file() or (file.parent / root).is_dir():
            return (
                f"{key} must name a module that can be imported (line {line} of {file} imports {module!r}, "
                f"which is beside it, but not on the import path), got {path!r}; start the command with "
                f"PYTHONPATH={shlex.quote(str(file.parent))}"
            )
        return (
            f"{key} must name a module that can be imported (line {line} of {file} imports {module!r}, which "
            f"is not installed), got {path!r}; install {module.partition('.')[0]}, or correct {file}"
        )
    if source.lacks(name):
        return no_function(key, path, source.functions)
    definition = source.definition(name)
    if isinstance(definition, ast.Constant):
        kind = f"of type {type(definition.value).__name__}"
        return _not_a_function(key, path, f"{name} is {kind}", source.functions)
    if isinstance(definition, ast.ClassDef):
        return _not_a_function(key, path, f"{name} is {_CLASS}", source.functions)
    if isinstance(definition, ast.AsyncFunctionDef):
        return _not_a_function(key, path, f"{name} is {_ASYNC}", [f for f in source.functions if f != name])
    if isinstance(definition, ast.FunctionDef | ast.Lambda):
        return _arguments_problem(key, path, function_source.signature(definition.args), arguments)
    return None


def readable_source(key: str, path: str, file: Path) -> function_source.Source | str:
    """Return the source of the address `path` in `file`, or the error message if it cannot be read."""
    try:
        return function_source.read(file)
    except OSError as error:
        return f"{key} must name a file that can be read ({error.strerror}), got {path!r}; check {file}"
    except SyntaxError as error:
        return _not_importable(key, path, error, str(file), error.lineno)


def takes_lists(path: str) -> bool | None:
    """Return whether the parameters of the function at `path` show that it takes lists, or text (False).

    The result is None if neither a name nor an annotation shows it, or if there is no such function.
    """
    match = FORM.fullmatch(path)
    if match is None or missing(match["place"]) or (file := file_of(match["place"])) is None:
        return None
    try:
        definition = function_source.read(file).definition(match["function"])
    except (OSError, SyntaxError):
        return None
    return function_source.takes_lists(definition.args) if isinstance(definition, ast.FunctionDef) else None


def suggestion(path: str) -> str | None:
    """Return a valid address that `path`, whose form is wrong, probably means; or None."""
    bare = path.strip().removesuffix("()").removesuffix(":")
    guesses: list[tuple[str, str | None]] = [(bare, None), (f"{bare}.py", None)]
    if match := _LAST_NAME.fullmatch(bare):
        guesses = [(match["place"], match["function"]), (f"{match['place']}.py", match["function"]), *guesses]
    for place, name in guesses:
        if FORM.fullmatch(f"{place}:f") is None or missing(place) or (file := file_of(place)) is None:
            continue
        try:
            source = function_source.read(file)
        except (OSError, SyntaxError):
            continue
        if name is not None and not source.lacks(name):
            return f"{place}:{name}"
        if name is None and source.functions:
            return f"{place}:{source.functions[0]}"
    return None


def missing(place: str) -> str | None:
    """Return the reason why the file or module `place` is not found, or None."""
    if place.endswith(".py"):
        return None if Path(place).expanduser().is_file() else f"no file {place!r} here"
    try:
        spec = _find_module(place)
    except ModuleNotFoundError as error:
        return str(error)
    return f"{place!r} is a folder" if spec.origin is None and not spec.has_location else None


def similar(place: str) -> str | None:
    """Return the file or module beside `place` with the most similar name, in the same form; or None."""
    if place.endswith(".py"):
        file = Path(place)
        folder = file.parent.expanduser()
        names = [each.name for each in folder.glob("*.py")] if folder.is_dir() else []
        close = get_close_matches(file.name, names, n=1)
        return str(file.with_name(close[0])) if close else None
    close = get_close_matches(place, [file.stem for file in Path.cwd().glob("*.py")], n=1)
    return close[0] if close else None


def file_of(place: str) -> Path | None:
    """Return the source file of an existing file or module; None for a module that is not a Python file."""
    origin = place if place.endswith(".py") else _find_module(place).origin
    return Path(origin).expanduser() if origin and origin.endswith(".py") else None


def _find_module(name: str) -> ModuleSpec:
    """Return where the module `name` is. Nothing is imported, not even the packages that contain the module.

    Raises:
        ModuleNotFoundError: there is no such module.
    """
    _working_directory_first()
    loaded = sys.modules.get(name)
    if loaded is not None and loaded.__spec__ is not None:
        return loaded.__spec__
    found = ""  # the part of the name that is found already
    spec: ModuleSpec | None = None
    for part in name.split("."):
        folders = spec.submodule_search_locations if spec is not None else None
        if not found:
            spec = function_source.top_level_module(part)
        else:
            spec = None if folders is None else PathFinder.find_spec(f"{found}.{part}", folders)
        found = f"{found}.{part}" if found else part
        if spec is None:
            raise ModuleNotFoundError(f"no module {found!r}")
    assert spec is not None, "a name has at least one part"
    return spec


def _innermost(error: BaseException) -> traceback.FrameSummary:
    """Return the innermost frame of the user's code in the traceback of `error`; if none, of a library."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<frozen") and frame.filename != __file__
    ]
    return ([frame for frame in frames if not frame.filename.startswith(LIBRARIES)] or frames)[-1]


def signature_of(function: Callable[..., Any]) -> inspect.Signature | None:
    """Return the signature of a function; None for some built-in functions."""
    try:
        return inspect.signature(function)
    except ValueError:
        return None


def load_function(key: str, path: str, arguments: tuple[str, ...]) -> Callable[..., Any]:
    """Import and return the function at an address.

    Args:
        key: the config key of the address.
        path: the address.
        arguments: names of the arguments that the function may receive by position.

    Raises:
        UserError: the module cannot be imported, or has no such function, or the function does not accept the
            arguments.
    """
    name = path.rpartition(":")[2]
    module = load(key, path)
    function = getattr(module, name, None)
    functions = [each for each, value in vars(module).items() if inspect.isfunction(value) and each != name]
    if function is None:
        raise UserError(no_function(key, path, functions))
    kind = (
        _CLASS
        if inspect.isclass(function)
        else _ASYNC
        if inspect.iscoroutinefunction(function)
        else f"of type {type(function).__name__}"
    )
    if kind in (_CLASS, _ASYNC) or not callable(function):
        raise UserError(_not_a_function(key, path, f"{name} is {kind}", functions))
    if problem := _arguments_problem(key, path, signature_of(function), arguments):
        raise UserError(problem)
    return function


# -- messages --------------------------------------------------------------------------------------


def _not_importable(key: str, path: str, error: BaseException, file: str | None, line: int | None) -> str:
    """Return the message for a module whose import raises `error` at a line of a file."""
    text = error.msg if isinstance(error, SyntaxError) else error
    return (
        f"{key} must name a module that can be imported (importing it raised {type(error).__name__}: {text}, "
        f"in {file}, line {line}), got {path!r}; correct {file}"
    )


def no_function(key: str, path: str, functions: list[str]) -> str:
    """Return the message for a module that has `functions`, but nothing of the name in `path`."""
    place, _, name = path.rpartition(":")
    has = f"there is no {name} in it" + (f", only {', '.join(functions[:5])}" if functions else "")
    remedy = _other_function(key, path, functions)
    return f"{key} must name a function of {place} ({has}), got {path!r}; {remedy}"


def _not_a_function(key: str, path: str, reason: str, functions: list[str]) -> str:
    """Return the message for an address that names something else than a function."""
    remedy = _other_function(key, path, functions)
    return f"{key} must name a function ({reason}), got {path!r}; {remedy}"


def _other_function(key: str, path: str, functions: list[str]) -> str:
    """Return the remedy for an address that must name another function of the module, if it has any."""
    place, _, name = path.rpartition(":")
    if close := get_close_matches(name, functions, n=1):
        return f"did you mean {setting(key, f'{place}:{close[0]}')}?"
    return f"set {setting(key, f'{place}:{functions[0]}')}" if functions else f"write the function in {place}"


def relative(key: str, path: str, file: Path, line: int | None) -> str:
    """Return the message for a file with a relative import, which only a module of a package can have."""
    name, parts = path.rpartition(":")[2], file.resolve().with_suffix("").parts
    here = Path.cwd().parts
    inside = parts[: len(here)] == here and len(parts) > len(here) + 1
    module = ".".join(parts[len(here) :] if inside else parts[-2:])
    where = "" if inside else f" in {Path(*parts[:-2])}, and run the command there"
    at = f"line {line} of {file}" if line else str(file)
    return (
        f"{key} must be <package>.<module>:<function> for a file with relative imports ({at} has one), got "
        f"{path!r}; set {setting(key, f'{module}:{name}')}{where}"
    )


def _arguments_problem(
    key: str, path: str, signature: inspect.Signature | None, arguments: tuple[str, ...]
) -> str | None:
    """Return the message for a function that accepts its arguments neither by name nor by position; or None.

    Args:
        key: the config key of the address.
        path: the address.
        signature: the signature of the function; None: unknown.
        arguments: names of the arguments that the function may receive by position.
    """
    try:
        parameters_of(signature)
    except TypeError as error:
        assert signature is not None
        name, wanted = path.rpartition(":")[2], ", ".join(arguments)
        plain = signature.replace(
            parameters=[each.replace(annotation=each.empty) for each in signature.parameters.values()],
            return_annotation=signature.empty,
        )
        return (
            f"{key} must name a function with a parameter {arguments[1]}, and others with the names "
            f"{arguments[0]}, {arguments[2]}, messages or of columns of the data ({name} takes {plain}: "
            f"{error}), got {path!r}; write def {name}({wanted})"
        )
    return None


# -- imports ---------------------------------------------------------------------------------------


def load(key: str, path: str) -> ModuleType:
    """Import and return the module or the file of an address of valid form.

    Args:
        key: the config key of the address.
        path: the address.

    Raises:
        UserError: the module cannot be imported.
    """
    place = path.rpartition(":")[0]
    try:
        with protected():
            return load_file(Path(place).expanduser()) if place.endswith(".py") else _load_module(place)
    except SyntaxError as error:
        raise UserError(_not_importable(key, path, error, error.filename, error.lineno)) from error
    except (Exception, SystemExit) as error:  # the user's code may raise any exception
        where = _innermost(error)
        if "attempted relative import" in str(error) and place.endswith(".py"):
            raise UserError(relative(key, path, Path(place).expanduser(), where.lineno)) from error
        raise UserError(_not_importable(key, path, error, where.filename, where.lineno)) from error


def _load_module(name: str) -> ModuleType:
    """Import a module by name. The working directory is searched first."""
    _working_directory_first()
    return importlib.import_module(name)


def load_file(file: Path) -> ModuleType:
    """Import a Python file as a module that has the name of the file, or a unique name if that is taken.

    The folder of the file becomes the last of the import path, so that processes that the functions start
    find the module by its name. Imports in the file search the working directory first.
    """
    _working_directory_first()
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
