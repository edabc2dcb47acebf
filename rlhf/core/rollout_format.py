"""Rollouts on disk: `save_generations` keeps every one with its scores, `generator=dataset` replays them.

    generations/000001.parquet      the rollouts of update 1, one row a response, the K of a prompt together

The folder loads with `datasets.load_dataset(<folder>)`. What the rows of a file share is in the metadata of
its schema. A file is there whole or not at all; a run that goes on from a checkpoint writes those after it
anew.
`rlhf/scorers/saved.py` writes, `rlhf/generators/replay.py` reads. Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

KEY = b"rlhf"  # of our metadata in a schema


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """What the rows of a file share."""

    prompts: int  # N
    samples: int  # K
    response_length: int  # tokens that were allowed
    temperature: float
    vocabulary: str  # of the token ids

    def metadata(self) -> dict[bytes, bytes]:
        """As metadata of a schema."""
        return {KEY: json.dumps(asdict(self)).encode()}


def shared(file: Path) -> Shared:
    """What the rows of a file share.

    Raises:
        ValueError, OSError: it cannot be read, or `save_generations` did not write it.
    """
    import pyarrow.parquet

    found = (pyarrow.parquet.read_schema(file).metadata or {}).get(KEY)
    if found is None:
        raise ValueError(f"{file.name} was not written by save_generations")
    return Shared(**json.loads(found))


def files(folder: Path) -> list[Path]:
    """The files of a folder by update, from 1 to where one is missing."""
    found: list[Path] = []
    while (file := folder / name(len(found) + 1)).is_file():
        found.append(file)
    return found


def name(update: int) -> str:
    """The name of the file of an update (from 1)."""
    return f"{update:06d}.parquet"


def vocabulary(ids: Mapping[str, int]) -> str:
    """A hash of a tokenizer's vocabulary (token -> id)."""
    return hashlib.sha256(repr(sorted(ids.items())).encode()).hexdigest()[:16]
