"""The trial of the fused head: when it starts, and what follows from its result."""

import logging

import pytest
import torch

from rlhf.core.errors import UserError
from rlhf.models.logprobs import token_outputs
from rlhf.models.modules import LogprobHead
from rlhf.trials import speed
from rlhf.trials.speed import choose_head
from rlhf.trials.trial import parts
from rlhf.words.compose import compose
from tests.engines.test_engine import engine_of


def right(*given):
    return token_outputs(*given).logprobs


def wrong(hidden, weight, bias, targets, temperature):
    return token_outputs(hidden, weight, bias, targets, 1.5 * temperature).logprobs


def gradients_of_equal_weights(*given):
    """Return log-probs whose gradients are those of their mean, as some versions of Liger do."""
    output = right(*given)
    return output.detach() + output.mean() - output.mean().detach()


def broken(*given):
    raise RuntimeError("no kernel image")


@pytest.fixture
def fused(monkeypatch):
    """Return a function that runs the trial, and returns whether the heads use the fused kernel."""

    def choose(setting, kernel, seconds=(1.0, 2.0), gpu=True):
        monkeypatch.setattr(speed, "head_may_pay_off", lambda *_: gpu)
        monkeypatch.setattr(speed, "fused_logprobs", kernel)
        times = iter(seconds)
        monkeypatch.setattr(speed, "fastest", lambda step, _: (step(), next(times)))
        engine = engine_of()
        cfg = compose([f"model.fused_head={setting}", "backend.micro_batch=4"])
        choose_head(engine, cfg)
        heads = parts(engine, LogprobHead)
        assert len(heads) == 2, "policy and reference"
        assert all(head.weight.grad is None for head in heads)
        assert len({head.fused for head in heads}) == 1
        return heads[0].fused

    return choose


@pytest.mark.parametrize(
    ("setting", "seconds", "used"),
    [("null", (2.0, 1.0), True), ("null", (1.0, 2.0), False), ("true", (1.0, 2.0), True)],
)
def test_null_uses_the_fused_head_if_it_is_faster_and_true_in_any_case(fused, setting, seconds, used, capsys):
    assert fused(setting, right, seconds) == used
    assert ("Liger; log-probs differ" if used else "tiles, Liger is not faster") in capsys.readouterr().out


@pytest.mark.parametrize("kernel", [wrong, gradients_of_equal_weights, broken])
def test_a_kernel_that_fails_or_gives_wrong_results_is_not_used(fused, kernel, caplog):
    with caplog.at_level(logging.WARNING):
        assert not fused("null", kernel)
    (warning,) = caplog.messages
    assert "set model.fused_head=false to hide this message" in warning
    with pytest.raises(UserError, match="model.fused_head must be false"):
        fused("true", kernel)


@pytest.mark.parametrize(("setting", "gpu"), [("null", False), ("false", True)])
def test_without_a_gpu_and_with_false_there_is_no_trial(fused, setting, gpu):
    assert not fused(setting, broken, gpu=gpu)


def test_the_trial_changes_no_gradient_and_no_random_number(fused):
    before = torch.get_rng_state()
    fused("true", right)
    assert torch.equal(torch.get_rng_state(), before)


def test_null_needs_a_gpu_liger_16_bits_and_whole_weights(monkeypatch):
    cpu, cuda = torch.device("cpu"), torch.device("cuda")

    def pays(device, *words):
        return speed.head_may_pay_off(compose(["model.dtype=bfloat16", *words]), device)

    monkeypatch.setattr(speed.importlib.util, "find_spec", lambda name: name)
    assert pays(cuda) and pays(cuda, "backend=zero2")
    assert not pays(cpu) and not pays(cuda, "model.dtype=float32") and not pays(cuda, "backend=zero3")
    assert not pays(cuda, "model.float32_head=true")
    monkeypatch.setattr(speed.importlib.util, "find_spec", lambda name: None)
    assert not pays(cuda)
