"""Numbers of over-optimization: how far a proxy may be pushed (Gao et al., arXiv 2210.10760)."""

from __future__ import annotations

import math

import numpy as np

# The best of n responses by a proxy.


def best_of(n: int, proxy: np.ndarray, gold: np.ndarray) -> np.ndarray:
    """Return the expected gold score of the best of n samples by the proxy, [...], without bias.

    With N samples in the order of their proxy scores, the estimate is the sum of C(i - 1, n - 1) / C(N, n)
    times the gold score of sample i. Samples with equal proxy scores share their weight.

    Args:
        n: samples of which the best is taken, at most N.
        proxy: proxy scores [..., N].
        gold: gold scores [..., N].
    """
    shape, total = np.shape(proxy), np.shape(proxy)[-1]
    places = np.arange(total - 1, 0, -1)  # the weight of place i is that of i + 1 times (i - n + 1) / i
    weights = n / total * np.cumprod([1.0, *((places - n + 1).clip(0) / places)])[::-1]
    found = []
    for each, values in zip(np.reshape(proxy, (-1, total)), np.reshape(gold, (-1, total)), strict=True):
        _, inverse, counts = np.unique(each, return_inverse=True, return_counts=True)
        ends = np.cumsum(counts)
        shares = np.add.reduceat(weights, ends - counts) / counts
        found.append(shares @ np.bincount(inverse, values))
    return np.reshape(found, shape[:-1])


def best_of_kl(n: int) -> float:
    """Return the KL in nats of the best of n samples to one sample; an upper bound if samples repeat."""
    return math.log(n) - (n - 1) / n
