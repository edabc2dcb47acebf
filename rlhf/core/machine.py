"""Memory of this machine: RAM (or the limit of its container) and GPUs. This module imports no torch."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import psutil

_CGROUPS = Path("/sys/fs/cgroup")
LIMITS = ("memory.max", "memory.limit_in_bytes")  # files with the memory limit of a group: cgroups v2, v1
_QUERY = ("nvidia-smi", "--query-gpu=index,uuid,memory.total", "--format=csv,noheader,nounits")
TIMEOUT_S = 5.0  # time limit of nvidia-smi


@dataclass(frozen=True, slots=True)
class Machine:
    """The memory of a machine, in bytes."""

    ram: int
    gpus: tuple[int, ...] = ()  # memory of each GPU that torch sees, in torch's order


@cache
def this_machine() -> Machine:
    """Return the memory that a run on this machine may use."""
    limits = [psutil.virtual_memory().total, *cgroup_limits(Path("/proc/self/cgroup"), _CGROUPS)]
    return Machine(min(limits), gpus(os.environ.get("CUDA_VISIBLE_DEVICES")) if torch_has_cuda() else ())


def cgroup_limits(membership: Path, root: Path) -> list[int]:
    """Return the memory limits in bytes of this process's control groups and of all their parents.

    A container or SLURM sets such limits.

    Args:
        membership: file that lists the groups of a process, with lines `<number>:<controllers>:<path>`.
        root: folder of all control groups: files of v2 are below `root`, files of v1 below `root`/memory.
    """
    limits = []
    for line in read_lines(membership):
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top = root / "memory" if controllers else root
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            for name in LIMITS:
                limits += [int(text) for text in read_lines(folder / name) if text.isdigit()]
            if folder == top:
                break
    return [limit for limit in limits if limit > 0]


def read_lines(file: Path) -> list[str]:
    """Return the lines of a file; return [] if the file cannot be read."""
    try:
        return file.read_text().split("\n")[:-1]
    except OSError:
        return []


def torch_has_cuda() -> bool:
    """Return whether the installed torch was built for CUDA, according to torch/version.py."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    text = "\n".join(read_lines(Path(spec.origin).with_name("version.py")))
    return re.search(r"^cuda\b[^=]*=\s*['\"]", text, re.M) is not None


def gpus(visible: str | None) -> tuple[int, ...]:
    """Return the memory in bytes of each NVIDIA GPU.

    Args:
        visible: the value of CUDA_VISIBLE_DEVICES, which selects GPUs by index or UUID; None: all GPUs.

    Returns:
        An empty tuple if nvidia-smi is missing, fails or takes longer than 5 seconds: the memory is unknown.
    """
    try:
        done = subprocess.run(_QUERY, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
        rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line]
        sizes = [(index, uuid, int(float(mib) * 2**20)) for index, uuid, mib in rows]
    except (OSError, subprocess.SubprocessError, ValueError):
        return ()
    if visible is None:
        return tuple(size for _, _, size in sizes)
    selected = []
    for name in map(str.strip, visible.split(",")):
        matching = [size for index, uuid, size in sizes if name and (index == name or uuid.startswith(name))]
        # Like CUDA, ignore an entry that matches no single GPU, and all later entries.
        if len(matching) != 1:
            break
        selected.append(matching[0])
    return tuple(selected)
