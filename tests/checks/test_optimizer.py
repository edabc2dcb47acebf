"""Rules about the optimizer, and about the learning rate that is scaled by the effective sample size."""

import importlib.util

import pytest

from rlhf.checks.check import problems, warnings
from rlhf.words.compose import compose
from rlhf.words.identity import run_name, what_counts


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
