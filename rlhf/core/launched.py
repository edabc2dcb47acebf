"""This process: rank and cores, first signals, random seeds, portable arithmetic, version. No torch."""

from __future__ import annotations

import hashlib
import math
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

# Rank and world size from the variables of the launcher (torchrun, DeepSpeed, SLURM), and CPU cores.
#
# Only this module reads the values of RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE and LOCAL_SIZE.
# `rlhf.launch.command_line` sets the first four variables from SLURM's variables.


# Variables that torchrun and DeepSpeed's launcher set for a rank, and `rlhf.launch.command_line` for a task.
_OF_RANK = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "CROSS_RANK", "CROSS_SIZE"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "LOCAL_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
)


def rank() -> int:
    """Return the rank of this process among the processes that train together; 0 without a launcher."""
    return number("RANK", default=0)


def world_size() -> int:
    """Return the number of processes that train together; 1 without a launcher."""
    return number("WORLD_SIZE", default=1)


def local_rank() -> int:
    """Return the rank of this process among the ranks on this host; 0 without a launcher."""
    return number("LOCAL_RANK", default=0)


def local_world_size() -> int:
    """Return the number of ranks on this host.

    torchrun sets LOCAL_WORLD_SIZE, the launcher of DeepSpeed sets LOCAL_SIZE. If neither is set, all ranks
    are assumed to be on this host.
    """
    return number("LOCAL_WORLD_SIZE", "LOCAL_SIZE", default=world_size())


def missing_variables() -> list[str]:
    """Return the variables without which the ranks cannot connect, and which are not set."""
    if world_size() == 1:
        return []
    return [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]


def is_first_rank() -> bool:
    """Return whether this process is rank 0, the rank that writes files and prints.

    If RANK is not set, SLURM_PROCID counts: messages may be printed before RANK is set from SLURM_PROCID.
    """
    return number("RANK", "SLURM_PROCID", default=0) == 0


def cpu_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def number(*variables: str, default: int) -> int:
    """Return the number in the first environment variable that is set and not empty."""
    return next((int(text) for name in variables if (text := os.environ.get(name))), default)


@contextmanager
def exported(name: str, value: str) -> Iterator[None]:
    """Set an environment variable of this process, and of those that it starts, during the block."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
        os.environ.update({} if before is None else {name: before})


def without_rank(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables without those that describe a rank and how it connects to others.

    With these variables torch.distributed in a child process would wait for the store of the ranks:
    TORCHELASTIC_USE_AGENT_STORE redirects every new process group to the store of torchrun.
    """
    return {
        name: value
        for name, value in environ.items()
        if name not in _OF_RANK and not name.startswith("TORCHELASTIC_")
    }


# Signals in the first second of a command, while Python imports the command.
#
# `rlhf.processes.signals` replaces these handlers as soon as the command begins.


EXIT_CODES = dict.fromkeys((signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2), os.EX_TEMPFAIL)
EXIT_CODES[signal.SIGINT] = 128 + signal.SIGINT
DEFAULTS = (signal.SIG_DFL, signal.default_int_handler)
_STARTED_BY_PYTHON = "multiprocessing"  # in the command line of a process that multiprocessing starts
_COMMANDS = ("-m", "rlhf")  # `sys.argv[0]` while `python -m rlhf.<command>` or `rlhf` imports this package


def handle() -> None:
    """Let signals end this process with the exit code of an interrupted command, if it is a command."""
    if os.path.basename(sys.argv[0]) in _COMMANDS and _STARTED_BY_PYTHON not in " ".join(sys.orig_argv[:3]):
        for number in EXIT_CODES:
            if signal.getsignal(number) in DEFAULTS:
                signal.signal(number, end)


def default(number: int) -> Any:
    """Return the handler of a signal in a process that Python starts."""
    return signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL


def end(number: int, frame: FrameType | None) -> None:
    """End the process; nothing has begun, so there is nothing to clean up."""
    if is_first_rank():
        what = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        os.write(2, f"interrupted by {what} before the command began\n".encode())
    os._exit(EXIT_CODES[signal.Signals(number)])


# Reproducible random seeds, derived from the run's seed and the purpose of each draw.


def derive(seed: int, *purpose: str | int) -> int:
    """Return a 63-bit seed for one purpose.

    Different purposes give unrelated seeds. The same purpose gives the same seed in every process and on
    every rank.

    Args:
        seed: the seed of the run.
        purpose: names and counters that identify the draw, for example "minibatches", update, epoch.
    """
    text = ":".join(str(part) for part in (seed, *purpose))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


# What `backend.portable` needs: the same bits on every x86 processor with AVX2.


# Variables that libraries read when they first compute. By default torch takes the widest instructions of the
# processor, and MKL (its matrix products) kernels for its model, so that sums are made in another order.
PORTABLE = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "MKL_CBWR": "COMPATIBLE",  # the only branch that MKL takes on processors of every maker
    "ONEDNN_MAX_CPU_ISA": "AVX2",
}


def asked_portable() -> bool:
    """Return whether this process has the variables."""
    return PORTABLE.items() <= os.environ.items()


def root(scalar: Tensor) -> Tensor:
    """Return the square root of a scalar.

    `torch.sqrt` in MKL's compatible branch begins with an instruction that approximates, and whose last bits
    are the choice of a processor's maker.
    """
    return scalar.new_tensor(math.sqrt(scalar.item())) if asked_portable() else scalar.sqrt()


# The version of this package.


try:
    __version__ = version("rlhf-lab")  # from the tag of the commit that was installed (pyproject.toml)
except PackageNotFoundError:  # the source is imported without an installation
    __version__ = "unknown"

RESULTS = 1  # raise it with every change after which benchmarks.same_results finds a difference in a number
