"""Tests of corrections and objectives against losses and gradients of other implementations.

These are verl, OpenRLHF, TRL, AReaL, slime, Trinity-RFT and the code of the authors, or formulas in float64.
The golden values are functions of fixed log-probs, so no model is needed (see the README of the folder).
"""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from rlhf.assembly.parts import make
from rlhf.config.algorithms import (
    Advantage,
    Anchor,
    CorrectionConfig,
    CorrectionKind,
    Covariance,
    CovarianceConfig,
    Divergence,
    DPPODivergence,
    KLIn,
    Level,
    M2POForm,
    Mean,
    OAPLAnchor,
    Reject,
    RLOOLoss,
    Scale,
)
from rlhf.config.run import OptimConfig
from rlhf.config.schema import SCHEMAS
from rlhf.core.batch import Batch, Budget, Outputs
from rlhf.engines.engine import EngineSettings, TorchEngine
from rlhf.objectives.objective import mismatch
from rlhf.processes.ranks import ALONE
from tests import needs

GOLDEN = Path(__file__).parents[3] / "shared" / "golden"
pytestmark = pytest.mark.skipif(not GOLDEN.is_dir(), reason=needs.GOLDEN)
PROMPTS = 4


@pytest.fixture(scope="module")
def arrays():
    return np.load(GOLDEN / "methods.npz")


@pytest.fixture(scope="module")
def gradients():
    return {**np.load(GOLDEN / "methods_grads.npz"), **np.load(GOLDEN / "methods_more_grads.npz")}


@pytest.fixture(scope="module")
def cases():
    files = ("methods.json", "methods_more.json")
    return {
        name: case
        for file in files
        for name, case in json.loads((GOLDEN / file).read_text())["cases"].items()
    }


def grouped(rows) -> torch.Tensor:
    """Return rows [K * N, ...], which are in sample-major order, as [N, K, ...] float64."""
    x = torch.as_tensor(np.asarray(rows))
    x = x.double() if x.is_floating_point() else x
    return x.view(-1, PROMPTS, *x.shape[1:]).transpose(0, 1).contiguous()


def batch_of(arrays, sharp: bool = False) -> Batch:
    """Return the recorded batch of K = 4 with its advantages as scores."""
    of = {name: grouped(arrays[f"k4_{name}"]) for name in ("mask", "scores", "advantages", "versions", "ref")}
    names = {"old": "sharp_old", "behaviour": "sharp_behaviour"} if sharp else {}
    old, behaviour = (grouped(arrays[f"k4_{names.get(name, name)}"]) for name in ("old", "behaviour"))
    mask = of["mask"].bool()
    return Batch(
        index=torch.arange(PROMPTS),
        texts=[""] * PROMPTS,
        references=[""] * PROMPTS,
        prompt_ids=torch.ones(PROMPTS, 1, dtype=torch.int64),
        prompt_mask=torch.ones(PROMPTS, 1, dtype=torch.bool),
        response_ids=torch.ones(mask.shape, dtype=torch.int64),
        response_mask=mask,
        ended=torch.ones(mask.shape[:2], dtype=torch.bool),
        behaviour_logprobs=behaviour,
        ref_logprobs=of["ref"],
        old_logprobs=old,
        scores=of["scores"],
        advantages=of["advantages"][:, :, None] * mask,
        token_versions=of["versions"].long().clamp(min=0),
        trainer_version=6,  # the update makes version 7
    )


def settings(name: str, **keys):
    """Return the objective of an algorithm without KL penalty."""
    return make(SCHEMAS[f"schema/algo/{name}"](samples_per_prompt=4, kl_coef=0.0, kl_in=KLIn.loss, **keys))


def correction(kind=CorrectionKind.none, **keys) -> CorrectionConfig:
    return CorrectionConfig(kind=kind, **keys)


TRUNCATE, MASK, DECOUPLED = CorrectionKind.truncate, CorrectionKind.mask, CorrectionKind.decoupled


def reject(over: Reject, low=0.0, high=None, kind=CorrectionKind.none, **keys) -> CorrectionConfig:
    return correction(kind, reject=over, reject_low=low, reject_high=high, **keys)


def tokens(name="dapo", clip=0.2, **keys):
    """Return a clipped policy gradient with a mean over tokens."""
    return settings(name, clip_low=0.2, clip_high=clip, **keys)


SAMPLER = {"anchor": Anchor.behaviour}
COV = CovarianceConfig
IPO = {"cap": 1e4, "both_sides": True}
NO_LOSS = {"ipo_0.1_0.15_0.01", "prime_rl_dppo_0.2_0.2_0.001"}  # the ratio has the gradient there, not log p

CASES = {
    "verl_token_is_2.0": tokens(correction=correction(TRUNCATE)),
    "verl_sequence_is_2.0": tokens(correction=correction(TRUNCATE, level=Level.sequence)),
    "verl_token_is_0.5_5.0": tokens(correction=correction(MASK, low=0.5, high=5.0)),
    "verl_token_is_2.0_normalised": tokens(correction=correction(TRUNCATE, normalise=True)),
    "verl_rs_seq_mean_k1_0.8_1.25": tokens(correction=reject(Reject.mean, 0.8, 1.25)),
    "verl_rs_seq_mean_k3_0.12": tokens(
        correction=reject(Reject.mean, reject_by=Divergence.k3, reject_limit=0.12)
    ),
    "verl_rs_token_k1_0.5_2.0": tokens(correction=reject(Reject.token, 0.5, 2.0)),
    "verl_sequence_is_2.0_rs_seq_sum_k1_0.25_4.0": tokens(
        correction=reject(Reject.sum, 0.25, 4.0, TRUNCATE, level=Level.sequence)
    ),
    # verl bounds -log w: its 0.6 and 1.4 are the inverses of bounds of w
    "verl_rs_token_k1_asymmetric_0.6_1.4": tokens(correction=reject(Reject.token, 1 / 1.4, 1 / 0.6)),
    "veto_0.3_token_tis_2": tokens(correction=reject(Reject.max, 0.3, None, TRUNCATE)),
    "openrlhf_icepop_0.5_5.0_token_mean": tokens(clip=0.28, correction=correction(MASK, low=0.5, high=5.0)),
    "openrlhf_tis_0.5_2.0_token_mean": tokens(clip=0.28, correction=correction(TRUNCATE, floor=0.5)),
    "openrlhf_seq-mask-tis_0.8_1.25_token_mean": tokens(
        clip=0.28, correction=reject(Reject.mean, 0.8, 1.25, DECOUPLED, reject_counted=True)
    ),
    "trl_dapo_sequence_mask__3.0": tokens(
        correction=correction(MASK, level=Level.sequence, low=0.0, high=3.0)
    ),
    "trl_grpo_token_mask_0.5_2.0": tokens("grpo", correction=correction(MASK)),
    "trl_dapo_opsm_0.05_uncorrected": tokens(off_policy_mask=0.05),
    "areal_token_clamp_2.0": tokens(correction=correction(TRUNCATE)),
    "areal_token_clamp_none": tokens(correction=correction(DECOUPLED)),
    "areal_token_mask_2.0_0.5": tokens(correction=correction(MASK)),
    "areal_sequence_mask_1.2_0.8": tokens(
        correction=correction(MASK, level=Level.geometric, low=0.8, high=1.2)
    ),
    "areal_m2po_0.04": tokens(correction=correction(DECOUPLED, reject=Reject.m2, reject_limit=0.04)),
    "areal_prox_loglinear": tokens(anchor=Anchor.loglinear, correction=correction(TRUNCATE, cap=5.0)),
    "m2po_authors_0.04_None_None": settings("m2po", form=M2POForm.clip),
    "m2po_mask_0.04": settings("m2po"),
    "topr_sequence_scores": settings("topr", advantage=Advantage.none),
    "trinity_topr_token_advantages": settings("topr", level=Level.token),
    "verl_bypass_reinforce_sequence_2.0": settings(
        "rloo", loss_type=RLOOLoss.reinforce, correction=correction(TRUNCATE, level=Level.sequence)
    ),
    "verl_cispo_1.0_4.0_token-mean": settings("cispo", **SAMPLER),
    "scalerl_4.0": settings("scalerl", cap=4.0),
    "verl_dppo_tv_0.15_0.15_10000": settings("dppo", cap=1e4),
    "verl_dppo_kl_0.05_0.05_10000": settings(
        "dppo", divergence=DPPODivergence.kl, limit_low=0.05, limit_high=0.05, cap=1e4
    ),
    "stable_rl_dppo_binary_tv": settings("dppo", cap=10.0),
    "verl_dual_clip_3.0": tokens(dual_clip=3.0, **SAMPLER),
    "verl_kl_cov_0.05_1.0": tokens(covariance=COV(kind=Covariance.kl, share=0.05)),
    "verl_clip_cov_all_0.5_5.0": tokens(covariance=COV(kind=Covariance.clip, share=1.0, low=0.5)),
    "areal_sapo_1.0_1.05": settings("sapo"),
    "vespo_behaviour": settings("vespo"),
    "prox_linear_clip_0.2_cap_2": tokens(anchor=Anchor.linear, correction=correction(TRUNCATE)),
    "m2po_clip_0.04_least_0.25_0.4": settings("m2po", form=M2POForm.clip, least_low=0.25, least_high=0.4),
    "rs_mean_k1_0.85_1.2_max_k3_0.8": tokens(correction=reject(Reject.mean, 0.85, 1.2, TRUNCATE, veto=0.8)),
    "ipo_0.1_0.15_0.01": settings("dppo", **IPO, limit_low=0.1, limit_high=0.15, square_coef=0.01),
    "prime_rl_dppo_0.2_0.2_0.001": settings("dppo", cap=1e4, limit_low=0.2, limit_high=0.2, square_coef=1e-3),
    "cispo_0.3_0.5_responses": settings("cispo", clip_low=0.3, clip_high=0.5, mean=Mean.responses, **SAMPLER),
    "topr_token_sign_of_score": settings("topr", level=Level.token, sign_of_score=True, anchor=Anchor.old),
    "gpg_responses": settings("gpg"),
    "reinforce_pp_kl_0.05": make(SCHEMAS["schema/algo/reinforce_pp"](samples_per_prompt=4, kl_coef=0.05)),
    "oapl_1.0_0.001": make(SCHEMAS["schema/algo/oapl"]()),
    "trl_a2po_0.5_0.001": make(SCHEMAS["schema/algo/oapl"](anchor=OAPLAnchor.reference, beta_value=0.5)),
}
FROM_SCORES = {
    "topr_sequence_scores",
    "scalerl_4.0",
    "oapl_1.0_0.001",
    "trl_a2po_0.5_0.001",
    "gpg_responses",
    "reinforce_pp_kl_0.05",
}
# Limits that these cases select with the policy, which is the trainer before the update in a first step
SELECTED_NOW = ("m2po_", "verl_kl_cov", "verl_clip_cov")


def prepared(name, objective, arrays) -> tuple[Batch, torch.Tensor]:
    """Return the batch of a case after credit, and the policy's log-probs [N, K, T] that need a gradient."""
    sharp = "dppo" in name or "ipo_" in name
    batch = batch_of(arrays, sharp)
    policy = grouped(arrays["k4_sharp_policy" if sharp else "k4_policy"]).requires_grad_()
    if name in FROM_SCORES:
        return objective.credit(batch), policy
    if name.startswith(SELECTED_NOW):
        credited = objective.coupled(replace(batch, old_logprobs=policy.detach()))
        return replace(credited, old_logprobs=batch.old_logprobs), policy
    if "bypass" in name:  # the weights come from the policy itself
        batch = replace(batch, old_logprobs=None)
    return objective.coupled(batch), policy


def mean_loss(objective, batch: Batch, policy: torch.Tensor) -> torch.Tensor:
    """Return the loss of log-probs, divided by its count."""
    sums, _ = objective.loss(lambda _: Outputs(logprobs=policy), batch)
    return sums["policy"] / objective.count(batch)["policy"]


class Stored(nn.Module):
    """A policy whose log-probs [N, K, T] are its parameters."""

    def __init__(self, logprobs: torch.Tensor) -> None:
        super().__init__()
        self.logprobs = nn.Parameter(logprobs.detach())

    def forward(self, batch: Batch) -> Outputs:
        return Outputs(logprobs=self.logprobs[batch.index][..., : batch.response_ids.shape[-1]])


@pytest.mark.parametrize("micro", [16, 1])
@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_equal_those_of_the_other_implementation(name, micro, arrays, gradients, cases):
    objective, case = CASES[name], cases[name]
    batch, policy = prepared(name, objective, arrays)
    budget = Budget(micro)
    settings = EngineSettings(
        optim=OptimConfig(lr=1.0),
        total_steps=1,
        steps_per_batch=1,
        budget=budget,
        inference=budget,
        stale=True,
    )
    engine = TorchEngine(Stored(policy), None, None, ALONE, settings)

    found = engine.forward_backward(batch, objective)

    if name not in NO_LOSS:
        assert found.losses["policy"].item() == pytest.approx(case["loss"], rel=1e-5, abs=1e-7)
    expected = grouped(gradients[name]).to(policy)
    torch.testing.assert_close(engine.module.logprobs.grad, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", CASES)
def test_gradient_equals_finite_differences_of_the_loss(name, arrays, monkeypatch):
    """Values that the formula takes without gradient stay those of the undisturbed policy."""
    objective = CASES[name]
    batch, policy = prepared(name, objective, arrays)
    detach, fixed = torch.Tensor.detach, []

    def loss_of(logprobs):
        places = itertools.count()

        def replay(tensor):
            if (place := next(places)) == len(fixed):
                fixed.append(detach(tensor))
            return fixed[place]

        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "detach", replay)
            return mean_loss(objective, batch, logprobs)

    (gradient,) = torch.autograd.grad(loss_of(policy), policy)
    policy, step = policy.detach(), 1e-6
    smooth = torch.ones_like(batch.response_mask)
    if name.startswith("m2po_authors"):  # the bound is the log-ratio of a token, where the loss has a kink
        smooth = (policy - batch.behaviour_logprobs).abs() != batch.per_token["reach"]
    for seed in range(3):
        rng = torch.Generator().manual_seed(seed)
        direction = torch.randn(policy.shape, generator=rng, dtype=policy.dtype) * smooth
        rise = loss_of(policy + step * direction) - loss_of(policy - step * direction)
        expected = (gradient * direction).sum().item()
        assert rise.item() / (2 * step) == pytest.approx(expected, rel=1e-6, abs=1e-8)


def test_gpg_equals_the_other_implementation_but_for_its_factor(arrays, gradients, cases):
    """The other one multiplies by responses / responses with a score."""
    objective, batch = settings("gpg", mean=Mean.tokens), batch_of(arrays)
    right = batch.scores > 0.3
    policy = grouped(arrays["k4_policy"]).requires_grad_()
    loss = mean_loss(objective, objective.credit(replace(batch, scores=right.double())), policy)
    loss = loss * right.numel() / right.sum()
    (gradient,) = torch.autograd.grad(loss, policy)
    assert loss.item() == pytest.approx(cases["verl_gpg_binary"]["loss"], rel=1e-5)
    expected = grouped(gradients["verl_gpg_binary"]).to(gradient)
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-7)


def test_advantages_of_reinforce_pp_equal_those_of_the_other_implementation(arrays, cases):
    objective = settings("reinforce_pp", advantage=Advantage.mean)
    batch = objective.credit(batch_of(arrays))
    expected = grouped(np.array(cases["verl_reinforce_plus_plus_baseline"]["figures"]["advantages"]))
    torch.testing.assert_close(batch.advantages[..., 0], expected, rtol=1e-6, atol=1e-8)


def test_length_weighted_advantages_equal_those_of_the_other_implementation(arrays, cases):
    objective = settings("grpo", advantage=Advantage.opo, scale=Scale.none)
    batch = objective.credit(batch_of(arrays))
    expected = grouped(np.array(cases["verl_opo"]["figures"]["advantages"]))
    torch.testing.assert_close(batch.advantages[..., 0], expected)


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("verl") and "_rs_" in name])
def test_the_share_of_rejected_tokens_equals_that_of_the_other_implementation(name, arrays, cases):
    objective = CASES[name]
    batch, _ = prepared(name, objective, arrays)
    found = objective.observe(batch)["correction/rejected"].value()
    assert found == pytest.approx(cases[name]["figures"]["rollout_rs_masked_fraction"], rel=1e-6)


def test_the_kl_between_sampler_and_trainer_equals_that_of_the_other_implementation(arrays, cases):
    batch = batch_of(arrays)
    found = mismatch(batch.old_logprobs, batch)["mismatch/kl"].value()
    assert found == pytest.approx(cases["verl_offpolicy_metrics"]["figures"]["k3_kl"], rel=1e-6)
