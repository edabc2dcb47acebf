"""Tests of all objectives: ratios that overflow float32, and garbage at tokens that are not trained."""

from dataclasses import fields, replace

import pytest
import torch

from rlhf.config.algorithms import (
    Anchor,
    CorrectionConfig,
    CorrectionKind,
    Covariance,
    CovarianceConfig,
    DPOLoss,
    DPPODivergence,
    KLEstimator,
    KLIn,
    M2POForm,
    OAPLAnchor,
    PairWeighting,
    Reject,
    RLOOLoss,
)
from rlhf.config.schema import SCHEMAS
from rlhf.core.batch import Batch, Outputs
from tests.objectives.test_policy_gradient import LENGTHS, SCORES, batch_of, draw, objective_of

POLICY_GRADIENT = (
    "ppo", "rloo", "grpo", "dr_grpo", "dapo", "gspo", "cispo", "m2po", "topr", "dppo", "scalerl"
)  # fmt: skip
LOSS_KL = {"kl_in": KLIn.loss, "kl_coef": 0.1, "kl_estimator": KLEstimator.k3}
VARIANTS = {
    **{name: (name, {}) for name in (*POLICY_GRADIENT, "oapl", "dpo", "bok", "sft")},
    **{f"{name}, kl in the loss": (name, LOSS_KL) for name in POLICY_GRADIENT},
    **{
        f"{name}, kl in the reward": (name, {"kl_in": KLIn.reward, "kl_coef": 0.1})
        for name in ("ppo", "rloo")
    },
    **{f"{name}, entropy": (name, {"entropy_coef": 0.1}) for name in ("ppo", "grpo")},
    "rloo, reinforce": ("rloo", {"loss_type": RLOOLoss.reinforce}),
    "m2po, clip": ("m2po", {"form": M2POForm.clip}),
    "dppo, kl": ("dppo", {"divergence": DPPODivergence.kl}),
    "oapl, reference": ("oapl", {"anchor": OAPLAnchor.reference}),
    "dpo, ipo": ("dpo", {"loss_type": DPOLoss.ipo, "length_normalised": True}),
    "dpo, is": ("dpo", {"weighting": PairWeighting("is")}),
    "dpo, wpo": ("dpo", {"weighting": PairWeighting.wpo}),
    "grpo, dual clip": ("grpo", {"dual_clip": 3.0, "off_policy_mask": 0.5}),
    "grpo, kl-cov": ("grpo", {"covariance": CovarianceConfig(kind=Covariance.kl, share=0.2)}),
    "grpo, clip-cov": (
        "grpo",
        {"covariance": CovarianceConfig(kind=Covariance.clip, share=0.3, low=-9, high=9)},
    ),
    **{
        f"grpo, {kind.value}": ("grpo", {"correction": CorrectionConfig(kind=kind)})
        for kind in CorrectionKind
    },
    **{
        f"grpo, reject by {how.value}": (
            "grpo",
            {"correction": CorrectionConfig(reject=how, reject_limit=0.02)},
        )
        for how in Reject
    },
    "ppo, whitened": ("ppo", {"whiten_rewards": True, "whiten_advantages": True}),
}
GARBAGE = (float("nan"), float("inf"), -float("inf"), -1e30)


def outputs_of(batch: Batch, seed: int = 3) -> Outputs:
    """Return outputs of a forward pass, 0 at padding; log-probs, values and entropy need gradients."""
    old = batch.behaviour_logprobs if batch.old_logprobs is None else batch.old_logprobs
    logprobs = old + 0.3 * (draw(*old.shape, seed=seed) - 0.5) * batch.response_mask
    samples = old.shape[1]
    return Outputs(
        logprobs=logprobs.requires_grad_(),
        values=draw(2, 3, 4, seed=seed + 1)[:, :samples].clone().requires_grad_(),
        entropy=(draw(*old.shape, seed=seed + 2) * batch.response_mask).requires_grad_(),
        log_sum_squares=-draw(*old.shape, seed=seed + 3) * batch.response_mask,
    )


def results(objective, batch: Batch, out: Outputs):
    """Return the sum of the losses, the gradients, and the metrics."""
    sums, figures = objective.loss(lambda _: out, batch)
    leaves = [x for x in out if x is not None and x.requires_grad]
    gradients = torch.autograd.grad(sum(sums.values()), leaves, allow_unused=True)
    return sum(sums.values()).detach(), gradients, {name: stat.value() for name, stat in figures.items()}


def spoiled(x: torch.Tensor, mask: torch.Tensor, value: float) -> torch.Tensor:
    """Return a leaf with `value` where `mask` is False."""
    return torch.where(mask, x.detach(), value).requires_grad_(x.requires_grad)


def start(name, settings, **given):
    objective = objective_of(name, **settings)
    batch = batch_of(SCORES, LENGTHS, **given)
    old = batch.behaviour_logprobs + 0.2 * (draw(2, 3, 3, seed=1) - 0.5) * batch.response_mask
    return objective, replace(batch, old_logprobs=old, trainer_version=2)


@pytest.mark.parametrize("value", GARBAGE)
@pytest.mark.parametrize(("name", "settings"), VARIANTS.values(), ids=VARIANTS)
def test_tokens_that_are_not_trained_change_no_loss_gradient_or_metric(name, settings, value):
    objective, batch = start(name, settings)
    states = torch.nn.functional.pad(batch.response_mask, (1, 0), value=True)
    dirty = replace(
        batch,
        **{
            field: spoiled(getattr(batch, field), batch.response_mask, value)
            for field in ("behaviour_logprobs", "ref_logprobs", "old_logprobs")
        },
        values=spoiled(batch.values, states, value),
    )
    described = [objective_of(name, **settings).describe(each) for each in (batch, dirty)]
    assert {k: v.value() for k, v in described[0].items()} == {k: v.value() for k, v in described[1].items()}
    batch, dirty = objective.credit(batch), objective_of(name, **settings).credit(dirty)
    out, mask = outputs_of(batch), batch.response_mask
    found = Outputs(
        **{
            field: spoiled(x, states[:, : x.shape[1]] if field == "values" else mask, value)
            for field, x in out._asdict().items()
            if x is not None
        }
    )
    loss, gradients, figures = results(objective, batch, out)
    same, others, other_figures = results(objective, dirty, found)
    assert loss.isfinite() and torch.equal(loss, same)
    assert figures == other_figures
    for one, other in zip(gradients, others, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert torch.equal(one, other)
    assert not gradients[0][~mask].any()


@pytest.mark.parametrize("score", [-1.0, 0.0, 1.0])
@pytest.mark.parametrize("anchor", Anchor)
@pytest.mark.parametrize(
    ("name", "settings"), [each for each in VARIANTS.values() if each[0] in POLICY_GRADIENT],
    ids=[key for key, each in VARIANTS.items() if each[0] in POLICY_GRADIENT],
)  # fmt: skip
def test_a_token_that_the_sampler_found_impossible_gives_finite_losses_and_gradients(
    name, settings, anchor, score
):
    if "anchor" not in {f.name for f in fields(SCHEMAS[f"schema/algo/{name}"])}:
        pytest.skip("no anchor")
    objective, batch = start(name, {**settings, "anchor": anchor})
    sampled = batch.behaviour_logprobs.clone()
    sampled[0, 0, 1] = -91.0
    batch = replace(batch, behaviour_logprobs=sampled, old_logprobs=None)
    batch = objective.credit(batch)
    advantages = torch.where(batch.response_mask, torch.sign(batch.advantages), 0.0)
    advantages[0, 0] = score
    out = outputs_of(batch)
    logprobs = out.logprobs.detach().clone()
    logprobs[0, 0, 1] = -2.0
    out = out._replace(logprobs=logprobs.requires_grad_())
    loss, gradients, figures = results(objective, replace(batch, advantages=advantages), out)
    assert loss.isfinite() and all(x.isfinite().all() for x in gradients if x is not None)
    assert all(value is None or torch.tensor(value).isfinite() for value in figures.values()), figures


def test_the_ratio_is_bounded_like_the_importance_weights():
    objective, batch = start("grpo", {"anchor": Anchor.behaviour, "kl_coef": 0.0})
    mask = torch.zeros_like(batch.response_mask)
    mask[0, 0, 0] = True
    batch = replace(batch, response_mask=mask, behaviour_logprobs=torch.full((2, 3, 3), -91.0) * mask)
    batch = replace(batch, advantages=-1.0 * mask, old_logprobs=None)
    out = Outputs(logprobs=(torch.full((2, 3, 3), -2.0) * mask).requires_grad_())
    loss, (gradient,), _ = results(objective, batch, out)
    assert loss == torch.tensor(20.0).exp() and not gradient.any()


def test_a_ratio_at_its_bound_has_the_gradient_of_a_ratio_below_it():
    objective, batch = start("grpo", {"anchor": Anchor.behaviour, "kl_coef": 0.0})
    batch = replace(batch, old_logprobs=None, advantages=-1.0 * batch.response_mask)
    batch = replace(batch, behaviour_logprobs=-24.0 * batch.response_mask)
    out = Outputs(logprobs=(-4.0 * batch.response_mask).requires_grad_())
    loss, (gradient,), _ = results(objective, batch, out)
    torch.testing.assert_close(gradient.sum(), loss)  # the derivative of the ratio is the ratio


@pytest.mark.parametrize("how", [Reject.token, Reject.max])
def test_a_rejected_token_is_selected_away_whatever_its_loss(how):
    settings = {"correction": CorrectionConfig(reject=how, reject_low=0.5, reject_high=2.0), "kl_coef": 0.0}
    objective, batch = start("dapo", settings)
    sampled = batch.behaviour_logprobs.clone()
    sampled[0, 0, 1] = -91.0
    batch = objective.credit(replace(batch, behaviour_logprobs=sampled))
    kept = batch.per_token["trained"]
    assert not kept[0, 0, 1] and kept.any()
    loss, gradients, _ = results(objective, batch, outputs_of(batch))
    assert loss.isfinite() and not gradients[0][~kept].any()
