"""Ensembles of reward models: how their scores become one score, and the mean of their weights."""

import pytest
import torch

from rlhf.assembly.parts import make
from rlhf.config.algorithms import BestOfKConfig
from rlhf.config.models import Combine
from rlhf.config.scorers import RewardModelScorerConfig
from rlhf.core.errors import UserError
from rlhf.models.loading import save
from rlhf.scorers.scorer import combined
from tests.chat_tokenizers import llama_3
from tests.scorers.test_scorers import rollouts
from tests.tiny_models import scorer_context, tiny_classifier, tiny_tokenizer

TOKENIZER = tiny_tokenizer()


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> list[str]:
    """Return the folders of three reward models with different weights."""
    folders = [tmp_path_factory.mktemp(name) for name in "abc"]
    for seed, folder in enumerate(folders):
        model = tiny_classifier()
        torch.manual_seed(seed)
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(0.3 * torch.randn_like(weight))
        save(model, TOKENIZER, folder)
    return [*map(str, folders)]


def scorer_of(path, **settings):
    return make(RewardModelScorerConfig(path=path, **settings), scorer_context(TOKENIZER))


def test_scores_of_members_become_their_mean_their_lowest_or_their_mean_minus_the_doubt():
    members = torch.tensor([[[1.0, 2.0]], [[2.0, 2.0]], [[6.0, 2.0]]], dtype=torch.float64)
    deviation = 7**0.5  # of 1, 2, 6: squares 4, 1, 9 over 3 - 1
    assert combined(members, "mean", 0.5).tolist() == [[3, 2]]
    assert combined(members, "worst", 0.5).tolist() == [[1, 2]]
    assert combined(members, "uncertainty", 2.0).tolist() == [pytest.approx([3 - 2 * deviation, 2])]


def test_an_ensemble_has_the_combined_score_the_scores_of_its_members_and_their_spread(models):
    each = torch.stack([scorer_of(path).score_once(rollouts()) for path in models])
    lowest = scorer_of(models, combine=Combine.worst, missing_eos_score=-100.0)
    batch = lowest(rollouts())
    assert batch.scores[batch.ended].equal(each.amin(0).float()[batch.ended])
    assert (batch.scores[~batch.ended] == -100).all(), "the setting replaces the combined score"
    assert [*batch.parts] == ["1", "2", "3"]
    assert torch.stack([*batch.parts.values()]).equal(each.float()), "and not those of the members"
    spread = each.float().std(0)
    assert batch.member_spread.equal(spread)
    assert batch.select(torch.tensor([2])).member_spread.equal(spread[2:])
    found = make(BestOfKConfig()).describe(batch)
    assert found["objective/score_std"].value() == pytest.approx(spread.mean().item())
    assert found["objective/scores/2"].value() == pytest.approx(each[1].mean().item())
    assert scorer_of(models)(rollouts()).scores.equal(each.mean(0).float()), "the default is the mean"


def test_a_single_model_and_a_weighted_sum_have_no_spread_of_members(models):
    assert scorer_of(models[0])(rollouts()).member_spread is None
    assert scorer_of(models[:1])(rollouts()).parts is None, "a list of one model is one model"


def test_averaged_weights_are_the_mean_in_float32_and_those_of_one_model_stay_bit_for_bit(models):
    one = scorer_of(models[0]).score_once(rollouts())
    for times in (2, 3, 7):
        same = scorer_of([models[0]] * times, combine=Combine.weights)
        assert same.score_once(rollouts()).equal(one)
    averaged = scorer_of(models, combine=Combine.weights)
    states = [scorer_of(path).model.model.state_dict() for path in models]
    for name, weight in averaged.model.model.state_dict().items():
        wanted = torch.stack([state[name].double() for state in states]).mean(0)
        torch.testing.assert_close(weight.double(), wanted, rtol=0, atol=1e-6)
    assert averaged(rollouts()).parts is None, "it is one model"


def test_weights_of_other_architectures_or_with_other_tokens_are_not_averaged(models, tmp_path):
    save(tiny_classifier(intermediate_size=24), TOKENIZER, tmp_path / "wide")
    with pytest.raises(UserError, match=r"layers\.0\.mlp.* \(24, .*\(\d+, "):
        scorer_of([models[0], str(tmp_path / "wide")], combine=Combine.weights)
    save(tiny_classifier(), llama_3(), tmp_path / "tokens")
    with pytest.raises(UserError, match="one tokenizer"):
        scorer_of([models[0], str(tmp_path / "tokens")], combine=Combine.weights)
