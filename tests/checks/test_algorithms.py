"""What an algorithm reads, and the remedies with DeepSpeed."""

from __future__ import annotations

import pytest

from rlhf.assembly.parts import make
from rlhf.checks.check import problems
from rlhf.words.compose import compose

REINFORCE = "algo=rloo algo.loss_type=reinforce"


@pytest.mark.parametrize(
    ("words", "limits"),
    [
        ("", (0.15, 0.15)),
        ("algo.divergence=kl", (0.05, 0.05)),
        ("algo.divergence=kl algo.limit_high=0.15", (0.05, 0.15)),
        ("algo.limit_low=0.2", (0.2, 0.15)),
    ],
)
def test_the_limits_of_dppo_follow_the_divergence_unless_they_are_set(words, limits):
    assert compose(["algo=dppo", *words.split()]).algo.limits == limits


@pytest.mark.parametrize(
    ("words", "needed"),
    [
        ("algo=rloo", True),
        (REINFORCE, False),
        (f"{REINFORCE} algo.correction.kind=truncate", True),
        (f"{REINFORCE} algo.kl_in=loss", True),
        (f"{REINFORCE} algo.kl_in=loss algo.kl_unbiased=false", False),
        (f"{REINFORCE} algo.kl_in=loss algo.kl_coef=0", False),
    ],
)
def test_reinforce_needs_the_log_probs_before_the_update_only_if_its_loss_reads_them(words, needed):
    assert ("ratio" in make(compose(words.split()).algo).needs) == needed
    assert "old_logprobs" in make(compose(REINFORCE.split()).algo).needs, "the KL term of the reward"


@pytest.mark.parametrize("name", ["muon", "adamw_8bit"])
@pytest.mark.parametrize("backend", ["zero0", "zero2", "zero3_offload", "fsdp2"])
def test_deepspeed_and_fsdp2_have_only_adamw_and_both_remedies_are_valid(name, backend):
    words = [f"optim.optimizer={name}", f"backend={backend}"]
    (message,) = problems(compose(words))
    for remedy in message.rpartition("set ")[2].split(" or "):
        assert problems(compose(["optim.optimizer=muon", f"backend={backend}", remedy])) == []
