"""Evaluators of a model on held-out examples, used during training and by `rlhf.evaluate`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from rlhf.config.run import EvalConfig
from rlhf.config.scorers import scorers
from rlhf.core.batch import Prompts, Rollouts, Sampling
from rlhf.core.files import as_line, write_atomically
from rlhf.core.formatting import in_float32, mean_bounds, rate, with_bounds
from rlhf.core.metrics import Evaluation, Row
from rlhf.core.overoptimization import best_of, best_of_kl
from rlhf.core.state import TrainState
from rlhf.core.statistics import length_controlled
from rlhf.engines.engine import Engine
from rlhf.environments.environment import EnvironmentFactory, limits, transcripts
from rlhf.generators.generator import Generator
from rlhf.models.modules import RewardModel
from rlhf.objectives.dpo import OnlineDPO
from rlhf.scorers.scorer import Scored, Scorer, first_of_identical, response_texts
from rlhf.tasks.kinds import means_of_parts
from rlhf.terminal.console import Phases
from rlhf.text.chat import unquoted
from rlhf.text.encoding import encode_completions
from rlhf.training.recorder import against_initial

_CHUNK = 1024  # responses that are sampled and scored together for the best of n
_POLL_S = 0.2  # seconds between checks for a signal while a generator in another process samples

Evaluator = Callable[[TrainState], Evaluation]


@dataclass(eq=False)
class PolicyEvaluator:
    """An evaluator of a policy, which samples near-greedy completions of held-out prompts.

    With a scorer, `eval/score` is the mean score of the completions. If the scorer only compares responses,
    `eval/win_rate_vs_initial` compares the completions with those before training.

    With a judge (`gold`), `eval/win_rate` is the fraction of prompts whose completion scores strictly higher
    than the reference response. A tie (`algo.tie_tolerance`) is not a win; `eval/tie_rate` is the fraction of
    ties; `eval/win_rate_lc` estimates the win rate at equal lengths. If the prompts have no reference
    responses, only the mean score of the judge is reported, and nothing of a judge that only compares.

    If the judge checks answers, or without a judge the scorer, `eval/accuracy` is the share of scores of 1,
    before a penalty on long responses. With `config.attempts`, `eval/pass_at_<k>` is measured, too.

    With a reference model, `eval/kl` is estimated on separate samples at the training temperature, and
    `eval/ppl` is the perplexity of the near-greedy completions under the reference model, at temperature 1.
    Without a reference model, the evaluator reports `eval/loss` instead of these two metrics.

    `<name>_low` and `<name>_high` are the bounds of the 95 % interval of a metric over prompts (or pairs).

    Args:
        prompts: held-out examples.
        generator: the generator that samples the completions.
        gold: the judge, which training does not use; None: only metrics that need no judge.
        scorer: the scorer of the training; None: it cannot score new completions, so no `eval/score`.
        engine: engine with policy and reference model.
        tokenizer: tokenizer of the policy.
        sampling: near-greedy sampling, one sample per prompt.
        train_temperature: temperature of the samples for the KL estimate.
        pairs: metrics of the policy on held-out pairs; None: the policy is not trained on stored pairs.
        parts: names of the parts of a mixture of tasks, for metrics of each part.
        phases: the phases of the run, for its progress display.
        environment: the factory of environments, for the dialogues of the completions; None: no environment.
        config: the config section of evaluations.
        initial: returns the responses before training, in the order of `prompts`; [] if they are not known.
        best_of: the file that the evaluation before training writes with `config.best_of`, unless it exists.
    """

    prompts: Prompts
    generator: Generator
    gold: Scorer | None
    scorer: Scorer | None
    engine: Engine
    tokenizer: PreTrainedTokenizerFast
    sampling: Sampling
    train_temperature: float
    pairs: HeldOutPairs | None = None
    parts: tuple[str, ...] = ()
    phases: Phases = field(default_factory=Phases)
    environment: EnvironmentFactory | None = None
    config: EvalConfig = field(default_factory=EvalConfig)
    initial: Callable[[], list[str]] = list
    best_of: Path | None = None
    judged_references: Scored | None = field(default=None, init=False)

    def __call__(self, state: TrainState) -> Evaluation:
        """Return metrics and completions of the policy with its current weights."""
        if state.update == 0 and self.best_of is not None:
            self.write_best_of(self.best_of)
        rollouts = self.generate_completions(self.sampling)
        columns: dict[str, list[Any]] = {
            "prompt": rollouts.texts,
            "response": [group[0] for group in response_texts(rollouts, self.tokenizer)],
            "reference": list(map(unquoted, rollouts.references)),
        }
        figures: Row = {}
        if self.environment is not None and rollouts.episode is not None:
            columns["messages"] = transcripts(rollouts, self.environment.turns)
            columns["limit"] = limits(rollouts, self.environment)
            means = {name: values.double().mean().item() for name, values in rollouts.episode.items()}
            figures |= {f"eval/environment/{name}": means[name] for name in means if name != "seconds"}
        if self.scorer is not None:
            with self.phases("scoring"):
                if self.scorer.config.compares:
                    figures |= self.against_initial(rollouts, self.scorer)
                else:
                    scored = self.scorer(rollouts)
                    scores = scored.scores[:, 0].double()
                    columns["score"] = scores.tolist()
                    figures |= _average("eval/score", scores)
                    if scored.member_spread is not None:
                        figures["eval/score_std"] = scored.member_spread.double().mean().item()
        if self.gold is not None:
            with self.phases("judging"):
                (judged,) = self.gold.scored(rollouts)
            gold, compares = judged.scores, self.gold.config.compares
            if not compares:
                columns["gold_score"] = gold.tolist()
                figures |= _average("eval/gold_score", gold.double())
            if any(self.prompts.references):  # without references, all are ""
                if self.judged_references is None:  # the references keep their scores
                    (self.judged_references,) = self.gold.scored(self.references())
                references = self.judged_references
                difference = (gold - references.scores).double().mean().item()
                gold, reference = self.gold.compare(judged, references).T
                columns |= {"gold_score": gold.tolist(), "reference_gold_score": reference.tolist()}
                wins, ties = (gold > reference).double(), (gold == reference).double()
                longer = (rollouts.response_mask.sum(-1) - references.rollouts.response_mask.sum(-1))[:, 0]
                points = (wins + ties / 2).cpu().numpy()
                figures |= {
                    **rate("eval/win_rate", wins.mean().item(), len(rollouts)),
                    "eval/tie_rate": ties.mean().item(),
                    **({} if compares else {"eval/norm_reward": difference}),
                    **length_controlled("eval/win_rate_lc", points, longer.cpu().numpy()),
                }
        told = {} if self.gold is None else self.gold.told()
        figures |= {f"eval/{name}": total / (count or 1) for name, (total, count) in told.items()}
        checks, checked = (self.scorer, "score") if self.gold is None else (self.gold, "gold_score")
        if checks is not None and checks.config.verifies:
            found = columns[checked]
            if any(each.overlong_buffer is not None for _, each in scorers(checks.config)):
                found = checks.score_once(rollouts)[:, 0].tolist()
            correct = sum(score == 1 for score in found)
            figures |= rate("eval/accuracy", correct / len(rollouts), len(rollouts))
            if self.config.attempts:
                figures |= self.pass_rates(checks)
        figures["eval/response_tokens"] = rollouts.response_mask.sum(-1).double().mean().item()
        figures["eval/eos_rate"] = rollouts.ended.double().mean().item()
        compares = self.engine.reference is not None
        figures |= self.against_reference(rollouts) if compares else self.likelihood()
        if self.pairs is not None:
            figures = self.pairs.measure() | figures  # the accuracy of answers, if a judge checks answers
        if self.prompts.part is not None:
            known = ("score", "gold_score")
            values: dict[str, list[float]] = {
                name: columns[name] for name in known if f"eval/{name}" in figures
            }
            if (reference := columns.get("reference_gold_score")) is not None:
                pairs = zip(columns["gold_score"], reference, strict=True)
                values["win_rate"] = [float(mine > theirs) for mine, theirs in pairs]
            values["response_tokens"] = rollouts.response_mask.sum(-1)[:, 0].tolist()
            figures |= means_of_parts(self.parts, self.prompts.part, values)
        columns |= {name: [*map(in_float32, columns[name])] for name in columns if "score" in name}
        rows = zip(*columns.values(), strict=True)
        samples = [dict(zip(columns, row, strict=True)) for row in rows]
        return Evaluation(
            figures,
            samples,
            examples=len(samples),
            scores=columns.get("score"),
            messages=last_messages(rollouts.dialogues),
        )

    def generate_completions(self, sampling: Sampling, prompts: Prompts | None = None) -> Rollouts:
        """Return responses to held-out prompts (None: to all), sampled with the weights of the generator."""
        future = self.generator.submit(prompts or self.prompts, sampling)
        with self.phases("waiting for rollouts") as done:
            while True:
                try:
                    return future.result(_POLL_S)
                except TimeoutError:
                    if future.done():  # the error of the generator
                        raise
                    done(0)

    def against_initial(self, rollouts: Rollouts, scorer: Scorer) -> Row:
        """Return the win rate against the responses before training, if there are any, by the scorer."""
        before = scorer.ranks.from_first(self.initial)
        if len(before) != len(rollouts):
            return {}
        texts = [[text] for text in before]
        old = encode_completions(self.prompts, texts, self.tokenizer, response_length=None)
        compared = scorer.compare(*scorer.scored(rollouts), *scorer.scored(old))
        figures = {f"eval/{name}": total / (count or 1) for name, (total, count) in scorer.told().items()}
        return figures | against_initial(
            compared[:, 0].tolist(), compared[:, 1].tolist(), scorer.tie_tolerance
        )

    def pass_rates(self, checks: Scorer) -> Row:
        """Return the estimates of pass@k, the probability that one of k responses to a prompt is correct.

        With c correct ones of n samples at the training temperature, the unbiased estimate is
        1 - C(n - c, k) / C(n, k) (Chen et al., arXiv 2107.03374, equation 1).
        """
        n, figures = self.config.attempts, {}  # type: int, Row
        sampling = replace(self.sampling, samples=n, temperature=self.train_temperature, purpose="eval-pass")
        scores = checks.score_once(self.generate_completions(sampling))
        for name, k in self.config.passes.items():
            passed = [1 - math.comb(n - c, k) / math.comb(n, k) for c in (scores == 1).sum(1).tolist()]
            figures |= _average(f"eval/{name}", torch.tensor(passed, dtype=torch.float64))
        return figures

    def write_best_of(self, file: Path) -> None:
        """Write what the best of n responses by the scorer has as score and gold score, n = 1, 2, 4, ...

        A row has the means over prompts, and the standard deviations over prompts (`_std`), of estimates
        without bias (`best_of`), the KL to the policy of one response if all responses differ, and the share
        of n responses that differ from earlier ones. A file that exists is kept, so a resumed run does not
        sample again.
        """
        assert self.scorer is not None and self.gold is not None, "validated: both score the responses"
        ranks, most = self.engine.ranks, self.config.best_of
        if ranks.from_first(file.exists):
            return
        asked = replace(self.sampling, temperature=self.train_temperature, purpose="eval-best-of")
        chunks, found = torch.arange(len(self.prompts)).split(max(1, _CHUNK // most)), []
        with self.phases("best of n", len(chunks)) as done:
            for request, rows in enumerate(chunks):
                sampling = replace(asked, samples=most, request=request)
                rollouts = self.generate_completions(sampling, self.prompts.select(rows))
                scores = self.scorer(rollouts).scores, self.gold.score_once(rollouts)
                new = first_of_identical(rollouts) == torch.arange(most)
                found.append([each.double().cpu().numpy() for each in (*scores, new)])
                done()
        proxy, gold, differs = map(np.concatenate, zip(*found, strict=True))
        lines = []
        for n in (2**power for power in range(most.bit_length())):
            row: Row = {"n": n, "kl": best_of_kl(n), "distinct": float(differs[:, :n].mean())}
            for name, values in (("score", proxy), ("gold_score", gold)):
                best = best_of(n, proxy, values)
                row |= {name: best.mean(), f"{name}_std": best.std(ddof=min(1, len(best) - 1))}
            lines.append(as_line({name: float(value) for name, value in row.items()}))
        if ranks.first:
            write_atomically(file, "".join(lines))

    def references(self) -> Rollouts:
        """Return the reference responses as rollouts, without truncation."""
        texts = [[text] for text in self.prompts.references]
        return encode_completions(self.prompts, texts, self.tokenizer, response_length=None)

    def against_reference(self, rollouts: Rollouts) -> Row:
        """Return the KL to the reference model, and the reference model's perplexity of `rollouts`."""
        engine = self.engine
        assert engine.reference is not None
        sampling = replace(self.sampling, temperature=self.train_temperature, purpose="eval-kl")
        samples = self.generate_completions(sampling)
        policy = engine.infer(engine.policy, samples, "logprobs")
        reference = engine.infer(engine.reference, samples, "logprobs")
        nll = -engine.infer(engine.reference.at(temperature=1.0), rollouts, "logprobs").double().sum()
        return {
            **_average("eval/kl", (policy - reference).double().sum(-1)[:, 0]),
            "eval/ppl": math.exp(nll.item() / int(rollouts.response_mask.sum())),
        }

    def likelihood(self) -> Row:
        """Return the cross-entropy per token of the held-out reference responses, the loss of SFT."""
        references = self.references()
        logprobs = self.engine.infer(self.engine.policy, references, "logprobs").double().sum()
        return {"eval/loss": -logprobs.item() / int(references.response_mask.sum())}


def last_messages(dialogues: list[list[dict[str, str]]] | None) -> list[str] | None:
    """Return the text of the last message of each dialogue; None if the prompts are texts."""
    return None if dialogues is None else [str(turns[-1].get("content") or "") for turns in dialogues]


def _average(name: str, values: Tensor) -> Row:
    """Return the mean of values [N] as metric `name`, with the bounds of its 95 % interval if N > 1."""
    return with_bounds(name, values.mean().item(), mean_bounds(values.tolist()))


@dataclass(eq=False)
class HeldOutPairs:
    """Held-out preference pairs, on which a policy that DPO trains on stored pairs is measured.

    Args:
        pairs: the pairs as rollouts, the chosen response first.
        objective: the DPO objective, which defines the loss and the margin of a pair.
        engine: engine with policy and reference model.
    """

    pairs: Rollouts
    objective: OnlineDPO
    engine: Engine
    ref_logprobs: Tensor | None = field(default=None, init=False)

    def measure(self) -> Row:
        """Return loss, accuracy and margin of the policy with its current weights."""
        engine = self.engine
        assert engine.reference is not None, "DPO has a reference model"
        if self.ref_logprobs is None or engine.moving is not None:
            self.ref_logprobs = engine.infer(engine.reference, self.pairs, "logprobs")
        logprobs = engine.infer(engine.policy, self.pairs, "logprobs")
        figures = self.objective.held_out(logprobs, self.ref_logprobs, self.pairs.response_mask)
        return figures | rate("eval/accuracy", figures["eval/accuracy"], len(self.pairs))


@dataclass(eq=False)
class RewardEvaluator:
    """An evaluator of a reward model on held-out pairs; equal rewards count as a wrong preference.

    Args:
        pairs: held-out pairs, the chosen response first.
        engine: engine with the reward model.
    """

    pairs: Rollouts
    engine: Engine

    def __call__(self, state: TrainState) -> Evaluation:
        """Return metrics of the reward model with its current weights."""
        assert isinstance(self.engine.module, RewardModel)
        rewards = self.engine.infer(self.engine.module, self.pairs, "rewards").double()
        margins = rewards[:, 0] - rewards[:, 1]
        count = len(self.pairs)
        figures = {
            **rate("eval/accuracy", (margins > 0).double().mean().item(), count),
            "eval/loss": -torch.nn.functional.logsigmoid(margins).mean().item(),
            "eval/margin": margins.mean().item(),
            "eval/reward": rewards.mean().item(),
        }
        return Evaluation(figures, examples=count)
