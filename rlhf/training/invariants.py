"""Metrics whose values at the first on-policy update are known in advance, for every algorithm.

At this update, sampler, trainer and reference are the same model.
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
    """Return the names of the metrics in `EXPECTED` that are checked at the first update.

    Args:
        starts_as_reference: whether the initial policy is the reference; if not, `objective/kl` is not
            checked.
    """
    return set(EXPECTED) - (set() if starts_as_reference else {"objective/kl"})


_SUMS = ("objective/kl", "policy/ratio")  # computed from a sum over the tokens of a response
TOKENS = 10  # tokens of a response whose rounding errors are within the tolerance


def broken_invariants(row: Mapping[str, float], tolerance: float, tokens: float = 1.0) -> list[str]:
    """Return a warning for each metric in `row` that differs from its value in `EXPECTED`.

    Args:
        row: the metrics of the first update.
        tolerance: the largest difference without a warning, for up to `TOKENS` tokens; the bound of a metric
            in `_SUMS` grows with the number of tokens, as rounding errors do.
        tokens: the mean number of tokens of a response.
    """
    longer = max(1.0, tokens / TOKENS)
    bounds = {name: tolerance * (longer if name in _SUMS else 1.0) for name in EXPECTED}
    return [
        f"{name} is {row[name]:.3g} at the first update, expected {expected:g} (within {bounds[name]:.2g}): "
        "sampler, trainer and reference disagree on the log-probs of the same tokens"
        for name, expected in EXPECTED.items()
        if name in row and abs(row[name] - expected) > bounds[name]
    ]
