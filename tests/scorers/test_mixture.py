"""Tests of the scorer that has a scorer of its own for each part of a mixture of tasks."""

from dataclasses import replace

import pytest
import torch

from rlhf.assembly.parts import make
from rlhf.config.scorers import FunctionScorerConfig, MixtureScorerConfig
from tests.tiny_models import scorer_context, tiny_rollouts, tiny_tokenizer


def one(prompt: str, response: str, reference: str) -> float:
    """Return 1."""
    return 1.0


def two(prompt: str, response: str, reference: str) -> float:
    """Return 2."""
    return 2.0


def function(name: str, **settings) -> FunctionScorerConfig:
    return FunctionScorerConfig(path=f"tests.scorers.test_mixture:{name}", **settings)


def rollouts_of(*parts: int):
    rollouts = tiny_rollouts(len(parts))
    rollouts.part = torch.tensor(parts)
    return rollouts


def scorer_of(**parts):
    context = replace(scorer_context(tiny_tokenizer()), parts=("a", "b"))
    return make(MixtureScorerConfig(parts=parts), context)


def test_each_part_has_its_scorer_and_its_weight():
    scorer = scorer_of(b=function("two", weight=0.5), a=function("one", weight=3.0))
    rollouts = rollouts_of(1, 0, 1, 0)
    expected = [[1.0, 1.0], [3.0, 3.0], [1.0, 1.0], [3.0, 3.0]]
    assert scorer.score_once(rollouts).tolist() == scorer(rollouts).scores.tolist() == expected


def test_a_part_without_prompts_is_not_scored():
    assert (
        scorer_of(a=function("one"), b=function("two")).score(rollouts_of(1, 1)).tolist() == [[2.0, 2.0]] * 2
    )


@pytest.mark.parametrize("ended", [True, False])
def test_missing_eos_settings_of_a_part_apply_to_its_responses(ended):
    scorer = scorer_of(a=function("one", missing_eos_score=-1.0), b=function("two"))
    rollouts = rollouts_of(0, 1)
    rollouts.ended[:] = ended
    assert scorer(rollouts).scores[:, 0].tolist() == [1.0 if ended else -1.0, 2.0]
