"""Metrics of evaluations against values by hand, with a fake generator, judge and engine."""

import math
import re
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from statistics import fmean
from types import SimpleNamespace

import pytest
import torch

from rlhf.config.algorithms import DPOConfig
from rlhf.config.run import EvalConfig
from rlhf.config.scorers import AnswerScorerConfig, FunctionScorerConfig
from rlhf.core.batch import Sampling
from rlhf.core.files import read_lines
from rlhf.core.formatting import mean_bounds, wilson
from rlhf.core.state import TrainState
from rlhf.generators.generator import finished
from rlhf.models.modules import RewardModel
from rlhf.objectives.dpo import OnlineDPO
from rlhf.processes.ranks import ALONE
from rlhf.scorers.scorer import Scorer
from rlhf.terminal.console import Phases
from rlhf.text.encoding import encode_completions, encode_prompts
from rlhf.training import evaluators
from rlhf.training.evaluators import HeldOutPairs, PolicyEvaluator, RewardEvaluator
from tests.environments.test_episodes import SAMPLING as EPISODES
from tests.environments.test_episodes import prompts, sampled, settings
from tests.environments.test_episodes import tokenizer as chat_tokenizer
from tests.tiny_models import tiny_classifier, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
GREEDY, KL_SAMPLES = ["w1 w2 w3", "w1", "w4 w4"], ["w2", "w1 w1", "w5 w6 w7"]
REFERENCES = ["w9 w9", "w8", "w7 w7 w7"]
STATE = TrainState(num_updates=1)


@dataclass
class Model:
    """A model whose log-prob of each token, the end token included, is `-nats`."""

    nats: float

    def at(self, temperature):
        assert temperature == 1.0, "the perplexity is that of the model itself"
        return Model(0.5)


class Engine(SimpleNamespace):
    def infer(self, module, rollouts, field):
        assert field == "logprobs"
        return -module.nats * rollouts.response_mask.float()


class Generator:
    """Answers with `GREEDY`; a request with the purpose eval-kl gets `KL_SAMPLES`."""

    def __init__(self):
        self.asked = []

    def submit(self, prompts, sampling):
        self.asked.append(sampling)
        texts = KL_SAMPLES if sampling.purpose == "eval-kl" else GREEDY
        answer = Future()
        answer.set_result(encode_completions(prompts, [[text] for text in texts], TOKENIZER, 8))
        return answer


class Judge(Scorer):
    """Gives the responses, then the references, the scores of `answers`."""

    def score(self, rollouts):
        raise AssertionError("callers use `score_once`")

    def __init__(self, *answers, tie_tolerance=0.0, verifies=False):
        self.answers = iter(answers)
        self.config = AnswerScorerConfig() if verifies else FunctionScorerConfig()
        self.tie_tolerance = tie_tolerance

    def score_once(self, rollouts):
        return torch.tensor(next(self.answers))[:, None]


def evaluated(gold, scorer=None, engine=None, references=REFERENCES, generator=None, part=None, **settings):
    """Return an evaluation of prompts w1, w2, ..., the requests for completions, and the evaluator."""
    index, texts = torch.arange(len(references)), [f"w{i + 1}" for i in range(len(references))]
    prompts = replace(encode_prompts(index, texts, references, TOKENIZER), part=part)
    generator = generator or Generator()
    engine = engine or Engine(policy=Model(2.0), reference=Model(3.0))
    sampling = Sampling(samples=1, temperature=0.01, response_length=8, purpose="eval")
    evaluator = PolicyEvaluator(
        prompts, generator, gold, scorer, engine, TOKENIZER, sampling, 0.7, **settings
    )
    return evaluator(STATE), getattr(generator, "asked", []), evaluator


def test_a_win_is_a_strictly_higher_score_than_that_of_the_reference_and_a_tie_is_no_win():
    evaluation, _, _ = evaluated(Judge([3.0, 1.0, 0.0], [1.0, 1.0, 1.0]))
    found = evaluation.figures
    assert found["eval/win_rate"] == found["eval/tie_rate"] == pytest.approx(1 / 3)
    assert (found["eval/win_rate_low"], found["eval/win_rate_high"]) == wilson(1 / 3, 3)
    assert found["eval/norm_reward"] == pytest.approx((2 + 0 - 1) / 3)
    assert found["eval/gold_score"] == pytest.approx(4 / 3)
    bounds = found["eval/gold_score_low"], found["eval/gold_score_high"]
    assert bounds == pytest.approx(mean_bounds([3.0, 1.0, 0.0]))
    assert evaluation.examples == 3
    assert [row["reference_gold_score"] for row in evaluation.samples] == [1, 1, 1]


def test_a_wait_for_a_generator_in_another_process_can_be_ended_by_a_signal():
    def stop():
        raise KeyboardInterrupt

    phases = Phases()
    evaluator = evaluated(None, phases=phases)[2]
    evaluator.generator = SimpleNamespace(submit=lambda prompts, sampling: Future())  # is never answered
    with pytest.raises(KeyboardInterrupt), phases("evaluating", between=stop):
        evaluator(STATE)


def test_a_time_limit_of_the_generator_is_an_error_of_the_evaluation():
    evaluator, answer = evaluated(None)[2], Future()
    answer.set_exception(TimeoutError("request_limit_s"))
    evaluator.generator = SimpleNamespace(submit=lambda prompts, sampling: answer)
    with pytest.raises(TimeoutError, match="request_limit_s"):
        evaluator(STATE)


def test_scores_of_completions_are_the_shortest_decimals_of_their_float32():
    gold, references = [-0.05, 1 / 3, 2.0], [0.1, 0.7, 1e-9]
    evaluation, *_ = evaluated(Judge(gold, references))
    shown = [row["gold_score"] for row in evaluation.samples]
    assert shown == [-0.05, 0.33333334, 2.0] and torch.tensor(shown).equal(torch.tensor(gold))
    assert [row["reference_gold_score"] for row in evaluation.samples] == references
    exact = torch.tensor(gold).double().mean().item()
    assert evaluation.figures["eval/gold_score"] == exact, "metrics are not rounded"


def test_an_evaluation_with_an_environment_has_its_figures_and_the_limit_of_each_episode():
    played = sampled(prompts(12), replace(EPISODES, samples=1), reply_tokens=12, max_turns=1)
    factory = settings(reply_tokens=12).environment
    generator = SimpleNamespace(submit=lambda prompts, sampling: finished(played))
    asked = Sampling(samples=1, temperature=0.01, response_length=48, purpose="eval")
    engine = Engine(policy=Model(2.0), reference=Model(3.0))
    evaluator = PolicyEvaluator(
        prompts(12), generator, None, None, engine, chat_tokenizer(), asked, 0.7, environment=factory
    )
    evaluation = evaluator(STATE)
    assert {row["limit"] for row in evaluation.samples} == {
        "environment.max_turns",
        "environment.reply_tokens",
    }
    cut = [row["messages"][-1].get("cut", False) for row in evaluation.samples]
    assert cut == [row["limit"] == "environment.reply_tokens" for row in evaluation.samples]
    found = evaluation.figures
    assert found["eval/environment/cut"] == pytest.approx(sum(cut) / len(cut)) and 0 < sum(cut) < len(cut)
    assert found["eval/environment/words"] == played.episode["words"].double().mean().item()
    assert found["eval/environment/turns"] == 1 and "eval/environment/seconds" not in found


def test_scores_within_the_tie_tolerance_tie():
    found = evaluated(Judge([1.0, 1.0, 1.0], [1.001, 0.999, 2.0], tie_tolerance=0.01))[0].figures
    assert (found["eval/win_rate"], found["eval/tie_rate"]) == (0, pytest.approx(2 / 3))


def test_the_accuracy_of_a_judge_that_verifies_is_the_share_of_scores_of_1():
    found = evaluated(Judge([1.0, 0.0, 0.5], [1.0, 1.0, 1.0], verifies=True))[0].figures
    assert found["eval/accuracy"] == pytest.approx(1 / 3)
    assert (found["eval/accuracy_low"], found["eval/accuracy_high"]) == wilson(1 / 3, 3)


def test_without_a_judge_the_accuracy_is_that_of_a_scorer_that_verifies():
    scorer = Judge([1.0, 0.0, -1.0], verifies=True)
    found = evaluated(None, scorer)[0].figures
    assert found["eval/accuracy"] == pytest.approx(1 / 3) and found["eval/score"] == pytest.approx(0)
    judged = evaluated(Judge([5.0] * 3, [4.0] * 3), Judge([1.0] * 3, verifies=True))[0].figures
    assert "eval/accuracy" not in judged, "another judge decides"


def test_pass_at_k_is_estimated_without_bias_from_further_samples_at_the_training_temperature():
    class Sampler(Generator):
        def submit(self, prompts, sampling):
            if sampling.purpose != "eval-pass":
                return super().submit(prompts, sampling)
            self.asked.append(sampling)
            return finished(encode_completions(prompts, [["w1"] * 5] * 3, TOKENIZER, 8))

    class Checker(Judge):
        def score_once(self, rollouts):
            return torch.tensor(next(self.answers))

    right = [[1.0, 0, 0, 1, 0], [0.0] * 5, [1.0] * 5]  # 2, 0 and 5 of 5 are correct
    scorer, generator = Checker([[0.0]] * 3, right, verifies=True), Sampler()
    found = evaluated(None, scorer, generator=generator, config=EvalConfig(attempts=5))[0].figures
    passed = {
        k: sum(any(one[i] for i in chosen) for one in right for chosen in subsets) / (3 * len(subsets))
        for k, subsets in ((k, list(combinations(range(5), k))) for k in (1, 2, 4))
    }
    names = {f"eval/pass_at_{k}": pytest.approx(share) for k, share in passed.items()}
    assert {name: found[name] for name in found if re.fullmatch(r"eval/pass_at_\d", name)} == names
    bounds = found["eval/pass_at_2_low"], found["eval/pass_at_2_high"]
    assert bounds == pytest.approx(mean_bounds([0.7, 0, 1]))
    asked = [each for each in generator.asked if each.purpose == "eval-pass"]
    assert [(each.samples, each.temperature) for each in asked] == [(5, 0.7)]


class Many(Generator):
    """Answers a request for n samples of a prompt with n texts, of which each second one is the same."""

    def submit(self, prompts, sampling):
        if sampling.purpose != "eval-best-of":
            return super().submit(prompts, sampling)
        self.asked.append((len(prompts), sampling))
        texts = [[f"w{k + 1}" if k % 2 else "w9" for k in range(sampling.samples)]] * len(prompts)
        return finished(encode_completions(prompts, texts, TOKENIZER, 8))


class Numbers(Judge):
    """Scores the responses of a request by `factor` times their numbers 0, 1, 2, ..."""

    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def score_once(self, rollouts):
        N, K, _ = rollouts.response_ids.shape
        return self.factor * torch.arange(K).double().expand(N, K)


def test_the_best_of_n_is_measured_before_training_once_in_bounded_requests(tmp_path, monkeypatch):
    monkeypatch.setattr(evaluators, "_CHUNK", 16)
    file, generator = tmp_path / "best_of.jsonl", Many()
    engine = Engine(policy=Model(2.0), reference=Model(3.0), ranks=ALONE)
    evaluate = partial(evaluated, Numbers(-1.0), Numbers(1.0), engine, generator=generator)
    evaluate(config=EvalConfig(best_of=8), best_of=file)
    asked = [each for each in generator.asked if isinstance(each, tuple)]
    assert [(count, each.samples, each.temperature) for count, each in asked] == [(2, 8, 0.7), (1, 8, 0.7)]
    assert len({each.request for _, each in asked}) == 2, "each request has random numbers of its own"
    rows = read_lines(file, ["n"])
    means = {n: fmean(max(some) for some in combinations(range(8), n)) for n in (1, 2, 4, 8)}
    assert [row["n"] for row in rows] == [*means]
    assert [row["score"] for row in rows] == pytest.approx([*means.values()])
    assert [row["gold_score"] for row in rows] == pytest.approx([-each for each in means.values()])
    assert [row["distinct"] for row in rows] == [1, 1, 0.75, 0.625]
    assert [row["kl"] for row in rows] == pytest.approx([math.log(n) - (n - 1) / n for n in means])
    assert all(row["score_std"] == row["gold_score_std"] == 0 for row in rows), "the prompts are equal"
    evaluate(config=EvalConfig(best_of=8), best_of=file)
    assert sum(isinstance(each, tuple) for each in generator.asked) == 2, (
        "a resumed run does not sample again"
    )
    file.unlink()
    evaluator = evaluated(None)[2]
    evaluator.best_of, evaluator.config = file, EvalConfig(best_of=8)
    evaluator(TrainState(num_updates=2, update=1))
    assert not file.exists(), "only before training"


def test_a_signal_ends_the_best_of_n_between_two_requests(tmp_path, monkeypatch):
    def stop():
        raise KeyboardInterrupt

    monkeypatch.setattr(evaluators, "_CHUNK", 8)
    phases, generator, file = Phases(), Many(), tmp_path / "best_of.jsonl"
    evaluator = evaluated(Numbers(1.0), Numbers(1.0), generator=generator, phases=phases)[2]
    evaluator.engine.ranks, evaluator.config, evaluator.best_of = ALONE, EvalConfig(best_of=8), file
    with pytest.raises(KeyboardInterrupt), phases("evaluating", between=stop):
        evaluator(STATE)
    assert sum(isinstance(each, tuple) for each in generator.asked) == 1 and not file.exists()


def test_an_evaluation_has_the_spread_of_the_members_of_an_ensemble():
    class Ensemble(Judge):
        def training_scores(self, rollouts):
            members = {"1": torch.tensor([[1.0], [2], [3]]), "2": torch.tensor([[3.0], [2], [1]])}
            return torch.full((3, 1), 2.0), members

    found = evaluated(None, Ensemble())[0].figures
    assert found["eval/score"] == 2 and found["eval/score_std"] == pytest.approx(2 * 2**0.5 / 3)
    assert "eval/score_std" not in evaluated(None, Judge([1.0] * 3))[0].figures


def test_a_penalty_on_long_responses_does_not_lower_the_accuracy():
    scorer = Judge([1.0, 0.0, 1.0], [1.0, 0.0, 1.0], verifies=True)
    scorer.config = AnswerScorerConfig(overlong_buffer=8)
    scorer.response_length = 8
    found = evaluated(None, scorer)[0].figures
    assert found["eval/accuracy"] == pytest.approx(2 / 3) and found["eval/score"] < 2 / 3


def test_the_accuracy_of_answers_takes_precedence_over_that_of_pairs():
    pairs = SimpleNamespace(measure=lambda: {"eval/accuracy": 0.5, "eval/margin": 0.1, "eval/loss": 0.7})
    found = evaluated(Judge([1.0, 0.0, 0.0], [1.0] * 3, verifies=True), pairs=pairs)[0].figures
    assert found["eval/accuracy"] == pytest.approx(1 / 3) and found["eval/margin"] == 0.1
    assert evaluated(Judge([1.0] * 3, [1.0] * 3), pairs=pairs)[0].figures["eval/accuracy"] == 0.5


def test_kl_is_on_samples_at_the_training_temperature_and_perplexity_on_near_greedy_ones_at_1():
    """The policy has 2 nats a token, the reference 3 at the training temperature and 0.5 at temperature 1."""
    evaluation, asked, _ = evaluated(None)
    assert [(s.purpose, s.temperature, s.samples) for s in asked] == [("eval", 0.01, 1), ("eval-kl", 0.7, 1)]
    found = evaluation.figures
    tokens = [2, 3, 4]  # of `KL_SAMPLES`, with the end tokens
    assert found["eval/kl"] == pytest.approx((3 - 2) * sum(tokens) / 3)
    assert (found["eval/kl_low"], found["eval/kl_high"]) == pytest.approx(mean_bounds(tokens))
    assert found["eval/ppl"] == pytest.approx(math.exp(0.5)), "the mean over the tokens of all responses"
    assert found["eval/response_tokens"] == pytest.approx((4 + 2 + 3) / 3) and found["eval/eos_rate"] == 1
    assert "eval/loss" not in found and "eval/win_rate" not in found


def test_perplexity_weighs_all_tokens_equally():
    class OfToken(Model):
        def at(self, temperature):
            return self

    class ByToken(Engine):
        def infer(self, module, rollouts, field):
            return -module.nats * rollouts.response_ids * rollouts.response_mask

    engine = ByToken(policy=OfToken(0.0), reference=OfToken(0.1))
    ids = [4, 5, 6, 1, 4, 1, 7, 7, 1]  # of `GREEDY`: "w1" is 4, the end token 1
    assert evaluated(None, engine=engine)[0].figures["eval/ppl"] == pytest.approx(
        math.exp(0.1 * sum(ids) / len(ids))
    )


def test_the_loss_of_sft_is_the_mean_over_the_tokens_of_references_of_unequal_length():
    class ByToken(Engine):
        def infer(self, module, rollouts, field):
            return -0.1 * rollouts.response_ids * rollouts.response_mask

    def submit(prompts, sampling):
        return finished(encode_completions(prompts, [["w1"], ["w1"]], TOKENIZER, 2))

    settings = {"engine": ByToken(policy=None, reference=None), "references": ["w9 w8 w7", "w6"]}
    found = evaluated(None, generator=SimpleNamespace(submit=submit), **settings)[0].figures
    ids = [12, 11, 10, 1, 9, 1]  # references are not cut to two tokens
    assert found["eval/loss"] == pytest.approx(0.1 * sum(ids) / len(ids)) and "eval/kl" not in found


def test_references_are_judged_once_and_the_scorer_of_the_training_gives_the_score():
    scorer = Judge([1.0, 2.0, 6.0])
    scorer.at_end = lambda scores, rollouts: scores
    judge = Judge([1.0, 1.0, 1.0], [0.0, 0.0, 0.0], [2.0, 2.0, 2.0])
    evaluation, _, evaluator = evaluated(judge, scorer=scorer)
    assert evaluation.figures["eval/score"] == 3 and evaluation.scores == [1, 2, 6]
    evaluator.scorer = None
    assert evaluator(STATE).figures["eval/norm_reward"] == 2, "the references keep their scores"


def stored_pairs(count):
    """Return `count` pairs for two prompts; all prompts are the same."""
    prompts = encode_prompts(torch.arange(count), ["w1"] * count, [""] * count, TOKENIZER)
    return encode_completions(prompts, [["w1", "w2"]] * count, TOKENIZER, 4)


def test_a_tied_pair_is_wrong_for_a_reward_model_and_the_interval_is_over_pairs():
    rewards = torch.tensor([[2.0, 1.0], [1.0, 1.0]])
    engine = SimpleNamespace(
        module=RewardModel(tiny_classifier(), False), infer=lambda module, pairs, field: rewards
    )
    evaluation = RewardEvaluator(stored_pairs(2), engine)(STATE)
    found = evaluation.figures
    assert found["eval/accuracy"] == 0.5 and evaluation.examples == 2
    assert (found["eval/accuracy_low"], found["eval/accuracy_high"]) == wilson(0.5, 2)
    assert found["eval/loss"] == pytest.approx((math.log1p(math.exp(-1)) + math.log(2)) / 2)
    assert found["eval/margin"] == 0.5 and found["eval/reward"] == 1.25


def test_the_interval_of_held_out_pairs_is_over_pairs_not_over_prompts():
    pairs = stored_pairs(40)
    engine = Engine(policy=Model(1.0), reference=Model(1.0))
    measured = HeldOutPairs(pairs, OnlineDPO(DPOConfig()), engine)
    evaluation, _, _ = evaluated(None, pairs=measured)
    found = evaluation.figures
    assert found["eval/accuracy"] == 0.5 and found["eval/loss"] == pytest.approx(math.log(2))
    assert (found["eval/accuracy_low"], found["eval/accuracy_high"]) == wilson(0.5, 40)
    assert evaluation.examples == 3


def test_metrics_of_the_parts_of_a_mixture_are_means_over_their_own_prompts():
    judge = Judge([3.0, 1.0, 0.0], [1.0, 0.0, 1.0])
    found = evaluated(judge, part=torch.tensor([0, 1, 0]), parts=("a", "b"))[0].figures
    assert (found["eval/part/a/win_rate"], found["eval/part/b/win_rate"]) == (0.5, 1)
    assert (found["eval/part/a/gold_score"], found["eval/part/b/gold_score"]) == (1.5, 1)
    assert found["eval/part/a/response_tokens"] == 3.5
