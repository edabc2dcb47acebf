"""Tests of the statistics of studies: small cases by hand, and simulated studies."""

import math

import numpy as np
import pytest
from scipy import stats

from rlhf.core import statistics

SEEDS = (0.01, 0.03, 0.02, 0.04, 0.025)  # mean 0.025, sd 0.01118


def test_a_t_interval_is_the_mean_with_2_78_standard_errors_of_five_seeds():
    found = statistics.mean_interval(SEEDS)
    half = 2.7764 * 0.0111803 / math.sqrt(5)
    assert found == pytest.approx((0.025, 0.025 - half, 0.025 + half, 5), abs=1e-6)


def test_one_seed_has_no_interval_and_equal_seeds_have_one_of_width_0():
    assert all(map(math.isnan, statistics.mean_interval([0.5])[1:3])) and math.isnan(statistics.p_t([0.5]))
    assert (
        statistics.mean_interval([0.5] * 5) == statistics.bootstrap_interval([0.5] * 5) == (0.5, 0.5, 0.5, 5)
    )


def test_equal_differences_are_tested_by_their_signs():
    """A t test of values without spread would be certain after two seeds."""
    assert statistics.p_t([1 / 256] * 5) == 2 / 32 and statistics.p_t([0.0] * 5) == 1
    assert statistics.p_t([1 / 256] * 5, side="greater") == 1 / 32
    assert statistics.p_t([0.1 + 0.2, 0.3, 0.3], 0.0) == 2 / 8, "rounding is no spread"


def test_holm_multiplies_the_smallest_p_by_the_number_of_comparisons_and_keeps_the_order():
    assert statistics.holm([0.04, 0.01, 0.03]) == pytest.approx([0.06, 0.03, 0.06])
    assert statistics.holm([0.5, 0.9]) == [1, 1] and statistics.holm([0.02]) == [0.02]
    assert statistics.holm([]) == []


def test_methods_with_equal_values_count_once():
    found = statistics.distinct({"a": [1, 2], "b": [1, 3], "c": [1, 2], "d": [1]})
    assert found == {"a": ["a", "c"], "b": ["b"], "d": ["d"]}


def test_the_sign_flip_test_must_agree_where_it_has_enough_seeds():
    """Six small gains and two losses: the t test is sure of differences that signs do not support."""
    x = [0.1] * 6 + [-0.02, -0.09, 0.11, 0.1]
    t, exact = statistics.p_t(x), statistics.p_sign_flip(x)
    assert t < exact and statistics.p_value(x) == exact
    assert statistics.p_value(x, family=100) == t, "2 / 1024 x 100 cannot reach the level"
    assert statistics.p_value(SEEDS) == statistics.p_t(SEEDS) < 2 / 32


def test_the_signs_of_many_seeds_are_drawn():
    x = np.random.default_rng(0).normal(0.4, 1, 20)
    assert statistics.p_sign_flip(x) == pytest.approx(statistics.p_t(x), rel=0.1)
    assert statistics.p_sign_flip(np.ones(20)) == pytest.approx(2 / 2**16, rel=0.6)


def test_numbers_of_seeds_and_detectable_differences_are_inverse():
    for sd in (0.01, 0.05):
        least = statistics.detectable(sd, 5)
        assert statistics.power(least, sd, 5) == pytest.approx(0.8)
        assert (
            statistics.seeds_needed(least * 1.001, sd) == 5
            and statistics.seeds_needed(least * 0.999, sd) == 6
        )
    assert statistics.power(0, 0.01, 5) == pytest.approx(statistics.LEVEL)
    assert statistics.power(-0.02, 0.01, 5) == statistics.power(0.02, 0.01, 5)
    assert statistics.power(1, 0.001, 2) == statistics.power(1, 0, 2) == 1
    assert statistics.detectable(0, 5) == 0 and statistics.seeds_needed(0.01, 0) == 2


def test_the_spread_of_five_seeds_may_be_1_6_times_as_large():
    x = np.random.default_rng(0).normal(size=(20000, 5)).std(ddof=1, axis=1)
    assert statistics.sd_limit(1, 5) == pytest.approx(1.5576, abs=1e-4)
    assert np.mean(x * statistics.sd_limit(1, 5) > 1) == pytest.approx(0.8, abs=0.01)


def test_strata_are_resampled_each():
    found = statistics.bootstrap_interval([0.0] * 10, np.linspace(9, 11, 10), statistic=np.mean)
    assert found.centre == 5 and found.seeds == 20 and 4.7 < found.low < found.high < 5.3


def test_rankings_without_noise_agree_and_rankings_of_noise_do_not():
    draw = np.random.default_rng(0)
    clear = np.arange(6.0)[:, None] + draw.normal(0, 1e-3, (6, 5))
    assert statistics.split_half(clear) == pytest.approx(np.ones(10))
    assert len(statistics.split_half(clear[:, :4])) == 3
    assert statistics.ceiling([statistics.signal(clear)], 5) == pytest.approx(1)
    assert statistics.seeds_for_ceiling(math.inf) == 1
    noise = np.array([[1, 0.0], [0, 1.0], [0.4, 0.6]])
    assert statistics.split_half(noise).mean() == -1 and statistics.signal(noise) == 0
    assert statistics.ceiling([0.0], 5) == 0 and statistics.seeds_for_ceiling(0.0) is None


def test_a_ceiling_between_two_tables_is_the_geometric_mean_of_their_reliabilities():
    assert statistics.ceiling([0.2], 5) == pytest.approx(1 / 3), "half of the variance is noise: asin(1/2)"
    assert statistics.ceiling([0.2, 0.2], 5) == pytest.approx(1 / 3)
    assert statistics.ceiling([0.2, math.inf], 5) == pytest.approx(1 / 2), "asin(sqrt(1/2))"


def test_equal_values_have_no_order_and_no_noise():
    assert statistics.split_half(np.ones((3, 4))).tolist() == [0, 0, 0]
    assert statistics.evaluation_share(np.ones((3, 8)), 8) == 0


def test_saturation_is_the_share_of_methods_with_the_most_common_value():
    assert statistics.saturation(np.array([[0.8, 0.7], [0.8, 0.6], [0.9, 0.5], [0.8, 0.7]])) == (3 + 2) / 8


def test_variance_components_of_a_table_without_residuals_are_those_of_its_margins():
    rows, columns = np.array([1.0, 2.0, 3.0]), np.array([0.0, 4.0])
    assert statistics.components(rows[:, None] + columns) == pytest.approx((1, 8, 0))


# -- simulated studies -----------------------------------------------------------------------------------


def test_t_intervals_of_five_seeds_contain_the_mean_in_95_percent_of_studies():
    draw = np.random.default_rng(1)
    found = [statistics.mean_interval(draw.normal(0, 1, 5)) for _ in range(1000)]
    assert np.mean([each.low <= 0 <= each.high for each in found]) == pytest.approx(0.95, abs=0.02)


def test_holm_makes_a_false_statement_in_at_most_5_percent_of_studies():
    draw = np.random.default_rng(2)
    studies = draw.normal(0, 1, (120, 14, 5)) + draw.normal(0, 1, (120, 1, 5))  # methods share their seeds
    p = [[statistics.p_t(x) for x in study] for study in studies]
    false = [[min(each), min(statistics.holm(each))] for each in p]
    plain, corrected = (np.array(false) < statistics.LEVEL).mean(0)
    assert corrected < 0.1 and plain > 0.2


def test_the_noise_ceiling_is_the_agreement_of_two_studies_of_the_same_methods():
    draw = np.random.default_rng(3)
    ceilings, taus = [], []
    for _ in range(40):
        truth = draw.normal(0, 1, (14, 1))
        first, second = truth + draw.normal(0, 1.5, (2, 14, 5))
        ceilings.append(statistics.ceiling([statistics.signal(first)], 5))
        taus.append(stats.kendalltau(first.mean(1), second.mean(1)).statistic)
    assert np.mean(ceilings) == pytest.approx(np.mean(taus), abs=0.07)
