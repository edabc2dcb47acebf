"""Rules about the weights of preference pairs."""

import pytest

from rlhf.checks.check import problems, warnings
from rlhf.words.compose import compose


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
    assert sum("algo.weighting" in text for text in problems(compose(words))) == 1
    found = problems(compose([*words, "generator.path=run/generations"]))
    assert not any("algo.weighting" in text for text in found)


def test_the_remedy_for_stored_pairs_is_valid():
    (message,) = problems(compose(["algo.weighting=is", "generator=dataset"]))
    remedy = message.rpartition("set ")[2]
    assert problems(compose(["algo.weighting=is", "generator=dataset", remedy])) == []
