"""What the launcher (torchrun, DeepSpeed, SLURM) says about this process: rank, world size, cores."""

from __future__ import annotations

import os


def is_first_rank() -> bool:
    """Whether this process is the one that writes and speaks, as torchrun and SLURM number them."""
    return int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))) == 0


def rank_count() -> int:
    """How many processes train together, as torchrun numbers them."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def cpu_cores() -> int:
    """The CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def local_ranks() -> int:
    """How many ranks there are on this host, as torchrun or the launcher of DeepSpeed say it."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or "1")
