"""File format of saved rollouts: written with `save_generations`, replayed with `generator=dataset`.

    generations/000001.parquet      rollouts of update 1, one row per response, grouped by prompt

`datasets.load_dataset(<folder>)` loads the folder. Settings shared by all rows of a file are in the metadata
of the Parquet schema. Each file is written completely or not at all. A resumed run overwrites the files of
the updates after its checkpoint. `rlhf.scorers.scorer` writes the files, `rlhf.generators.generator` reads the
files. This module imports no torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

KEY = b"rlhf"  # key of `Shared` in the metadata of a Parquet schema


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
        return {KEY: json.dumps(asdict(self)).encode()}


def shared(file: Path) -> Shared:
    """Read the settings shared by all rows of a file.

    Raises:
        ValueError, OSError: the file cannot be read, or was not written by `save_generations`.
    """
    import pyarrow.parquet

    metadata = (pyarrow.parquet.read_schema(file).metadata or {}).get(KEY)
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
