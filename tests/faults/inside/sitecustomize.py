"""Code that Python runs at the start of the commands of a trial (PYTHONPATH).

The variable RLHF_FAULTS is a JSON object:

    phases: file to which each phase of a run is appended as a line, when the phase begins
    clock: [file, seconds]; while the file exists, `time.time` is shifted, and `time.monotonic` is not
    slow_disk: seconds that each fsync and each rename takes longer
"""

import functools
import importlib
import json
import os
import sys
import time

# Phase, and the function whose call begins the phase. The phases of a Timer have its names.
SEAMS = (
    ("", "rlhf.core.metrics", "Timer", "__call__"),
    ("row", "rlhf.training.recorder", "Recorder", "flush"),
    ("evaluation", "rlhf.training.recorder", "Recorder", "evaluation"),
    ("checkpoint", "rlhf.training.checkpoint", "Checkpoints", "save"),
    ("model", "rlhf.stages.run", "", "write_model"),
)
# Texts in the arguments of the processes that train: commands, and the jobs of sweeps.
TRAINS = ("rlhf.train", "rlhf.pipeline", "rlhf.extend", "rlhf.evaluate", "rlhf.relabel", "submitit", "loky")
OTHERS = ("torch.distributed.run", "resource_tracker", "rlhf.processes.worker")


def report_phases(file):
    """Append a line to `file` whenever a phase begins."""

    def before(owner, name, phase):
        function = getattr(owner, name)

        @functools.wraps(function)
        def called(*arguments, **more):
            line = f"{phase or arguments[1]} {os.getpid()}\n"
            end = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.write(end, line.encode())
            os.close(end)
            return function(*arguments, **more)

        setattr(owner, name, called)

    for phase, module, owner, name in SEAMS:
        place = importlib.import_module(module)
        before(getattr(place, owner) if owner else place, name, phase)


def shift_clock(file, seconds):
    """Shift `time.time` and `time.time_ns` while `file` exists."""
    real, real_ns = time.time, time.time_ns
    time.time = lambda: real() + (seconds if os.path.exists(file) else 0)
    time.time_ns = lambda: real_ns() + (int(seconds * 1e9) if os.path.exists(file) else 0)


def slow_disk(seconds):
    """Let each fsync and each rename take longer."""

    def slowed(function):
        @functools.wraps(function)
        def called(*arguments, **more):
            time.sleep(seconds)
            return function(*arguments, **more)

        return called

    for name in ("fsync", "rename", "replace"):
        setattr(os, name, slowed(getattr(os, name)))


def main():
    """Install what RLHF_FAULTS describes."""
    given = json.loads(os.environ.get("RLHF_FAULTS", "{}"))
    if "clock" in given:
        shift_clock(*given["clock"])
    if "slow_disk" in given:
        slow_disk(given["slow_disk"])
    words = " ".join(sys.orig_argv)
    trains = any(name in words for name in TRAINS) and not any(name in words for name in OTHERS)
    if "phases" in given and trains:
        report_phases(given["phases"])


main()
