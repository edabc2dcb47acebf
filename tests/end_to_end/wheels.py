"""Wheels of this project and of other packages, built and installed without a network."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
VERSION = "1.2.3"  # of the wheel of this project; the copy of the source has no git tag


def pip(*words: object) -> None:
    """Call pip of this Python.

    Raises:
        AssertionError: pip failed.
    """
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *map(str, words)]
    environ = {**os.environ, "SETUPTOOLS_SCM_PRETEND_VERSION_FOR_RLHF_LAB": VERSION}
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def build(source: Path, folder: Path) -> Path:
    """Build the wheel of the project in `source`, and return its path in `folder`."""
    pip("wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", folder, source)
    (wheel,) = folder.glob("*.whl")
    return wheel


def build_this_project(folder: Path) -> None:
    """Build the wheel of this project in `folder`, from a copy of the files that a wheel is made of."""
    source = folder / "source"
    for name in ("rlhf", "conf"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    build(source, folder)
    shutil.rmtree(source)
