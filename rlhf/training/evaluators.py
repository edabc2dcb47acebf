"""What measures a model on held-out examples: in training, and in `rlhf.evaluate`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf.core.encoding import encode_completions
from rlhf.core.metrics import Evaluation
from rlhf.core.state import TrainState
from rlhf.models.modules import RewardModel
from rlhf.scorers.scorer import response_texts

if TYPE_CHECKING:
    from rlhf.core.batch import Prompts, Rollouts, Sampling
    from rlhf.core.metrics import Row
    from rlhf.engines.engine import Engine
    from rlhf.generators.generator import Generator
    from rlhf.scorers.scorer import Scorer


Evaluator = Callable[[TrainState], Evaluation]


class PolicyEvaluator:
    """Near-greedy completions of held-out prompts against the reference responses, judged by gold.

    `eval/win_rate` is the part of prompts whose completion scores strictly higher than the reference
    response (a tie is no win; `eval/tie_rate` says how many there were). `eval/kl` is estimated on samples
    at the temperature of training; `eval/ppl` is the perplexity of the near-greedy completions under the
    reference model, at temperature 1.

    Args:
        prompts: held-out examples.
        generator: answers them.
        gold: the judge that training never sees; None: only figures without a judge.
        scorer: what training sees, for the completions' `score`; None where there is none.
        engine: policy and reference.
        sampling: near-greedy, one sample a prompt.
        train_temperature: of the samples for the KL.
    """

    def __init__(
        self,
        prompts: Prompts,
        generator: Generator,
        gold: Scorer | None,
        scorer: Scorer | None,
        engine: Engine,
        tokenizer: PreTrainedTokenizerBase,
        sampling: Sampling,
        train_temperature: float,
    ) -> None:
        self.prompts = prompts
        self.generator = generator
        self.gold = gold
        self.scorer = scorer
        self.engine = engine
        self.tokenizer = tokenizer
        self.sampling = sampling
        self.train_temperature = train_temperature
        self.reference_gold: Tensor | None = None

    def __call__(self, state: TrainState) -> Evaluation:
        """Evaluate the policy as it stands."""
        rollouts = self.generate_completions(self.sampling)
        columns: dict[str, list[Any]] = {
            "prompt": rollouts.texts,
            "response": [group[0] for group in response_texts(rollouts, self.tokenizer)],
            "reference": rollouts.references,
        }
        figures: Row = {}
        if self.scorer is not None:
            columns["score"] = self.scorer(rollouts).scores[:, 0].tolist()
        if self.gold is not None:
            gold = self.gold.score(rollouts)[:, 0]
            reference = self.score_references(self.gold)
            columns["gold_score"] = gold.tolist()
            columns["reference_gold_score"] = reference.tolist()
            figures |= {
                "eval/win_rate": (gold > reference).double().mean().item(),
                "eval/tie_rate": (gold == reference).double().mean().item(),
                "eval/gold_score": gold.double().mean().item(),
                "eval/norm_reward": (gold - reference).double().mean().item(),
            }
        figures["eval/response_tokens"] = rollouts.response_mask.sum(-1).double().mean().item()
        figures["eval/eos_rate"] = rollouts.ended.double().mean().item()
        figures |= (
            self.against_reference(rollouts) if self.engine.reference is not None else self.likelihood()
        )
        rows = zip(*columns.values(), strict=True)
        samples = [dict(zip(columns, row, strict=True)) for row in rows]
        return Evaluation(figures, samples, len(samples))

    def generate_completions(self, sampling: Sampling) -> Rollouts:
        """One response to each held-out prompt, with the generator's present weights."""
        return self.generator.submit(self.prompts, sampling).result()

    def score_references(self, gold: Scorer) -> Tensor:
        """The judge's scores [N] of the reference responses; they never change."""
        if self.reference_gold is None:
            self.reference_gold = gold.score(self.references())[:, 0]
        return self.reference_gold

    def references(self) -> Rollouts:
        """The reference responses as rollouts, uncut."""
        texts = [[text] for text in self.prompts.references]
        return encode_completions(self.prompts, texts, self.tokenizer, response_length=None)

    def against_reference(self, rollouts: Rollouts) -> Row:
        """KL to the reference, and perplexity of `rollouts` under it."""
        engine = self.engine
        assert engine.reference is not None
        sampling = replace(self.sampling, temperature=self.train_temperature, purpose="eval-kl")
        samples = self.generate_completions(sampling)
        policy = engine.infer(engine.policy, samples, "logprobs")
        reference = engine.infer(engine.reference, samples, "logprobs")
        nll = -engine.infer(engine.reference.at(temperature=1.0), rollouts, "logprobs").double().sum()
        return {
            "eval/kl": (policy - reference).double().sum(-1).mean().item(),
            "eval/ppl": math.exp(nll.item() / int(rollouts.response_mask.sum())),
        }

    def likelihood(self) -> Row:
        """Cross-entropy a token of the held-out reference responses: what supervised fine-tuning lowers."""
        references = self.references()
        logprobs = self.engine.infer(self.engine.policy, references, "logprobs").double().sum()
        return {"eval/loss": -logprobs.item() / int(references.response_mask.sum())}


class RewardEvaluator:
    """How often a reward model prefers the chosen of two held-out responses (a tie is a miss)."""

    def __init__(self, pairs: Rollouts, engine: Engine) -> None:
        self.pairs = pairs
        self.engine = engine

    def __call__(self, state: TrainState) -> Evaluation:
        """Evaluate the reward model as it stands."""
        assert isinstance(self.engine.module, RewardModel)
        rewards = self.engine.infer(self.engine.module, self.pairs, "rewards").double()
        margins = rewards[:, 0] - rewards[:, 1]
        return Evaluation(
            {
                "eval/accuracy": (margins > 0).double().mean().item(),
                "eval/loss": -torch.nn.functional.logsigmoid(margins).mean().item(),
                "eval/margin": margins.mean().item(),
                "eval/reward": rewards.mean().item(),
            },
            examples=len(self.pairs),
        )
