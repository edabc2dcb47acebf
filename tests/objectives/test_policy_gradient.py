"""Tests of the policy-gradient objectives against values derived by hand."""

import math
from dataclasses import replace

import pytest
import torch

from rlhf.assembly.parts import make
from rlhf.config.algorithms import (
    Anchor,
    CorrectionConfig,
    CorrectionKind,
    KLEstimator,
    KLIn,
    Level,
    RLOOLoss,
    Scale,
    Ties,
)
from rlhf.config.schema import SCHEMAS
from rlhf.core.batch import Batch, Budget, Outputs, microbatches
from rlhf.objectives.objective import Objective

PLAIN = {"kl_coef": 0.0}
GROUPS = ("grpo", "dr_grpo", "dapo", "gspo", "cispo")
SAMPLED = ("ppo", "rloo", *GROUPS)  # objectives that use importance ratios


def objective_of(name: str, **settings) -> Objective:
    objective: Objective = make(SCHEMAS[f"schema/algo/{name}"](**settings))
    return objective


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def batch_of(scores, lengths=None, length=3, **fields) -> Batch:
    """Return a batch of responses with `length` or `lengths` [N, K] tokens, each sampled with log-prob -1."""
    scores = torch.as_tensor(scores, dtype=torch.float32)
    N, K = scores.shape
    T = length
    lengths = torch.full((N, K), T) if lengths is None else torch.tensor(lengths)
    mask = torch.arange(T) < lengths[..., None]
    sampled = -torch.ones(N, K, T) * mask
    batch = Batch(
        index=torch.arange(N),
        texts=["p"] * N,
        references=["r"] * N,
        prompt_ids=torch.ones(N, 2, dtype=torch.int64),
        prompt_mask=torch.ones(N, 2, dtype=torch.bool),
        response_ids=torch.ones(N, K, T, dtype=torch.int64),
        response_mask=mask,
        ended=torch.ones(N, K, dtype=torch.bool),
        behaviour_logprobs=sampled,
        ref_logprobs=sampled.clone(),
        values=draw(N, K, T + 1, seed=5),
        scores=scores,
    )
    return replace(batch, **fields)


def step(objective, batch, logprobs=None):
    """Return the loss as the engine computes it, its gradient with respect to the log-probs, and the metrics.

    By default `logprobs` are the old or else the sampled log-probs, so that all ratios are 1.
    """
    if logprobs is None:
        logprobs = batch.behaviour_logprobs if batch.old_logprobs is None else batch.old_logprobs
    logprobs = logprobs.clone().requires_grad_()
    values = None if batch.values is None else batch.values.clone()
    sums, figures = objective.loss(lambda _: Outputs(logprobs=logprobs, values=values), batch)
    loss = sums["policy"] / objective.count(batch)["policy"]
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return loss.item(), gradient, {name: stat.value() for name, stat in figures.items()}


SCORES = [[1.0, 0.0, 2.0], [0.5, 3.0, 0.25]]
LENGTHS = [[3, 1, 2], [2, 3, 3]]


@pytest.mark.parametrize("clip", [{}, {"clip_low": 0.0, "clip_high": 0.0}], ids=["within", "at"])
@pytest.mark.parametrize("name", SAMPLED)
def test_the_gradient_at_ratio_1_equals_reinforce_with_the_same_advantages(name, clip):
    """The ratio 1 is within the clip range or at its bounds, where `clamp` of torch 2.14 has no gradient."""
    objective = objective_of(name, **PLAIN, **clip)
    batch = objective.credit(batch_of(SCORES, LENGTHS))
    _, gradient, _ = step(objective, batch)

    mask = batch.response_mask
    share = {
        "rloo": 1 / mask.shape[0] / mask.shape[1],  # a mean over responses of a sum over tokens
        "ppo": 1 / mask.sum(),  # a mean over tokens
        "dapo": 1 / mask.sum(),
        "cispo": 1 / mask.sum(),
        "grpo": 1 / mask.sum(-1, keepdim=True) / 6,  # a mean over responses of a mean over tokens
        "gspo": 1 / mask.sum(-1, keepdim=True) / 6,
        "dr_grpo": 1 / mask.numel(),  # a constant
    }[name]
    torch.testing.assert_close(gradient, -batch.advantages * mask * share)
    assert not gradient[~mask].any()


@pytest.mark.parametrize("name", ["rloo", *GROUPS])
def test_tied_groups_give_no_gradient_and_a_tie_rate_of_1(name):
    objective = objective_of(name, **PLAIN)
    batch = batch_of([[0.3, 0.3, 0.3], [2.0, 2.0, 2.0]])
    assert objective.describe(batch)["objective/tie_rate"].value() == 1
    loss, gradient, _ = step(objective, objective.credit(batch))
    assert loss == 0 and not gradient.any()


@pytest.mark.parametrize("name", SAMPLED)
def test_the_first_on_policy_step_has_ratio_1_and_no_clipping(name):
    objective = objective_of(name)
    _, _, figures = step(objective, objective.credit(batch_of(SCORES, LENGTHS)))
    for figure, expected in {"ratio": 1, "clipfrac": 0, "approxkl": 0}.items():
        assert figures[f"policy/{figure}"] == expected
    assert figures["mismatch/kl"] == 0 and figures["mismatch/max_ratio"] == figures["mismatch/ess"] == 1


@pytest.mark.parametrize("name", SAMPLED)
def test_the_ratio_of_the_first_step_shows_a_mismatch_of_sampler_and_trainer(name):
    objective = objective_of(name)
    batch = objective.credit(batch_of(SCORES))
    _, _, figures = step(objective, batch, batch.behaviour_logprobs + 0.1)
    assert figures["policy/ratio"] > 1.05
    assert figures["mismatch/max_ratio"] == pytest.approx(math.exp(0.1))
    assert figures["policy/clipfrac"] == 0, "without old log-probs, clipping compares the policy with itself"


def test_rloo_clips_the_ratio_of_the_whole_response():
    objective = objective_of("rloo", **PLAIN)
    batch = objective.credit(batch_of([[1.0, 0.0]]))
    batch.old_logprobs = batch.behaviour_logprobs
    loss, gradient, figures = step(objective, batch, batch.old_logprobs + 0.05)
    ratio = math.exp(0.15)
    assert figures["policy/ratio"] == pytest.approx(ratio)
    assert loss == pytest.approx((-1 * ratio + 1 * ratio) / 2, abs=1e-6)
    loss, gradient, figures = step(objective, batch, batch.old_logprobs + 0.1)  # ratio 1.35
    assert loss == pytest.approx((-1 * 1.2 + 1 * math.exp(0.3)) / 2, rel=1e-5)
    assert not gradient[0, 0].any() and gradient[0, 1].all()
    assert figures["policy/clipfrac"] == 0.5


def test_rloo_with_reinforce_loss_is_minus_advantage_times_response_logprob():
    objective = objective_of("rloo", loss_type=RLOOLoss.reinforce, **PLAIN)
    batch = objective.credit(batch_of([[1.0, 0.0]], lengths=[[3, 1]]))
    logprobs = torch.tensor([[[-1.0, -2.0, -3.0], [-4.0, 0, 0]]])
    loss, _, _ = step(objective, batch, logprobs)
    assert loss == pytest.approx((6 - 4) / 2)


def test_rloo_subtracts_the_kl_of_the_trainer_before_the_update_from_the_reward():
    objective = objective_of("rloo", kl_coef=0.5)
    ref = torch.tensor([[[-1.0, -1, -1], [-2.0, -1, -1]]])  # KL of the second: 1
    assert objective.credit(batch_of([[0.0, 0.0]], ref_logprobs=ref)).advantages[0, :, 0].tolist() == [
        0.5,
        -0.5,
    ]
    old = torch.tensor([[[-1.0, -1, -1], [-2.0, -1, -1]]])  # the trainer's log-probs of the same tokens
    batch = objective.credit(batch_of([[0.0, 0.0]], ref_logprobs=ref, old_logprobs=old))
    assert not batch.advantages.any()


def test_gspo_uses_the_geometric_mean_of_the_token_ratios_of_a_response():
    objective = objective_of("gspo", clip_low=0.9, clip_high=9.0)
    batch = objective.credit(batch_of([[1.0, 0.0]], lengths=[[3, 2]]))
    batch.old_logprobs = batch.behaviour_logprobs
    change = torch.tensor([[[2.0, 4.0, 1.0], [3.0, 3.0, 100.0]]]).log()  # the last is padding
    loss, _, figures = step(objective, batch, (batch.old_logprobs + change) * batch.response_mask)
    assert figures["policy/ratio"] == pytest.approx((2 + 3) / 2)  # cube root of 8, square root of 9
    first, second = batch.advantages[0, :, 0].tolist()
    assert loss == pytest.approx(-(first * 2 + second * 3) / 2, rel=1e-5)


def test_gspo_clips_whole_responses():
    objective = objective_of("gspo")
    batch = objective.credit(batch_of([[1.0, 0.0]]))
    batch.old_logprobs = batch.behaviour_logprobs
    _, gradient, figures = step(objective, batch, batch.old_logprobs + 1e-3)
    assert figures["policy/clipfrac"] == 0.5
    assert not gradient[0, 0].any() and gradient[0, 1].all()


def test_dapo_clips_increases_later_than_decreases():
    objective = objective_of("dapo")
    batch = objective.credit(batch_of([[1.0, 0.0]]))
    batch.old_logprobs = batch.behaviour_logprobs
    for ratio, clipped in ((1.27, 0), (1.29, 0.5), (0.81, 0), (0.79, 0.5)):
        _, _, figures = step(objective, batch, batch.old_logprobs + math.log(ratio))
        assert figures["policy/clipfrac"] == clipped, ratio


def test_cispo_keeps_the_gradient_of_a_token_whose_weight_is_clipped():
    objective = objective_of("cispo")
    batch = objective.credit(batch_of([[1.0, 0.0]]))
    batch.old_logprobs = batch.behaviour_logprobs
    _, small, figures = step(objective, batch, batch.old_logprobs + math.log(4))
    torch.testing.assert_close(small, -4 * batch.advantages / 6)
    assert figures["policy/clipfrac"] == 0
    _, large, figures = step(objective, batch, batch.old_logprobs + math.log(50))
    torch.testing.assert_close(large, -5 * batch.advantages / 6)
    assert figures["policy/clipfrac"] == 1


@pytest.mark.parametrize("name", GROUPS)
def test_dropped_ties_are_excluded_from_the_count_and_kept_ties_are_included(name):
    batch = batch_of([[1.0, 0.0], [2.0, 2.0]], lengths=[[3, 2], [1, 1]])
    kept, dropped = objective_of(name, **PLAIN), objective_of(name, ties=Ties.drop, **PLAIN)
    assert dropped.credit(batch).signal.tolist() == [True, False]
    assert kept.credit(batch).signal.tolist() == [True, False], "a prompt without gradient needs no forward"
    assert objective_of(name, kl_coef=0.1).credit(batch).signal is None, (
        "with a KL term, every prompt needs a forward"
    )
    alone = kept.credit(batch).select(torch.tensor([0]))
    assert dropped.count(dropped.credit(batch)) == kept.count(alone)
    assert kept.count(kept.credit(batch))["policy"] > kept.count(alone)["policy"]


KL_IN_LOSS = {
    **{name: {} for name in (*SAMPLED, "scalerl", "dppo", "m2po")},
    **{f"topr {level}": {"level": level} for level in Level},
    "gspo behaviour": {"anchor": Anchor.behaviour},
}


@pytest.mark.parametrize("estimator", KLEstimator)
@pytest.mark.parametrize("name", KL_IN_LOSS)
def test_the_kl_in_the_loss_has_the_gradient_of_the_kl_of_responses_of_two_tokens(name, estimator):
    """The sum over all nine responses of two tokens, of three symbols each: p * d(sum_t u k_t) is dKL."""
    logits = (2 * draw(2, 3)).requires_grad_()
    reference = (2 * draw(2, 3, seed=1)).log_softmax(-1)
    kl = (logits.softmax(-1) * (logits.log_softmax(-1) - reference)).sum()
    (exact,) = torch.autograd.grad(kl, logits)

    algo = name.split()[0]
    settings = {"kl_coef": 1.0, "kl_in": KLIn.loss, "kl_estimator": estimator, **KL_IN_LOSS[name]}
    objective = objective_of(algo, **settings)
    pairs = torch.cartesian_prod(torch.arange(3), torch.arange(3))[None]  # [1, 9, 2]

    def of(table):  # [2, 3] -> log-probs [1, 9, 3] of the tokens of each response, 0 at padding
        return torch.cat([table[torch.arange(2), pairs], torch.zeros(1, 9, 1)], -1)

    batch = batch_of(torch.zeros(1, 9), lengths=[[2] * 9], ref_logprobs=of(reference))
    logprobs = of(logits.log_softmax(-1))
    batch.behaviour_logprobs = batch.old_logprobs = logprobs.detach()
    batch.advantages = torch.zeros_like(logprobs)
    chances = logprobs.detach().sum(-1, keepdim=True).exp()
    objective.reduce = lambda losses, mask: (losses * mask * chances).sum()
    loss, _ = objective.policy_loss(Outputs(logprobs=logprobs), objective.coupled(batch))
    (found,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(found, exact)


def test_approxkl_is_half_the_mean_squared_log_ratio_per_token():
    objective = objective_of("grpo", **PLAIN)
    batch = objective.credit(batch_of([[1.0, 0.0]], lengths=[[3, 1]]))
    batch.old_logprobs = batch.behaviour_logprobs
    moved = batch.old_logprobs + torch.tensor([[[0.1, 0.0, -0.3], [0.2, 0.0, 0.0]]])
    _, _, figures = step(objective, batch, moved)
    assert figures["policy/approxkl"] == pytest.approx((0.1**2 + 0.3**2 + 0.2**2) / 4 / 2)
    assert figures["policy/ratio"] == pytest.approx((math.exp(0.1) + 1 + math.exp(-0.3) + math.exp(0.2)) / 4)


def test_dr_grpo_divides_by_the_allowed_length_even_if_all_responses_are_shorter():
    objective = objective_of("dr_grpo", **PLAIN)
    batch = batch_of([[1.0, 0.0]], lengths=[[2, 1]])
    assert objective.count(objective.credit(batch)) == {"policy": 2 * 3}
    for field in ("response_ids", "response_mask", "behaviour_logprobs", "ref_logprobs"):  # T = 8
        setattr(batch, field, torch.nn.functional.pad(getattr(batch, field), (0, 5)))
    batch = objective.credit(batch)
    assert objective.count(batch) == {"policy": 2 * 8}
    ((_, micro, _),) = microbatches(batch, Budget(16))
    assert micro.response_ids.shape[-1] == 2, "a forward is over the longest response only"


def test_the_kl_in_the_loss_is_the_coefficient_times_the_estimate():
    batch = batch_of([[1.0, 1.0]], ref_logprobs=torch.full((1, 2, 3), -1.5))
    objective = objective_of("dapo", kl_coef=0.1, kl_estimator=KLEstimator.k3)
    loss, _, _ = step(objective, objective.credit(batch))
    assert loss == pytest.approx(0.1 * (math.exp(-0.5) - 1 + 0.5), rel=1e-5)


@pytest.mark.parametrize("name", SAMPLED)
@pytest.mark.parametrize("kl_in", KLIn)
def test_the_kl_can_be_in_the_reward_or_in_the_loss_of_every_objective(name, kl_in):
    settings = {"kl_in": kl_in, "kl_estimator": KLEstimator.k3}
    far = batch_of(SCORES, ref_logprobs=-2 * draw(2, 3, 3))
    with_kl, without = (
        objective_of(name, kl_coef=0.5, **settings),
        objective_of(name, kl_coef=0.0, **settings),
    )
    changed = with_kl.credit(far).advantages - without.credit(far).advantages
    assert bool(changed.any()) == (kl_in is KLIn.reward)
    same = far.ref_logprobs * 0 + far.behaviour_logprobs
    near = replace(far, ref_logprobs=same)
    torch.testing.assert_close(step(with_kl, with_kl.credit(near))[1], step(without, without.credit(near))[1])


def test_scores_are_normalised_over_the_batch_then_clipped():
    config = {"normalize_scores": True, "clip_scores": 1.0, "scale": Scale.none, **PLAIN}
    objective = objective_of("dr_grpo", **config)
    batch = batch_of([[0.0, 1.0], [2.0, 9.0]])
    found = objective.scores(batch)
    mean, std = 3.0, torch.tensor([0.0, 1, 2, 9]).std().item()
    assert found.flatten().tolist() == pytest.approx([-3 / std, -2 / std, -1 / std, 1.0])
    assert mean == batch.scores.mean().item()
    assert objective.describe(batch)["objective/scores"].value() == 3, (
        "the metric is computed from the original scores"
    )


# -- corrections -----------------------------------------------------------------------------------


def stale(name, correction) -> tuple[Objective, Batch]:
    """Return an objective and a batch. The trainer finds first tokens 3 times as likely as the sampler."""
    objective = objective_of(name, correction=correction, **PLAIN)
    batch = batch_of([[1.0, 0.0]])
    batch.old_logprobs = batch.behaviour_logprobs.clone()
    batch.old_logprobs[..., 0] += math.log(3)
    return objective, objective.credit(batch)


def relative(name, kind, level=Level.token, **settings) -> torch.Tensor:
    """Return the factor by which the correction changes the gradient of each token of the first response."""
    objective, batch = stale(name, CorrectionConfig(kind=kind, level=level, **settings))
    plain, _ = stale(name, CorrectionConfig())
    return (step(objective, batch)[1] / step(plain, batch)[1])[0, 0]


@pytest.mark.parametrize("name", ["ppo", "grpo", "dr_grpo", "dapo", "cispo"])
def test_token_weights_are_truncated_masked_or_unchanged(name):
    found = {kind: relative(name, kind).tolist() for kind in CorrectionKind}
    assert found[CorrectionKind.none] == pytest.approx([1, 1, 1])
    assert found[CorrectionKind.truncate] == pytest.approx([2, 1, 1])
    assert found[CorrectionKind.mask] == pytest.approx([0, 1, 1])
    assert found[CorrectionKind.decoupled] == pytest.approx([3, 1, 1])


@pytest.mark.parametrize("name", SAMPLED)
def test_a_sequence_weight_is_the_product_over_its_tokens(name):
    assert relative(name, CorrectionKind.truncate, Level.sequence).tolist() == pytest.approx([2, 2, 2])
    assert relative(name, CorrectionKind.mask, Level.sequence).tolist() == pytest.approx([0, 0, 0])
    assert relative(name, CorrectionKind.mask, Level.sequence, high=4.0).tolist() == pytest.approx([3, 3, 3])
    assert relative(name, CorrectionKind.decoupled, Level.sequence).tolist() == pytest.approx([3, 3, 3])


def test_decoupled_ppo_clips_towards_the_trainer_and_weighs_by_trainer_over_sampler():
    objective, batch = stale("ppo", CorrectionConfig(kind=CorrectionKind.decoupled))
    batch.advantages = torch.tensor([[[1.0, 1, 1], [-1.0, -1, -1]]])
    loss, gradient, _ = step(objective, batch, batch.old_logprobs + math.log(1.5))
    by_hand = [-1.2 * (3 + 1 + 1), 1.5 * (3 + 1 + 1)]
    assert loss == pytest.approx(sum(by_hand) / 6, rel=1e-5)
    assert not gradient[0, 0].any()


def test_corrections_report_the_share_of_changed_tokens():
    for kind, name in ((CorrectionKind.truncate, "truncated"), (CorrectionKind.mask, "masked")):
        objective, batch = stale("grpo", CorrectionConfig(kind=kind))
        assert step(objective, batch)[2][f"correction/{name}"] == pytest.approx(1 / 3)
