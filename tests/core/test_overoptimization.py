"""Peaks and falls of simulated studies, and rules that stop a run before the gold score falls."""

import numpy as np
import pytest

from rlhf.core.overoptimization import (
    fall,
    fieller,
    fit,
    peak,
    peak_interval,
    peak_shift,
    regret,
    stop_at,
    terms,
)

D = np.array([0, 0.6, 1.1, 1.5, 1.8, 2.0, 2.2, 2.35, 2.45])


def coefficients(rng, studies, a=1.28, b=0.62, noise=0.4):
    """Return a and b [studies, 2, 10 seeds], which vary together between seeds."""
    z = rng.standard_normal((2, studies, 10))
    z[1] = 0.7 * z[0] + 0.7 * z[1]
    return np.stack([a * (1 + 0.3 * z[0]), b * (1 + noise * z[1])], 1)


def covered(intervals, truth):
    """Return the share of intervals that contain the truth, and the share of studies that have one."""
    known = [each for each in intervals if each is not None]
    return np.mean([low <= truth <= high for low, high in known]), len(known) / len(intervals)


@pytest.mark.parametrize("kind", ["rl", "best_of_n"])
def test_a_fit_finds_its_coefficients_again_and_leaves_out_the_start(kind):
    d = np.linspace(0, 3, 9)
    gain = np.r_[0.0, terms(d[1:], kind) @ (1.5, 0.4)]
    assert fit(d, gain, kind) == pytest.approx((1.5, 0.4, 1.0))
    top = np.linspace(0.01, 20, 4000)
    at = top[(terms(top, kind) @ (1.5, 0.4)).argmax()]
    assert peak(1.5 / 0.4, kind) == pytest.approx(at, abs=0.01)
    assert np.isnan(fit(d, np.ones(9), kind)[2]), "equal gains have no R^2"


@pytest.mark.parametrize("noise", [0.4, 0.8])
def test_intervals_of_peaks_contain_the_true_peak_in_95_percent_of_studies(noise):
    rng = np.random.default_rng(0)
    share, known = covered([fieller(*each) for each in coefficients(rng, 3000, noise=noise)], 1.28 / 0.62)
    assert 0.935 < share < 0.97 and known > (0.99 if noise < 0.5 else 0.8)


def test_a_peak_is_claimed_in_few_studies_of_straight_lines():
    found = [peak_interval(each, "rl") for each in np.random.default_rng(1).normal(0, 1, (2000, 2, 8))]
    assert 0.015 < np.mean([each is not None for each in found]) < 0.035, "one side of a test at 5 %"


@pytest.mark.parametrize("common", [0.0, 0.7])
def test_intervals_of_the_shift_of_a_peak_contain_the_truth_whatever_the_seeds_share(common):
    rng = np.random.default_rng(2)
    first = coefficients(rng, 1500)
    second = coefficients(rng, 1500, b=0.8)
    if common:
        shared = (first / [[1.28], [0.62]] - 1) * common
        second = np.array([[1.28], [0.8]]) * (
            1 + shared + (second / [[1.28], [0.8]] - 1) * np.sqrt(1 - common**2)
        )
    truth = peak(1.28 / 0.62, "rl") - peak(1.28 / 0.8, "rl")
    wide = []
    for paired in (True, False):
        found = [peak_shift(one, other, "rl", paired) for one, other in zip(first, second, strict=True)]
        share, _ = covered([each and each[1:3] for each in found], truth)
        assert share > 0.93
        wide.append(np.median([each.high - each.low for each in found if each]))
    assert wide[0] < 0.75 * wide[1] if common else wide[0] == pytest.approx(wide[1], rel=0.05)
    assert peak_shift(first[0], first[0] * [[1], [-1]], "rl") is None


def studies(truth, count, noise=0.3, seeds=10):
    rng = np.random.default_rng(3)
    slopes = rng.normal(0, 0.2, (count, seeds, 1)) * D  # each seed has a slope of its own
    return truth + slopes + rng.normal(0, noise, (count, seeds, len(D)))


@pytest.mark.parametrize(
    ("truth", "least"),
    [
        pytest.param(0 * D, 0.9, id="flat"),
        pytest.param(0.3 * D, 0.95, id="rising"),
        pytest.param(1.3 * D - 0.45 * D**2, 0.92, id="hump"),
        pytest.param(0.5 * D - 0.16 * D**2, 0.88, id="small hump"),
    ],
)
def test_intervals_of_the_fall_are_rarely_too_high_and_contain_the_truth(truth, least):
    """The largest value minus the last one, in place of it, sees a fall of 0.3 to 0.5 where there is none."""
    gold, d = studies(truth, 400), np.tile(D, (10, 1))
    found = [fall(each, d)[1] for each in gold]
    true = truth.max() - truth[-1]
    share, _ = covered([(each.low - 1e-9, each.high + 1e-9) for each in found], true)
    assert share > least
    assert np.mean([each.low > true + 1e-9 for each in found]) < 0.045
    assert abs(np.mean([each.centre for each in found]) - true) < 0.07
    assert (gold.max(2) - gold[..., -1]).mean() > true + 0.2


def test_the_place_of_the_peak_does_not_depend_on_the_seed_itself():
    gold = studies(1.3 * D - 0.45 * D**2, 1)[0]
    changed = gold.copy()
    changed[0] = gold[0, ::-1] * 10
    d, other = np.tile(D, (10, 1)), np.tile(D, (10, 1))
    other[0] = D[::-1]
    assert fall(gold)[0][0] == fall(changed)[0][0]
    assert fall(gold, d)[0][0] == fall(changed, other)[0][0]


def test_rules_stop_at_the_first_evaluation_beyond_their_limit():
    kl, proxy = np.array([0.0, 1.0, 4.0, 9.0]), np.array([0.0, 1.0, 1.4, 1.5])
    spread = np.array([2.0, 2.2, 3.0, 3.2])
    assert [stop_at("kl", limit, kl, proxy) for limit in (0.5, 1.0, 2.5, 9.0)] == [1, 2, 3, 3]
    assert [stop_at("proxy", limit, kl, proxy) for limit in (0.5, 0.3, 0.05, -np.inf)] == [2, 3, 3, 3]
    assert [stop_at("members", limit, kl, proxy, spread) for limit in (1.05, 1.2, 2.0)] == [1, 2, 3]
    assert stop_at("proxy", 0.5, kl, -proxy) == 1, "a proxy that falls"


def curves(rng, seeds=10):
    """Return KL, proxy, gold and spread [seeds, evaluations] of runs whose gold peaks at sqrt(KL) = 1.4."""
    d = D * rng.uniform(0.7, 1.3, (seeds, 1))
    gold = 1.3 * d - 0.46 * d**2 + rng.normal(0, 0.05, d.shape)
    return d**2, d, gold, 1 + 0.2 * d


def test_a_limit_that_other_seeds_choose_saves_most_of_the_fall():
    kl, proxy, gold, spread = curves(np.random.default_rng(4))
    limits, lost, early = regret("kl", kl, proxy, gold, spread)
    assert np.all((limits > 1) & (limits < 2)) and early > 0.5
    _, fallen, none = regret("never", kl, proxy, gold, spread)
    assert none == 0 and fallen.mean() == pytest.approx(fall(gold, np.sqrt(kl))[1].centre)
    assert lost.mean() < 0.25 * fallen.mean()
    assert regret("members", kl, proxy, gold, spread)[1].mean() < 0.25 * fallen.mean()
    limits, lost, early = regret(
        "proxy", kl, proxy, gold, spread
    )  # a proxy with a constant slope says nothing
    assert early < 0.5 and lost.mean() > 0.5 * fallen.mean()


def test_no_gold_score_of_a_seed_chooses_its_limit():
    kl, proxy, gold, spread = curves(np.random.default_rng(5))
    changed = gold.copy()
    changed[0] = np.linspace(0, 10, len(D))  # would never stop
    for rule in ("kl", "proxy", "members"):
        before, after = (regret(rule, kl, proxy, each, spread)[0] for each in (gold, changed))
        assert before[0] == after[0]
    before, after = (regret("kl", kl, proxy, each, spread)[0] for each in (gold, changed))
    assert (before[1:] < after[1:]).any(), "it is one of the seeds that choose for the others"
