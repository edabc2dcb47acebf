"""Settings for stale samples that are refused or warned of, and values that follow from other settings."""

import pytest

from rlhf.assembly.parts import make
from rlhf.checks.check import problems, warnings
from rlhf.words.compose import compose

REINFORCE = "algo=rloo algo.loss_type=reinforce"
LINEAR = "algo.anchor=loglinear"


@pytest.mark.parametrize(
    "words",
    [
        f"{REINFORCE} algo.anchor=behaviour",
        f"{REINFORCE} {LINEAR}",
        f"{REINFORCE} {LINEAR} algo.kl_in=loss algo.kl_unbiased=false",
        "algo=m2po algo.anchor=old",
        f"algo=m2po {LINEAR}",
        "algo=gspo algo.covariance.kind=kl",
        "algo=gspo algo.covariance.kind=clip",
        "algo=rloo algo.covariance.kind=kl",
        f"{REINFORCE} algo.covariance.kind=kl",
        "algo=grpo algo.covariance.kind=clip algo.covariance.low=6",
    ],
)
def test_a_contradiction_has_one_error_whose_remedy_is_valid(words):
    (message,) = problems(compose(words.split()))
    assert problems(compose([*words.split(), *message.rpartition("set ")[2].split()])) == []


@pytest.mark.parametrize(
    "words",
    [
        "algo=rloo algo.anchor=behaviour",
        f"{REINFORCE} {LINEAR} algo.correction.kind=truncate algo.correction.level=sequence",
        f"{REINFORCE} algo.anchor=behaviour algo.kl_in=loss",
        "algo=topr algo.anchor=old",
        "algo=ppo algo.covariance.kind=kl algo.covariance.share=0.1 algo.covariance.coef=2",
        "algo=dapo algo.covariance.kind=clip algo.covariance.low=0 algo.covariance.high=9",
        "algo=grpo algo.advantage=opo algo.scale=none",
        "algo=topr algo.advantage=opo",
    ],
)
def test_an_anchor_that_the_loss_reads_and_keys_that_it_uses_are_accepted(words):
    cfg = compose(words.split())
    assert problems(cfg) == [] and not any("algo." in text for text in warnings(cfg))


@pytest.mark.parametrize(
    ("kind", "unused"), [("none", "share low high coef"), ("kl", "low high"), ("clip", "coef")]
)
def test_keys_of_covariance_that_its_kind_does_not_read_are_warned_of(kind, unused):
    values = [f"algo.covariance.{key}" for key in ("share=0.1", "low=0", "high=9", "coef=2")]
    found = warnings(compose(["algo=grpo", f"algo.covariance.kind={kind}", *values]))
    named = [text.split()[0].rpartition(".")[2] for text in found if text.startswith("algo.covariance")]
    assert named == unused.split()


def test_the_limits_of_dppo_follow_the_divergence_unless_they_are_set():
    for words, limits in (
        ([], (0.15, 0.15)),
        (["algo.divergence=kl"], (0.05, 0.05)),
        (["algo.divergence=kl", "algo.limit_high=0.15"], (0.05, 0.15)),
        (["algo.limit_low=0.2"], (0.2, 0.15)),
    ):
        assert compose(["algo=dppo", *words]).algo.limits == limits


def test_reinforce_needs_the_log_probs_before_the_update_only_if_its_loss_reads_them():
    for words, needed in (
        ("algo=rloo", True),
        (f"{REINFORCE}", False),
        (f"{REINFORCE} algo.correction.kind=truncate", True),
        (f"{REINFORCE} algo.kl_in=loss", True),
        (f"{REINFORCE} algo.kl_in=loss algo.kl_unbiased=false", False),
        (f"{REINFORCE} algo.kl_in=loss algo.kl_coef=0", False),
    ):
        needs = make(compose(words.split()).algo).needs
        assert ("ratio" in needs) == needed, words
    assert "old_logprobs" in make(compose(REINFORCE.split()).algo).needs, "the KL term of the reward"
