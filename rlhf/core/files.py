"""Write files whole or not at all; read and write JSON lines."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def sync(path: Path) -> None:
    """Wait until the file or folder is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(file: Path, value: Any) -> None:
    """Write JSON, whole or not at all."""
    write_atomically(file, json.dumps(value, indent=2) + "\n")


def write_atomically(file: Path, text: str) -> None:
    """Write under another name, then rename: a reader sees the old file or the new one."""
    scratch = file.with_name(f".{file.name}.tmp-{os.getpid()}")
    try:
        with named(file), scratch.open("w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        scratch.replace(file)
    finally:
        scratch.unlink(missing_ok=True)


@contextmanager
def named(file: Path) -> Iterator[None]:
    """Have an OSError name the file that was to be written; one of a full disk names none."""
    try:
        yield
    except OSError as error:
        if error.errno is not None:
            error.filename = str(file)
        raise


def append(file: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write one JSON object a line at the end of `file`."""
    with named(file), file.open("a", encoding="utf-8") as out:
        out.writelines(map(as_line, rows))


def as_line(row: dict[str, Any]) -> str:
    """A row as one line of JSON."""
    return json.dumps(row, ensure_ascii=False) + "\n"


def read_lines(file: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file; a last line that was cut off by a crash is left out, an absent file
    is empty.
    """
    if not file.exists():
        return []
    *whole, _ = file.read_text(encoding="utf-8").split("\n")  # not splitlines: texts hold other line ends
    return [json.loads(line) for line in whole]
