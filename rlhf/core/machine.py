"""What memory this machine has, told without torch: RAM (less in a container that may use less) and GPUs."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import psutil

CGROUPS = Path("/sys/fs/cgroup")


LIMITS = ("memory.max", "memory.limit_in_bytes")  # of cgroups v2 and v1


QUERY = ("nvidia-smi", "--query-gpu=index,uuid,memory.total", "--format=csv,noheader,nounits")


TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Machine:
    """Bytes of memory."""

    ram: int
    gpus: tuple[int, ...] = ()  # those that torch would see, in its order


@cache
def this_machine() -> Machine:
    """The memory that a run on this machine may use."""
    limits = [psutil.virtual_memory().total, *cgroup_limits(Path("/proc/self/cgroup"), CGROUPS)]
    return Machine(min(limits), gpus(os.environ.get("CUDA_VISIBLE_DEVICES")) if torch_has_cuda() else ())


def cgroup_limits(membership: Path, root: Path) -> list[int]:
    """The memory limits of this process's control groups, set by a container or SLURM, and of all above them.

    `membership` has lines <number>:<controllers>:<path>; v2 has its files below `root`, v1 below
    `root`/memory.
    """
    found = []
    for line in read_lines(membership):
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top = root / "memory" if controllers else root
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            for name in LIMITS:
                found += [int(text) for text in read_lines(folder / name) if text.isdigit()]
            if folder == top:
                break
    return [limit for limit in found if limit > 0]


def read_lines(file: Path) -> list[str]:
    """The lines of a file; none where it cannot be read."""
    try:
        return file.read_text().split("\n")[:-1]
    except OSError:
        return []


def torch_has_cuda() -> bool:
    """Whether the torch that is installed was built for CUDA, read from its version file."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    text = "\n".join(read_lines(Path(spec.origin).with_name("version.py")))
    return re.search(r"^cuda\b[^=]*=\s*['\"]", text, re.M) is not None


def gpus(visible: str | None) -> tuple[int, ...]:
    """Bytes of each NVIDIA GPU, of those in `visible` (CUDA_VISIBLE_DEVICES) where that is set.

    Nothing where nvidia-smi is missing, fails or takes long: memory is then not known.
    """
    try:
        done = subprocess.run(QUERY, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
        rows = [[word.strip() for word in line.split(",")] for line in done.stdout.splitlines() if line]
        sizes = [(index, uuid, int(float(mib) * 2**20)) for index, uuid, mib in rows]
    except (OSError, subprocess.SubprocessError, ValueError):
        return ()
    if visible is None:
        return tuple(size for _, _, size in sizes)
    found = []
    for word in map(str.strip, visible.split(",")):
        named = [size for index, uuid, size in sizes if word and (index == word or uuid.startswith(word))]
        if len(named) != 1:  # CUDA ends its list there too
            break
        found.append(named[0])
    return tuple(found)
