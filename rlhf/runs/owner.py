"""The process that holds a lock: its description in the lock file, and whether the process has ended.

psutil cannot replace /proc here: if a system hides the processes of other users (hidepid), psutil takes
them for ended, and its start times depend on the clock. This module imports no torch.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
from dataclasses import asdict, dataclass, field
from datetime import datetime
from functools import cache
from pathlib import Path

_STATE, _START = 0, 19  # positions in /proc/<pid>/stat after the name of the program


@dataclass(frozen=True, kw_only=True)
class Owner:
    """Description of a process that holds a lock.

    Attributes:
        process: process id.
        host: host name.
        since: local time at which the process took the lock.
        slurm_job: id of the SLURM job; None outside of SLURM.
        restarts: how often SLURM had requeued the job.
        machine: identity of the running kernel and its process ids; see `_this_machine`.
        start: start time of the process in clock ticks since boot; None if unknown. With it, another process
            that later gets the same id is recognized.
        token: random text that identifies this lock.
    """

    process: int
    host: str
    since: str
    slurm_job: str | None = None
    restarts: int = 0
    machine: str = ""
    start: int | None = None
    token: str = field(default_factory=lambda: secrets.token_hex(8))

    def __str__(self) -> str:
        """Return the description for messages."""
        job = f" (SLURM job {self.slurm_job})" if self.slurm_job else ""
        return f"process {self.process} on {self.host}{job}, since {self.since}"

    @property
    def here(self) -> bool:
        """Whether this process can look up the owner by its process id."""
        return self.machine == _this_machine()

    @property
    def ended(self) -> bool:
        """Whether the owner has certainly ended.

        The owner has ended if its process does not exist any more on this machine, or if it was an earlier
        session of this SLURM job, before SLURM requeued the job.
        """
        job = os.environ.get("SLURM_JOB_ID")
        requeued = job is not None and job == self.slurm_job and self.restarts < _slurm_restarts()
        return requeued or (self.here and not self.runs())

    def runs(self) -> bool:
        """Return whether the process exists on this machine; a stopped process exists, a zombie does not."""
        fields = _process_fields(self.process)
        if fields is None:
            return _exists(self.process)
        return fields[_STATE] not in ("Z", "X") and self.start in (None, int(fields[_START]))

    @property
    def stop(self) -> str:
        """How to end the owner, with the command."""
        if self.slurm_job:
            return f"stop its job: scancel {self.slurm_job}"
        how = "stop it" if self.host == socket.gethostname() else f"stop it on {self.host}"
        fields = _process_fields(self.process) if self.here else None
        if fields is not None and fields[_STATE] == "T":
            return f"continue it (it is stopped): kill -CONT {self.process}"
        return f"{how}: kill {self.process}"

    def encode(self) -> bytes:
        """Return the content of a lock file."""
        return json.dumps(asdict(self)).encode() + b"\n"


def decode(content: bytes) -> Owner | None:
    """Return the owner that the content of a lock file describes; None if it is not readable."""
    try:
        owner = Owner(**{"token": "", **json.loads(content)})
    except (ValueError, TypeError):
        return None
    return owner if isinstance(owner.process, int) else None


def this_process() -> Owner:
    """Return the description of this process as the owner of a new lock."""
    fields = _process_fields(os.getpid())
    return Owner(
        process=os.getpid(),
        host=socket.gethostname(),
        since=datetime.now().isoformat(" ", "seconds"),
        slurm_job=os.environ.get("SLURM_JOB_ID"),
        restarts=_slurm_restarts(),
        machine=_this_machine(),
        start=None if fields is None else int(fields[_START]),
    )


def _slurm_restarts() -> int:
    """Return how often SLURM has requeued this job."""
    return int(os.environ.get("SLURM_RESTART_COUNT") or 0)


@cache
def _this_machine() -> str:
    """Return the identity of the running kernel and of the namespace of process ids.

    Two containers on one host have the same kernel, but a process id of one means another process, or none,
    in the other. Without /proc (not Linux), the host name is returned.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return socket.gethostname()


def _process_fields(process: int) -> list[str] | None:
    """Return the fields of /proc/<pid>/stat after the program's name; None if the file cannot be read."""
    try:
        return Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None


def _exists(process: int) -> bool:
    """Return whether a process with this id exists."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # a process of another user
        return True
    return True
