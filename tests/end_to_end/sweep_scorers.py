"""Scorers for sweep tests: `patient` waits for a signal, `fails` raises, `dies` kills its process."""

import os
import signal
import time

from rlhf.processes import signals

SECONDS = 300  # maximum wait
BATCH = 32  # responses per update; an evaluation scores another number
scored = 0  # number of scored updates


def length(prompts: list[str], responses: list[str], references: list[str]) -> list[float]:
    return [float(len(response)) for response in responses]


def patient(prompts: list[str], responses: list[str], references: list[str]) -> list[float]:
    """Wait in update 2 until a signal stops the job, if PATIENT is set and the job was not requeued."""
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
