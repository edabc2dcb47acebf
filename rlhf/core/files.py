"""Files on disk: complete-or-absent writes, JSON lines, digests of settings."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlhf.core.errors import UserError

SCRATCH = ".tmp-"  # prefix of unfinished files and folders; a crash leaves them behind


def scratch_of(path: Path) -> Path:
    """Return the scratch path of `path`: a path in the same folder that is written first and then renamed."""
    return path.with_name(f"{SCRATCH}{path.name}")


def discard(path: Path) -> None:
    """Remove a file or a folder; a missing path is ignored."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def whole(
    path: Path, *, durable: bool = False, private: bool = False, publish: bool = True
) -> Iterator[Path]:
    """Write a file or a folder completely or not at all: a reader never sees a part of it.

    Yields a scratch path in the same folder, at which the block creates a file or folder. If the block
    succeeds, the scratch path is renamed to `path`, which replaces an older file or folder. If the block
    fails, the scratch path is removed.

    Args:
        path: the file or folder to write.
        durable: fsync every written file before the rename, so that a power failure leaves no empty file.
        private: include the process id in the scratch name, so that several processes can write `path` at
            the same time. The scratch path that a crashed process left behind is then not replaced by the
            next attempt.
        publish: remove an old scratch path before the block, and rename the scratch path after the block. If
            several ranks write the same scratch folder, only one rank (usually the first) sets True.
    """
    scratch = scratch_of(path)
    if private:
        scratch = scratch.with_name(f"{scratch.name}-{os.getpid()}")
    if publish:
        discard(scratch)
    try:
        yield scratch
        if not publish:
            return
        if durable:
            sync_all(scratch)
        if scratch.is_dir():
            shutil.rmtree(path, ignore_errors=True)  # a folder can only be renamed to an empty or absent one
        scratch.replace(path)
    except BaseException:
        discard(scratch)
        raise


def sync(path: Path) -> None:
    """Wait until the file or folder is on disk (fsync)."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_all(path: Path) -> None:
    """Wait until a file, or every file and folder below a folder, is on disk."""
    if path.is_dir():
        for below in path.rglob("*"):
            sync(below)
    sync(path)


def write_json(file: Path, value: Any) -> None:
    """Write `value` to a file as JSON, completely or not at all."""
    write_atomically(file, json.dumps(value, indent=2) + "\n")


def write_atomically(file: Path, text: str) -> None:
    """Write text to a file, completely or not at all: a reader sees the old file or the new file."""
    with (
        whole(file, private=True) as scratch,
        name_in_error(file),
        scratch.open("w", encoding="utf-8") as stream,
    ):
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


@contextmanager
def name_in_error(file: Path) -> Iterator[None]:
    """Add the name of `file` to an OSError that the block raises: the error of a full disk names no file."""
    try:
        yield
    except OSError as error:
        if error.errno is not None:
            error.filename = str(file)
        raise


def append(file: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Append rows to a JSON-lines file."""
    with name_in_error(file), file.open("a", encoding="utf-8") as out:
        out.writelines(map(as_line, rows))


def as_line(row: dict[str, Any]) -> str:
    """Return a row as one line of JSON, with its newline."""
    return json.dumps(row, ensure_ascii=False) + "\n"


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Read the rows of a JSON-lines file.

    If the file is missing, the result is empty. A last line without a newline is skipped: a crash cut it off.

    Raises:
        UserError: another line is not a JSON object.
    """
    rows, damaged = split_lines(file)
    for number, line in damaged.items():
        raise UserError(
            f"{file} must have a JSON object in each line, got {line[:60]!r} in line {number}; delete "
            f"the line: sed -i {number}d {shlex.quote(str(file))}"
        )
    return rows


def split_lines(file: Path) -> tuple[list[dict[str, Any]], dict[int, bytes]]:
    """Return the rows of a JSON-lines file, and by number (from 1) the lines that are not JSON objects.

    If the file is missing, both are empty. A last line without a newline is skipped: a crash cut it off.
    """
    rows: list[dict[str, Any]] = []
    damaged: dict[int, bytes] = {}
    # not splitlines(): texts may contain line separators other than a newline
    *complete, _ = file.read_bytes().split(b"\n") if file.exists() else [b""]
    for number, line in enumerate(complete, 1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if isinstance(row, dict):
            rows.append(row)
        else:
            damaged[number] = line
    return rows, damaged


def digest(value: Any) -> str:
    """Return 8 hex digits of the SHA-256 of `value` as JSON; the order of dict keys does not matter."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:8]
