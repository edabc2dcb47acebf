"""The trial that decides whether blocks are compiled. Most tests replace the compiler by a function."""

import logging
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from rlhf.config.models import Dtype
from rlhf.config.schedule import OptimConfig
from rlhf.core.batch import Budget
from rlhf.core.errors import UserError
from rlhf.engines.engine import EngineSettings
from rlhf.engines.torch_engine import TorchEngine
from rlhf.models.forward import raise_errors
from rlhf.models.modules import Policy
from rlhf.processes.ranks import ALONE, Ranks
from rlhf.trials import speed
from rlhf.trials.speed import compile_blocks, fault, work
from rlhf.trials.trial import Trial
from rlhf.words.compose import compose
from tests.tiny_models import tiny_lm

GOOD = Trial(usual_s=2.0, faster_s=1.0, preparation_s=60.0, outputs=1e-6, gradients=1e-6)


def config(*words):
    return compose(
        [
            "algo=dpo",
            "task.max_prompt_tokens=9",
            "generator.response_length=5",
            "backend.micro_batch=4",
            *words,
        ]
    )


@pytest.fixture
def engine():
    reference = Policy(tiny_lm(hidden_size=16), 0.7, shared_prefix=True).requires_grad_(False)
    return TorchEngine(
        Policy(tiny_lm(hidden_size=16), 0.7, shared_prefix=True),
        reference,
        None,  # tokenizer, which only `save` needs
        ALONE,
        EngineSettings(
            optim=OptimConfig(lr=1e-3),
            total_steps=10,
            steps_per_batch=1,
            budget=Budget(4),
            inference=Budget(4),
        ),
    )


@pytest.fixture
def compiler(monkeypatch):
    """`compiler(wrap)` replaces `torch.compile` by `wrap`, a function of the forward of a block."""
    return lambda wrap: monkeypatch.setattr(torch, "compile", lambda forward, dynamic: wrap(forward))


@pytest.fixture
def on_gpu(monkeypatch):
    """Let `backend.compile=null` start a trial of any run, as on a GPU with a long run."""
    monkeypatch.setattr(speed, "may_pay_off", lambda cfg, device: True)
    monkeypatch.setattr(speed, "WORTH_TRYING_S", 0.0)


def calls_of(forward, called):
    def counted(*args, **kwargs):
        called.append(forward)
        torch.rand(1)  # a compiler may draw random numbers
        return forward(*args, **kwargs)

    return counted


def test_the_trial_changes_no_weights_no_gradients_and_no_random_numbers(engine, compiler):
    called = []
    compiler(lambda forward: calls_of(forward, called))
    weights = [each.detach().clone() for each in engine.module.parameters()]
    torch.manual_seed(3)
    compile_blocks(engine, config("backend.compile=true"), updates=2)
    drawn = torch.rand(3)
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.rand(3))
    assert all(torch.equal(a, b) for a, b in zip(engine.module.parameters(), weights, strict=True))
    assert all(each.grad is None for each in engine.module.parameters())
    assert not engine.optimizer.state and engine.step_index == 0
    assert len({id(each.__self__) for each in called}) == 4, "two blocks of the policy, two of the reference"


def test_policy_and_reference_are_compiled_and_the_sampled_model_is_not(engine, compiler, capsys):
    compiler(lambda forward: calls_of(forward, []))
    compile_blocks(engine, config("backend.compile=true"), updates=2)
    assert engine.module.blocks.__self__.blocks and engine.reference.blocks.__self__.blocks
    with engine.borrow_policy() as model:
        assert all("forward" not in vars(module) for module in model.modules())
    assert "yes; outputs differ by at most 0.0e+00 of 1 + |output|" in capsys.readouterr().out


def broken(forward):
    return lambda *args, **kwargs: 1.5 * forward(*args, **kwargs)


def test_compiled_blocks_with_wrong_results_are_refused(engine, compiler):
    compiler(broken)
    with pytest.raises(UserError) as refused:
        compile_blocks(engine, config("backend.compile=true"), updates=2)
    assert str(refused.value).startswith(
        "error: backend.compile must be false (compiled blocks give wrong results"
    )
    assert str(refused.value).endswith("got true; set backend.compile=false")
    assert engine.module.blocks is nullcontext


def test_wrong_gradients_alone_are_refused(engine, compiler):
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, gradient):
            return 1.5 * gradient

    compiler(lambda forward: lambda *args, **kwargs: Scaled.apply(forward(*args, **kwargs)))
    with pytest.raises(UserError, match=r"outputs differ by at most 0.0e\+00"):
        compile_blocks(engine, config("backend.compile=true"), updates=2)


def test_by_default_wrong_results_give_a_warning_and_the_usual_blocks(engine, compiler, on_gpu, caplog):
    compiler(broken)
    with caplog.at_level(logging.WARNING):
        compile_blocks(engine, config(), updates=2)
    assert "blocks are not compiled (set backend.compile=false to hide this message)" in caplog.text
    assert engine.module.blocks is nullcontext


@pytest.mark.process  # the compiler is looked for in a process
def test_a_missing_c_compiler_is_named(engine, compiler):
    small = torch.compile(lambda x: x + 1, dynamic=True)  # compiled faster than a block
    compiler(lambda forward: lambda *args, **kwargs: (small(torch.ones(2)), forward(*args, **kwargs))[1])
    missing = torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",), "force_disable_caches": True})
    raise_errors(False)  # as after an earlier run of this process
    with missing, pytest.raises(UserError, match="the blocks cannot be compiled: .*no-such-compiler"):
        compile_blocks(engine, config("backend.compile=true"), updates=2)
    assert all(each.grad is None for each in engine.module.parameters())


def test_by_default_an_error_of_the_compiler_gives_a_warning(engine, compiler, on_gpu, caplog):
    def fail(*args, **kwargs):
        raise FileNotFoundError("no-such-compiler")

    compiler(lambda forward: fail)
    with caplog.at_level(logging.WARNING):
        compile_blocks(engine, config(), updates=2)
    assert "the blocks cannot be compiled: FileNotFoundError: no-such-compiler" in caplog.text
    assert engine.module.blocks is nullcontext


@pytest.mark.parametrize(("left", "pays"), [(60, False), (61, True)])
def test_blocks_are_compiled_if_they_save_more_time_than_the_compilation_took(left, pays):
    assert GOOD.pays_off(left) is pays
    assert not replace(GOOD, faster_s=2.5, preparation_s=0.0).pays_off(left)


@pytest.mark.parametrize(("updates", "word"), [(10, "no, too little gain"), (100, "yes; ")])
def test_by_default_the_rest_of_the_run_decides(engine, on_gpu, monkeypatch, capsys, updates, word):
    monkeypatch.setattr(speed, "compare", lambda engine, batch: GOOD)
    cfg = config("schedule.prompts_per_update=4", "algo.samples_per_prompt=2", "schedule.minibatches=1")
    assert work(cfg, ALONE, updates) == (2, 2 * updates)
    compile_blocks(engine, cfg, updates)
    assert word in capsys.readouterr().out
    assert (engine.module.blocks is nullcontext) is word.startswith("no")


def test_a_short_run_starts_no_trial_by_default(engine, monkeypatch):
    monkeypatch.setattr(speed, "may_pay_off", lambda cfg, device: True)
    monkeypatch.setattr(speed, "compare", lambda engine, batch: pytest.fail("a trial"))
    compile_blocks(engine, config(), updates=2)


def test_a_cpu_compiles_only_on_request(engine, monkeypatch):
    monkeypatch.setattr(speed, "run", lambda engine, batch: pytest.fail("a trial"))
    for words in ([], ["backend.compile=false"]):
        compile_blocks(engine, config(*words), updates=10**6)


@pytest.mark.parametrize("dtype", Dtype)
def test_differences_that_are_not_numbers_are_a_fault(dtype):
    assert fault(GOOD, dtype) is None
    for name in ("outputs", "gradients"):
        for value in (float("nan"), float("inf"), 2.0):
            assert "wrong results" in fault(replace(GOOD, **{name: value}), dtype)


def test_micro_batches_are_counted_per_rank_and_with_every_epoch():
    cfg = config(
        "schedule.prompts_per_update=32",
        "algo.samples_per_prompt=2",
        "schedule.minibatches=2",
        "schedule.epochs=3",
    )
    assert work(cfg, ALONE, 5) == (2, 5 * 3 * 2 * 8)
    assert work(cfg, Ranks(rank=0, size=2), 5) == (2, 5 * 3 * 2 * 4)
    cfg.backend.tokens = 28  # one prompt with two sequences of 14 tokens
    assert work(cfg, ALONE, 5) == (1, 5 * 3 * 2 * 16)
