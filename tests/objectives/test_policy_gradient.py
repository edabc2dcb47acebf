"""Facts about the policy-gradient objectives that can be derived by hand."""

import math
from dataclasses import replace

import pytest
import torch

from rlhf.assembly.parts import make
from rlhf.config.algo import (
    CorrectionConfig,
    CorrectionKind,
    KLEstimator,
    KLIn,
    Level,
    PolicyGradientConfig,
    RLOOLoss,
    Scale,
    Ties,
)
from rlhf.config.schema import SCHEMAS
from rlhf.core.batch import Batch, Outputs
from rlhf.objectives.objective import Objective

PLAIN = {"kl_coef": 0.0}
GROUPS = ("grpo", "dr_grpo", "dapo", "gspo", "cispo")
SAMPLED = ("ppo", "rloo", *GROUPS)  # those that take ratios


def objective_of(name: str, **settings) -> Objective:
    objective: Objective = make(SCHEMAS[f"schema/algo/{name}"](**settings))
    return objective


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def batch_of(scores, lengths=None, **fields) -> Batch:
    """A batch of responses of three tokens, or of `lengths` [N, K], all sampled with log-prob -1 a token."""
    scores = torch.as_tensor(scores, dtype=torch.float32)
    N, K = scores.shape
    T = 3
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
    """Loss as the engine makes it, its gradient in the log-probs, and figures; by default at ratio 1."""
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


@pytest.mark.parametrize("name", SAMPLED)
def test_with_ratio_1_the_gradient_is_that_of_reinforce_with_the_same_advantages(name):
    objective = objective_of(name, **PLAIN)
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
def test_groups_that_are_all_tied_give_no_gradient_and_say_so(name):
    objective = objective_of(name, **PLAIN)
    batch = batch_of([[0.3, 0.3, 0.3], [2.0, 2.0, 2.0]])
    assert objective.describe(batch)["objective/tie_rate"].value() == 1
    loss, gradient, _ = step(objective, objective.credit(batch))
    assert loss == 0 and not gradient.any()


@pytest.mark.parametrize("name", SAMPLED)
def test_at_the_first_step_on_policy_nothing_is_clipped_and_the_ratio_is_1(name):
    objective = objective_of(name)
    _, _, figures = step(objective, objective.credit(batch_of(SCORES, LENGTHS)))
    for figure, expected in {"ratio": 1, "clipfrac": 0, "approxkl": 0}.items():
        assert figures[f"policy/{figure}"] == expected
    assert figures["mismatch/kl"] == 0 and figures["mismatch/max_ratio"] == figures["mismatch/ess"] == 1


@pytest.mark.parametrize("name", SAMPLED)
def test_a_sampler_that_disagrees_with_the_trainer_shows_in_the_ratio_of_the_first_step(name):
    objective = objective_of(name)
    batch = objective.credit(batch_of(SCORES))
    _, _, figures = step(objective, batch, batch.behaviour_logprobs + 0.1)
    assert figures["policy/ratio"] > 1.05
    assert figures["mismatch/max_ratio"] == pytest.approx(math.exp(0.1))
    assert figures["policy/clipfrac"] == 0, (
        "clipping is towards the trainer before the update, which is itself"
    )


def test_rloo_takes_the_ratio_of_the_whole_response_and_clips_it():
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


def test_plain_rloo_is_minus_advantage_times_the_log_prob_of_the_response():
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
    old = torch.tensor([[[-1.0, -1, -1], [-2.0, -1, -1]]])  # what the trainer now says of the same tokens
    batch = objective.credit(batch_of([[0.0, 0.0]], ref_logprobs=ref, old_logprobs=old))
    assert not batch.advantages.any()


def test_gspo_takes_the_geometric_mean_of_the_ratios_of_a_response():
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


def test_grpo_weighs_responses_alike_dapo_tokens_and_dr_grpo_divides_by_what_was_allowed():
    batch = batch_of([[1.0, 0.0]], lengths=[[3, 1]])
    gradients = {}
    for name in ("grpo", "dapo", "dr_grpo"):
        objective = objective_of(name, scale=Scale.none, **PLAIN)
        gradients[name] = step(objective, objective.credit(batch))[1]
    by_hand = {  # advantages are +-1/2, responses have 3 and 1 of 3 allowed tokens
        "grpo": (-1 / 2 / 3 / 2, 1 / 2 / 2),
        "dapo": (-1 / 2 / 4, 1 / 2 / 4),
        "dr_grpo": (-1 / 2 / 6, 1 / 2 / 6),
    }
    for name, (first, second) in by_hand.items():
        expected = torch.tensor([[[first] * 3, [second, 0, 0]]])
        torch.testing.assert_close(gradients[name], expected)


def test_dapo_leaves_more_room_upwards():
    objective = objective_of("dapo")
    batch = objective.credit(batch_of([[1.0, 0.0]]))
    batch.old_logprobs = batch.behaviour_logprobs
    for ratio, clipped in ((1.27, 0), (1.29, 0.5), (0.81, 0), (0.79, 0.5)):
        _, _, figures = step(objective, batch, batch.old_logprobs + math.log(ratio))
        assert figures["policy/clipfrac"] == clipped, ratio


def test_cispo_keeps_the_gradient_of_a_token_whose_weight_is_cut_off():
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
def test_dropped_ties_leave_the_mean_and_kept_ones_count(name):
    batch = batch_of([[1.0, 0.0], [2.0, 2.0]], lengths=[[3, 2], [1, 1]])
    kept, dropped = objective_of(name, **PLAIN), objective_of(name, ties=Ties.drop, **PLAIN)
    assert dropped.credit(batch).signal.tolist() == [True, False]
    assert kept.credit(batch).signal.tolist() == [True, False], "what has no gradient needs no forward"
    assert objective_of(name, kl_coef=0.1).credit(batch).signal is None, "but the KL is of every prompt"
    alone = kept.credit(batch).select(torch.tensor([0]))
    assert dropped.count(dropped.credit(batch)) == kept.count(alone)
    assert kept.count(kept.credit(batch))["policy"] > kept.count(alone)["policy"]


@pytest.mark.parametrize("estimator", KLEstimator)
def test_the_kl_in_the_loss_has_the_gradient_of_the_kl_on_average(estimator):
    """Over all actions of a small policy, weighted by it: sum of p * d(u k) = dKL, whatever the estimator."""
    logits = draw(5).requires_grad_()
    reference = draw(5, seed=1).log_softmax(-1)
    kl = (logits.softmax(-1) * (logits.log_softmax(-1) - reference)).sum()
    (exact,) = torch.autograd.grad(kl, logits)

    objective = objective_of("grpo", kl_coef=1.0, kl_estimator=estimator)
    batch = batch_of(torch.zeros(1, 15), lengths=[[1] * 15])
    logprobs = logits.log_softmax(-1).repeat(3)[None, :, None].expand(1, 15, 3) * batch.response_mask
    batch.behaviour_logprobs = logprobs.detach()
    batch.ref_logprobs = reference.repeat(3)[None, :, None].expand(1, 15, 3) * batch.response_mask
    batch.advantages = torch.zeros_like(logprobs)
    weight = logits.detach().softmax(-1).repeat(3)[None, :, None] / 3
    objective.reduce = lambda losses, mask: (losses * mask * weight).sum()
    loss, _ = objective.policy_loss(logprobs, batch)
    (found,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(found, exact)


def test_the_kl_in_the_loss_is_what_the_coefficient_times_the_estimate_says():
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
    assert objective.describe(batch)["objective/scores"].value() == 3, "the metric is of the scores as given"


# -- corrections -----------------------------------------------------------------------------------


def stale(name, correction) -> tuple[Objective, Batch]:
    """A batch whose first token the trainer finds three times as likely as the sampler did."""
    objective = objective_of(name, correction=correction, **PLAIN)
    batch = batch_of([[1.0, 0.0]])
    batch.old_logprobs = batch.behaviour_logprobs.clone()
    batch.old_logprobs[..., 0] += math.log(3)
    return objective, objective.credit(batch)


def relative(name, kind, level=Level.token, **settings) -> torch.Tensor:
    """How the correction changes the gradient of each token of the first response."""
    objective, batch = stale(name, CorrectionConfig(kind=kind, level=level, **settings))
    plain, _ = stale(name, CorrectionConfig())
    return (step(objective, batch)[1] / step(plain, batch)[1])[0, 0]


@pytest.mark.parametrize("name", ["ppo", "grpo", "dr_grpo", "dapo", "cispo"])
def test_token_weights_are_truncated_masked_or_taken_as_they_are(name):
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


def test_corrections_carry_no_gradient_and_do_nothing_on_policy():
    for kind in CorrectionKind:
        objective = objective_of("grpo", correction=CorrectionConfig(kind=kind), **PLAIN)
        plain = objective_of("grpo", **PLAIN)
        batch = objective.credit(batch_of(SCORES, LENGTHS))
        torch.testing.assert_close(step(objective, batch)[1], step(plain, batch)[1])


def test_mismatch_figures_are_of_the_trainer_before_the_update_against_the_sampler():
    objective, batch = stale("grpo", CorrectionConfig())
    _, _, figures = step(objective, batch, batch.old_logprobs - 0.5)
    weights = torch.tensor([3.0, 1.0, 1.0])
    assert figures["mismatch/max_ratio"] == pytest.approx(3)
    assert figures["mismatch/kl"] == pytest.approx((3 - 1 - math.log(3)) / 3)
    assert figures["mismatch/ess"] == pytest.approx((weights.sum() ** 2 / 3 / weights.square().sum()).item())


def test_what_a_correction_changed_is_counted():
    for kind, name in ((CorrectionKind.truncate, "truncated"), (CorrectionKind.mask, "masked")):
        objective, batch = stale("grpo", CorrectionConfig(kind=kind))
        assert step(objective, batch)[2][f"correction/{name}"] == pytest.approx(1 / 3)


def test_an_objective_asks_for_the_trainer_before_the_update_only_where_it_reads_it():
    assert "old_logprobs" in objective_of("rloo").needs, "its reward holds the KL of that policy"
    assert "old_logprobs" not in objective_of("rloo", kl_coef=0.0).needs
    assert "old_logprobs" not in objective_of("grpo").needs
    for name in SAMPLED:
        assert {"ratio", "ref_logprobs"} <= objective_of(name).needs


def test_every_policy_gradient_objective_has_the_shared_settings():
    for name in SAMPLED:
        assert issubclass(SCHEMAS[f"schema/algo/{name}"], PolicyGradientConfig)
