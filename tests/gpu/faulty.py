"""Stages that fail in different ways, for the tests of the runner."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from tests.gpu.report import NO_GPU, Report, Skip


def right(report: Report) -> None:
    """Report a fact, a figure and a skipped part."""
    with report.part("numbers"):
        report.at_most("difference", 0.5, 1.0)
        report.figure("rate [GB/s]", 1234.5, "GB/s")
    with report.part("on a GPU"):
        raise Skip(NO_GPU)


def wrong(report: Report) -> None:
    """Report wrong numbers, and fail in a part."""
    with report.part("numbers"):
        report.at_most("too large", 2.0, 1.0)
        report.at_most("not a number", float("nan"), 1.0)
        report.equal("not equal", 1, 2)
    with report.part("broken part"):
        raise ValueError("no such tensor")
    with report.part("next part"):
        report.equal("equal", 1, 1)


def hangs(report: Report) -> None:
    """Start a process with a process group of its own, and hang."""
    with report.part("first part"):
        command = [sys.executable, "-c", "import time; time.sleep(1000)"]
        process = subprocess.Popen(command, start_new_session=True)
        report.figure("process", process.pid)
    with report.part("second part"):
        time.sleep(1000)


def crashes(report: Report) -> None:
    """End the process without cleaning up."""
    with report.part("last part"):
        report.equal("before the crash", 1, 1)
        os._exit(3)


def fails_to_import(report: Report) -> None:
    """Fail outside of a part."""
    import no_such_module  # type: ignore[import-not-found]  # noqa: F401
