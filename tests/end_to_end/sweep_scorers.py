"""Scorers with which a job of a sweep stays where it is until it is stopped, or fails."""

import os
import signal
import time

from rlhf.processes import signals

SECONDS = 300  # until a test gives up
BATCH = 32  # responses of an update; evaluations have another number
scored = 0  # updates


def length(prompts: list[str], responses: list[str], references: list[str]) -> list[float]:
    return [float(len(response)) for response in responses]


def patient(prompts: list[str], responses: list[str], references: list[str]) -> list[float]:
    """Waits in update 2 of a job's first session until the job is asked to stop, where PATIENT is set."""
    global scored
    scored += len(prompts) == BATCH
    if scored == 2 and "PATIENT" in os.environ and "SLURM_RESTART_COUNT" not in os.environ:
        end = time.monotonic() + SECONDS
        while signals.active and signals.active.received is None and time.monotonic() < end:
            time.sleep(0.1)
    return length(prompts, responses, references)


def fails(prompts: list[str], responses: list[str], references: list[str]) -> list[float]:
    raise ArithmeticError("no score for these")


def dies(prompts: list[str], responses: list[str], references: list[str]) -> list[float]:
    os.kill(os.getpid(), signal.SIGKILL)
    return []
