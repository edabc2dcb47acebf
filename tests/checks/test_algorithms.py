"""Rules for algorithms, optimizers, weights of pairs, and compiled blocks."""

from __future__ import annotations

import importlib.util

import pytest

from rlhf.assembly.parts import make
from rlhf.checks.check import problems, warnings
from rlhf.words.compose import compose
from rlhf.words.identity import run_name, what_counts


@pytest.mark.parametrize("backend", ["zero0", "zero3", "zero2_offload"])
def test_compiled_blocks_are_refused_with_deepspeed_and_the_remedies_are_valid(backend):
    words = [f"backend={backend}", "algo=dpo"]
    (message,) = problems(compose([*words, "backend.compile=true"]))
    assert message.startswith("backend.compile must be null or false with backend=")
    first, second = message.rpartition("set ")[2].split(", or ")
    assert problems(compose([*words, first])) == []
    assert problems(compose(["algo=dpo", second, "backend.compile=true"])) == []


@pytest.mark.parametrize("value", ["null", "false"])
def test_deepspeed_runs_without_compiled_blocks(value):
    assert problems(compose(["backend=zero2", "algo=dpo", f"backend.compile={value}"])) == []


def test_compilation_is_part_of_the_run_name_only_if_it_is_set():
    assert "compile" not in what_counts(compose([]))["backend"]
    assert run_name(compose(["backend.compile=true"])) != run_name(compose([]))


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


@pytest.mark.parametrize(
    "words", [["algo=sft"], ["algo=reward"], ["algo=dpo", "generator=dataset"]], ids=" ".join
)
def test_scaling_is_refused_without_a_sampler_and_its_remedy_is_valid(words):
    (message,) = problems(compose([*words, "optim.ess_scaling=linear"]))
    assert message.startswith("optim.ess_scaling must be none") and "got linear" in message
    assert problems(compose([*words, message.rpartition("set ")[2]])) == []


@pytest.mark.parametrize("algo", ["dpo", "bok", "ppo", "rloo", "gspo"])
def test_scaling_is_allowed_wherever_a_policy_samples(algo):
    cfg = compose([f"algo={algo}", "optim.ess_scaling=sqrt", "optim.ess_on_policy=0.55"])
    assert problems(cfg) == [] and not any("ess_" in text for text in warnings(cfg))


def test_saved_rollouts_have_the_log_probs_of_their_sampler():
    words = ["generator=dataset", "generator.path=run/generations", "optim.ess_scaling=sqrt"]
    assert not any("ess_scaling" in text for text in problems(compose(words)))


def test_an_on_policy_size_without_scaling_gives_a_warning():
    (message,) = (text for text in warnings(compose(["optim.ess_on_policy=0.5"])) if "ess" in text)
    assert message.startswith("optim.ess_on_policy=0.5 has no effect with optim.ess_scaling=none")
    remedy = message.rpartition("set ")[2]
    assert not any("ess" in text for text in warnings(compose(["optim.ess_on_policy=0.5", remedy])))


@pytest.mark.parametrize("value", ["0", "1.5"])
def test_the_on_policy_size_is_a_fraction(value):
    (message,) = problems(compose(["optim.ess_scaling=sqrt", f"optim.ess_on_policy={value}"]))
    assert message.startswith("optim.ess_on_policy must be ")


def test_scaling_is_part_of_the_run_name_only_if_it_is_on():
    assert not {"ess_scaling", "ess_on_policy"} & what_counts(compose([]))["optim"].keys()
    assert run_name(compose(["optim.ess_scaling=sqrt"])) != run_name(compose([]))


@pytest.mark.parametrize("name", ["muon", "adamw_8bit"])
@pytest.mark.parametrize("backend", ["zero0", "zero2", "zero3_offload"])
def test_deepspeed_has_only_adamw_and_the_remedies_are_valid(name, backend):
    words = [f"optim.optimizer={name}", f"backend={backend}"]
    (message,) = problems(compose(words))
    assert message.startswith(f"optim.optimizer must be adamw with backend={backend}")
    assert f"got {name}" in message
    for remedy in message.rpartition("set ")[2].split(" or "):
        assert problems(compose(["optim.optimizer=muon", f"backend={backend}", remedy])) == []


def test_a_missing_bitsandbytes_is_reported_before_the_run(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "bitsandbytes" else find(name)
    )
    (message,) = problems(compose(["optim.optimizer=adamw_8bit"]))
    assert "needs the package bitsandbytes" in message and "pip install -e '.[bnb]'" in message


def test_a_momentum_without_muon_gives_a_warning():
    words = ["optim.momentum=0.9"]
    (message,) = (text for text in warnings(compose(words)) if "momentum" in text)
    assert message.startswith("optim.momentum has no effect with optim.optimizer=adamw")
    assert not any("momentum" in text for text in warnings(compose([*words, "optim.optimizer=muon"])))


def test_the_optimizer_is_part_of_the_run_name_only_if_it_is_not_adamw():
    assert not {"optimizer", "momentum"} & what_counts(compose([]))["optim"].keys()
    names = {run_name(compose([f"optim.optimizer={name}"])) for name in ("adamw", "muon", "adamw_8bit")}
    assert len(names) == 3 and run_name(compose([])) in names
