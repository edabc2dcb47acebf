"""The processes of a trial, found by their working folder, and the shared memory that no process uses.

Every trial runs in its own folder. A process inherits the working folder of its parent, also if it is forked
from a server (tests/forks.py), whose environment `/proc/<pid>/environ` would show.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
CLONE_NEWNS = 0x20000
SERVER = "server of forks"  # title of a server of tests/forks.py; it ends with its process
RANKS = "torch.distributed.run"
COMMANDS = ("train", "evaluate", "relabel", "extend", "pipeline")


@dataclass(frozen=True, slots=True)
class Process:
    """A process of a trial."""

    pid: int
    parent: int
    arguments: tuple[str, ...]
    started: int  # clock ticks after the start of the machine
    state: str  # the letter that `ps` shows

    @property
    def role(self) -> str:
        """The part of the process in the run."""
        words = self.arguments
        if words[:1] == (SERVER,):
            return "server"
        if "rlhf.processes.worker" in words:
            return words[words.index("rlhf.processes.worker") + 1]
        if RANKS in words:
            return "launcher"
        if any(f"rlhf.{command}" in words for command in COMMANDS):
            return "command"
        return "other"

    def send(self, number: int) -> None:
        """Send a signal, if the process still exists."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)


def of(folder: Path) -> list[Process]:
    """Return the processes whose working folder is `folder` or below, oldest first; no zombies."""
    found = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        with suppress(OSError, ValueError, IndexError):
            place = os.readlink(f"/proc/{entry.name}/cwd").removesuffix(" (deleted)")
            if place != str(folder) and not place.startswith(f"{folder}/"):
                continue
            process = read(int(entry.name))
            if process.state not in "ZX":
                found.append(process)
    return sorted(found, key=lambda process: (process.started, process.pid))


def read(pid: int) -> Process:
    """Return the description of a process.

    Raises:
        OSError: the process has ended.
    """
    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return Process(
        pid, int(fields[1]), tuple(os.fsdecode(word) for word in words if word), int(fields[19]), fields[0]
    )


def left(folder: Path, grace_s: float) -> list[Process]:
    """Wait up to `grace_s` seconds until the trial has no process; return the processes that still exist."""
    end = time.monotonic() + grace_s
    while (found := of(folder)) and time.monotonic() < end:
        time.sleep(0.05)
    return found


def kill(folder: Path) -> None:
    """Kill all processes of a trial."""
    for _ in range(20):
        if not (found := of(folder)):
            return
        for process in found:
            process.send(signal.SIGKILL)
        time.sleep(0.05)


def exists(number: str) -> bool:
    """Return whether a text is the id of a process."""
    return os.path.exists(f"/proc/{number}/stat")


def isolate() -> None:
    """Give this process, and its children, mounts and a /dev/shm of their own, if the user is root."""
    system = ctypes.CDLL(None, use_errno=True)
    if os.geteuid() != 0 or system.unshare(CLONE_NEWNS) != 0:
        return
    for words in (["--make-rprivate", "/"], ["-t", "tmpfs", "tmpfs", str(SHARED_MEMORY)]):
        subprocess.run(["mount", *words], check=True)


def shared_memory() -> set[str]:
    """Return the names of the files in /dev/shm."""
    return set(os.listdir(SHARED_MEMORY)) if SHARED_MEMORY.is_dir() else set()


def unused(names: set[str]) -> set[str]:
    """Return the files of `names` in /dev/shm that no process has open, has mapped, or has put its id on.

    Files are compared by their inodes: a process that creates a semaphore maps it under another name.
    """
    inodes = {}
    for name in names:
        with suppress(FileNotFoundError):
            if not any(map(exists, re.findall(r"\d+", name))):
                inodes[name] = (SHARED_MEMORY / name).stat().st_ino
    if not inodes:
        return set()
    used = set()
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal():
            with suppress(OSError):
                for link in os.scandir(f"/proc/{entry.name}/fd"):
                    if os.readlink(link).startswith(f"{SHARED_MEMORY}/"):
                        used.add(link.stat().st_ino)
            with suppress(OSError):
                maps = Path(f"/proc/{entry.name}/maps").read_text()
                used |= {int(line.split()[4]) for line in maps.splitlines() if "/dev/shm" in line}
    return {name for name in inodes.keys() & shared_memory() if inodes[name] not in used}
