"""Files: complete-or-absent writes, JSON lines, YAML with an end, digests, the format of saved rollouts."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rlhf.core.errors import UserError

# Files on disk: complete-or-absent writes, JSON lines, digests of settings.


_LONGEST = 160  # bytes of a path component that is made from a text; file systems allow 255
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


def leftovers(folder: Path) -> list[Path]:
    """Return the scratch paths in `folder` that a crash left behind.

    A scratch path with the process id of another process that runs on this host is not in the list.
    """
    return [path for path in folder.glob(f"{SCRATCH}*") if not _is_being_written(path)]


def _is_being_written(scratch: Path) -> bool:
    """Return whether a private scratch path (see `whole`) belongs to another process that runs."""
    import psutil

    found = re.search(r"\.(\d+)$", scratch.name)
    return found is not None and int(found[1]) != os.getpid() and psutil.pid_exists(int(found[1]))


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
        durable: fsync every written file before the rename, and the folder of `path` after the rename. A
            power failure then leaves either the old or the new content, and the new content after the block.
        private: include the process id in the scratch name, so that several processes can write `path` at
            the same time. The scratch path that a crashed process left behind is then not replaced by the
            next attempt.
        publish: remove an old scratch path before the block, and rename the scratch path after the block. If
            several ranks write the same scratch folder, only one rank (usually the first) sets True.
    """
    scratch = scratch_of(path)
    if private:
        scratch = scratch.with_name(f"{scratch.name}.{os.getpid()}")
    if publish:
        discard(scratch)
    try:
        yield scratch
        if not publish:
            return
        if durable:
            sync_all(scratch)
        if scratch.is_dir():
            discard(path)  # a folder can only be renamed to an empty folder or to an absent path
        scratch.replace(path)
        if durable:
            sync(path.parent)
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


def read_json(file: Path, remedy: str) -> dict[str, Any]:
    """Read a JSON object from a file.

    Args:
        file: the file.
        remedy: what to do if the file is damaged, for the message.

    Raises:
        UserError: the file cannot be read, or contains something else.
    """
    try:
        found = json.loads(file.read_bytes())
        if isinstance(found, dict):
            return found
        problem = json.dumps(found)[:40]
    except (OSError, ValueError) as error:
        problem = getattr(error, "strerror", None) or str(error)
    raise UserError(f"{file} must be a JSON object, got: {problem}; {remedy}")


def write_atomically(file: Path, content: str | bytes) -> None:
    """Write a file completely or not at all, and wait until the file and its name are on disk.

    A reader sees the old file or the new file, also after a power failure. Text is encoded as UTF-8.
    """
    with _name_in_error(file), whole(file, private=True, durable=True) as scratch:
        scratch.write_bytes(content.encode() if isinstance(content, str) else content)


def delete_command(path: Path) -> str:
    """Return the command that deletes a file or a folder, for a message."""
    return f"rm -r {shlex.quote(str(path))}"


@contextmanager
def _name_in_error(file: Path) -> Iterator[None]:
    """Add the name of `file` to an OSError that the block raises: the error of a full disk names no file."""
    try:
        yield
    except OSError as error:
        if error.errno is not None:
            error.filename = str(file)
        raise


def append(file: Path, rows: Iterable[dict[str, Any]]) -> bytes:
    """Append rows to a JSON-lines file, and return the bytes that were appended."""
    content = "".join(map(as_line, rows)).encode()
    with _name_in_error(file), file.open("ab") as out:
        out.write(content)
    return content


def as_line(row: dict[str, Any]) -> str:
    """Return a row as one line of JSON, with its newline."""
    return json.dumps(row, ensure_ascii=False) + "\n"


def read_lines(file: Path, required: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Read the rows of a JSON-lines file.

    If the file is missing, the result is empty. A last line without a newline is skipped: a crash cut it off.

    Args:
        file: the file.
        required: keys that each row must have.

    Raises:
        UserError: the file cannot be read, or another line is not a JSON object with the keys `required`.
    """
    try:
        rows, damaged = split_lines(file, required)
    except OSError as error:
        raise UserError(
            f"{file} must be a file that can be read, got: {error.strerror}; move it away: "
            f"mv {shlex.quote(str(file))} {shlex.quote(f'{file}.damaged')}"
        ) from None
    for number, line in damaged.items():
        keys = f" with {', '.join(required)}" if required else ""
        raise UserError(
            f"{file} must have a JSON object{keys} in each line, got {line[:60]!r} in line {number}; delete "
            f"the line: sed -i {number}d {shlex.quote(str(file))}"
        )
    return rows


def split_lines(file: Path, required: Sequence[str] = ()) -> tuple[list[dict[str, Any]], dict[int, bytes]]:
    """Return the rows of a JSON-lines file, and by number (from 1) the lines that are no rows.

    A row is a JSON object with the keys `required`. If the file is missing, both results are empty. A last
    line without a newline is skipped: a crash cut it off.
    """
    rows: list[dict[str, Any]] = []
    damaged: dict[int, bytes] = {}
    lines = file.read_bytes().split(b"\n")[:-1] if file.exists() else []  # the last line may be unfinished
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if isinstance(row, dict) and row.keys() >= set(required):
            rows.append(row)
        else:
            damaged[number] = line
    return rows, damaged


def component(text: str, fill: str = "-") -> str:
    """Return a text as one component of a path, of at most `_LONGEST` bytes.

    Characters other than letters, digits, `.`, `_` and `-` are replaced by `fill`, so the path stays in its
    folder. A longer text keeps its end, after a digest of the whole text.
    """
    name = re.sub(r"[^\w.-]+", fill, text).strip(fill)
    if not name.strip("."):
        return f"name-{digest(text)}"
    if len(name.encode()) > _LONGEST:
        end = name.encode()[len(digest(text)) + 1 - _LONGEST :].decode(errors="ignore")
        return f"{digest(text)}-{end}"
    return name


def digest(value: Any) -> str:
    """Return 8 hex digits of the SHA-256 of `value` as JSON; the order of dict keys does not matter."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:8]


def digest_of(path: Path) -> str:
    """Return 16 hex digits of the SHA-256 of a file, or of names and contents of all files in a folder."""
    if not path.is_dir():
        state = path.stat()
        return _digest_of_file(path, state.st_size, state.st_mtime_ns)
    below = sorted(each for each in path.rglob("*") if each.is_file())
    contents = json.dumps([[str(each.relative_to(path)), digest_of(each)] for each in below])
    return hashlib.sha256(contents.encode()).hexdigest()[:16]


@cache
def _digest_of_file(file: Path, size: int, changed_ns: int) -> str:
    """Return the digest of a file with this size and this time of its last change."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()[:16]


# The YAML document config.yaml, with a first and a last line, so that a file without its end is noticed.


BEGIN, END = "---\n", "...\n"


def read_document(file: Path) -> DictConfig:
    """Return the mapping in a file that contains a document; files of earlier versions may lack both lines.

    Raises:
        ValueError: the file contains something else, or its end is missing.
        OSError, YAMLError, OmegaConfBaseException: the file cannot be read.
    """
    text = file.read_text(encoding="utf-8")
    if text.startswith(BEGIN) and not text.endswith(END):
        raise ValueError("its end is missing")
    saved = OmegaConf.load(StringIO(text))
    if not isinstance(saved, DictConfig):
        raise ValueError("not a mapping of keys")
    return saved


def flat(tree: dict[str, Any], at: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted key and value of every leaf of nested dictionaries."""
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from flat(value, f"{at}{name}.")
        else:
            yield f"{at}{name}", value


# File format of saved rollouts: written with `save_generations`, replayed with `generator=dataset`.
#
#     generations/000001.parquet      rollouts of update 1, one row per response, grouped by prompt
#
# `datasets.load_dataset(<folder>)` loads the folder. Settings shared by all rows of a file are in the
# metadata of the Parquet schema. Each file is written completely or not at all. A resumed run overwrites
# the files of the updates after its checkpoint. `rlhf.scorers.scorer` writes the files,
# `rlhf.generators.generator` reads the files.


_KEY = b"rlhf"  # key of `Shared` in the metadata of a Parquet schema


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """Settings shared by all rows of a file."""

    prompts: int  # N
    samples: int  # K
    response_length: int  # maximum number of tokens of a response
    temperature: float
    vocabulary: str  # hash of the vocabulary that the token ids refer to

    def metadata(self) -> dict[bytes, bytes]:
        """Return the settings as metadata of a Parquet schema."""
        return {_KEY: json.dumps(asdict(self)).encode()}


def shared(file: Path) -> Shared:
    """Read the settings shared by all rows of a file.

    Raises:
        ValueError, OSError: the file cannot be read, or was not written by `save_generations`.
    """
    import pyarrow.parquet

    metadata = (pyarrow.parquet.read_schema(file).metadata or {}).get(_KEY)
    if metadata is None:
        raise ValueError(f"{file.name} was not written by save_generations")
    return Shared(**json.loads(metadata))


def files(folder: Path) -> list[Path]:
    """Return the files of updates 1, 2, ... in a folder, up to the first update without a file."""
    present: list[Path] = []
    while (file := folder / name(len(present) + 1)).is_file():
        present.append(file)
    return present


def name(update: int) -> str:
    """Return the file name for an update (from 1)."""
    return f"{update:06d}.parquet"


def vocabulary(ids: Mapping[str, int]) -> str:
    """Return 16 hex digits that identify a tokenizer's vocabulary (token -> id)."""
    return hashlib.sha256(repr(sorted(ids.items())).encode()).hexdigest()[:16]
