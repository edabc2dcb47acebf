"""Reward functions that are given as objects in Python: each gets an address, as a config has it.

A function of a module keeps its place: `<module>:<function>` or `<file>.py:<function>`. Any other function
(of a notebook or a script, a lambda, an object) exists in this process only, as
`only_in_this_process:<name>_<digest of what it does>`. This module imports no torch, and pickles nothing.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from rlhf.core.errors import UserError
from rlhf.core.files import digest
from rlhf.core.formatting import shortened
from rlhf.usercode.address import LIBRARIES, NAME, ONLY_HERE

Function = Callable[..., Any]


class GivenFunctions:
    """The addresses of reward functions that are given as objects.

    Args:
        reward: a function, or a list of functions.

    Attributes:
        paths: the address of each function.
        only_here: the functions that exist only in this process, by the name in their address.

    Raises:
        UserError: an object is not a function.
    """

    def __init__(self, reward: Function | Sequence[Function]) -> None:
        self.only_here: dict[str, Function] = {}
        functions: list[Any] = list(reward) if isinstance(reward, list | tuple) else [reward]
        torch = sys.modules.get("torch")
        wrong = (type, *((torch.nn.Module,) if torch is not None else ()))
        for function in functions or [functions]:
            if not callable(function) or isinstance(function, wrong):
                raise UserError(
                    "reward must be a function or a list of functions, got "
                    f"{shortened(repr(function), 80)} of type {type(function).__name__}; write "
                    "reward=<function>, for the address of a function set scorer=function "
                    "scorer.path=<file>.py:<function>, for a model set scorer=reward_model "
                    "model.reward=<folder or hub name>"
                )
        self.paths = [self.address(function) for function in functions]

    def address(self, function: Function) -> str:
        """Return the address of a function; one without a place of its own joins `only_here`."""
        name = getattr(function, "__name__", type(function).__name__)
        if (place := _place_of(function, name)) is not None:
            return f"{place}:{name}"
        name = f"{name if re.fullmatch(NAME, name) else 'reward'}_{digest(_content(function, []))}"
        while self.only_here.get(name, function) is not function:
            name += "_"
        self.only_here[name] = function
        return f"{ONLY_HERE}:{name}"

    def provide(self) -> None:
        """Make the functions of `only_here`, if any, those that addresses in this process name."""
        if self.only_here:
            module = ModuleType(ONLY_HERE)
            module.__spec__ = ModuleSpec(ONLY_HERE, None, origin="this process")
            vars(module).update(self.only_here)
            sys.modules[ONLY_HERE] = module

    def warnings(self) -> Iterator[str]:
        """Yield a warning for each function that exists only in this process."""
        for name in self.only_here:
            yield (
                f"the reward function {name} exists only in this process: only the same call in Python "
                "resumes the run, and the name of the run does not depend on the content of objects that the "
                "function reads; write it as a function of a module to have both"
            )


def _place_of(function: Any, name: str) -> str | None:
    """Return the module or the file that defines a function, for an address; None: no place of its own."""
    module = sys.modules.get(getattr(function, "__module__", None) or "__main__")
    if module is None or module.__spec__ is None or module.__name__ in ("__main__", ONLY_HERE):
        return None
    if getattr(module, name, None) is not function:
        return None
    file = Path(getattr(module, "__file__", None) or "")
    found = file.parent == Path.cwd() or any(file.is_relative_to(each) for each in LIBRARIES)
    if "." in module.__name__ or hasattr(module, "__path__") or file.suffix != ".py":
        return module.__name__
    return module.__name__ if found and module.__name__.isidentifier() else str(file)


def _content(value: Any, seen: list[Any]) -> Any:
    """Return what a value is or does, as JSON that is equal in every process.

    Of a function, this is its code with the values that it reads; of an object, its type and `__call__`.

    Args:
        value: the value.
        seen: the functions and objects so far, each of which counts once.
    """
    if value is None or isinstance(value, int | float | str | bytes):
        return repr(value)
    if isinstance(value, list | tuple):
        return [_content(each, seen) for each in value]
    if isinstance(value, dict):
        return [[_content(key, seen), _content(each, seen)] for key, each in value.items()]
    if isinstance(value, set | frozenset):
        return sorted((_content(each, seen) for each in value), key=str)
    if isinstance(value, re.Pattern):
        return [repr(value.pattern), value.flags]
    if isinstance(value, CodeType):
        names = value.co_names, value.co_varnames
        return [value.co_code.hex(), *names, _content(value.co_consts, seen)]
    if isinstance(value, ModuleType):
        return value.__name__
    for number, each in enumerate(seen):
        if each is value:
            return number
    seen.append(value)
    if (place := _place_of(value, name := getattr(value, "__name__", ""))) is not None:
        return [place, name]
    if isinstance(value, partial):
        return _content([value.func, value.args, value.keywords], seen)
    if isinstance(value, MethodType):
        return _content([value.__func__, value.__self__], seen)
    if not isinstance(value, FunctionType):
        call = getattr(type(value), "__call__", None)  # noqa: B004
        wrapped = getattr(value, "__dict__", {}).get("__wrapped__")  # of functools
        inner = [call if isinstance(call, FunctionType) else None, wrapped]
        return [type(value).__qualname__, name, _content(inner, seen)]
    cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
    read = {name: cell.cell_contents for name, cell in cells if cell != CellType()}
    codes = [value.__code__]
    for code in codes:  # the list grows
        codes += [each for each in code.co_consts if isinstance(each, CodeType)]
        known = value.__globals__
        read |= {name: known[name] for name in code.co_names if name in known and name not in read}
    return _content([value.__code__, value.__defaults__, value.__kwdefaults__, read], seen)
