"""Tests of search spaces: swept overrides become distributions of Optuna."""

from __future__ import annotations

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from rlhf.core.errors import UserError
from rlhf.launch.preflight import distribution, middle, overrides


def distributed(word: str):
    (override,) = OverridesParser.create().parse_overrides([word])
    return distribution(override)


@pytest.mark.parametrize(
    ("word", "wanted", "in_the_middle"),
    [
        ("optim.lr=interval(0.2,0.4)", FloatDistribution(0.2, 0.4), 0.3),
        ("optim.lr=tag(log,interval(1e-5,1e-3))", FloatDistribution(1e-5, 1e-3, log=True), 1e-4),
        ("schedule.epochs=int(interval(1,5))", IntDistribution(1, 5), 3),
        ("schedule.epochs=tag(log,int(interval(1,100)))", IntDistribution(1, 100, log=True), 10),
        ("schedule.epochs=range(1,4)", IntDistribution(1, 3), 2),
        ("schedule.epochs=range(8,0,step=-4)", IntDistribution(4, 8, step=4), 4),
        ("algo.beta=range(0.1,0.35,step=0.1)", FloatDistribution(0.1, 0.3, step=0.1), 0.2),
        ("algo.beta=choice(0.05,0.1)", CategoricalDistribution(["0.05", "0.1"]), "0.05"),
        ("algo=dpo,rloo", CategoricalDistribution(["dpo", "rloo"]), "dpo"),
        (
            "optim.betas=[0.9,0.9],[0.9,0.99]",
            CategoricalDistribution(["[0.9,0.9]", "[0.9,0.99]"]),
            "[0.9,0.9]",
        ),
    ],
)
def test_a_swept_override_is_a_distribution(word, wanted, in_the_middle):
    assert distributed(word) == wanted
    assert middle(wanted) == (
        pytest.approx(in_the_middle) if isinstance(in_the_middle, float) else in_the_middle
    )


@pytest.mark.parametrize(
    "word",
    ["optim.lr=interval(2,1)", "optim.lr=tag(log,interval(0,1.0))", "seed=range(3,3)", "seed=range(1,2,0)"],
)
def test_invalid_bounds_are_refused_with_the_key_and_the_value(word):
    with pytest.raises(UserError, match=r"must have valid bounds .*correct the bounds") as refused:
        distributed(word)
    assert f"got {word}" in str(refused.value)


def test_numbers_of_a_trial_are_rounded_to_six_digits_and_texts_are_kept():
    values = {"optim.lr": 0.000123456789, "schedule.epochs": 12345678, "algo.beta": "0.05"}
    assert overrides(values) == ["optim.lr=0.000123457", "schedule.epochs=12345678", "algo.beta=0.05"]
