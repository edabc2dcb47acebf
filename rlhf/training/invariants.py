"""What must hold at the first on-policy update, whatever the algorithm: sampler, trainer and reference are
one model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlhf.config.root import Config


EXPECTED = {
    "objective/kl": 0.0,  # the policy starts as the reference
    "policy/ratio": 1.0,  # sampler and trainer give the same log-probs
    "policy/clipfrac": 0.0,
    "mismatch/kl": 0.0,
}


def expected(cfg: Config) -> set[str]:
    """The figures that must be so in the run `cfg`."""
    return set(EXPECTED) - (set() if cfg.model.starts_as_reference else {"objective/kl"})


def broken_invariants(row: Mapping[str, float], tolerance: float) -> list[str]:
    """One sentence for each figure of the first row that is further than `tolerance` from what it must be."""
    return [
        f"{name} is {row[name]:.3g} at the first update and must be {expected:g} (within {tolerance:g}): "
        "sampler, trainer and reference do not agree on the log-probs of the same tokens"
        for name, expected in EXPECTED.items()
        if name in row and abs(row[name] - expected) > tolerance
    ]
