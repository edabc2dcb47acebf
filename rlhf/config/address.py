"""Python functions named in a config: `<module>:<function>` or `<file>.py:<function>`.

This module imports no torch.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from rlhf.core.errors import UserError

NAME = r"[^\W\d]\w*"
FORM = re.compile(rf"(?P<place>.+\.py|{NAME}(\.{NAME})*):(?P<function>{NAME})")
RULE = "must be <module>:<function> or <file>.py:<function> (it names a Python function)"


def function_problem(key: str, path: str | None) -> str | None:
    """Return the error message for the address of a function, or None if the address is valid.

    The module or file is not executed.

    Args:
        key: the config key of the address.
        path: the address; None if the key is not set.
    """
    match = FORM.fullmatch(path or "")
    if match is None:
        got = "null" if path is None else repr(path)
        return f"{key} {RULE}, got {got}; set {key}=my_module:my_function"
    place = match["place"]
    if place.endswith(".py"):
        reason = None if Path(place).expanduser().is_file() else f"no file {place!r} here"
    else:
        reason = missing_module(place)
    if reason is None:
        return None
    return (
        f"{key} must name a function in an existing module or file ({reason}), got {path!r}; run the command "
        f"in the folder that contains it, or set {key}=<path of the file>.py:{match['function']}"
    )


def missing_module(name: str) -> str | None:
    """Return the reason why the module `name` is not found, or None. Parent packages are imported."""
    working_directory_first()
    try:
        return None if importlib.util.find_spec(name) else f"no module {name!r}"
    except ModuleNotFoundError as error:
        return f"no module {error.name!r}"
    except Exception as error:  # the package's code may raise any exception
        return f"importing its package raised {type(error).__name__}: {error}"


def load_function(key: str, path: str, arguments: tuple[str, ...]) -> Callable[..., Any]:
    """Import and return the function at an address.

    Args:
        key: the config key of the address.
        path: the address.
        arguments: names of the positional arguments that the function must accept.

    Raises:
        UserError: the module cannot be imported, or has no such function, or the function does not accept the
            arguments.
    """
    place, _, name = path.rpartition(":")
    try:
        module = load_file(Path(place).expanduser()) if place.endswith(".py") else load_module(place)
    except Exception as error:  # the user's code may raise any exception
        where = traceback.extract_tb(error.__traceback__)[-1]
        raise UserError(
            f"{key} must name a module that can be imported (importing it raised {type(error).__name__}: "
            f"{error}, in {where.filename}, line {where.lineno}), got {path!r}; fix {place}"
        ) from error
    function = getattr(module, name, None)
    if function is None:
        raise UserError(
            f"{key} must name a function of {place} (there is no {name} in it), got {path!r}; "
            f"set {key}={place}:<function>"
        )
    if not callable(function):
        raise UserError(
            f"{key} must name a function ({name} is of type {type(function).__name__}), got {path!r}; "
            f"set {key}={place}:<function>"
        )
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        raise UserError(
            f"{key} must name a function of ({', '.join(arguments)}) ({error}), got {path!r}; "
            f"write def {name}({', '.join(arguments)})"
        ) from error
    except ValueError:  # some built-in functions have no signature
        pass
    return function


def load_module(name: str) -> ModuleType:
    """Import a module by name. The working directory is searched first."""
    working_directory_first()
    return importlib.import_module(name)


def load_file(file: Path) -> ModuleType:
    """Import a Python file as a module with a unique name.

    Imports in the file search the working directory first.
    """
    working_directory_first()
    name = f"rlhf_scorer:{file.resolve()}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None, "a file that ends in .py"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # a dataclass defined in the file looks up its module here
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def working_directory_first() -> None:
    """Put the working directory first on the import path, if it is not on the path.

    `python -m` does so, but a console script does not.
    """
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
