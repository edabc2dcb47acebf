"""What can be typed: config groups, options and keys; options of users and of packages; overrides."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, fields
from functools import cache, wraps
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from rlhf.config.schema import ABSENT, SCHEMAS, content, dotted, schema_of, section_class, value_at
from rlhf.core.errors import UserError, setting
from rlhf.core.files import flat

# Catalogue of the config groups, options and keys.


_LATER = ("correction", "hardware", "experiment", "sweep", "debug")  # groups that come after all others
_ORDER = ("algo", "model", "task", "generator", "backend", "scorer", "logger", *_LATER)
_F = TypeVar("_F", bound=Callable[..., Any])
_NOT_LISTED = ("tuned", "length", "hydra")  # folders of conf/ that --help does not list

added: ContextVar[tuple[Path, ...]] = ContextVar("added", default=())  # folders of `also`


def conf_dir() -> Path:
    """Return the folder conf/: beside the package in a checkout, inside the package in a wheel."""
    package = Path(__file__).resolve().parent.parent
    inside, beside = package / "conf", package.parent / "conf"
    return inside if inside.is_dir() else beside


@contextmanager
def also(folder: str | Path | None) -> Iterator[None]:
    """Let `conf_dirs` contain another folder, as with `--config-dir`; None: no other folder.

    Raises:
        UserError: the folder does not exist.
    """
    if folder is None:
        yield
        return
    if not Path(folder).is_dir():
        raise UserError(f"config_dir must be a folder laid out like conf/, got {folder}; fix the path")
    token = added.set((*added.get(), Path(folder)))
    try:
        yield
    finally:
        added.reset(token)


def conf_dirs() -> list[Path]:
    """Return the folder conf/, each folder of `also`, and each folder of `--config-dir`."""
    found = [conf_dir(), *added.get()]
    for argument, following in zip(sys.argv, [*sys.argv[1:], ""], strict=True):
        if argument in ("--config-dir", "-cd"):
            found.append(Path(following))
        elif argument.startswith("--config-dir="):
            found.append(Path(argument.partition("=")[2]))
    return found


def config_dir_words() -> list[str]:
    """Return `--config-dir <folder>` for each further folder of `conf_dirs`, as words of a command."""
    return [word for folder in conf_dirs()[1:] for word in ("--config-dir", str(folder))]


def groups() -> list[str]:
    """Return the config groups that `--help` lists."""
    found = {file.parent.name for folder in conf_dirs() for file in folder.glob("*/*.yaml")} - {*_NOT_LISTED}
    return sorted(found, key=lambda name: (_ORDER.index(name) if name in _ORDER else len(_ORDER), name))


def options(group: str) -> dict[str, str]:
    """Return the options of a group with their descriptions (the first sentence of each file)."""
    return {name: _first_sentence(path) for name, path in option_files(group).items()}


def option_files(group: str) -> dict[str, Path]:
    """Return the file of each option of a group."""
    return {path.stem: path for folder in conf_dirs() for path in sorted((folder / group).glob("*.yaml"))}


def _first_sentence(file: Path) -> str:
    """Return the first comment of a YAML file that is no package directive; "" if there is none.

    A line that begins with a small letter continues the sentence of the line before.
    """
    found: list[str] = []
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.startswith("#") and "@package" not in line:
            text = line.lstrip("# ").strip()
            if found and not text[:1].islower():
                break
            found.append(text)
        elif found:
            break
    return " ".join(found)


@dataclass(frozen=True, slots=True)
class _DeclaredKey:
    """A key that a section class declares; `*` in the dotted key stands for the name of a part."""

    key: str
    section: type
    name: str
    hint: Any  # type of the value


def until_another_option(function: _F) -> _F:
    """Cache the results of a function until another option is registered, for example by a package."""
    cached = cache(lambda options, *arguments: function(*arguments))
    return wraps(function)(lambda *arguments: cached(len(SCHEMAS), *arguments))  # type: ignore[return-value]


@until_another_option
def declared_keys() -> tuple[_DeclaredKey, ...]:
    """Return the keys of all sections and options; a key of several options once for each of them."""
    from rlhf.config.root import Config

    found: dict[_DeclaredKey, None] = {}

    def walk(section: type, at: str) -> None:
        hints = get_type_hints(section)
        for each in fields(section):
            key, hint = dotted(at, each.name), hints[each.name]
            found[_DeclaredKey(key, section, each.name, hint)] = None
            parts = get_origin(hint) is dict
            below = section_class(get_args(hint)[1] if parts else hint)
            if below is not None and not (parts and "*" in key):  # parts have no parts
                options = [each for each in SCHEMAS.values() if issubclass(each, below)]
                for cls in dict.fromkeys([below, *options]):
                    walk(cls, f"{key}.*" if parts else key)

    walk(Config, "")
    return tuple(found)


@until_another_option
def all_keys() -> Mapping[str, _DeclaredKey]:
    """Return the keys of all sections and options that have a value, without those of parts.

    A key of several options stands for that of the first.
    """
    found: dict[str, _DeclaredKey] = {}
    for each in declared_keys():
        if each.name != "name" and "*" not in each.key and section_class(each.hint) is None:
            found.setdefault(each.key, each)
    return found


def owners(section: str, name: str) -> list[str]:
    """Return the options that declare the field `name`, in the group of the section key `section`."""
    prefix = f"schema/{group_of(section).removeprefix('schema/')}/"
    return [
        option.removeprefix(prefix)
        for option, cls in SCHEMAS.items()
        if option.startswith(prefix) and name in {each.name for each in fields(cls)}
    ]


def types_of(key: str) -> list[Any]:
    """Return the types that a dotted key may have in any option; of a union, also its members."""
    declared = re.sub(r"\.parts\.\w+", ".parts.*", key)
    hints = [each.hint for each in declared_keys() if each.key == declared]
    return [part for hint in hints for part in (hint, *get_args(hint))]


def takes_list(key: str) -> bool:
    """Return whether a key, such as `optim.betas` or `model.lora.targets`, has a list as its value."""
    return any(get_origin(each) in (tuple, list) for each in types_of(key))


def option_name(section: type) -> str | None:
    """Return the name of the option that has the section class `section`; None if no option has it."""
    stored = schema_of(section)
    return stored and stored.rpartition("/")[2]


def group_of(section: str) -> str:
    """Return the config group of a section key: `scorer` for `gold` and for parts of a scorer.

    A part of a mixture of tasks is chosen in the group of the schemas, because the options of `task` also set
    keys of other sections.
    """
    if section.startswith("task.parts."):
        return "schema/task"
    return "scorer" if section == "gold" or ".parts." in section else section


def chosen_by(section: str) -> str:
    """Return the key that selects the option of a section key, for example `scorer@gold` for `gold`."""
    group = group_of(section)
    return section if group == section else f"{group}@{section}"


# Overrides as typed, and the config files that they select.


@dataclass(frozen=True, slots=True)
class Override:
    """An override as typed, such as `+scorer@scorer.parts.a=facts`.

    Args:
        text: the whole override.
        sign: "", "+", "++" or "~".
        key: the key without the sign, with the section after `@`.
        value: the value without quotes around it.
    """

    text: str
    sign: str
    key: str
    value: str

    @property
    def group(self) -> str:
        """The key without the section after `@`."""
        return self.key.partition("@")[0]

    @property
    def options(self) -> list[str]:
        """The words of the value, which may be a list of options."""
        return [word for word in re.split(r"[\[\],\s]+", self.value) if word]


def read_overrides(overrides: Iterable[str]) -> list[Override]:
    """Return the overrides of a command line."""
    found = []
    for text in overrides:
        typed, _, value = text.partition("=")
        key = typed.lstrip("+~")
        value = value[1:-1] if re.fullmatch('"[^"]*"', value) else value
        found.append(Override(text, typed.removesuffix(key), key, value))
    return found


@dataclass(frozen=True, slots=True)
class _ConfigFile:
    """A file with an option of a group.

    Args:
        name: group and option, such as "experiment/mine".
        path: the file.
        content: the settings, as nested dictionaries from the root of the config on.
        defaults: group and option of each entry of the defaults list: "override /algo", "dpo" or "", "mine".
    """

    name: str
    path: Path
    content: Any
    defaults: list[tuple[str, str]]

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the file by dotted key."""
        return dict(flat(self.content))


def selected_files(overrides: Iterable[Override]) -> Iterator[_ConfigFile]:
    """Yield the files of the options that overrides select, and of those in their defaults lists."""
    waiting = [
        (f"{each.group}/{option}", each.key.rpartition("@")[2])
        for each in overrides
        for option in each.options
    ]
    for name, section in waiting:  # the list grows
        group, _, option = name.removesuffix(".yaml").rpartition("/")
        if (path := option_files(group).get(option)) is None:
            continue
        package = re.search(r"^# *@package +(\S+)", path.read_text(encoding="utf-8"), re.M)
        at = package[1].replace("_global_", "") if package else section.replace("/", ".")
        tree: Any = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
        listed = tree.pop("defaults", None) or () if isinstance(tree, dict) else ()
        for outer in reversed(at.split(".") if at else []):
            tree = {outer: tree}
        defaults: list[tuple[str, str]] = []
        for entry in listed:
            for own, value in (entry if isinstance(entry, dict) else {"": entry}).items():
                every = value if isinstance(value, list) else [value]
                defaults += [(str(own), str(other)) for other in every]
        yield _ConfigFile(name, path, tree, defaults)
        for entry, other in defaults:
            own, _, place = entry.split(" ")[-1].partition("@")
            own = own[1:] if own.startswith("/") else f"{group}/{own}".rstrip("/")
            found = f"{own}/{other}", place or (section if own == group else own)
            waiting += [found] if found not in waiting else []


# Option files of the user, in the folders of `--config-dir`.


def _own_settings(group: str, option: str) -> dict[str, tuple[Any, Path]]:
    """Return the settings in an option file of the user, with the file, by dotted key.

    Those of other files of the user in its defaults list are included. A file that cannot be read has none:
    its error is reported when it is composed.
    """
    found: dict[str, tuple[Any, Path]] = {}
    with suppress(OSError, ValueError, TypeError, YAMLError, OmegaConfBaseException, RecursionError):
        for file in selected_files([Override("", "", group, option)]):
            if not file.path.is_relative_to(conf_dir()):
                found = {key: (value, file.path) for key, value in file.settings.items()} | found
    return found


def length_of(task: str, algo: str) -> str:
    """Return the option of conf/length/ for a task; settings of an algorithm of the user come before it.

    Args:
        task: option of the task.
        algo: option of the algorithm, perhaps of a file in a folder of `--config-dir`.
    """
    if not (conf_dir() / "length" / f"{task}.yaml").is_file():
        return task
    keys = _own_settings("algo", algo).keys()
    length = bool(keys & {"schedule.total_episodes", "schedule.total_epochs"})
    own = {(True, True): "none", (True, False): "own_length", (False, True): "own_prompts"}
    return own.get((length, "schedule.prompts_per_update" in keys), task)


def tuned_of(task: str, model: str, algo: str) -> str:
    """Return the option of conf/tuned/ for three options: of the algorithm, else of all that sample."""
    own, shared = f"{task}_{model}_{algo}", f"{task}_{model}"
    supervised = getattr(SCHEMAS.get(f"schema/algo/{algo}"), "supervised", False)
    return own if supervised or own in option_files("tuned") else shared


def hidden() -> list[str]:
    """Return an error for each file of the user that is not used, because an option here has its name."""
    found = []
    for folder in conf_dirs()[1:]:
        for file in sorted(folder.glob("*/*.yaml")):
            shipped = conf_dir() / file.relative_to(folder)
            if shipped.is_file() and shipped.read_bytes() != file.read_bytes():
                group, option = file.parent.name, file.stem
                found.append(
                    f"{group}={option} must be an option of its own in {file} (the option of this project "
                    f"with this name would be used); rename the file to my_{file.name}, and set "
                    f"{group}=my_{option}"
                )
    return found


def replaced(cfg: object, overrides: Sequence[str]) -> list[str]:
    """Return a warning for each setting in a chosen file of the user that another option replaces.

    Args:
        cfg: the config of the run.
        overrides: the overrides of the command line, which may replace settings, as may the groups `_LATER`.
    """
    chosen = dict(word.lstrip("+").partition("=")[::2] for word in overrides)
    later: set[str] = set(chosen)
    for group in _LATER:
        first = next(selected_files([Override("", "", group, chosen.get(group, ""))]), None)
        later |= _own_settings(group, chosen.get(group, "")).keys() | (first.settings if first else {}).keys()
    found = []
    for group, option in chosen.items():
        for key, (value, file) in _own_settings(group, option).items() if group not in _LATER else ():
            actual = content(value_at(cfg, key), floats=False)
            if key not in later and actual not in (value, ABSENT) and "${" not in str(value):
                found.append(
                    f"{key} is {value} in {file}, but another option sets {actual}; to "
                    f"use the value of the file, add {setting(key, value)}"
                )
    return found


# Config options of other packages, from modules named in the entry-point group `rlhf.options`.
#
#     [project.entry-points."rlhf.options"]       # in the pyproject.toml of the other package
#     mine = "my_package.options"                 # importing this module registers its sections
#
# Such a module registers sections with `rlhf.config.schema.option`. The YAML files that select the sections
# are in a folder passed with `--config-dir`. This module imports no torch, and the modules of the group
# should not import torch either, because `--help` imports all of them.


GROUP = "rlhf.options"


@cache
def load_plugins() -> None:
    """Import all modules of the entry-point group, once.

    Raises:
        UserError: a module cannot be imported.
    """
    for point in entry_points(group=GROUP):
        try:
            point.load()
        except Exception as error:  # the module may raise any exception; the message names its package
            package = point.dist.name if point.dist else point.name
            raise UserError(
                f"{point.value} must import (the package {package} names it in its entry points), got "
                f"{type(error).__name__}: {error}; fix or uninstall {package}"
            ) from None
