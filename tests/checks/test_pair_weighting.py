"""Rules about the weights of preference pairs."""

import pytest

from rlhf.checks.check import problems, warnings
from rlhf.checks.rules import TRAINING_RULES
from rlhf.config.compose import compose

RULE = next(rule for rule in TRAINING_RULES if rule.__name__ == "pair_weights_need_a_sampler")


@pytest.mark.parametrize(
    "words",
    [
        "algo.weighting=is",
        "algo.weighting=is schedule.max_lag=1 algo.loss_type=ipo algo.weighting_eps=0.25",
        "algo.weighting=wpo algo.weighting_clamp=null",
        "algo.weighting=wpo generator=dataset",
    ],
)
def test_samples_allow_both_weightings_and_stored_pairs_allow_wpo(words):
    cfg = compose(words.split())
    assert problems(cfg) == [] and not any("weighting" in warning for warning in warnings(cfg))


def test_saved_rollouts_have_the_log_probs_that_importance_weights_need():
    words = ["algo.weighting=is", "generator=dataset"]
    assert len(list(RULE(compose(words)))) == 1
    assert list(RULE(compose([*words, "generator.path=run/generations"]))) == []


def test_the_remedy_for_stored_pairs_is_valid():
    (message,) = problems(compose(["algo.weighting=is", "generator=dataset"]))
    remedy = message.rpartition("set ")[2]
    assert problems(compose(["algo.weighting=is", "generator=dataset", remedy])) == []
