"""The YAML document config.yaml, with a first and a last line, so that a file without its end is noticed."""

from __future__ import annotations

from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

BEGIN, END = "---\n", "...\n"


def as_document(text: str) -> str:
    """Return YAML text with the first and the last line of a document."""
    return f"{BEGIN}{text}{END}"


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
