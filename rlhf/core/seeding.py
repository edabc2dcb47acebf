"""Reproducible random seeds, derived from the run's seed and the purpose of each draw."""

from __future__ import annotations

import hashlib


def derive(seed: int, *purpose: str | int) -> int:
    """Return a 63-bit seed for one purpose.

    Different purposes give unrelated seeds. The same purpose gives the same seed in every process and on
    every rank.

    Args:
        seed: the seed of the run.
        purpose: names and counters that identify the draw, for example "minibatches", update, epoch.
    """
    text = ":".join(str(part) for part in (seed, *purpose))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
