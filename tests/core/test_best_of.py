"""The best of n samples by a proxy, against the mean over all subsets."""

from itertools import combinations
from math import log
from statistics import fmean

import numpy as np
import pytest

from rlhf.core.overoptimization import best_of, best_of_kl


def test_the_best_of_n_is_the_mean_over_all_subsets_in_which_equal_proxy_scores_share():
    proxy, gold = np.array([2.0, 1, 2, 0, 1, 2]), np.array([5.0, -1, 3, 2, 7, 1])
    for n in range(1, 7):
        best = []
        for some in combinations(range(6), n):
            top = max(proxy[[*some]])
            best.append(fmean(gold[i] for i in some if proxy[i] == top))
        orders = [np.random.default_rng(seed).permutation(6) for seed in range(3)]
        found = best_of(
            n, np.stack([proxy[order] for order in orders]), np.stack([gold[order] for order in orders])
        )
        assert found == pytest.approx([fmean(best)] * 3), "whatever the order of the samples"


def test_the_best_of_one_is_the_mean_and_the_best_of_all_is_the_best_also_of_many_samples():
    draw = np.random.default_rng(0)
    proxy, gold = draw.normal(size=(2, 1024)), draw.normal(size=(2, 1024))
    assert best_of(1, proxy, gold) == pytest.approx(gold.mean(1))
    assert best_of(1024, proxy, gold) == pytest.approx(gold[[0, 1], proxy.argmax(1)])
    assert best_of(512, proxy, np.ones((2, 1024))) == pytest.approx([1, 1]), "the weights sum to 1"
    assert best_of_kl(1) == 0 and best_of_kl(1024) == pytest.approx(log(1024) - 1023 / 1024)
