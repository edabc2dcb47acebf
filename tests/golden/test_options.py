"""Tests of overlong penalty, moving references, GDPO and the order of prompts against golden values."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from rlhf.config.algorithms import Advantage
from rlhf.config.models import MovingConfig
from rlhf.config.scorers import AnswerScorerConfig, WeightedScorerConfig
from rlhf.core.batch import Rollouts
from rlhf.scorers.scorer import Scorer, WeightedScorer
from rlhf.text.encoding import encode_completions, encode_prompts
from tests import needs
from tests.engines.test_engine import engine_of
from tests.golden.test_methods import GOLDEN, batch_of, grouped, settings
from tests.tasks.test_prompt_order import Scored
from tests.tasks.test_task import ListSource, make_task
from tests.tiny_models import scorer_context, tiny_tokenizer

pytestmark = pytest.mark.skipif(not GOLDEN.is_dir(), reason=needs.GOLDEN)
TOKENIZER = tiny_tokenizer()


def figures(file: str, name: str) -> dict:
    return json.loads((GOLDEN / file).read_text())["cases"][name]["figures"]


class Given(Scorer):
    """A scorer that returns the scores [N, K] that it was made with."""

    def __init__(self, config, context, scores: torch.Tensor) -> None:
        super().__init__(config, context)
        self.scores, self.merges_identical = scores, False

    def score(self, rollouts: Rollouts) -> torch.Tensor:
        return self.scores


def test_the_penalty_on_long_responses_equals_the_recorded_values():
    prompts = encode_prompts(torch.arange(1), ["w1"], [""], TOKENIZER)
    for case, expected in figures("methods.json", "overlong_20_4").items():
        tokens, _, factor = case.partition("_factor")
        config = AnswerScorerConfig(overlong_buffer=4, overlong_factor=float(factor or 1))
        context = replace(scorer_context(TOKENIZER), response_length=20)
        response = " ".join(["w2"] * (int(tokens) - 1))  # and the end token
        rollouts = encode_completions(prompts, [[response]], TOKENIZER, response_length=20)
        scores = Given(config, context, torch.tensor([[3.0]]))(rollouts).scores
        assert scores.item() == pytest.approx(3 + expected, abs=1e-6), case


@pytest.mark.parametrize(
    ("file", "case", "config"),
    [
        ("methods_more.json", "moving_reference", MovingConfig(every=2, share=0.6)),
        ("methods.json", "elastic_reset", MovingConfig(every=3, decay=0.9)),
    ],
)
def test_policy_and_reference_or_average_move_as_recorded(file, case, config):
    engine = engine_of(moving=config)
    for weights in (*engine.module.parameters(), *engine.moving.moved, *engine.reference.parameters()):
        weights.data.zero_()
    ((_, expected),) = figures(file, case).items()
    for version, (policy, moved) in enumerate(expected, 1):
        for weights in engine.module.parameters():
            weights.data += 1
        engine.moving(version)
        for own, followed in zip(engine.module.parameters(), engine.moving.moved, strict=True):
            assert own.unique().tolist() == pytest.approx([policy], rel=1e-5)
            assert followed.unique().tolist() == pytest.approx([moved], rel=1e-5, abs=1e-7)


def test_decoupled_advantages_of_a_weighted_scorer_equal_the_recorded_values():
    batch = batch_of(np.load(GOLDEN / "methods.npz"))
    case = json.loads((GOLDEN / "methods_more.json").read_text())["cases"]["gdpo"]
    values = [batch.scores, batch.response_mask.sum(-1) / 16, (batch.scores > 0.3).double()]
    parts = {f"p{i}": AnswerScorerConfig(weight=w) for i, w in enumerate(case["settings"]["weights"])}
    scores = dict(zip(parts, values, strict=True))
    build = lambda section, key: Given(section, scorer_context(TOKENIZER, key), scores[key[-2:]])  # noqa: E731
    context = replace(scorer_context(TOKENIZER), build=build)
    rollouts = Rollouts(**{name: getattr(batch, name) for name in Rollouts.__dataclass_fields__})
    scored = WeightedScorer(WeightedScorerConfig(parts=parts), context)(rollouts)
    credited = settings("grpo", advantage=Advantage.decoupled).credit(scored)
    expected = grouped(np.array(case["figures"]["advantages"])).float()
    torch.testing.assert_close(credited.advantages[..., 0], expected, rtol=1e-5, atol=1e-5)


def test_the_next_epoch_has_the_recorded_order():
    found = figures("methods_more.json", "curriculum")
    for seed in range(20):
        task = make_task(ListSource(queries=[" w0"] * 7), prompts_per_update=7, seed=seed)
        before = task.order(1).tolist()
        if all(before.index(a) < before.index(b) for a, b in ((2, 3), (4, 5))):  # ties keep this order
            break
    order = task.prompts(pass_rate=0.5)
    next(order)
    for row, score in enumerate(found["scores"]):
        if score is not None:
            scored = Scored([row], score)
            scored.scores[:] = score  # a sum in float32 may round to the other side of 0.05
            order.scored(scored)
    assert next(order).index.tolist() == found["order"]
