"""The generator that `generator=auto` selects. This module imports no torch."""

from __future__ import annotations

import importlib.util
import os

from rlhf.core.launched import local_world_size
from rlhf.core.machine import this_machine

# The generator of jobs that run on other machines than the sweep that names their run folders.
OF_JOBS = "RLHF_GENERATOR_OF_JOBS"


def best_generator() -> str:
    """Return the option of the group `generator` that is the fastest on this machine.

    In a job of a sweep, the sweep has chosen: see `choose_for_jobs`.
    """
    return os.environ.get(OF_JOBS) or fastest(len(this_machine().gpus), local_world_size())


def fastest(gpus: int, ranks: int) -> str:
    """Return the fastest generator for a host; vLLM needs a GPU.

    vLLM uses a GPU of its own if there are more GPUs than ranks on the host, otherwise the trainer's GPU.

    Args:
        gpus: GPUs of the host.
        ranks: ranks on the host.
    """
    if not gpus or importlib.util.find_spec("vllm") is None:
        return "hf"
    return "vllm" if gpus > ranks else "vllm_colocated"


def choose_for_jobs(gpus: int, ranks: int) -> None:
    """Choose the generator of SLURM jobs, in this process and, by its environment, in the jobs.

    The machine that submits jobs may have no GPU. The name of a run contains its generator, so the sweep and
    its jobs must choose the same one.

    Args:
        gpus: GPUs of a node of a job.
        ranks: tasks of a node of a job.
    """
    os.environ.setdefault(OF_JOBS, fastest(gpus, ranks))
