"""What can be typed: config groups, options and keys; options of users and of packages; overrides."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from rlhf.config.schema import ABSENT, SCHEMAS, dotted, section_class, value_at
from rlhf.core.errors import UserError, setting
from rlhf.core.files import flat, read_document

# Catalogue of the config groups, options and keys. This module imports no torch.


_ORDER = (
    *("algo", "model", "task", "generator", "backend", "scorer", "logger"),
    *("correction", "hardware", "experiment", "sweep", "debug"),
)
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
    found = {
        path.name
        for folder in conf_dirs()
        if folder.is_dir()
        for path in folder.iterdir()
        if path.is_dir() and path.name not in _NOT_LISTED and any(path.glob("*.yaml"))
    }
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
class DeclaredKey:
    """A key that a section class declares; `*` in the dotted key stands for the name of a part."""

    key: str
    section: type
    name: str


def declared_keys() -> tuple[DeclaredKey, ...]:
    """Return the keys of all sections and options; a key of several options once for each of them."""
    from rlhf.config.root import Config

    return _declared(Config, len(SCHEMAS))


def options_of(section: type) -> list[type]:
    """Return the classes of the options of a section."""
    return [cls for cls in SCHEMAS.values() if issubclass(cls, section) and cls is not section]


@cache
def _declared(root: type, options: int) -> tuple[DeclaredKey, ...]:
    """Return the keys of a root section; `options` is the number of options that are registered."""
    found: dict[DeclaredKey, None] = {}

    def walk(section: type, at: str) -> None:
        hints = get_type_hints(section)
        for each in fields(section):
            key, hint = dotted(at, each.name), hints[each.name]
            found[DeclaredKey(key, section, each.name)] = None
            parts = get_origin(hint) is dict
            below = section_class(get_args(hint)[1] if parts else hint)
            if below is not None and not (parts and "*" in key):  # parts have no parts
                for cls in (below, *options_of(below)):
                    walk(cls, f"{key}.*" if parts else key)

    walk(root, "")
    return tuple(found)


def all_keys() -> list[str]:
    """Return the dotted keys of all sections and options."""
    from rlhf.config.root import Config

    keys = []
    for name, hint in get_type_hints(Config).items():
        if is_dataclass(hint):
            keys += [f"{name}.{inner.name}" for inner in fields(hint) if inner.name != "name"]
        else:
            keys.append(name)
    for name, cls in SCHEMAS.items():
        keys += [f"{name.split('/')[1]}.{inner.name}" for inner in fields(cls) if inner.name != "name"]
    return list(dict.fromkeys(keys))


def declarations(key: str) -> list[tuple[type, Any]]:
    """Return the section classes that declare the last part of a dotted key, with the types of the field."""
    from rlhf.config import root  # registers all sections

    found: list[type] = [root.Section]
    for cls in found:
        found += cls.__subclasses__()
    leaf = key.rpartition(".")[2]
    return [(cls, hints[leaf]) for cls in found if leaf in (hints := get_type_hints(cls))]


def takes_list(key: str) -> bool:
    """Return whether a key, such as `optim.betas` or `model.lora.targets`, has a list as its value."""
    exact = {each.section for each in declared_keys() if each.key == key}
    hints = [hint for section, hint in declarations(key) if section in exact or not exact]
    return any(get_origin(each) in (tuple, list) for hint in hints for each in (hint, *get_args(hint)))


# Option files of the user, in the folders of `--config-dir`. This module imports no torch.


_LATER = ("correction", "hardware", "experiment", "sweep", "debug")  # groups that come after all others


def _own_file(group: str, option: str) -> Path | None:
    """Return the file of an option in a folder of `--config-dir`; None: there is none."""
    files = (folder / group / f"{option}.yaml" for folder in conf_dirs()[1:])
    return next((file for file in files if file.is_file()), None)


def _own_settings(group: str, option: str) -> dict[str, Any]:
    """Return the settings in an option file of the user, by dotted key.

    Those of other files of the user in its defaults list are included. A file that cannot be read has none:
    its error is reported when it is composed.
    """
    file = _own_file(group, option)
    try:
        return {} if file is None else _settings_of(group, file)
    except (OSError, ValueError, TypeError, YAMLError, OmegaConfBaseException, RecursionError):
        return {}


def _settings_of(group: str, file: Path) -> dict[str, Any]:
    """Return the settings in the file of an option of `group`, and in the user's files that it inherits."""
    content: dict[str, Any] = OmegaConf.to_container(read_document(file))  # type: ignore[assignment]
    found: dict[str, Any] = {}
    for entry in content.pop("defaults", None) or ():
        if isinstance(entry, str) and (match := re.fullmatch(r"(?:/(.+)/)?([\w-]+)(?:@.*)?", entry)):
            inner = _own_file(match[1] or group, match[2])
            found |= {} if inner is None else _settings_of(match[1] or group, inner)
    whole = re.search(r"^#\s*@package\s+_global_\s*$", file.read_text(encoding="utf-8"), re.M)
    return found | dict(flat(content, "" if whole else f"{group}."))


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
        shipped = conf_dir() / group / f"{chosen.get(group)}.yaml"
        later |= _own_settings(group, chosen.get(group, "")).keys()
        later |= _settings_of(group, shipped).keys() if shipped.is_file() else set()
    found = []
    for group, option in chosen.items():
        for key, value in _own_settings(group, option).items() if group not in _LATER else ():
            actual = value_at(cfg, key)
            actual = actual.name if isinstance(actual, Enum) else actual
            same = actual == (
                tuple(value) if isinstance(actual, tuple) and isinstance(value, list) else value
            )
            if key not in later and not same and "${" not in str(value) and actual is not ABSENT:
                found.append(
                    f"{key} is {value} in {_own_file(group, option)}, but another option sets {actual}; to "
                    f"use the value of the file, add {setting(key, value)}"
                )
    return found


# Overrides as typed, and the config files that they select. This module imports no torch.


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
    def typed(self) -> str:
        """The key with the sign."""
        return self.sign + self.key

    @property
    def group(self) -> str:
        """The key without the section after `@`."""
        return self.key.partition("@")[0]

    @property
    def options(self) -> list[str]:
        """The words of the value, which may be a list of options."""
        return re.split(r"[\[\],\s]+", self.value)


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
class ConfigFile:
    """A file with an option of a group.

    Args:
        name: group and option, such as "experiment/mine".
        section: the dotted key of the section that the file sets; empty for the root.
        content: the settings, usually a dictionary.
    """

    name: str
    section: str
    content: Any

    @property
    def defaults(self) -> Iterator[tuple[str, str]]:
        """Group and option of each entry of the defaults list: "override /algo", "dpo" or "", "mine"."""
        for entry in self.content.get("defaults", ()) if isinstance(self.content, dict) else ():
            for group, value in entry.items() if isinstance(entry, dict) else [("", entry)]:
                for option in value if isinstance(value, list) else [value]:
                    yield str(group), str(option)

    def value_of(self, key: str) -> Any:
        """Return the value that the file sets for a dotted key; `ABSENT`: it sets none."""
        if key == self.section:
            return self.content
        return value_at(self.content, key.removeprefix(f"{self.section}.") if self.section else key)


def selected_files(overrides: Iterable[Override]) -> Iterator[ConfigFile]:
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
        file = ConfigFile(name, at, OmegaConf.to_container(OmegaConf.load(path), resolve=False))
        yield file
        for entry, other in file.defaults:
            own, _, place = entry.split(" ")[-1].partition("@")
            own = own[1:] if own.startswith("/") else f"{group}/{own}".rstrip("/")
            found = f"{own}/{other}", place or (section if own == group else own)
            waiting += [found] if found not in waiting else []


def files_that_set(key: str, overrides: Iterable[Override]) -> Iterator[tuple[str, Any]]:
    """Yield the name of each selected file that sets a dotted key, and the value."""
    for file in selected_files(overrides):
        if (value := file.value_of(key)) is not ABSENT:
            yield file.name, value


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
