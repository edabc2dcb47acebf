"""Tests of anchors, rejection and off-policy objectives against values derived by hand."""

import math
from dataclasses import replace

import pytest
import torch

from rlhf.config.algorithms import (
    Anchor,
    CorrectionConfig,
    CorrectionKind,
    Covariance,
    CovarianceConfig,
    Divergence,
    Level,
    M2POForm,
    Reject,
    Ties,
)
from rlhf.core.batch import Outputs
from rlhf.objectives.correction import accepted, clip_bound, importance_weights, largest_kept
from rlhf.objectives.oapl import optimal_value
from tests.objectives.test_policy_gradient import LENGTHS, SCORES, batch_of, draw, objective_of, step

TRUNCATE, DECOUPLED = CorrectionKind.truncate, CorrectionKind.decoupled


def rejecting(reject: Reject, **settings) -> dict:
    return {"correction": CorrectionConfig(reject=reject, **settings)}


OPTIONS = {
    "response by mean": rejecting(Reject.mean, reject_low=0.9, reject_high=1.1),
    "response by sum": rejecting(Reject.sum, reject_by=Divergence.k3, reject_limit=0.01),
    "response by token": rejecting(Reject.max, reject_low=0.9, reject_high=None),
    "token": rejecting(Reject.token, reject_low=0.9, reject_high=1.1, kind=TRUNCATE),
    "m2": rejecting(Reject.m2, kind=DECOUPLED, reject_limit=0.02),
    "counted": rejecting(Reject.mean, reject_low=0.9, reject_high=1.1, reject_counted=True),
    "normalised tokens": {"correction": CorrectionConfig(kind=TRUNCATE, normalise=True)},
    "normalised responses": {
        "correction": CorrectionConfig(kind=TRUNCATE, level=Level.sequence, normalise=True)
    },
    "geometric": {"correction": CorrectionConfig(kind=TRUNCATE, level=Level.geometric)},
    "sampler": {"anchor": Anchor.behaviour},
    "log-linear": {"anchor": Anchor.loglinear, "correction": CorrectionConfig(kind=DECOUPLED)},
    "sequence mask": {"off_policy_mask": 0.02},
    "dual clip": {"dual_clip": 1.05},
}
COUPLED = {
    "kl-cov": {"covariance": CovarianceConfig(kind=Covariance.kl, share=0.2)},
    "clip-cov": {"covariance": CovarianceConfig(kind=Covariance.clip, share=0.3, low=-9, high=9)},
}


def stale_batch(objective):
    """Return a credited batch whose trainer differs from the sampler, and log-probs of the policy."""
    batch = batch_of(SCORES, LENGTHS)
    mask = batch.response_mask
    old = batch.behaviour_logprobs + 0.6 * (draw(2, 3, 3, seed=1) - 0.5) * mask
    policy = old + 0.4 * (draw(2, 3, 3, seed=2) - 0.5) * mask
    return objective.credit(replace(batch, old_logprobs=old, trainer_version=3)), policy


@pytest.mark.parametrize("name", ["ppo", "rloo", "grpo", "dr_grpo", "dapo", "gspo", "cispo"])
@pytest.mark.parametrize("option", OPTIONS)
def test_an_on_policy_batch_has_exactly_the_uncorrected_loss_and_gradient(name, option):
    plain, objective = objective_of(name, kl_coef=0.0), objective_of(name, kl_coef=0.0, **OPTIONS[option])
    batch = batch_of(SCORES, LENGTHS)
    expected, slope, _ = step(plain, plain.credit(batch))
    loss, gradient, _ = step(objective, objective.credit(batch))
    assert loss == expected
    assert torch.equal(gradient, slope)


@pytest.mark.parametrize("name", ["ppo", "grpo", "dapo"])
@pytest.mark.parametrize("option", OPTIONS)
def test_options_change_the_gradient_of_a_stale_batch(name, option):
    plain, objective = objective_of(name, kl_coef=0.0), objective_of(name, kl_coef=0.0, **OPTIONS[option])
    expected, policy = stale_batch(plain)
    batch, _ = stale_batch(objective)
    assert not torch.equal(step(objective, batch, policy)[1], step(plain, expected, policy)[1])


@pytest.mark.parametrize("name", ["grpo", "dapo", "m2po", "topr", "dppo", "scalerl", "oapl"])
@pytest.mark.parametrize("option", [*OPTIONS, *COUPLED])
def test_a_loss_does_not_depend_on_the_size_of_micro_batches(name, option):
    if name == "oapl" or (name != "grpo" and name != "dapo" and option not in ("token", "sequence mask")):
        settings = {}
    else:
        settings = {**OPTIONS, **COUPLED}[option]
    objective = objective_of(name, **settings)
    batch, policy = stale_batch(objective)

    def total(part, logprobs):
        return objective.loss(lambda _: Outputs(logprobs=logprobs), part)[0]["policy"]

    rows = [torch.tensor([0]), torch.tensor([1])]
    parts = sum(total(batch.select(row), policy[row]) for row in rows)
    torch.testing.assert_close(parts, total(batch, policy))


def test_normalised_weights_are_divided_by_their_mean_before_rejection():
    settings = {"kind": DECOUPLED, "normalise": True, "reject_low": 0.5, "reject_high": None}
    for level, mean in ((Level.token, (4 + 1 / 4 + 4 * 1) / 6), (Level.sequence, (1 + 1) / 2)):
        correction = CorrectionConfig(reject=Reject.token, level=level, **settings)
        batch = batch_of([[1.0, 0.0]], [[3, 3]])
        batch.old_logprobs = batch.behaviour_logprobs.clone()
        batch.old_logprobs[0, 0] += torch.tensor([math.log(4), -math.log(4), 0.0])
        batch = objective_of("dapo", correction=correction).credit(batch)
        raw = torch.tensor([[4.0, 0.0, 1.0], [1.0, 1.0, 1.0]])
        expected = raw if level is Level.token else (raw > 0).float()
        torch.testing.assert_close(batch.per_token["weights"][0], expected / mean)


def test_a_rejected_response_leaves_the_sum_and_the_count():
    objective = objective_of("dapo", **rejecting(Reject.mean, reject_low=0.5, reject_high=1.5))
    batch = batch_of([[1.0, 0.0, 2.0]], [[3, 2, 1]])
    batch.old_logprobs = batch.behaviour_logprobs.clone()
    batch.old_logprobs[0, 0] += math.log(1.6)
    batch = objective.credit(batch)
    assert objective.count(batch) == {"policy": 3.0}
    _, gradient, figures = step(objective, batch)
    assert not gradient[0, 0].any()
    torch.testing.assert_close(gradient[0, 1, :2], -batch.advantages[0, 1, :2] / 3)
    assert figures["correction/rejected"] == pytest.approx(0.5)


def test_a_rejected_response_that_is_counted_only_leaves_the_sum():
    objective = objective_of("dapo", **rejecting(Reject.max, reject_high=1.5, reject_counted=True))
    batch = batch_of([[1.0, 0.0, 2.0]], [[3, 2, 1]])
    batch.old_logprobs = batch.behaviour_logprobs.clone()
    batch.old_logprobs[0, 0, 1] += math.log(1.6)
    batch = objective.credit(batch)
    assert objective.count(batch) == {"policy": 6.0}
    assert not step(objective, batch)[1][0, 0].any()


@pytest.mark.parametrize("name", ["grpo", "rloo", "dapo"])
def test_prompts_without_a_trained_token_have_no_signal(name):
    objective = objective_of(name, **rejecting(Reject.mean, reject_high=1.5))
    batch = batch_of(SCORES, LENGTHS)
    batch.old_logprobs = batch.behaviour_logprobs.clone()
    batch.old_logprobs[1] += math.log(2) * batch.response_mask[1]
    assert objective.credit(batch).signal.tolist() == [True, False]


def test_the_value_model_of_ppo_learns_from_rejected_responses():
    objective = objective_of("ppo", **rejecting(Reject.mean, reject_high=1.5))
    batch = batch_of(SCORES, LENGTHS)
    batch.old_logprobs = batch.behaviour_logprobs + math.log(2) * batch.response_mask
    batch = objective.credit(batch)
    assert batch.signal is None
    assert objective.count(batch)["policy"] == 0
    assert objective.count(batch)["value"] > 0


@pytest.mark.parametrize(
    "over, by, limit, kept",
    [
        (Reject.token, Divergence.k1, 0.1, [True, False, True]),
        (Reject.token, Divergence.k2, 0.1, [True, False, True]),
        (Reject.token, Divergence.k2, 0.25, [True, True, True]),  # (log 2)^2 / 2 is 0.24
        (Reject.mean, Divergence.k1, 0.1, [True, True, True]),  # geometric mean 2^(1/3) is below 1.5
        (Reject.sum, Divergence.k1, 0.1, [False, False, False]),  # the product is 2
        (Reject.max, Divergence.k1, 0.1, [False, False, False]),
        (Reject.mean, Divergence.k3, 0.1, [False, False, False]),  # (2 - 1 - log 2) / 3 is above 0.1
    ],
)
def test_bounds_are_bounds_of_the_ratio_or_of_the_divergence(over, by, limit, kept):
    lag = torch.tensor([[[0.0, math.log(2), 0.0]]])
    mask = torch.ones(1, 1, 3, dtype=torch.bool)
    config = CorrectionConfig(reject=over, reject_by=by, reject_low=0.7, reject_high=1.5, reject_limit=limit)
    assert accepted(lag, mask, config)[0, 0].tolist() == kept


def test_the_mean_of_the_squares_that_m2_keeps_is_below_the_limit_not_equal_to_it():
    lag, mask = torch.tensor([[[0.0, 1.0]]]), torch.ones(1, 1, 2, dtype=torch.bool)
    for limit, kept in ((0.5, [True, False]), (0.51, [True, True])):
        config = CorrectionConfig(reject=Reject.m2, reject_limit=limit)
        assert accepted(lag, mask, config)[0, 0].tolist() == kept


def test_the_largest_squares_are_left_out_until_the_mean_is_small_enough():
    squares, everything = torch.tensor([0.25, 2.0, 0.75, 1.5]), torch.ones(4, dtype=torch.bool)
    assert largest_kept(squares, everything, 0.5) == 1.5, "the mean of 0.25 and 0.75 is 0.5"
    assert largest_kept(squares, everything, 0.5, strictly=True) == 0.75
    assert largest_kept(squares, everything, 2.0) == torch.inf
    assert largest_kept(squares, ~everything, 0.5) == torch.inf
    assert largest_kept(squares, everything, 1e-9) == 0.75, "one element always stays"


def test_the_clip_bound_is_the_largest_square_whose_clipped_mean_fits():
    squares = torch.tensor([0.0, 0.125, 0.5, 0.375])
    assert clip_bound(squares, 0.21875) == 0.375, "(0 + 0.125 + 2 * 0.375) / 4 is 0.21875"
    assert clip_bound(squares, 0.2) == 0.125
    assert clip_bound(squares, 0.25) == torch.inf
    assert clip_bound(squares + 1, 0.25) == 0


@pytest.mark.parametrize("form", M2POForm)
def test_m2po_limits_only_tokens_whose_ratio_moved_with_the_advantage(form):
    objective = objective_of("m2po", form=form)
    batch = batch_of([[1.0, 0.0]])
    lag = torch.tensor([[[0.5, -0.5, 0.1], [0.5, -0.5, 0.0]]])
    batch.old_logprobs = batch.behaviour_logprobs + lag
    batch = objective.credit(batch)
    _, gradient, figures = step(objective, batch)
    assert (gradient != 0).tolist() == [[[False, True, True], [True, False, True]]]
    assert figures["policy/clipfrac"] == pytest.approx(2 / 6)


def test_m2po_trains_a_token_whose_log_ratio_is_at_the_limit():
    objective = objective_of("m2po", form=M2POForm.clip, limit=0.1)
    batch = batch_of([[1.0, 0.0]])
    lag = torch.tensor([[[0.5, 0.25, 0.0], [0.0, 0.0, 0.0]]])
    batch.old_logprobs = batch.behaviour_logprobs + lag
    batch = objective.credit(batch)
    assert batch.per_token["reach"].eq(0.25).all()
    _, gradient, _ = step(objective, batch)
    torch.testing.assert_close(gradient, -batch.advantages * lag.exp() * (lag < 0.5) / 6)


def test_the_log_linear_anchor_follows_the_lag_of_each_token():
    objective = objective_of("dapo", anchor=Anchor.loglinear, clip_high=10.0, clip_low=1.0)
    batch = batch_of([[1.0, 0.0]])
    batch.token_versions = torch.tensor([[[3, 2, 0], [3, 2, 0]]])
    batch.trainer_version = 3
    policy = batch.behaviour_logprobs + math.log(16)
    ratios = objective.loss(lambda _: Outputs(logprobs=policy), objective.credit(batch))[1]["policy/ratio"]
    assert ratios.value() == pytest.approx((16 + 4 + 2) / 3, rel=1e-5), (
        "exp((logp - behaviour) / d), d = 1, 2, 4"
    )


def test_the_log_linear_anchor_follows_the_lag_of_a_batch_without_versions_of_tokens():
    objective = objective_of("dapo", anchor=Anchor.loglinear, clip_high=10.0, clip_low=1.0)
    batch = objective.credit(batch_of([[1.0, 0.0]], version=1, trainer_version=3))
    policy = batch.behaviour_logprobs + math.log(8)
    ratios = objective.loss(lambda _: Outputs(logprobs=policy), batch)[1]["policy/ratio"]
    assert ratios.value() == pytest.approx(2.0, rel=1e-5), "exp((logp - behaviour) / 3)"


def test_kl_cov_adds_the_coefficient_times_the_log_ratio_of_the_selected_tokens():
    losses = {}
    for coef in (1.0, 3.0):
        covariance = CovarianceConfig(kind=Covariance.kl, share=0.5, coef=coef)
        objective = objective_of("dapo", kl_coef=0.0, covariance=covariance)
        batch, policy = stale_batch(objective)
        losses[coef] = step(objective, batch, policy)[0]
    selected = batch.per_token["limited"]
    added = 2.0 * (policy - batch.old_logprobs).abs()[selected].sum() / batch.response_mask.sum()
    assert selected.sum() == batch.response_mask.sum() // 2
    assert losses[3.0] - losses[1.0] == pytest.approx(added.item(), rel=1e-4)


def test_clip_cov_selects_only_tokens_whose_covariance_is_within_the_bounds():
    def selected(low, high):
        covariance = CovarianceConfig(kind=Covariance.clip, share=1.0, low=low, high=high)
        batch, _ = stale_batch(objective_of("dapo", kl_coef=0.0, covariance=covariance))
        mask, old = batch.response_mask, batch.old_logprobs
        (advantages, logprobs) = (x - x[mask].mean() for x in (batch.advantages, old))
        return batch.per_token["limited"], mask & (advantages * logprobs > low) & (
            advantages * logprobs < high
        )

    for low, high in ((-0.05, 0.05), (0.0, 9.0), (-9.0, 0.0)):
        found, expected = selected(low, high)
        assert torch.equal(found, expected) and 0 < expected.sum() < 10


def test_the_sequence_mask_drops_bad_responses_that_became_unlikely():
    objective = objective_of("dapo", off_policy_mask=0.1)
    batch = objective.credit(batch_of([[1.0, 0.0], [0.0, 1.0]]))
    policy = batch.behaviour_logprobs.clone()
    policy[0] -= 0.2
    _, gradient, figures = step(objective, batch, policy)
    assert [row.any().item() for row in gradient.flatten(0, 1)] == [True, False, True, True]
    assert figures["policy/off_policy_masked"] == pytest.approx(0.25)
    policy[0] += 0.16  # the mean of the log-ratios of a response is now 0.04, the sum 0.12
    assert step(objective, batch, policy)[2]["policy/off_policy_masked"] == 0.0


def test_the_entropy_bonus_is_subtracted_from_the_loss():
    objective = objective_of("dapo", entropy_coef=0.5)
    batch = objective.credit(batch_of([[1.0, 1.0]]))
    assert "entropy" in objective.needs
    assert batch.signal is None, "a tied prompt has a gradient"
    entropy = torch.full((1, 2, 3), 2.0)
    out = Outputs(logprobs=batch.behaviour_logprobs, entropy=entropy)
    losses, figures = objective.loss(lambda _: out, batch)
    assert losses["policy"].item() == pytest.approx(-0.5 * 2 * 6)
    assert figures["policy/entropy"].value() == 2


@pytest.mark.parametrize(
    "settings, text",
    [
        (
            {"anchor": Anchor.behaviour, "correction": CorrectionConfig(kind=TRUNCATE)},
            "correction.kind must be none",
        ),
        ({"anchor": Anchor.loglinear, **rejecting(Reject.mean)}, "must not be loglinear"),
        ({"correction": CorrectionConfig(cap=0.5, floor=0.9)}, ""),
        ({"dual_clip": 1.0}, "algo.dual_clip must be > 1"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, text):
    config = objective_of("grpo", **settings).config
    sections = [("algo", config), ("algo.correction", config.correction)]
    found = [problem for at, section in sections for problem in section.problems(at)]
    assert len(found) == 1
    assert text in found[0]


@pytest.mark.parametrize("name", ["cispo", "m2po", "topr", "dppo", "scalerl"])
@pytest.mark.parametrize("key", ["dual_clip", "covariance.kind", "clip_low"])
def test_keys_that_the_loss_does_not_use_are_refused(name, key):
    settings = {
        "dual_clip": {"dual_clip": 3.0},
        "covariance.kind": {"covariance": CovarianceConfig(kind=Covariance.kl)},
        "clip_low": {"clip_low": 0.1},
    }[key]
    found = list(objective_of(name, **settings).config.problems("algo"))
    refused = [f"algo.{key} must not be set for algo={name} (its loss does not use it)"]
    assert [problem.partition(", got")[0] for problem in found] == (
        [] if (name, key) == ("cispo", "clip_low") else refused
    )
    assert not list(objective_of("grpo", **settings).config.problems("algo"))


def test_keys_of_a_rejection_have_no_effect_without_it():
    warned = list(CorrectionConfig(reject_low=0.9, cap=5.0).warnings("algo.correction"))
    assert [text.split()[0] for text in warned] == ["algo.correction.cap", "algo.correction.reject_low"]
    assert not list(CorrectionConfig(reject=Reject.mean, reject_low=0.9).warnings("algo.correction"))


def test_needs_follow_from_anchor_and_correction():
    assert {"ratio", "ref_logprobs"} <= objective_of("grpo").needs
    assert "old_logprobs" not in objective_of("grpo").needs | objective_of("rloo", kl_coef=0.0).needs
    assert "ratio" not in objective_of("grpo", anchor=Anchor.behaviour).needs
    assert "ratio" not in objective_of("grpo", anchor=Anchor.loglinear).needs
    assert "correction" not in objective_of("grpo", correction=CorrectionConfig(kind=TRUNCATE)).needs
    assert "correction" in objective_of("grpo", **rejecting(Reject.mean)).needs
    assert "correction" in objective_of("m2po").needs
    for kind in (Covariance.kl, Covariance.clip):
        covariance = CovarianceConfig(kind=kind)
        assert "correction" in objective_of("grpo", covariance=covariance).needs, "the selection reads `old`"
    for name in ("ppo", "rloo"):
        assert "old_logprobs" in objective_of(name).needs, "the KL term of the reward"
        saved = objective_of(name, anchor=Anchor.loglinear).needs & {"ratio", "old_logprobs", "correction"}
        assert not saved, "the log-linear anchor saves the forward pass"


def test_truncated_weights_have_a_floor_and_a_cap_and_both_count_as_truncated():
    lag = torch.tensor([[[math.log(0.1), math.log(1.5), math.log(8.0)]]])
    config = CorrectionConfig(kind=TRUNCATE, floor=0.5, cap=2.0)
    weights, figures = importance_weights(
        lag, torch.zeros_like(lag), torch.ones_like(lag, dtype=bool), config
    )
    assert weights.flatten().tolist() == pytest.approx([0.5, 1.5, 2.0])
    assert figures["correction/truncated"].value() == pytest.approx(2 / 3)


def test_the_optimal_value_of_oapl_is_beta_times_the_log_of_the_mean_of_exponentials():
    scores = torch.tensor([[0.0, math.log(3.0)], [2.0, 2.0]])
    assert optimal_value(scores, 1.0).flatten().tolist() == pytest.approx([math.log((1 + 3) / 2), 2.0])
    assert optimal_value(2 * scores, 2.0).flatten().tolist() == pytest.approx([2 * math.log(2.0), 4.0])


@pytest.mark.parametrize("name", ["rloo", "grpo", "dapo", "gspo"])
@pytest.mark.parametrize("reject", [None, Reject.token])
def test_a_correction_has_an_effect_on_a_stale_batch_and_none_on_policy(name, reject):
    config = CorrectionConfig(kind=TRUNCATE, cap=1.01, reject=reject, reject_low=0.9, reject_high=1.1)
    corrected, plain = (objective_of(name, kl_coef=0.0, **own) for own in ({"correction": config}, {}))
    for on_policy in (False, True):
        batches = (
            objective.credit(replace(stale_batch(plain)[0], on_policy=on_policy, signal=None))
            for objective in (corrected, plain)
        )
        gradients = [
            step(objective, batch)[1] for objective, batch in zip((corrected, plain), batches, strict=True)
        ]
        assert torch.equal(*gradients) is on_policy


@pytest.mark.parametrize(("ties", "counted"), [(Ties.drop, 3.0), (Ties.keep, 6.0)])
def test_tied_prompts_do_not_count_again_when_a_response_is_rejected(ties, counted):
    """One prompt is tied; of the other, the second response (of three tokens) is rejected."""
    objective = objective_of("dapo", kl_coef=0.0, ties=ties, **rejecting(Reject.mean, reject_low=0.9))
    batch = batch_of([[1.0, 0.0], [2.0, 2.0]], lengths=[[3, 3], [1, 2]])
    old = batch.behaviour_logprobs.clone()
    old[0, 1] -= 0.5
    batch = objective.credit(replace(batch, old_logprobs=old, trainer_version=3))
    assert batch.signal.tolist() == [True, False]
    assert objective.count(batch) == {"policy": counted}


def test_a_squared_ratio_trains_prompts_whose_scores_tie():
    assert objective_of("dapo").skips_ties and not objective_of("dapo", square_coef=0.1).skips_ties
    assert objective_of("dapo", square_coef=0.1, ties=Ties.drop).skips_ties
