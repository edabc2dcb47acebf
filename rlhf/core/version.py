"""The version of this package."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("rlhf-lab")  # from the tag of the commit that was installed (pyproject.toml)
except PackageNotFoundError:  # the source is imported without an installation
    __version__ = "unknown"

RESULTS = 1  # raise it with every change after which benchmarks.same_results finds a difference in a number
