"""The user's functions and classes: named in a config by an address, or given as objects in Python."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import shlex
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from rlhf.core.errors import UserError, one_line, setting
from rlhf.core.files import digest
from rlhf.core.formatting import shortened
from rlhf.usercode.protection import protected

# Functions and classes named in a config: `<module>:<name>` or `<file>.py:<name>`.
#
# The check before a run imports them, and reports what is wrong with them.


NAME = r"[^\W\d]\w*"
ONLY_HERE = "only_in_this_process"  # stands for the module of functions that were given as objects
LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})  # folders
_FORM = re.compile(rf"(?P<place>.+\.py|{NAME}(\.{NAME})*):(?P<name>{NAME})")
_LAST_NAME = re.compile(rf"(?P<place>.+?)(?:::|[:./#\\])(?P<name>{NAME})")  # after the last separator
_METHOD = re.compile(rf"(.+:{NAME})\.({NAME})")
_CLASSES = ("environment.functions",)  # keys of functions that may be classes
_LISTS = ("hooks", *_CLASSES)  # keys of lists of addresses
_SEVERAL = ("list", "List", "Sequence", "Iterable", "Collection", "tuple", "Tuple")  # annotations


def function_problem(key: str, path: object, arguments: tuple[str, ...] | None) -> str | None:
    """Return the error message of `load_function` for an address; None if nothing is wrong with it."""
    return _problem(load_function, key, path, arguments)


def class_problem(key: str, path: object) -> str | None:
    """Return the error message of `load_class` for an address; None if nothing is wrong with it."""
    return _problem(load_class, key, path)


def _problem(load: Callable[..., object], key: str, path: object, *asked: object) -> str | None:
    """Return the error message of a call of `load`, or None; a new module with an error is forgotten."""
    before = set(sys.modules)
    try:
        load(key, path, *asked)
    except UserError as error:
        place = str(path).rpartition(":")[0]
        file = str(Path(place).expanduser().absolute())
        for name in sys.modules.keys() - before:
            if name == place or getattr(sys.modules[name], "__file__", None) == file:
                del sys.modules[name]
        return error.problems[0]
    return None


def load_function(key: str, path: object, arguments: tuple[str, ...] | None) -> Callable[..., Any]:
    """Import and return the function at an address.

    Args:
        key: the config key of the address.
        path: the address; None if the key is not set.
        arguments: names of the arguments that the function may receive by position; None: any.

    Raises:
        UserError: the address has another form, the module cannot be imported or has no such function, or the
            function does not accept the arguments.
    """
    at = _Address.read(key, path, "function")
    found = at.load()
    kind = "a class" if inspect.isclass(found) and key not in _CLASSES else None
    if not callable(found):
        kind = f"of type {type(found).__name__}"
    if kind is not None:
        raise at.error("name a function", f"{at.name} is {kind}", at.other())
    signature = signature_of(found)
    try:
        if arguments is not None and len(arguments) != 1:
            parameters_of(signature)
        elif arguments is not None and signature is not None:
            signature.bind(*arguments)
    except TypeError as error:
        assert arguments is not None
        rule = f"name a function of {', '.join(arguments)}"
        rule += " or of messages and columns of the data" if len(arguments) > 1 else ""
        example = f"write def {at.name}({', '.join(arguments)})"
        raise at.error(rule, f"{at.name} takes {signature}: {error}", example) from None
    return found


def load_class(key: str, path: object) -> type:
    """Import and return the class at an address; the errors are those of `load_function`."""
    at = _Address.read(key, path, "class")
    if not isinstance(found := at.load(), type):
        raise at.error("name a class", f"{at.name} is of type {type(found).__name__}", at.other())
    return found


def takes_lists(key: str, path: str) -> bool | None:
    """Return whether the response of the function at an address is a list, or text (False).

    Its annotation counts, otherwise its name (`responses` or `completions`). Without a parameter of such a
    name, the response is the second argument. The result is None if neither shows it.
    """
    signature = signature_of(load_function(key, path, None))
    every = list(signature.parameters.values()) if signature is not None else []
    named = [each for each in every if VALUES.get(each.name) == "response"]
    second = [each for each in every if each.kind < each.VAR_POSITIONAL][1:2]
    for response in (named or second)[:1]:
        hint = response.annotation
        text = hint.__name__ if type(hint) is type else str(hint)  # list[str] has another type
        name = text.strip("'\"").partition("[")[0].rpartition(".")[2].strip()
        if name in (*_SEVERAL, "str"):
            return name != "str"
        return True if response.name in _PLURAL else None
    return None


def signature_of(function: Callable[..., Any]) -> inspect.Signature | None:
    """Return the signature of a function; None for some built-in functions."""
    with suppress(ValueError):
        return inspect.signature(function)
    return None


def _assigned(key: str, address: str) -> str:
    """Return the setting of an address, as it is typed in a shell."""
    return setting(key, [address] if key in _LISTS else address)


def addresses(value: object) -> list[str]:
    """Return the addresses in a value with several: a mapping, or a text with commas or blanks; else []."""
    texts = value.values() if isinstance(value, Mapping) else re.split(r"[\s,;]+", str(value or ""))
    found = [str(text) for text in texts]
    return found if len(found) > 1 and all(map(_FORM.fullmatch, found)) else []


@dataclass(frozen=True, slots=True)
class _Address:
    """An address, `<place>:<name>`, of valid form, and the error messages about what it names.

    Args:
        key: the config key of the address.
        place: the module, or the file.
        name: the name of the function or class.
        kind: what the address names, `function` or `class`.
    """

    key: str
    place: str
    name: str
    kind: str

    @classmethod
    def read(cls, key: str, path: object, kind: str) -> _Address:
        """Return the address in a value of the config.

        Raises:
            UserError: the value has another form.
        """
        text = path if isinstance(path, str) else ""
        several, match = addresses(path), _FORM.fullmatch(text)
        if match is not None and (not several or Path(match["place"]).expanduser().is_file()):
            return cls(key, match["place"], match["name"], kind)
        remedy = f"set {_assigned(key, 'my_module:MyClass' if kind == 'class' else 'my_module:my_function')}"
        if method := _METHOD.fullmatch(text):
            whole, name = method.groups()
            place, _, owner = whole.rpartition(":")
            remedy = f"write {name} = {owner}().{name} below the class and set {key}={place}:{name}"
            remedy = f"set {_assigned(key, whole)} (methods are tools)" if key in _CLASSES else remedy
        elif several:
            remedy = f"for several functions set {setting(key, several)}"
        elif close := _suggestion(text):
            remedy = f"did you mean {_assigned(key, close)}?"
        form = kind.capitalize() if kind == "class" else kind
        raise UserError(
            f"{key} must be <module>:<{form}> or <file>.py:<{form}> (it names a Python {kind}), got "
            f"{'null' if path is None else repr(path)}; {remedy}"
        )

    def error(self, rule: str, reason: object, remedy: str) -> UserError:
        return UserError(f"{self.key} must {rule} ({reason}), got {f'{self.place}:{self.name}'!r}; {remedy}")

    def load(self) -> Any:
        """Import the module or the file, and return what it has under the name.

        Raises:
            UserError: it cannot be imported, or has nothing of this name.
        """
        if self.place == ONLY_HERE and getattr(sys.modules.get(self.place), self.name, None) is None:
            raise self.error(
                "name a function that this process has",
                "the Python process that started the run had it as an object",
                f"make the call Experiment(..., {'loop' if self.key == 'loop' else 'reward'}=<function>) "
                f"again, or set {self.key}=<file>.py:<function>",
            )
        try:
            module = _imported(self.place)
        except (Exception, SystemExit) as error:  # the user's code may raise any exception
            raise self.not_importable(error) from None
        if (found := getattr(module, self.name, None)) is not None:
            return found
        names = self.own(module)
        wanted = f"class {self.name}" if self.kind == "class" else self.name
        has = f"there is no {wanted} in it" + (f", only {', '.join(names[:20])}" if names else "")
        raise self.error(f"name a {self.kind} of {self.place}", has, self.other())

    def own(self, module: ModuleType) -> list[str]:
        """Return the public names of functions or classes that a module defines, and does not import."""
        kinds = {"class": (type,)}.get(self.kind, (FunctionType, *((type,) if self.key in _CLASSES else ())))
        found = [(name, value) for name, value in vars(module).items() if isinstance(value, kinds)]
        found.sort(key=lambda each: isinstance(each[1], type))  # functions first
        return [name for name, value in found if value.__module__ == module.__name__ and name[0] != "_"]

    def other(self) -> str:
        """Return the remedy for an address that must name another function or class of the module."""
        names = [name for name in self.own(_imported(self.place)) if name != self.name]
        if not names:
            return f"write the {self.kind} in {self.place}"
        close = get_close_matches(self.name, names, n=1)
        other = _assigned(self.key, f"{self.place}:{(close or names)[0]}")
        return f"did you mean {other}?" if close or self.kind == "class" else f"set {other}"

    def not_importable(self, error: BaseException) -> UserError:
        """Return the error for a module whose import raised `error`."""
        missing = (error.name or "") if isinstance(error, ModuleNotFoundError) else ""
        if missing and (self.place == missing or self.place.startswith(f"{missing}.")):
            other = f"<path of the file>.py:{self.name}"
            other = f"[{other}]" if self.key in _LISTS else other
            remedy = f"run the command in the folder that contains it, or set {self.key}={other}"
            if close := _similar(self.place):
                remedy = f"did you mean {_assigned(self.key, f'{close}:{self.name}')}?"
            said = f"no module {missing!r}" if str(error).startswith("No module") else error
            return self.error(f"name a {self.kind} in an existing module or file", said, remedy)
        frames = traceback.extract_tb(error.__traceback__)
        called = [each for each in frames if not each.filename.startswith(("<frozen", __file__))]
        own = [each for each in called if not each.filename.startswith(LIBRARIES)]
        start = traceback.FrameSummary(self.place, 1, "")  # the error came before the first line
        where = (own or called or [start])[-1]
        file, line, raised = where.filename, where.lineno, one_line(error)
        if "attempted relative import" in str(error) and self.place.endswith(".py"):
            module, here = Path(self.place).expanduser().resolve().with_suffix(""), Path.cwd()
            above = module.parent.parent
            there = "" if above.is_relative_to(here) else f" in {above}, and run the command there"
            address = ".".join(module.relative_to(above if there else here).parts)
            return self.error(
                "be <package>.<module>:<function> for a file with relative imports",
                f"line {line} of {self.place} has one",
                f"set {_assigned(self.key, f'{address}:{self.name}')}{there}",
            )
        if isinstance(error, SyntaxError):  # its text repeats the place
            file, line, raised = error.filename or file, error.lineno, f"{type(error).__name__}: {error.msg}"
        remedy, root = f"correct {file}", missing.partition(".")[0]
        if root and ((beside := Path(file).with_name(root)).is_dir() or beside.with_suffix(".py").is_file()):
            remedy = f"start the command with PYTHONPATH={shlex.quote(str(beside.parent))}"
        elif root:
            remedy = f"install {root}, or {remedy}"
        reason = f"importing it raised {raised}, in {file}, line {line}"
        return self.error("name a module that can be imported", reason, remedy)


def _suggestion(path: str) -> str | None:
    """Return a valid address that `path`, whose form is wrong, probably means; or None."""
    bare = path.strip().removesuffix("()").removesuffix(":")
    match = _LAST_NAME.fullmatch(bare)
    for place, name in [*([(match["place"], match["name"])] if match else ()), (bare, "")]:
        for each in (place, f"{place}.py"):
            with suppress(Exception, SystemExit):  # the user's code may raise any exception
                module = _imported(each)
                names = [name] if name else _Address("", each, "", "function").own(module)
                if hasattr(module, names[0]):
                    return f"{each}:{names[0]}"
    return None


def _similar(place: str) -> str | None:
    """Return the file or module beside `place` with the most similar name, in the same form; or None."""
    file = Path(place if place.endswith(".py") else f"{place}.py")
    folder = file.parent.expanduser()
    names = [each.name for each in folder.glob("*.py")] if folder.is_dir() else []
    if not (close := get_close_matches(file.name, names, n=1)):
        return None
    return str(file.with_name(close[0])) if place.endswith(".py") else close[0].removesuffix(".py")


# -- imports ---------------------------------------------------------------------------------------


def _imported(place: str) -> ModuleType:
    """Import and return a module or a file; imports search the working directory, as with `python -m`."""
    with protected():
        if (here := str(Path.cwd())) not in sys.path:  # a console script does not have it
            sys.path.insert(0, here)
        if place.endswith(".py"):
            if not (file := Path(place).expanduser()).is_file():
                raise ModuleNotFoundError(f"no file {place!r} here", name=place)
            return _load_file(file)
        module = importlib.import_module(place)
        if hasattr(module, "__path__") and getattr(module, "__file__", None) is None:
            raise ModuleNotFoundError(f"{place!r} is a folder", name=place)
        return module


def _load_file(file: Path) -> ModuleType:
    """Import a Python file as a module that has the name of the file, or a unique name if that is taken.

    The folder of the file becomes the last of the import path, so that processes that the functions start
    find the module by its name. Imports in the file search the working directory first.
    """
    folder, name = str(file.resolve().parent), file.stem
    if folder not in sys.path:
        sys.path.append(folder)
        importlib.invalidate_caches()
    found = sys.modules[name].__spec__ if name in sys.modules else PathFinder.find_spec(name)
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


# The parameters of a reward function: which values of a response, and which columns, it receives.
#
# A function with a parameter `response` receives its arguments by name. Any other function receives prompt,
# response and reference by position.


# Name of a parameter -> the value that the function receives; in lists, if it takes several responses.
VALUES = {
    **{"prompt": "prompt", "response": "response", "reference": "reference", "messages": "messages"},
    **{"prompts": "prompt", "responses": "response", "references": "reference"},
    **{"completion": "response", "completions": "response", "episode": "episode", "episodes": "episode"},
}
GIVEN = frozenset(VALUES)
_PLURAL = frozenset({"responses", "completions"})  # names of the responses in a function that takes lists
_BY_POSITION = ("prompt", "response", "reference")
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True, slots=True)
class _Parameters:
    """What a reward function receives.

    Attributes:
        position: values that it receives by position: none, or prompt, response and reference.
        taken: names of the parameters that receive these values.
        values: name of a parameter -> the value that it receives by name.
        columns: parameters that name a column of the data.
        optional: parameters with a default that receive a column of the data, if there is one.
        rest: the function takes `**kwargs`, and so all other columns.
    """

    position: tuple[str, ...]
    values: dict[str, str]
    columns: tuple[str, ...]
    optional: tuple[str, ...]
    rest: bool
    taken: tuple[str, ...] = ()

    @property
    def asks_columns(self) -> bool:
        """Whether the function receives columns of the data."""
        return bool(self.columns or self.optional or self.rest)

    @property
    def asks_messages(self) -> bool:
        """Whether the function receives the messages of a dialogue."""
        return "messages" in self.values

    @property
    def asks_episode(self) -> bool:
        """Whether the function receives the replies and messages of an episode."""
        return "episode" in self.values.values()


def parameters_of(signature: inspect.Signature | None) -> _Parameters:
    """Return what a function receives; None: a built-in function without a signature.

    Raises:
        TypeError: the function cannot be called with these values.
    """
    if signature is None:
        return _Parameters(_BY_POSITION, {}, (), (), rest=False)
    every = list(signature.parameters.values())
    named = [each for each in every if each.kind in _NAMED]
    rest = any(each.kind is each.VAR_KEYWORD for each in every)
    position: tuple[str, ...] = ()
    by_position: list[inspect.Parameter] = []
    if not any(VALUES.get(each.name) == "response" for each in named):
        position = _BY_POSITION
        signature.bind_partial(*position)
        taken = [each for each in every if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
        by_position = taken[: len(position)]
        named = [each for each in named if each not in by_position]
        if any(each.kind is each.VAR_POSITIONAL for each in every):
            rest = False  # probably a wrapper around a function with other parameters
        for each, value in zip(taken, position, strict=False):
            if VALUES.get(each.name, value) != value:
                raise TypeError(f"without a parameter response, {each.name} would be the {value}")
    elif any(each.kind is each.POSITIONAL_ONLY for each in every):
        raise TypeError("arguments before / have no names")
    values = {each.name: VALUES[each.name] for each in named if each.name in VALUES}
    others = [each for each in named if each.name not in VALUES]
    return _Parameters(
        position,
        values,
        columns=tuple(each.name for each in others if each.default is each.empty),
        optional=tuple(each.name for each in others if each.default is not each.empty),
        rest=rest,
        taken=tuple(each.name for each in by_position),
    )


# Functions that are given as objects in Python: each gets an address, as a config has it.
#
# A function of a module keeps its place: `<module>:<function>` or `<file>.py:<function>`. Any other function
# (of a notebook or a script, a lambda, an object) exists in this process only, as
# `only_in_this_process:<name>_<digest of what it does>`. This module imports no torch, and pickles nothing.


Function = Callable[..., Any]


class GivenFunctions:
    """The addresses of reward functions, and of a training loop, that are given as objects.

    Args:
        reward: a function, or a list of functions; None: none.
        loop: a training loop; None: none. The check of the address says what is wrong with it.

    Attributes:
        paths: the address of each reward function.
        loop: the address of the loop; None: none.
        only_here: the functions that exist only in this process, by the name in their address.

    Raises:
        UserError: an object is not a function.
    """

    def __init__(
        self, reward: Function | Sequence[Function] | None = None, loop: Function | None = None
    ) -> None:
        self.only_here: dict[str, Function] = {}
        functions: list[Any] = list(reward) if isinstance(reward, list | tuple) else [reward]
        torch = sys.modules.get("torch")
        wrong = (type, *((torch.nn.Module,) if torch is not None else ()))
        for function in () if reward is None else functions or [functions]:
            if not callable(function) or isinstance(function, wrong):
                raise UserError(
                    "reward must be a function or a list of functions, got "
                    f"{shortened(repr(function), 80)} of type {type(function).__name__}; write "
                    "reward=<function>, for the address of a function set scorer=function "
                    "scorer.path=<file>.py:<function>, for a model set scorer=reward_model "
                    "model.reward=<folder or hub name>"
                )
        self.paths = [] if reward is None else [self.address(function) for function in functions]
        self.loop = None if loop is None else self.address(loop)

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
                f"the function {name} exists only in this process: only the same call resumes the run, whose "
                "name does not depend on objects that the function reads; a function of a module has both"
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
