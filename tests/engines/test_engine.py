"""Tests of the engine: micro-batches, clipping, learning-rate schedules, precision and non-finite losses."""

import math
from dataclasses import replace

import pytest
import torch

from rlhf.assembly.parts import make
from rlhf.config.algorithms import CorrectionConfig, DPOConfig, PPOConfig, Reject, SFTConfig
from rlhf.config.models import Dtype
from rlhf.config.run import LRSchedule, OptimConfig
from rlhf.config.schema import SCHEMAS
from rlhf.core.batch import Batch, Budget, microbatches
from rlhf.engines.engine import EngineSettings, NonFinite, TorchEngine, learning_rate
from rlhf.models.forward import autocast
from rlhf.models.modules import ActorCritic, Policy, ValueModel
from rlhf.objectives.dpo import OnlineDPO
from rlhf.objectives.ppo import PPO
from rlhf.objectives.sft import SFT
from rlhf.processes.ranks import ALONE
from tests.tiny_models import tiny_classifier, tiny_lm, tiny_rollouts, tiny_tokenizer


def engine_of(
    micro_batch=16, tokens=None, steps_per_batch=1, dtype=Dtype.float32, critic=False, optim=None, **settings
):
    """Return an engine with a reference of other weights; `optim` changes the settings of the optimizer."""
    reference = tiny_lm()
    with torch.no_grad():
        for p in reference.parameters():
            p.add_(0.02 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))
    module = Policy(tiny_lm(), 0.7, shared_prefix=True)
    if critic:
        module = ActorCritic(module, ValueModel(tiny_classifier(), shared_prefix=True))
    given = EngineSettings(
        optim=OptimConfig(**{"lr": 1e-3, "max_grad_norm": None, "weight_decay": 0.0} | (optim or {})),
        total_steps=10,
        steps_per_batch=steps_per_batch,
        budget=Budget(micro_batch, tokens),
        inference=Budget(micro_batch, tokens),
        dtype=dtype,
        **settings,
    )
    frozen = Policy(reference, 0.7, shared_prefix=True).requires_grad_(False)
    return TorchEngine(module, frozen, None, ALONE, given)  # without tokenizer, which only `save` needs


def scored(prompts=8, samples=2) -> Batch:
    rollouts = tiny_rollouts(prompts, samples)
    scores = torch.rand(prompts, samples, generator=torch.Generator().manual_seed(3))
    sampled = engine_of().infer(Policy(tiny_lm(), 0.7, True), rollouts, "logprobs")
    return replace(rollouts, behaviour_logprobs=sampled).extend(Batch, scores=scores)


def weights(engine):
    return torch.cat([p.detach().flatten() for p in engine.module.parameters()])


def gradient(engine):
    """Return the gradient of the only step so far, computed from Adam's first moment."""
    return torch.cat([s["exp_avg"].flatten() for s in engine.optimizer.state.values()]) / 0.1


def step(objective, **settings):
    engine = engine_of(**settings)
    batch = objective.credit(engine.annotate(scored(), objective.needs))
    return {name: stat.value() for name, stat in engine.step(batch, objective).items()}, engine


def ppo(**settings):
    return PPO(PPOConfig(**settings))


OBJECTIVES = {
    "dpo": OnlineDPO(DPOConfig()),
    "sft": SFT(SFTConfig()),
    **{
        name: make(SCHEMAS[f"schema/algo/{name}"]())
        for name in ("bok", "ppo", "rloo", "grpo", "dr_grpo", "dapo", "gspo", "cispo")
    },
}


@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)
@pytest.mark.parametrize(
    "limits", [{"micro_batch": 2}, {"tokens": 60}], ids=["one prompt at a time", "60 tokens"]
)
def test_a_step_does_not_depend_on_the_micro_batches(objective, limits):
    critic = isinstance(objective, PPO)
    one, engine_one = step(objective, critic=critic, **limits)
    all_, engine_all = step(objective, micro_batch=16, critic=critic)
    for name in ("loss/policy", "policy/grad_norm"):
        assert one[name] == pytest.approx(all_[name], rel=1e-5, abs=1e-7)
    assert one == pytest.approx(all_, rel=1e-3, abs=1e-6), (
        "the tolerance is larger because a margin is a small difference"
    )
    torch.testing.assert_close(gradient(engine_one), gradient(engine_all), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("prompts", [1, 2])
def test_the_loss_is_the_mean_over_the_pairs_with_signal(prompts):
    engine, objective = engine_of(), OnlineDPO(DPOConfig())
    batch = objective.credit(engine.annotate(scored(), objective.needs)).select(torch.arange(prompts))
    policy, reference = (
        engine.infer(model, batch, "logprobs").sum(-1) for model in (engine.policy, engine.reference)
    )
    margins = 0.1 * ((policy - reference)[:, 0] - (policy - reference)[:, 1])
    expected = -torch.nn.functional.logsigmoid(margins).mean().item()
    assert engine.step(batch, objective)["loss/policy"].value() == pytest.approx(expected, rel=1e-5)


def test_gradient_norm_is_reported_before_clipping_and_the_step_uses_the_clipped_gradient():
    free, _ = step(SFT(SFTConfig()))
    clipped, engine = step(SFT(SFTConfig()), optim={"max_grad_norm": 1e-3})
    assert clipped["policy/grad_norm"] == pytest.approx(free["policy/grad_norm"])
    assert gradient(engine).norm().item() == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize("name", ["dpo", "dapo"])
def test_a_batch_of_ties_skips_the_step_and_counts_it(name):
    engine, objective = engine_of(), OBJECTIVES[name]
    batch = replace(scored(), scores=torch.full((8, 2), 0.3))
    before = weights(engine).clone()
    figures = engine.step(objective.credit(engine.annotate(batch, objective.needs)), objective)
    assert figures["policy/skipped_steps"].value() == 1
    assert "loss/policy" not in figures
    assert torch.equal(weights(engine), before)
    assert engine.step_index == 1, "a skipped step also advances the learning-rate schedule"
    if name == "dpo":
        assert objective.describe(batch)["objective/tie_rate"].value() == 1


@pytest.mark.parametrize("dtype", [Dtype.float32, Dtype.float16])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_stops_before_any_weight_changes(bad, dtype):
    class Broken(SFT):
        def loss(self, forward, batch):
            loss, figures = super().loss(forward, batch)
            return {"policy": loss["policy"] * bad}, figures

    engine = engine_of(dtype=dtype)
    before = weights(engine).clone()
    with pytest.raises(NonFinite) as stopped:
        engine.step(scored(), Broken(SFTConfig()))
    assert stopped.value.index == list(range(8))
    assert torch.equal(weights(engine), before)


@pytest.mark.parametrize(
    ("settings", "computed"),  # for these needs
    [
        ({}, set()),
        ({"stale": True}, {"old_logprobs", "correction"}),
        ({"exact_sampler": False}, {"correction"}),
        ({"steps_per_batch": 2}, {"old_logprobs", "correction", "ratio"}),
    ],
)
def test_old_logprobs_are_computed_only_if_they_can_differ_from_those_of_the_step(settings, computed):
    engine, batch = engine_of(**settings), scored(2)
    for need in ("ratio", "old_logprobs", "correction"):
        found = engine.annotate(batch, frozenset({need})).old_logprobs
        assert (found is not None) is (need in computed)


def test_policy_and_value_model_are_optimizer_groups_with_separate_learning_rates():
    engine = engine_of(critic=True, value_lr=5e-3)
    actor, critic = engine.optimizer.param_groups
    parts = engine.module.actor, engine.module.critic
    for group, part in zip((actor, critic), parts, strict=True):
        assert {id(p) for p in group["params"]} == {id(p) for p in part.parameters()}
    objective = ppo()
    engine.step(objective.credit(engine.annotate(scored(), objective.needs)), objective)
    assert (actor["lr"], critic["lr"]) == pytest.approx((1e-3, 5e-3))
    engine.step(objective.credit(engine.annotate(scored(), objective.needs)), objective)
    assert (actor["lr"], critic["lr"]) == pytest.approx((0.9e-3, 4.5e-3)), "both follow the schedule"


def test_the_value_model_is_trained_only_by_the_value_loss():
    for weight, moved in ((0.0, "actor"), (0.1, "both")):
        engine = engine_of(critic=True, optim={"lr": 1e-2})
        before = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
        objective = ppo(vf_coef=weight)
        engine.step(objective.credit(engine.annotate(scored(), objective.needs)), objective)
        changed = {
            name.partition(".")[0]
            for name, p in engine.module.named_parameters()
            if not torch.equal(p, before[name])
        }
        assert changed == ({"actor"} if moved == "actor" else {"actor", "critic"})


def test_an_actor_critic_is_saved_and_loaded_with_its_optimizer(tmp_path):
    objective = ppo()
    engine = engine_of(critic=True, value_lr=5e-3)
    engine.tokenizer = tiny_tokenizer()
    batch = objective.credit(engine.annotate(scored(), objective.needs))
    engine.step(batch, objective)
    engine.save(tmp_path)
    again = engine_of(critic=True, value_lr=5e-3)
    again.load(tmp_path)
    for one in (engine, again):
        one.step(batch, objective)
    assert torch.equal(weights(engine), weights(again))


def test_the_generator_receives_only_the_policy_of_an_actor_critic():
    engine = engine_of(critic=True)
    assert dict(engine.weights()).keys() == engine.module.actor.model.state_dict().keys()
    with engine.borrow_policy() as model:
        assert model is engine.policy.model


def test_annotation_does_not_depend_on_micro_batches():
    needs = frozenset({"ref_logprobs"})
    small = engine_of(micro_batch=2).annotate(scored(), needs).ref_logprobs
    large = engine_of(micro_batch=16).annotate(scored(), needs).ref_logprobs
    torch.testing.assert_close(small, large, rtol=0, atol=1e-5)
    assert small.shape == scored().response_ids.shape
    assert (small[~scored().response_mask] == 0).all()


@pytest.mark.parametrize(
    ("dtype", "loss", "norm"), [(Dtype.bfloat16, 2e-2, 0.1), (Dtype.float16, 5e-3, 2e-2)]
)
def test_16_bits_compute_near_float32_and_keep_float32_weights(dtype, loss, norm):
    exact, _ = step(OnlineDPO(DPOConfig()))
    rough, engine = step(OnlineDPO(DPOConfig()), dtype=dtype)
    assert rough["loss/policy"] == pytest.approx(exact["loss/policy"], rel=loss)
    assert rough["policy/grad_norm"] == pytest.approx(exact["policy/grad_norm"], rel=norm)
    assert rough.get("policy/overflows") == (0 if dtype is Dtype.float16 else None)
    assert "policy/overflows" not in exact
    assert all(p.dtype == torch.float32 for p in engine.module.parameters())
    assert not any(p.requires_grad for p in engine.reference.parameters())


@pytest.mark.parametrize("dtype", Dtype)
def test_autocast_computes_matrix_products_in_the_given_dtype(dtype):
    x = torch.ones(2, 2)
    with autocast(torch.device("cpu"), dtype):
        assert (x @ x).dtype is getattr(torch, dtype.value)


class Scaled(SFT):
    """An SFT loss whose scaled gradient overflows if its largest element exceeds `fits`."""

    def __init__(self, fits):
        super().__init__(SFTConfig())
        self.fits = fits

    def loss(self, forward, batch):
        loss, figures = super().loss(forward, batch)
        loss["policy"].register_hook(lambda grad: grad if grad.abs().max() <= self.fits else grad * math.inf)
        return loss, figures


def test_float16_scales_the_loss_so_that_small_gradients_do_not_underflow():
    class Small(SFT):
        loss_weights = {"policy": 1e-6}

    exact, _ = step(Small(SFTConfig()))
    rough, engine = step(Small(SFTConfig()), dtype=Dtype.float16)
    assert engine.scaler.get_scale() == 2**16
    assert rough["policy/grad_norm"] == pytest.approx(exact["policy/grad_norm"], rel=5e-2)
    clipped, engine = step(SFT(SFTConfig()), dtype=Dtype.float16, optim={"max_grad_norm": 1e-3})
    assert clipped["policy/grad_norm"] > 1e-2, "the norm is computed from unscaled gradients"
    assert gradient(engine).norm().item() == pytest.approx(1e-3, rel=1e-3)


def test_an_overflow_skips_the_step_and_lowers_the_scale(tmp_path):
    count = SFT(SFTConfig()).count(scored())["policy"]
    objective = Scaled(fits=2**14 / count)
    engine = engine_of(dtype=Dtype.float16)
    before = weights(engine).clone()
    figures = [engine.step(scored(), objective) for _ in range(3)]
    assert [row["policy/overflows"].value() for row in figures] == [1, 1, 0]
    assert all(math.isfinite(stat.value()) for row in figures for stat in row.values())
    assert "policy/grad_norm" not in figures[0] and figures[2]["policy/grad_norm"].value() > 0
    assert engine.scaler.get_scale() == 2**14 and engine.step_index == 3
    assert not torch.equal(weights(engine), before)

    engine.tokenizer = tiny_tokenizer()
    engine.save(tmp_path)
    again = engine_of(dtype=Dtype.float16)
    again.load(tmp_path)
    assert again.scaler.get_scale() == 2**14


@pytest.mark.parametrize(("dtype", "skipped"), [(Dtype.float16, 16), (Dtype.float32, 0)])
def test_overflows_that_persist_at_lower_scales_stop_the_run(dtype, skipped):
    engine = engine_of(dtype=dtype)
    before = weights(engine).clone()
    for _ in range(skipped):
        assert engine.step(scored(), Scaled(fits=0))["policy/overflows"].value() == 1
    with pytest.raises(NonFinite):
        engine.step(scored(), Scaled(fits=0))
    assert torch.equal(weights(engine), before)


def test_the_learning_rate_warms_up_then_follows_its_schedule():
    def rates(**settings):
        return [learning_rate(OptimConfig(lr=1.0, **settings), step, 10) for step in range(10)]

    assert rates(schedule=LRSchedule.constant) == [1.0] * 10
    assert rates(schedule=LRSchedule.linear) == pytest.approx([1 - s / 10 for s in range(10)])
    assert rates(schedule=LRSchedule.cosine)[5] == pytest.approx(0.5)
    warm = rates(schedule=LRSchedule.linear, warmup=2)
    assert warm[:2] == pytest.approx([1 / 3, 2 / 3])
    assert warm[2] == 1.0 and warm[9] == pytest.approx(1 / 8)
    assert rates(schedule=LRSchedule.linear, warmup=0.2) == warm


def test_metrics_of_the_sampler_cover_prompts_that_are_rejected_as_a_whole():
    """Micro-batches of one prompt; the first prompt is rejected, of the second one response of two."""
    objective = make(
        SCHEMAS["schema/algo/rloo"](
            kl_coef=0.0, correction=CorrectionConfig(reject=Reject.mean, reject_low=0.9, reject_high=1.1)
        )
    )
    for far, skipped in [([0, 1, 2], 0), (range(16), 1)]:
        engine = engine_of(micro_batch=2, stale=True)
        batch = scored()
        rows = torch.tensor([float(row in far) for row in range(16)]).view(8, 2, 1)
        batch.behaviour_logprobs = batch.behaviour_logprobs - 0.5 * rows * batch.response_mask
        batch = objective.credit(engine.annotate(batch, objective.needs))
        found = {name: stat.value() for name, stat in engine.step(batch, objective).items()}
        tokens, rows = batch.response_mask.sum(-1), rows[..., 0]
        share = float((rows * tokens).sum() / tokens.sum())
        assert found["correction/rejected"] == pytest.approx(share)
        assert found["policy/skipped_steps"] == skipped
        weights = (0.5 * rows * tokens).double().exp()
        assert found["mismatch/ess"] == pytest.approx(
            float(weights.sum() ** 2 / weights.square().sum() / 16), abs=1e-4
        )
        assert found["mismatch/max_ratio"] == pytest.approx(math.exp(0.5), abs=1e-4)
        assert found["mismatch/kl"] == pytest.approx(share * (math.exp(0.5) - 1.5), abs=1e-4)


def test_metrics_of_the_sampler_cover_ties_if_the_log_probs_before_the_update_are_known():
    objective = make(SCHEMAS["schema/algo/grpo"](kl_coef=0.0))
    engine = engine_of(micro_batch=2, steps_per_batch=2)
    batch = scored()
    batch.scores[1:] = 1.0
    batch.behaviour_logprobs = batch.behaviour_logprobs - 0.5 * batch.response_mask
    batch = objective.credit(engine.annotate(batch, objective.needs))
    batch.old_logprobs[0] = batch.behaviour_logprobs[0]  # the only prompt with signal
    found = engine.step(batch, objective)
    rest = float(batch.response_mask[1:].sum() / batch.response_mask.sum())
    assert found["mismatch/kl"].value() == pytest.approx(rest * (math.exp(0.5) - 1.5), abs=1e-4)
    assert found["mismatch/max_ratio"].value() == pytest.approx(math.exp(0.5), abs=1e-4)


def test_a_step_with_gradient_0_multiplies_the_weights_by_1_minus_lr_times_weight_decay():
    engine = engine_of(optim={"lr": 0.5, "weight_decay": 0.1})
    before = weights(engine)
    for parameter in engine.module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    engine.update(0.5)
    torch.testing.assert_close(weights(engine), before * (1 - 0.5 * 0.1))


def test_inference_of_a_16_bit_run_equals_the_module_under_autocast_bit_for_bit():
    engine = engine_of(dtype=Dtype.bfloat16)
    rollouts = tiny_rollouts(2, 2)
    ((_, micro, _),) = microbatches(rollouts, Budget(16))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = engine.policy(micro).logprobs
    found = engine.infer(engine.policy, micro, "logprobs")
    assert torch.equal(found, expected)
    exact = engine_of().infer(engine.policy, micro, "logprobs")
    assert not torch.equal(found, exact), "float32 computes other log-probs"
