"""Ties: identical responses get one score, and scores that differ only by rounding are equal."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from rlhf.assembly.parts import make
from rlhf.config.algorithms import BestOfKConfig, DPOConfig, RLOOConfig
from rlhf.config.scorers import (
    FunctionScorerConfig,
    LabelsScorerConfig,
    MixtureScorerConfig,
    ScorerConfig,
    WeightedScorerConfig,
)
from rlhf.core.batch import Batch, Rollouts
from rlhf.objectives.dpo import OnlineDPO
from rlhf.scorers.scorer import (
    LabelsScorer,
    Scored,
    Scorer,
    distinct_texts,
    first_of_identical,
    merge_ties,
    response_texts,
)
from rlhf.text.encoding import encode_completions, encode_prompts
from rlhf.training.recorder import against_initial
from rlhf.words.compose import compose, run_name
from tests.tiny_models import scorer_context, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
RESPONSES = [["w1", "w2", "w1", "w2"], ["w1", "w1 w2", "w3", "w1"], ["w3", "w4", "w5", "w6"]]
NEAR = 4e-6  # less than the tolerance of float32


def rollouts() -> Rollouts:
    """Return three prompts with four responses; the last response of the second prompt has no EOS."""
    prompts = encode_prompts(torch.arange(7, 10), ["w8", "w9", "w9"], ["w1", "w2", "w2"], TOKENIZER)
    ended = torch.ones(3, 4, dtype=torch.bool)
    ended[1, 3] = False
    return encode_completions(prompts, RESPONSES, TOKENIZER, response_length=None, ended=ended)


class Rounding(Scorer):
    """A scorer that gives every response the score 1, plus a small number that depends on its place."""

    def score(self, rollouts: Rollouts) -> torch.Tensor:
        count = rollouts.episodes
        return 1 + NEAR * torch.arange(count).view(rollouts.response_ids.shape[:2]) / count


def rounding(tie_tolerance: float = 0.0) -> Rounding:
    context = replace(scorer_context(TOKENIZER), tie_tolerance=tie_tolerance)
    return Rounding(ScorerConfig(name="rounding"), context)


def test_identical_responses_have_equal_tokens_of_one_prompt_and_equal_ends():
    assert first_of_identical(rollouts()).tolist() == [[0, 1, 0, 1], [0, 1, 2, 3], [0, 1, 2, 3]]
    noise = rollouts()
    noise.response_ids[~noise.response_mask] = 42
    assert torch.equal(first_of_identical(noise), first_of_identical(rollouts())), "padding does not matter"
    noise.ended[0, 2] = False  # with the tokens of the first response, but cut
    assert first_of_identical(noise).tolist()[0] == [0, 1, 2, 1]


def test_identical_responses_of_any_scorer_get_one_score():
    scores, once = rounding().score(rollouts()), rounding().score_once(rollouts())
    assert len(set(scores[0].tolist())) == 4, "the scorer itself distinguishes their places"
    assert once[0, 0] == once[0, 2] != once[0, 1] == once[0, 3]
    assert torch.equal(once[1:], scores[1:])
    assert torch.equal(rounding()(rollouts()).scores, once)
    labels = torch.arange(12.0).view(3, 4)  # may differ
    scorer = LabelsScorer(LabelsScorerConfig(), scorer_context(TOKENIZER))
    assert torch.equal(scorer(replace(rollouts(), labels=labels)).scores, labels)


@pytest.mark.parametrize("batched", [False, True])
def test_a_function_is_called_once_for_identical_responses(tmp_path, batched):
    calls = tmp_path / "calls"
    file = tmp_path / "own.py"
    body = f"open({str(calls)!r}, 'a').write(f'{{r}}|')\n"
    one = f"def score(p, r, a):\n    {body}    import random\n    return random.random()\n"
    many = f"def score(p, r, a):\n    {body}    import random\n    return [random.random() for _ in r]\n"
    file.write_text(many if batched else one)
    config = FunctionScorerConfig(path=f"{file}:score", batched=batched)
    scores = make(config, scorer_context(TOKENIZER))(rollouts()).scores
    assert scores[0, 0] == scores[0, 2] and scores[0, 1] == scores[0, 3]
    assert len(set(scores.flatten().tolist())) == 10
    seen = calls.read_text().split("|")[:-1]
    assert len(eval(seen[0])) == 10 if batched else len(seen) == 10


def test_distinct_texts_keep_prompts_references_and_rows_together():
    texts = distinct_texts(rollouts(), TOKENIZER)
    assert texts.responses == ["w1", "w2", "w1", "w1 w2", "w3", "w1", "w3", "w4", "w5", "w6"]
    assert texts.prompts == ["w8"] * 2 + ["w9"] * 8 and texts.references == ["w1"] * 2 + ["w2"] * 8
    assert texts.examples == [0] * 2 + [1] * 4 + [2] * 4
    assert texts.spread(list(range(10))).tolist() == [[0, 1, 0, 1], [2, 3, 4, 5], [6, 7, 8, 9]]


def test_scores_within_the_tolerance_of_best_and_worst_are_equal_to_them():
    scores = torch.tensor([[1.0, 0.5, 1 - NEAR, 0.5 + NEAR, 0.7, 0.7 + NEAR], [3, 3 + NEAR, 3, 3, 3, 3]])
    merged = merge_ties(scores, 1e-5)
    assert merged[0].tolist() == [1, 0.5, 1, 0.5, scores[0, 4], scores[0, 5]]
    assert len(set(merged[1].tolist())) == 1
    assert torch.equal(merge_ties(scores, 0.0), scores)
    scores = torch.tensor([[1000.0, 1000.005], [0.001, 0.001 + 2e-5]])  # relative above one
    assert (merge_ties(scores, 1e-5)[:, 0] == merge_ties(scores, 1e-5)[:, 1]).tolist() == [True, False]
    merged = merge_ties(torch.arange(10).div(10)[None], 0.15)  # a chain of small differences
    assert merged.tolist()[0] == pytest.approx([0, 0, *[0.1 * i for i in range(2, 8)], 0.9, 0.9])


def test_best_and_worst_differ_unless_they_tie():
    draw = random.Random(0)
    for _ in range(300):
        scores = torch.tensor([[draw.choice([0, 0.25, 0.5, 0.75, 1]) for _ in range(4)]])
        merged, spread = merge_ties(scores, 0.25), float(scores.max() - scores.min())
        assert (merged.max() > merged.min()) == (spread > 0.25)
        assert (merged - scores).abs().max() <= 0.25


def near_ties() -> Batch:
    scores = torch.tensor([[1.0, 1 + NEAR, 1, 1], [0, 2, 2 + NEAR, 1], [3, 1, 2, 1 + NEAR]])
    return rollouts().extend(Batch, scores=merge_ties(scores, 1e-5))


def test_near_ties_have_no_signal_and_the_choice_of_a_pair_does_not_depend_on_rounding():
    pair = make(DPOConfig(samples_per_prompt=4)).credit(near_ties())
    assert pair.signal.tolist() == [False, True, True]
    chosen = [RESPONSES[row].index(TOKENIZER.decode(pair.response_ids[row, 0], skip_special_tokens=True))
              for row in (1, 2)]  # fmt: skip
    assert chosen == [1, 0], "of responses that tie, the first is chosen"
    assert make(BestOfKConfig(samples_per_prompt=4)).credit(near_ties()).signal.tolist() == [
        False,
        True,
        True,
    ]
    assert make(RLOOConfig(samples_per_prompt=4, kl_coef=0.0)).credit(near_ties()).signal.tolist() == (
        [False, True, True]
    )


def test_the_win_rate_against_the_initial_policy_counts_near_ties_half():
    initial = [1.0, 1.0, 1.0, 1.0]
    now = [1 + NEAR, 1 - NEAR, 2.0, 0.0]
    assert against_initial(now, initial, 1e-5)["eval/win_rate_vs_initial"] == 0.5
    assert against_initial([1 + NEAR] * 4, initial, 1e-5)["eval/win_rate_vs_initial"] == 0.5
    assert against_initial([1 + NEAR] * 4, initial)["eval/win_rate_vs_initial"] == 1


# -- the default of `algo.tie_tolerance` -----------------------------------------------------------


def tolerance(*words: str) -> float:
    cfg = compose(list(words))
    return cfg.tie_tolerance(cfg.scorer)


def test_the_default_is_the_rounding_of_the_dtype_of_a_reward_model_or_the_sum_of_its_parts():
    for dtype, expected in (("float32", 1e-5), ("bfloat16", 1e-2), ("float16", 1e-3)):
        assert tolerance(f"model.dtype={dtype}") == expected
    assert tolerance("scorer=facts") == tolerance("algo.tie_tolerance=0") == 0
    assert tolerance("scorer=facts", "algo.tie_tolerance=0.5") == 0.5
    words = ["task=arithmetic", "scorer=reward_and_answer"]
    weight = compose(words).scorer.parts["reward_model"].weight
    assert tolerance(*words) == pytest.approx(weight * 1e-5)
    assert tolerance(*words, "scorer.parts.reward_model.weight=-3") == pytest.approx(3e-5)


def test_the_tolerance_is_part_of_the_name_of_a_run_only_if_it_is_set():
    names = [run_name(compose(words)) for words in ([], ["algo.tie_tolerance=0"], ["algo.tie_tolerance=0.1"])]
    assert len(set(names)) == 3
    assert names[0] == run_name(compose(["algo.tie_tolerance=null"]))


# Sums of scores

SHARES = {"w3": 0.1, "w4": 0.3, "w5": 0.2, "w6": 0.7}  # the shares of two parts, whose sum is always 0.7


def first(prompt: str, response: str, reference: str) -> float:
    """Return the share of the first part."""
    return SHARES[response]


def second(prompt: str, response: str, reference: str) -> float:
    """Return the share of the second part."""
    return 0.7 - SHARES[response] if response == "w6" else {"w3": 0.6, "w4": 0.4, "w5": 0.5}[response]


def late(prompt: str, response: str, reference: str) -> float:
    """Return a score that the penalty 0.4 makes 0.7 for the first response."""
    return 1.1 if response == "w3" else 0.7


def shares_of() -> Rollouts:
    prompts = encode_prompts(torch.arange(2), ["w8", "w9"], ["w1", "w2"], TOKENIZER)
    return encode_completions(prompts, [list(SHARES)] * 2, TOKENIZER, response_length=None)


def part(name: str, **settings) -> FunctionScorerConfig:
    return FunctionScorerConfig(path=f"tests.scorers.test_ties:{name}", **settings)


def context_of(**settings):
    def build(section, key):
        return make(section, scorer_context(TOKENIZER, key))

    return replace(scorer_context(TOKENIZER), **{"build": build, **settings})


def test_equal_sums_of_scores_are_ties_and_train_nothing():
    config = WeightedScorerConfig(parts={"a": part("first"), "b": part("second")})
    batch = make(config, context_of())(shares_of())
    assert batch.scores.dtype == torch.float32 and batch.parts["a"].dtype == torch.float32
    assert len(set(batch.scores.flatten().tolist())) == 1
    judged = merge_ties(make(config, context_of()).score_once(shares_of()), 0.0)
    assert len(set(judged.flatten().tolist())) == 1
    assert OnlineDPO(DPOConfig()).describe(batch)["objective/tie_rate"].value() == 1
    batch = replace(batch, ref_logprobs=torch.zeros(2, 4, 1), behaviour_logprobs=torch.zeros(2, 4, 1))
    for config in (DPOConfig(), BestOfKConfig(), RLOOConfig(samples_per_prompt=4)):
        assert not make(config).credit(batch).signal.any(), config


def test_the_weights_of_parts_and_of_mixtures_are_applied_before_rounding():
    config = WeightedScorerConfig(parts={"a": part("first", weight=0.1), "b": part("second", weight=0.1)})
    assert len(set(make(config, context_of())(shares_of()).scores.flatten().tolist())) == 1
    mixed = MixtureScorerConfig(parts={"x": config, "y": config})
    outer = context_of(parts=("x", "y"), build=lambda section, key: make(section, context_of()))
    rollouts = shares_of()
    rollouts.part = torch.tensor([0, 1])
    assert len(set(make(mixed, outer)(rollouts).scores.flatten().tolist())) == 1


# -- comparison of two responses -------------------------------------------------------------------


class Longer(Rounding):
    """A judge that reads both responses at once, and prefers the longer one."""

    def compare(self, a: Scored, b: Scored) -> torch.Tensor:
        first, second = (
            [group[each.sample] for group in response_texts(each.rollouts, TOKENIZER)] for each in (a, b)
        )
        return torch.tensor(
            [[float(len(x) > len(y)), float(len(y) > len(x))] for x, y in zip(first, second, strict=True)]
        )


def test_two_responses_are_compared_by_their_scores_with_ties_or_by_a_judge_of_both():
    first, second, third, _ = rounding(1e-5).scored(rollouts())
    assert second.sample == 1 and torch.equal(second.scores, rounding().score_once(rollouts())[:, 1].float())
    by_scores = rounding(1e-5).compare(first, second)
    assert by_scores[:, 0].equal(by_scores[:, 1]), "scores that differ by rounding tie"
    exact = rounding().compare(first, second)
    assert (exact[:, 1] > exact[:, 0]).all()
    judge = Longer(ScorerConfig(name="longer"), scorer_context(TOKENIZER))
    assert judge.compare(first, second).tolist() == [[0, 0], [0, 1], [0, 0]]
    assert judge.compare(second, third).tolist() == [[0, 0], [1, 0], [0, 0]]


def test_a_penalty_is_subtracted_before_rounding():
    rollouts = shares_of()
    rollouts.ended[:, 0] = False
    batch = make(part("late", missing_eos_penalty=0.4), context_of())(rollouts)
    assert len(set(batch.scores.flatten().tolist())) == 1
