"""Identity of a run: its settings, the content of its inputs, and the results version of the project.

Neither the commit nor the wording of the overrides belongs to the identity. This module imports no torch.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlhf.config.address import ONLY_HERE
from rlhf.config.identity import what_counts
from rlhf.config.root import Config
from rlhf.config.schema import PARTS, SCHEMAS, dotted, sections
from rlhf.core import files
from rlhf.core.hub import cached_folder
from rlhf.core.version import RESULTS
from rlhf.study.rows import Row

# Fields of sections that name data, a model or a function; `parts` of a section are sections of their own.
_DATA = ("path", "preferences_path", "chat_template")
_MODELS = ("base", "policy", "reference", "reward", "tokenizer")


def run_digest(cfg: Config) -> str:
    """Return eight hex digits of the settings that the result of a run depends on.

    The digits are those of the run name, except that absolute paths below the current folder count as
    relative ones, so that a checkout can be moved.
    """
    return files.digest(_portable(what_counts(cfg), f"{Path.cwd()}/"))


def inputs(cfg: Config) -> dict[str, str]:
    """Return a digest of the content of each input outside of the settings.

    Returns:
        Config keys of local data and models (of hub names the revision in the cache, if it is there), and
        files of the user's code, such as "my_lab/objective.py", with those that they import from their own
        package. What does not exist has no digest.
    """
    found: dict[str, str] = {}
    for key, section in sections(cfg):
        for name in section.__dataclass_fields__:
            for place, text in _texts(dotted(key, name), getattr(section, name)):
                if name in (*_DATA, *_MODELS):
                    found |= _content(place, text)
                if name == "path":
                    found |= _sources(text)
        for each in type(section).__mro__:
            if each in SCHEMAS.values():
                found |= _sources(f"{each.__module__}:")
        found |= _sources(PARTS.get(type(section), ""))
    return found


def stale(row: Row, wanted: Mapping[str, str], accept: tuple[int, ...] = ()) -> str | None:
    """Return why the row of a run is not its result any more; None if it is.

    Args:
        row: a row with the settings of the run.
        wanted: the `inputs` of the run now.
        accept: earlier results versions whose rows are used.
    """
    if row.results not in (RESULTS, *accept):
        return f"results version {row.results}, now {RESULTS}"
    changed = [name for name, content in wanted.items() if row.inputs.get(name) != content]
    return f"{', '.join(changed)} changed" if changed else None


def _portable(value: Any, here: str) -> Any:
    """Return settings with paths relative to the folder `here` where they are below it."""
    if isinstance(value, dict):
        return {key: _portable(each, here) for key, each in value.items()}
    if isinstance(value, list):
        return [_portable(each, here) for each in value]
    return value.removeprefix(here) if isinstance(value, str) else value


def _texts(key: str, value: object) -> Iterator[tuple[str, str]]:
    """Yield the texts in a value, which may be a mapping or a list, with their keys."""
    if isinstance(value, dict | list | tuple):
        for name, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _texts(f"{key}.{name}", each)
    elif isinstance(value, str) and value:
        yield key, value


def _content(key: str, value: str) -> dict[str, str]:
    """Return the digest of a path, or the revision of a hub name."""
    if ":" in value:  # the address of a function
        return {}
    path = Path(value).expanduser()
    if os.path.exists(path):  # False also for a long text
        return {key: files.digest_of(path)}
    is_name = key.rpartition(".")[2] in (*_MODELS, "path") and value.count("/") == 1
    folder = cached_folder(value) if is_name else None
    return {} if folder is None else {key: folder.name}


def _sources(address: str) -> dict[str, str]:
    """Return the digests of the file of a function or class, and of the files of its package it imports."""
    place, colon, _ = address.rpartition(":")
    if not colon or place == ONLY_HERE or place.partition(".")[0] == "rlhf":
        return {}
    if place.endswith(".py"):
        file = Path(place).expanduser()
        return {place: files.digest_of(file)} if file.is_file() else {}
    return {name: files.digest_of(file) for name, file in _module_files(place).items()}


def _module_files(module: str) -> dict[str, Path]:
    """Return the file of a module, and those of the modules of its package that it imports, by short name."""
    found: dict[str, Path] = {}
    waiting, top = [module], module.partition(".")[0]
    for name in waiting:  # the list grows
        file = _file_of(*name.split("."))
        if file is None:  # the name is that of an object of a module, or the module is not a Python file
            continue
        is_package = file.name == "__init__.py"
        found[name.replace(".", "/") + ("/__init__.py" if is_package else ".py")] = file
        for other in _imported(file, name if is_package else name.rpartition(".")[0]):
            if other.partition(".")[0] == top and other not in waiting:
                waiting.append(other)
    return found


def _file_of(root: str, *below: str) -> Path | None:
    """Return the Python file of a module, without importing it or the packages that contain it, or None."""
    spec = find_spec(root)
    if spec is None or (below and not spec.submodule_search_locations):
        return None
    folders = [Path(each, *below) for each in spec.submodule_search_locations or ()] if below else []
    files = [file for each in folders for file in (each / "__init__.py", each.with_suffix(".py"))]
    files = files or [Path(spec.origin or "")]
    return next((file for file in files if file.suffix == ".py" and file.is_file()), None)


def _imported(file: Path, package: str) -> Iterator[str]:
    """Yield the modules (and perhaps objects of modules) that a file imports, by their full names."""
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)
