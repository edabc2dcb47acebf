"""The trials that decide about compiled blocks and Liger's head; compiler and kernel are functions here."""

import logging
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from rlhf.config.models import Dtype
from rlhf.core.errors import UserError
from rlhf.models.forward import raise_errors
from rlhf.models.logprobs import token_outputs
from rlhf.models.modules import LogprobHead
from rlhf.processes.ranks import ALONE, Ranks
from rlhf.trials import trials
from rlhf.trials.trials import BLOCKS, Trial, choose_head, compile_blocks, parts, work
from rlhf.words.compose import compose
from tests.engines.test_engine import engine_of

GOOD = Trial(usual_s=2.0, faster_s=1.0, preparation_s=60.0, outputs=1e-6, gradients=1e-6)


def config(*words):
    sizes = ["task.max_prompt_tokens=9", "generator.response_length=5", "backend.micro_batch=4"]
    return compose(["algo=dpo", *sizes, *words])


@pytest.fixture
def engine():
    return engine_of()


@pytest.fixture
def compiler(monkeypatch):
    """`compiler(wrap)` replaces `torch.compile` by `wrap`, a function of the forward of a block."""
    return lambda wrap: monkeypatch.setattr(torch, "compile", lambda forward, dynamic: wrap(forward))


@pytest.fixture
def on_gpu(monkeypatch):
    """Let `backend.compile=null` start a trial of any run, as on a GPU with a long run."""
    monkeypatch.setattr(trials, "may_pay_off", lambda cfg, device: True)
    monkeypatch.setattr(trials, "WORTH_TRYING_S", 0.0)


def test_the_trial_changes_nothing_and_compiles_policy_and_reference(engine, compiler, capsys):
    called = []

    def counting(forward):
        def counted(*args, **kwargs):
            called.append(forward)
            torch.rand(1)  # a compiler may draw random numbers
            return forward(*args, **kwargs)

        return counted

    compiler(counting)
    weights = [each.detach().clone() for each in engine.module.parameters()]
    before = torch.get_rng_state()
    compile_blocks(engine, config("backend.compile=true"), updates=2)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(engine.module.parameters(), weights, strict=True))
    assert all(each.grad is None for each in engine.module.parameters())
    assert not engine.optimizer.state and engine.step_index == 0
    assert len({id(each.__self__) for each in called}) == 4, "two blocks of the policy, two of the reference"
    assert engine.module.blocks.__self__.blocks and engine.reference.blocks.__self__.blocks
    with engine.borrow_policy() as model:
        assert all("forward" not in vars(module) for module in model.modules()), (
            "the sampled model is as usual"
        )
    assert "yes; outputs differ by at most 0.0e+00 of 1 + |output|" in capsys.readouterr().out


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return 1.5 * gradient


def wrong_outputs(forward):
    return lambda *args, **kwargs: 1.5 * forward(*args, **kwargs)


def wrong_gradients(forward):
    return lambda *args, **kwargs: Scaled.apply(forward(*args, **kwargs))


def missing(forward):
    def fail(*args, **kwargs):
        raise FileNotFoundError("no-such-compiler")

    return fail


@pytest.mark.parametrize("fault", [wrong_outputs, wrong_gradients, missing])
def test_faulty_blocks_are_refused_if_asked_for_and_else_not_used(engine, compiler, on_gpu, caplog, fault):
    compiler(fault)
    with pytest.raises(UserError, match=r"backend.compile must be false \(.*; set backend.compile=false$"):
        compile_blocks(engine, config("backend.compile=true"), updates=2)
    with caplog.at_level(logging.WARNING):
        compile_blocks(engine, config(), updates=2)
    assert "backend.compile=false" in caplog.text
    assert engine.module.blocks is nullcontext
    assert all(each.grad is None for each in engine.module.parameters())


@pytest.mark.process  # the compiler is looked for in a process
def test_a_missing_c_compiler_is_named(engine, compiler):
    small = torch.compile(lambda x: x + 1, dynamic=True)  # compiled faster than a block
    compiler(lambda forward: lambda *args, **kwargs: (small(torch.ones(2)), forward(*args, **kwargs))[1])
    without = torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",), "force_disable_caches": True})
    raise_errors(False)  # as after an earlier run of this process
    with without, pytest.raises(UserError, match="no-such-compiler"):
        compile_blocks(engine, config("backend.compile=true"), updates=2)


@pytest.mark.parametrize(("updates", "used"), [(10, False), (100, True)])
def test_by_default_blocks_must_save_more_time_than_the_compilation_took(
    engine, on_gpu, monkeypatch, capsys, updates, used
):
    monkeypatch.setattr(trials, "compare", lambda engine, batch: GOOD)
    cfg = config("schedule.prompts_per_update=4", "algo.samples_per_prompt=2", "schedule.minibatches=1")
    assert work(cfg, ALONE, updates) == (2, 2 * updates)
    compile_blocks(engine, cfg, updates)
    assert ("yes; " if used else "no, ") in capsys.readouterr().out
    assert (engine.module.blocks is not nullcontext) == used
    assert not GOOD.pays_off(60) and GOOD.pays_off(61)
    assert not replace(GOOD, faster_s=2.5, preparation_s=0.0).pays_off(61)


def test_a_cpu_and_a_short_run_start_no_trial_by_default(engine, compiler, monkeypatch):
    compiler(lambda forward: pytest.fail("a trial"))
    for words in ([], ["backend.compile=false"]):
        compile_blocks(engine, config(*words), updates=10**6)
    monkeypatch.setattr(trials, "may_pay_off", lambda cfg, device: True)
    compile_blocks(engine, config(), updates=2)


@pytest.mark.parametrize("dtype", Dtype)
def test_differences_that_are_not_numbers_are_a_fault(dtype):
    assert BLOCKS.fault(GOOD, dtype) is None
    for name in ("outputs", "gradients"):
        for value in (float("nan"), float("inf"), 2.0):
            assert "wrong results" in BLOCKS.fault(replace(GOOD, **{name: value}), dtype)


def test_micro_batches_are_counted_per_rank_and_with_every_epoch():
    more = ["schedule.minibatches=2", "schedule.epochs=3"]
    cfg = config("schedule.prompts_per_update=32", "algo.samples_per_prompt=2", *more)
    assert work(cfg, ALONE, 5) == (2, 5 * 3 * 2 * 8)
    assert work(cfg, Ranks(rank=0, size=2), 5) == (2, 5 * 3 * 2 * 4)
    cfg.backend.tokens = 28  # one prompt with two sequences of 14 tokens
    assert work(cfg, ALONE, 5) == (1, 5 * 3 * 2 * 16)


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
        monkeypatch.setattr(trials, "head_may_pay_off", lambda *_: gpu)
        monkeypatch.setattr(trials, "fused_logprobs", kernel)
        times = iter(seconds)
        monkeypatch.setattr(trials, "fastest", lambda step, _: (step(), next(times)))
        engine, before = engine_of(), torch.get_rng_state()
        choose_head(engine, compose([f"model.fused_head={setting}", "backend.micro_batch=4"]))
        assert torch.equal(torch.get_rng_state(), before)
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
    assert ("yes; " if used else "no, ") in capsys.readouterr().out


@pytest.mark.parametrize("kernel", [wrong, gradients_of_equal_weights, broken])
def test_a_kernel_that_fails_or_gives_wrong_results_is_not_used(fused, kernel, caplog):
    with caplog.at_level(logging.WARNING):
        assert not fused("null", kernel)
    assert "model.fused_head=false" in caplog.text
    with pytest.raises(UserError, match="model.fused_head must be false"):
        fused("true", kernel)


def test_null_needs_a_gpu_liger_16_bits_and_whole_weights(fused, monkeypatch):
    assert not fused("null", broken, gpu=False) and not fused("false", broken)
    monkeypatch.undo()
    cpu, cuda = torch.device("cpu"), torch.device("cuda")

    def pays(device, *words):
        return trials.head_may_pay_off(compose(["model.dtype=bfloat16", *words]), device)

    monkeypatch.setattr(trials.importlib.util, "find_spec", lambda name: name)
    assert pays(cuda) and pays(cuda, "backend=zero2")
    assert not pays(cpu) and not pays(cuda, "model.dtype=float32") and not pays(cuda, "backend=zero3")
    assert not pays(cuda, "backend=fsdp2")
    assert not pays(cuda, "model.float32_head=true")
    monkeypatch.setattr(trials.importlib.util, "find_spec", lambda name: None)
    assert not pays(cuda)
