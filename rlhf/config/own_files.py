"""Option files of the user, in the folders of `--config-dir`. This module imports no torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from rlhf.config.catalogue import conf_dir, conf_dirs, option_files
from rlhf.config.schema import ABSENT, SCHEMAS, value_at
from rlhf.config.yaml_file import flat, read_document
from rlhf.core.pasting import setting

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
