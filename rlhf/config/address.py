"""Finding a function that a config names: `<module>:<function>`, or `<file>.py:<function>`. No torch here."""

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
    """What is wrong with the `path` that `key` names, as far as can be said without running it; or None."""
    found = FORM.fullmatch(path or "")
    if found is None:
        got = "null" if path is None else repr(path)
        return f"{key} {RULE}, got {got}; set {key}=my_module:my_function"
    place = found["place"]
    if place.endswith(".py"):
        missing = None if Path(place).expanduser().is_file() else f"no file {place!r} here"
    else:
        missing = missing_module(place)
    if missing is None:
        return None
    return (
        f"{key} must name a function in a module or file that is there ({missing}), got {path!r}; run in the "
        f"folder that holds it, or set {key}=<path of the file>.py:{found['function']}"
    )


def missing_module(name: str) -> str | None:
    """Why the module `name` is not found, or None. The packages around it are imported, itself it is not."""
    working_directory_first()
    try:
        return None if importlib.util.find_spec(name) else f"no module {name!r}"
    except ModuleNotFoundError as error:
        return f"no module {error.name!r}"
    except Exception as error:  # whatever the code of its package raises
        return f"importing its package raised {type(error).__name__}: {error}"


def load_function(key: str, path: str, arguments: tuple[str, ...]) -> Callable[..., Any]:
    """The function that `path` names, for positional `arguments`.

    Raises:
        UserError: it cannot be imported, is not there, is no function, or takes other arguments.
    """
    place, _, name = path.rpartition(":")
    try:
        module = load_file(Path(place).expanduser()) if place.endswith(".py") else load_module(place)
    except Exception as error:  # whatever the user's code raises
        where = traceback.extract_tb(error.__traceback__)[-1]
        raise UserError(
            f"{key} must name a module that can be imported (importing it raised {type(error).__name__}: "
            f"{error}, in {where.filename}, line {where.lineno}), got {path!r}; mend {place}"
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
    except ValueError:  # some builtins do not tell their arguments
        pass
    return function


def load_module(name: str) -> ModuleType:
    """Import a module by name, from the working directory first."""
    working_directory_first()
    return importlib.import_module(name)


def load_file(file: Path) -> ModuleType:
    """Import a file, under a name that no module has; what it imports may lie in the working directory."""
    working_directory_first()
    name = f"rlhf_scorer:{file.resolve()}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None, "a file that ends in .py"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # what a dataclass in the file looks itself up by
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def working_directory_first() -> None:
    """Let modules of the working directory be imported, as `python -m` does and a console script does not."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
