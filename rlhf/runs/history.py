"""The rows of metrics.jsonl and completions.jsonl, with a copy in every checkpoint.

    checkpoint-<update>/history/
        metrics.jsonl.gz  completions.jsonl.gz     all rows until the checkpoint
        rows.json                                  number of rows, bytes and XXH3 checksum of each file

A run appends rows to its files, and keeps a compressed copy of all rows in memory. A checkpoint stores this
copy. A file that was removed, truncated or altered is written again: at the next checkpoint, at the end of
the run, or when the run resumes. This module imports no torch.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import xxhash

from rlhf.core.files import append, as_line, discard, split_lines, sync, write_atomically

_COPIES = "history"  # folder of a checkpoint
_GZIP = 16 + zlib.MAX_WBITS  # the `wbits` of zlib that select the format of gzip
_FASTEST = 1  # level of compression


class History:
    """The rows of one JSON-lines file of a run.

    Args:
        file: the file.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.count = 0
        self.bytes = 0
        self.checksum = xxhash.xxh3_64()
        self.compressor = zlib.compressobj(_FASTEST, wbits=_GZIP)
        self.compressed = bytearray()

    def start(self) -> None:
        """Begin a new run: remove the rows of an earlier run."""
        write_atomically(self.file, "")

    def append(self, rows: Iterable[dict[str, Any]]) -> None:
        """Append rows to the file."""
        self.remember(append(self.file, rows))

    def remember(self, lines: bytes) -> None:
        """Add complete lines to the copy in memory."""
        self.count += lines.count(b"\n")
        self.bytes += len(lines)
        self.checksum.update(lines)
        self.compressed += self.compressor.compress(lines)

    def copy(self) -> bytes:
        """Return the copy of all rows, in the format of gzip."""
        return bytes(self.compressed) + self.compressor.copy().flush()

    def resume(self, checkpoint: Path) -> str | None:
        """Continue from the copy in an undamaged checkpoint, and remove later rows from the file.

        Returns:
            The damage of the rows until the checkpoint, which are then restored; None if the file was intact.
        """
        self.remember(gzip.decompress((checkpoint / _COPIES / f"{self.file.name}.gz").read_bytes()))
        if self.file.is_file() and self.file.stat().st_size > self.bytes:
            os.truncate(self.file, self.bytes)
        damage = self.restore()
        return damage and f"{damage}; its {self.count} rows were restored from {checkpoint}"

    def resume_without_copy(self, update: int) -> str | None:
        """Continue from the rows of the file until `update`: an earlier version wrote the checkpoint.

        Returns:
            The damage, if rows until the checkpoint are lost; None if the file was intact.
        """
        damage = None if os.path.lexists(self.file) else "was missing"
        rows: list[dict[str, Any]] = []
        try:
            rows, others = split_lines(self.file, ["update"])
        except OSError as error:
            damage = f"could not be read ({error.strerror})"
        else:
            if others:
                damage = f"had lines that are no rows ({', '.join(map(str, others))})"
        if damage is not None:
            self.set_aside()
        self.remember("".join(as_line(row) for row in rows if row["update"] <= update).encode())
        write_atomically(self.file, gzip.decompress(self.copy()))
        return damage and f"{damage}; the checkpoint has no copy, so these rows are lost"

    def restore(self) -> str | None:
        """Write the file again if it differs from the rows of the run, and wait until it is on disk (fsync).

        The damaged file is renamed to `<file>.damaged`.

        Returns:
            The damage; None if the file was intact.
        """
        damage = self.damage()
        if damage is None:
            sync(self.file)
        else:
            self.set_aside()
            write_atomically(self.file, gzip.decompress(self.copy()))
        return damage

    def damage(self) -> str | None:
        """Return how the file differs from the rows of the run, for a message; None if it is intact."""
        if not os.path.lexists(self.file):
            return "was missing"
        try:
            content = self.file.read_bytes()
        except OSError as error:
            return f"could not be read ({error.strerror})"
        if (count := content.count(b"\n")) != self.count:
            return f"had {count} of {self.count} rows" if count < self.count else "had rows of another run"
        return None if xxhash.xxh3_64_digest(content) == self.checksum.digest() else "had altered rows"

    def set_aside(self) -> None:
        """Rename the file to `<file>.damaged`."""
        if os.path.lexists(self.file):
            aside = self.file.with_name(f"{self.file.name}.damaged")
            discard(aside)
            self.file.rename(aside)


def has_copies(checkpoint: Path) -> bool:
    """Return whether a checkpoint has copies of the rows; checkpoints of earlier versions do not."""
    return (checkpoint / _COPIES).is_dir()


def save(histories: Iterable[History], checkpoint: Path) -> None:
    """Write the copies of the rows of several files into a checkpoint."""
    folder = checkpoint / _COPIES
    folder.mkdir()
    summary = {}
    for history in histories:
        name = history.file.name
        (folder / f"{name}.gz").write_bytes(history.copy())
        summary[name] = {
            "rows": history.count,
            "bytes": history.bytes,
            "xxh3": history.checksum.hexdigest(),
        }
    (folder / "rows.json").write_text(json.dumps(summary, indent=2) + "\n")
