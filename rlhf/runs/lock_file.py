"""A lock that is a file: it works on every file system, and across hosts that share one.

The file names its owner (`rlhf.runs.owner`), who touches it every `HEARTBEAT_S` seconds. The lock is free if

- the file does not exist,
- the owner ran on this machine and its process has ended, for example by `kill -9`; a process that is only
  stopped keeps the lock,
- or the file was not touched for `STALE_S` seconds, and the owner is not on this machine.

The seconds are counted on the clock of the process that waits, from the moment it has first seen the file in
its state, so the clocks of hosts do not matter. A process that continues after another one has taken its lock
over (its host was suspended) notices this before its next write (`rlhf.core.files.guards`).

A lock of the kernel (flock) would not have these properties: some parallel file systems do not have it, some
only between processes of one host, and a file server may keep the lock of a host that failed. The locks of
the package filelock do not have them either: `SoftFileLease` takes no lock over on NFS, which cannot exchange
two files, waits for a killed process until its parent has reaped it, and takes the lock of a stopped process.
"""

from __future__ import annotations

import errno
import os
import secrets
import shlex
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from rlhf.core.errors import RunError, UserError
from rlhf.core.files import SCRATCH, discard, guards
from rlhf.runs.owner import Owner, decode, this_process

HEARTBEAT_S = 10.0
STALE_S = 60.0
HALF_WRITTEN_S = 2.0  # seconds after which a file without content has no owner: its owner was killed
SETTLE_S = 0.2  # seconds in which another process may take over the same file at the same time
_POLL_S = 0.1  # seconds between the first attempts
_SLOWEST_POLL_S = 1.0


# Seconds, including those in which the host was suspended
clock = partial(time.clock_gettime, getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class LockFile:
    """A lock file, and the state of an attempt to get it.

    Args:
        path: the lock file; its folder is created if necessary.
        protects: the folders and files that the lock protects; messages name the first.

    Attributes:
        owner: the other process that holds the lock, after a failed attempt; None: not known.
        alive: whether the other process has certainly not ended.
        announced: whether a message about the other process was printed.
    """

    def __init__(self, path: Path, *protects: Path) -> None:
        self.path = path.absolute()
        self.protects = tuple(each.absolute() for each in protects)
        self.owner: Owner | None = None
        self.alive = self.announced = False
        self.content = b""  # content of the file of this process
        self.seen: tuple[bytes, int] | None = None  # content and modification time of the other's file
        self.seen_at = 0.0  # time.monotonic() of the first look at the file in this state
        self.released = threading.Event()
        self.touched_at = 0.0  # `clock()` when this process last created or touched its file

    def acquire(self) -> bool:
        """Try to get the lock once, and return whether this process now holds it."""
        self.content = this_process().encode()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.create()
            return self.held()
        except FileNotFoundError:  # the other process has removed its new folder
            return False
        except FileExistsError:
            found = look(self.path)
        if found is None:  # the other process has removed its file
            return False
        if found != self.seen:
            touched = self.seen is not None and self.seen[0] == found[0] != b""
            self.seen, self.seen_at = found, time.monotonic()
            self.owner = decode(found[0])
            self.alive = touched or (self.owner is not None and self.owner.here)
        return self.is_free() and self.take_over()

    def create(self) -> None:
        """Create the file; raise FileExistsError if it exists."""
        with self.path.open("xb") as file:
            try:
                file.write(self.content)
                file.flush()
            except OSError:  # the disk is full
                self.path.unlink(missing_ok=True)
                raise

    def is_free(self) -> bool:
        """Return whether the owner of the file that exists has ended, or is taken to have ended."""
        unchanged_s = time.monotonic() - self.seen_at
        if self.owner is None:
            return unchanged_s > (STALE_S if self.seen and self.seen[0] else HALF_WRITTEN_S)
        return self.owner.ended or (not self.owner.here and unchanged_s > STALE_S)

    def take_over(self) -> bool:
        """Replace the file of an owner that has ended, and return whether this process now holds the lock.

        Several processes may do this at once. The last one wins; the others see its file after `SETTLE_S`.
        """
        scratch = self.path.with_name(f"{SCRATCH}lock-{secrets.token_hex(8)}")
        try:
            scratch.write_bytes(self.content)
            if look(self.path) != self.seen:
                return False
            scratch.replace(self.path)
        finally:
            discard(scratch)
        time.sleep(SETTLE_S)
        return self.held()

    def held(self) -> bool:
        """Return whether the file is that of this process."""
        found = look(self.path)
        return found is not None and found[0] == self.content

    def hold(self) -> None:
        """Touch the file until `release`, and let writes check the lock."""
        self.touched_at = clock()
        guards.extend((path, self.check) for path in self.protects)
        threading.Thread(target=self.beat, name="lock", daemon=True).start()

    def beat(self) -> None:
        """Touch the file every `HEARTBEAT_S` seconds, until `release`."""
        while not self.released.wait(HEARTBEAT_S):
            with suppress(OSError):  # a file server that does not respond, or a folder that was removed
                if self.held():
                    os.utime(self.path)
                    self.touched_at = clock()

    def check(self) -> None:
        """Raise RunError if this process has lost the lock."""
        found = look(self.path)
        if found is not None and found[0] == self.content:
            return
        if not self.path.parent.is_dir():  # the folder was removed, so the write fails
            return
        if found is None and clock() - self.touched_at < STALE_S:  # nobody can have taken the lock over
            with suppress(FileExistsError):
                return self.create()
        owner = decode(found[0]) if found else None
        raise RunError(
            f"{self.protects[0]} must have one process that writes to it ({owner or 'another process'} took "
            f"over its lock, because this process did not respond for {STALE_S:g} seconds, for example on a "
            "suspended host); this process stops and writes nothing more; the same command resumes the run "
            "after the other process has ended"
        )

    def release(self) -> None:
        """End the lock, if this process holds it."""
        self.released.set()
        guards[:] = [guard for guard in guards if guard[1] != self.check]
        if self.content and self.held():
            self.path.unlink(missing_ok=True)


@contextmanager
def locked(lock: LockFile, busy: Callable[[LockFile, float], None]) -> Iterator[None]:
    """Hold a lock during the block.

    Args:
        lock: the lock.
        busy: called after each failed attempt, with the lock and the seconds since the first attempt; it may
            raise an exception to give up.
    """
    started = time.monotonic()
    try:
        while not lock.acquire():
            waited_s = time.monotonic() - started
            busy(lock, waited_s)
            time.sleep(min(_SLOWEST_POLL_S, _POLL_S + waited_s / 10))
        lock.hold()
        yield
    finally:
        lock.release()


def look(path: Path) -> tuple[bytes, int] | None:
    """Return the content and the modification time (ns) of a lock file; None if it does not exist.

    The file is opened, because NFS clients read the attributes from the server only then.
    """
    try:
        with path.open("rb") as file:
            return file.read(), os.fstat(file.fileno()).st_mtime_ns
    except IsADirectoryError:
        raise UserError(
            f"{path} must be a file (it locks the folder), got a folder; move it away: mv "
            f"{shlex.quote(str(path))} {shlex.quote(f'{path}.old')}"
        ) from None
    except PermissionError:  # the file of another user
        return b"?", path.stat().st_mtime_ns
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ESTALE):
            return None
        raise
