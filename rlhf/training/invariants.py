"""Metrics of the first on-policy update that do not depend on the algorithm, because sampler, trainer and
reference are the same model.
"""

from __future__ import annotations

from collections.abc import Mapping

EXPECTED = {
    "objective/kl": 0.0,  # the initial policy is the reference
    "policy/ratio": 1.0,  # sampler and trainer compute the same log-probs
    "policy/clipfrac": 0.0,
    "mismatch/kl": 0.0,
}


def expected(starts_as_reference: bool) -> set[str]:
    """Return the metrics that must have their expected value.

    `objective/kl` is one of them only if the initial policy is the reference.
    """
    return set(EXPECTED) - (set() if starts_as_reference else {"objective/kl"})


def broken_invariants(row: Mapping[str, float], tolerance: float) -> list[str]:
    """Return a warning for each metric of the first row that differs from its expected value.

    Args:
        row: the metrics of the first update.
        tolerance: the largest difference without a warning.
    """
    return [
        f"{name} is {row[name]:.3g} at the first update, expected {expected:g} (within {tolerance:g}): "
        "sampler, trainer and reference disagree on the log-probs of the same tokens"
        for name, expected in EXPECTED.items()
        if name in row and abs(row[name] - expected) > tolerance
    ]
