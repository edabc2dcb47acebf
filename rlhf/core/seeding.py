"""Random numbers that can be drawn again: a seed is made of the run's seed and what the draw is for."""

from __future__ import annotations

import hashlib


def derive(seed: int, *purpose: str | int) -> int:
    """A 63-bit seed for `purpose` (names and counters) in the run of `seed`.

    Two purposes give unrelated numbers; the same purpose gives the same number in any process, on any rank.
    """
    words = ":".join(str(part) for part in (seed, *purpose))
    return int.from_bytes(hashlib.sha256(words.encode()).digest()[:8], "big") >> 1
