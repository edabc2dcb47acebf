"""Tests of the objectives against values derived by hand."""

import math

import pytest
import torch

from rlhf.config.algorithms import BestOfKConfig, DPOConfig, DPOLoss, RewardConfig, SFTConfig, Ties
from rlhf.core.batch import Batch, Outputs
from rlhf.objectives.bok import BestOfK
from rlhf.objectives.dpo import OnlineDPO
from rlhf.objectives.objective import drift
from rlhf.objectives.reward_modelling import RewardModelling
from rlhf.objectives.sft import SFT
from tests.objectives.test_policy_gradient import batch_of as sampled


def batch_of(scores, logprobs=None, ref=None, lengths=None) -> Batch:
    """Return a batch with the given scores [N, K], two tokens per response, and ids that tell the sample."""
    scores = torch.tensor(scores, dtype=torch.float32)
    N, K = scores.shape
    ids = torch.arange(N * K).view(N, K, 1).expand(N, K, 2).clone()
    ref = torch.zeros(N, K, 2) if ref is None else ref
    fields = {"response_ids": ids, "behaviour_logprobs": logprobs, "ref_logprobs": ref, "values": None}
    return sampled(scores, lengths or [[2] * K] * N, length=2, **fields)


def forward_of(logprobs):
    return lambda batch: Outputs(logprobs=logprobs)


def test_dpo_loss_is_log2_when_policy_equals_reference():
    logprobs = -torch.rand(3, 2, 2)
    batch = batch_of([[1, 0]] * 3, ref=logprobs)
    loss, _ = OnlineDPO(DPOConfig()).loss(forward_of(logprobs), batch)
    assert loss["policy"].item() / 3 == pytest.approx(math.log(2))


def test_the_margin_uses_summed_logprobs():
    logprobs = torch.tensor([[[-1.0, -1.0], [-3.0, -4.0]]])
    loss, figures = OnlineDPO(DPOConfig(beta=0.1)).loss(forward_of(logprobs), batch_of([[1, 0]]))
    assert loss["policy"].item() == pytest.approx(-math.log(1 / (1 + math.exp(-0.1 * 5))))
    assert figures["rewards/margins"].value() == pytest.approx(0.5)
    assert figures["logps/rejected"].value() == pytest.approx(-7)


def test_dpo_compares_the_best_with_the_worst_of_k():
    pair = OnlineDPO(DPOConfig(samples_per_prompt=4)).credit(batch_of([[1, 5, -2, 3], [9, 0, 4, 0]]))
    assert pair.scores.tolist() == [[5, -2], [9, 0]]
    assert pair.response_ids[:, :, 0].tolist() == [[1, 2], [4, 7]]
    assert pair.ref_logprobs.shape == (2, 2, 2)


def test_a_tied_prompt_has_no_signal_unless_ties_are_kept():
    batch = batch_of([[1, 1, 1], [2, 1, 0]])
    dropped, kept = OnlineDPO(DPOConfig()), OnlineDPO(DPOConfig(ties=Ties.keep))
    assert dropped.credit(batch).signal.tolist() == [False, True]
    assert dropped.count(dropped.credit(batch)) == {"policy": 1}
    assert kept.count(kept.credit(batch)) == {"policy": 2}
    assert kept.credit(batch).response_ids[0, :, 0].tolist() == [0, 2], (
        "a kept tie compares two different responses"
    )


def test_best_of_k_imitates_the_best_and_skips_ties():
    batch = batch_of([[1, 5, -2], [3, 3, 3]])
    objective = BestOfK(BestOfKConfig())
    best = objective.credit(batch)
    assert best.scores.tolist() == [[5], [3]] and best.response_ids[:, 0, 0].tolist() == [1, 3]
    assert best.signal.tolist() == [True, False] and objective.count(best) == {"policy": 1}
    kept = BestOfK(BestOfKConfig(ties=Ties.keep))
    assert kept.count(kept.credit(batch)) == {"policy": 2}
    loss, figures = objective.loss(forward_of(torch.tensor([[[-1.0, -2.0]]])), best.select(torch.tensor([0])))
    assert loss["policy"].item() == 3 and figures["logps/chosen"].value() == -3


@pytest.mark.parametrize(
    "loss_type, smoothing, expected",
    [
        (DPOLoss.sigmoid, 0.0, math.log(1 + math.exp(-0.5))),
        (DPOLoss.sigmoid, 0.1, 0.9 * math.log(1 + math.exp(-0.5)) + 0.1 * math.log(1 + math.exp(0.5))),
        (DPOLoss.robust, 0.1, (0.9 * math.log(1 + math.exp(-0.5)) - 0.1 * math.log(1 + math.exp(0.5))) / 0.8),
        (DPOLoss.hinge, 0.0, 0.5),
        (DPOLoss.ipo, 0.0, 0.0),
    ],
)
def test_losses_of_a_pair_with_margin_5(loss_type, smoothing, expected):
    logprobs = torch.tensor([[[-1.0, -1.0], [-3.0, -4.0]]])
    objective = OnlineDPO(DPOConfig(beta=0.1, loss_type=loss_type, label_smoothing=smoothing))
    loss, _ = objective.loss(forward_of(logprobs), batch_of([[1, 0]]))
    assert loss["policy"].item() == pytest.approx(expected, abs=1e-6)


def test_the_length_normalised_margin_is_a_difference_of_means():
    logprobs = torch.tensor([[[-1.0, -1.0], [-3.0, 0.0]]])
    objective = OnlineDPO(DPOConfig(beta=0.1, length_normalised=True))
    loss, figures = objective.loss(forward_of(logprobs), batch_of([[1, 0]], lengths=[[2, 1]]))
    assert figures["rewards/margins"].value() == pytest.approx(0.1 * (-1 + 3))
    assert loss["policy"].item() == pytest.approx(math.log(1 + math.exp(-0.2)))
    assert figures["logps/chosen"].value() == -2, "the reported log-probs are sums"


def test_held_out_pairs_have_the_loss_accuracy_and_margin_of_the_training_loss():
    logprobs = torch.tensor([[[-1.0, -1.0], [-3.0, -4.0]], [[-2.0, -2.0], [-1.0, -1.0]]])  # z = 5 and -2
    objective = OnlineDPO(DPOConfig(beta=0.1))
    batch = batch_of([[1, 0]] * 2)
    figures = objective.held_out(logprobs, batch.ref_logprobs, batch.response_mask)
    loss, trained = objective.loss(forward_of(logprobs), batch)
    assert figures["eval/loss"] == pytest.approx(loss["policy"].item() / 2)
    assert figures["eval/accuracy"] == trained["rewards/accuracies"].value() == 0.5
    assert figures["eval/margin"] == pytest.approx(trained["rewards/margins"].value()) == pytest.approx(0.15)


@pytest.mark.parametrize("normalised", [False, True])
def test_margins_within_rounding_count_as_half_an_accurate_pair(normalised):
    ref = -50 - torch.rand(6, 2, 2)
    noise = torch.tensor([0.0, 4e-6, -8e-6, 1e-5, 0.3, -0.3])  # of the chosen response; one float32 ulp: 4e-6
    logprobs = ref.clone()
    logprobs[:, 0, 0] += noise
    objective = OnlineDPO(DPOConfig(beta=0.1, length_normalised=normalised))
    _, figures = objective.loss(forward_of(logprobs), batch_of([[1, 0]] * 6, ref=ref))
    assert figures["rewards/accuracies"].value() == (4 * 0.5 + 1) / 6


def test_equal_rewards_count_as_half_an_accurate_pair_in_the_training_of_a_reward_model():
    rewards = torch.tensor([[0.3, 0.3], [3.0, 3.0 + 2.4e-7], [0.3, 0.2], [0.2, 0.3]])
    forward = lambda batch: Outputs(rewards=rewards)  # noqa: E731
    _, figures = RewardModelling(RewardConfig()).loss(forward, batch_of([[1, 0]] * 4))
    assert figures["rewards/accuracies"].value() == (0.5 + 0.5 + 1) / 4


def test_half_of_the_held_out_pairs_with_equal_rewards_count_as_right():
    objective = OnlineDPO(DPOConfig(beta=0.1))
    batch = batch_of([[1, 0]] * 2)
    figures = objective.held_out(batch.ref_logprobs, batch.ref_logprobs, batch.response_mask)
    assert (figures["eval/accuracy"], figures["eval/margin"]) == (0.5, 0)


def test_the_kl_in_the_metrics_compares_the_sampler_with_the_reference():
    sampled = torch.full((1, 2, 2), -1.0)
    batch = batch_of([[1, 0]], logprobs=sampled, ref=torch.full((1, 2, 2), -1.5))
    figures = OnlineDPO(DPOConfig(beta=0.1)).describe(batch)
    assert figures["objective/kl"].value() == pytest.approx(1.0)
    assert figures["objective/entropy"].value() == pytest.approx(2.0)
    assert figures["objective/non_score_reward"].value() == pytest.approx(-0.1)
    assert figures["objective/rlhf_reward"].value() == pytest.approx(0.4)
    assert figures["objective/scores_margin"].value() == pytest.approx(1.0)


def test_drift_is_zero_if_sampler_and_trainer_agree_and_ignores_padding():
    sampled = -torch.rand(1, 2, 2)
    batch = batch_of([[1, 0]], logprobs=sampled, lengths=[[1, 1]])
    now = sampled.clone()
    now[..., 1] = -50  # padding
    figures = {name: stat.value() for name, stat in drift(now, batch).items()}
    assert figures == {
        "policy/ratio": 1.0,
        "policy/approxkl": 0.0,
        "policy/clipfrac": 0.0,
        "mismatch/kl": 0.0,
        "mismatch/max_ratio": 1.0,
        "mismatch/ess": 1.0,
        "mismatch/token_ess": 1.0,
        "mismatch/step_ess": 1.0,
    }


def test_ess_is_of_responses_and_token_ess_is_of_tokens():
    sampled = torch.full((1, 2, 2), -2.0)
    batch = batch_of([[1, 0]], logprobs=sampled, lengths=[[2, 1]])
    now = sampled.clone()
    now[0, 0] += math.log(2)  # weights of tokens: 2, 2, 1; of responses: 4, 1
    figures = drift(now, batch)
    assert figures["mismatch/ess"].value() == pytest.approx(5**2 / (2 * 17))
    assert figures["mismatch/token_ess"].value() == pytest.approx(5**2 / (3 * 9))
    now[0, 0] = 100.0  # a log-ratio of 204, limited to 20
    assert drift(now, batch)["mismatch/ess"].value() == pytest.approx(0.5, abs=1e-6)


def test_step_ess_is_of_the_policy_that_is_trained_and_ess_of_the_policy_before_the_update():
    sampled = torch.full((1, 2, 2), -2.0)
    batch = batch_of([[1, 0]], logprobs=sampled)
    batch.old_logprobs = sampled.clone()
    now = sampled.clone()
    now[0, 0, 0] += math.log(3)
    figures = drift(now, batch)
    assert figures["mismatch/ess"].value() == 1
    assert figures["mismatch/step_ess"].value() == pytest.approx(4**2 / (2 * 10))


def test_drift_uses_the_old_logprobs_if_the_batch_has_them():
    sampled = torch.full((1, 1, 2), -2.0)
    batch = batch_of([[1]], logprobs=sampled)
    batch.old_logprobs = torch.full((1, 1, 2), -1.0)
    figures = {name: stat.value() for name, stat in drift(torch.full((1, 1, 2), -1.0), batch).items()}
    assert figures["policy/ratio"] == 1.0
    assert figures["mismatch/max_ratio"] == pytest.approx(math.e)
    assert figures["mismatch/kl"] == pytest.approx(math.e - 2)


def test_sft_is_the_mean_cross_entropy_of_response_tokens():
    logprobs = torch.tensor([[[-1.0, -2.0]], [[-3.0, 0.0]]])
    batch = batch_of([[0], [0]], lengths=[[2], [1]])
    objective = SFT(SFTConfig())
    loss, _ = objective.loss(forward_of(logprobs), objective.credit(batch))
    assert loss["policy"].item() / objective.count(batch)["policy"] == pytest.approx(2.0)


def test_reward_modelling_prefers_the_higher_label_and_skips_equal_ones():
    objective = RewardModelling(RewardConfig())
    pair = objective.credit(batch_of([[0, 1], [1, 0], [1, 1]]))
    assert pair.response_ids[:2, :, 0].tolist() == [[1, 0], [2, 3]]
    assert objective.count(pair) == {"policy": 2}
    rewards = torch.tensor([[2.0, 1.0], [0.0, 1.0]])
    loss, figures = objective.loss(lambda batch: Outputs(rewards=rewards), pair)
    assert loss["policy"].item() == pytest.approx(sum(math.log(1 + math.exp(m)) for m in (-1, 1)))
    assert figures["rewards/accuracies"].value() == 0.5
