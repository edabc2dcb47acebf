"""Catalogue of the config groups, options and keys. This module imports no torch."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from rlhf.config.schema import SCHEMAS, dotted, section_class
from rlhf.core.errors import UserError

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
