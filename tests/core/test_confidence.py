import pytest

from rlhf.core.confidence import wilson


@pytest.mark.parametrize(  # Newcombe, Statistics in Medicine 17 (1998), table I, method 3
    ("successes", "count", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_the_interval_is_that_of_the_literature(successes, count, low, high):
    assert wilson(successes / count, count) == pytest.approx((low, high), abs=5e-5)


def test_the_interval_of_all_mirrors_that_of_none():
    low, high = wilson(0.0, 16)
    assert wilson(1.0, 16) == pytest.approx((1 - high, 1 - low)) and low == 0.0 and high < 0.2


def test_nothing_seen_says_nothing():
    assert wilson(0.0, 0) == (0.0, 1.0)
