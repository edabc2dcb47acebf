"""The interface of a scorer, which maps rollouts to scores [N, K]; scorers of labels and of texts.

What compares two responses calls `Scorer.compare`, which a judge of pairs overrides: win rates
(`rlhf.training.evaluators`), preference pairs, relabelling. A new scorer needs a section in
`rlhf/config/scorers.py` that names its part (`@option("scorer", "mine", part="module:Class")`), the part,
`conf/scorer/mine.yaml`, and a test.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from pathlib import Path
from typing import Any

import pyarrow.parquet
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from rlhf.config.models import Combine, ModelConfig
from rlhf.config.scorers import PartsScorerConfig, RewardModelScorerConfig, ScorerConfig, WeightedScorerConfig
from rlhf.core.batch import Batch, Budget, Rollouts, Sampling
from rlhf.core.errors import CommonError, UserError
from rlhf.core.files import Shared, leftovers, name, vocabulary, whole
from rlhf.core.formatting import in_float32
from rlhf.core.state import TrainState
from rlhf.environments.environment import Turns
from rlhf.models import loading
from rlhf.models.forward import infer
from rlhf.models.modules import RewardModel
from rlhf.processes.ranks import Ranks
from rlhf.text.chat import Dialogues, control_tokens, end_responses_with_turns, quoted, set_clock, unquoted
from rlhf.text.encoding import encode_completions, encode_prompts, pieces

_ROUNDING = 1e-12  # relative difference of sums in float64 that are equal as decimals, near 0 also in float32


Figures = dict[str, tuple[float, float]]  # total, and the count of which it is the mean, or 0 for a sum


def add(into: Figures, new: Figures) -> None:
    """Add figures to the figures `into`, in place."""
    for figure, (total, count) in new.items():
        before = into.get(figure, (0.0, 0.0))
        into[figure] = before[0] + total, before[1] + count


def merge_ties(scores: Tensor, tolerance: float) -> Tensor:
    """Return the scores [N, K], float32, in which scores that tie with the best or worst of a row equal it.

    Two scores a and b tie if |a - b| <= tolerance * max(1, |a|, |b|). Best and worst decide preference pairs,
    best-of-K, win rates and whether a prompt has a signal. Other scores do not change, and no score changes
    by more than the tolerance. If best and worst tie, all scores of the row become equal to the best.

    Args:
        scores: scores [N, K] that are compared within a row; rounded to float32 before.
        tolerance: largest relative difference of a tie; 0: only equal scores tie. Scores that differ by the
            rounding of a sum are equal: 0.1 + 0.2 and 0.3, 0.1 + 0.2 - 0.3 and 0.
    """
    scores, tolerance = scores.float(), max(tolerance, _ROUNDING)

    def tied(extreme: Tensor) -> Tensor:
        scale = torch.maximum(scores.abs(), extreme.abs()).clamp(min=1)
        return (scores - extreme).abs() <= tolerance * scale

    best = scores.amax(1, keepdim=True)
    scores = torch.where(tied(best), best, scores)
    worst = scores.amin(1, keepdim=True)
    return torch.where(tied(worst), worst, scores)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorerContext:
    """The objects of a run that a scorer needs, besides the config section of the scorer.

    Args:
        at: config key of the scorer: `scorer`, `gold`, or `<scorer or gold>.parts.<name>`; for messages.
        tokenizer: tokenizer of the policy; rollouts contain its token ids.
        ranks: the ranks of the run, and the device of this rank.
        model: config section of the models.
        place: returns the frozen module that a function builds, on the device or divided over the ranks;
            depends on the backend, and may call the function on the first rank only.
        build: returns the scorer of a config section and key, for a scorer that consists of other scorers.
        conversational: the prompts of the task are dialogues.
        turns: the messages of the environment as tokens, if one answers the replies; None: no environment.
        judgements: the file of the answers of a judge, with * in place of its key; None: it forgets them.
        used: gets the answers of judges that are used, and no judge is asked: the file has them all; None:
            judges are asked.
        parts: names of the parts of a mixture of tasks, in the order of `Prompts.part`; empty without parts.
        tie_tolerance: largest relative difference of two scores that count as equal (`algo.tie_tolerance`).
        response_length: largest number of tokens of a response.
    """

    at: str
    tokenizer: PreTrainedTokenizerFast
    ranks: Ranks
    model: ModelConfig
    place: Callable[[Callable[[], Any]], Any]
    build: Callable[[ScorerConfig, str], Scorer | None]
    conversational: bool = False
    turns: Turns | None = None
    parts: tuple[str, ...] = ()
    tie_tolerance: float = 0.0
    response_length: int = 0
    judgements: Path | None = None
    used: dict[str, dict[str, Any]] | None = None

    def part(self, key: str, section: ScorerConfig) -> Scorer:
        """Return the scorer of the part `key` of a scorer, given its config section."""
        made = self.build(section, f"{self.at}.parts.{key}")
        assert made is not None, "validated: every part scores"
        return made


class Scorer(ABC):
    """A scorer of rollouts, which applies the settings `missing_eos_...` and `overlong_...`.

    Args:
        config: config section of the scorer.
        context: the objects of the run that a scorer needs.
    """

    config: ScorerConfig
    merges_identical = True  # identical responses to a prompt get one score
    alone = True  # False: a part of a weighted sum; the score is NaN where only other parts judge a response

    def __init__(self, config: ScorerConfig, context: ScorerContext) -> None:
        self.config, self.at, self.ranks = config, context.at, context.ranks
        self.tokenizer: PreTrainedTokenizerBase = context.tokenizer
        self.tie_tolerance, self.response_length = context.tie_tolerance, context.response_length

    @abstractmethod
    def score(self, rollouts: Rollouts) -> Tensor:
        """Return the scores [N, K], float32 or float64, before the settings about lengths are applied.

        A subclass implements this method; callers use `score_once`.
        """

    def score_once(self, rollouts: Rollouts) -> Tensor:
        """Return `score` in float64; with `merges_identical`, identical responses get the score of the first.

        A model gives identical responses scores that differ by rounding, because they are at different
        places of a batch. Weights and penalties are applied in float64, and `merge_ties` rounds the result to
        float32: sums that are equal, such as 0.1 + 0.6 and 0.3 + 0.4, then are equal numbers.
        """
        scores = self.score(rollouts).double()
        if not self.merges_identical:
            return scores
        return scores.gather(1, first_of_identical(rollouts).to(scores.device))

    def told(self) -> Figures:
        """Return figures of this scorer about its work since the last call: total, and count (0: a sum)."""
        return {}

    def scored(self, rollouts: Rollouts) -> list[Scored]:
        """Return the K responses to each prompt, for `compare`, with their scores (NaN if it `compares`)."""
        if self.config.compares:
            columns = torch.full(rollouts.response_ids.shape[:2], math.nan).T
        else:
            columns = self.score_once(rollouts).float().T
        return [Scored(rollouts=rollouts, sample=k, scores=column) for k, column in enumerate(columns)]

    def compare(self, a: Scored, b: Scored) -> Tensor:
        """Return two numbers for each prompt, [N, 2] float32: the better of two responses has the higher one.

        The numbers are equal if the responses tie. Here they are the scores, in which ties are equal
        (`merge_ties`). A judge that reads both responses at once returns (1, 0), (0, 1) or (0.5, 0.5).

        Args:
            a, b: the first and the second response to each of N prompts.
        """
        return merge_ties(torch.stack([a.scores, b.scores], 1), self.tie_tolerance)

    def compared(self, a: Scored, b: Scored, rows: Tensor) -> Tensor:
        """Return `compare` of the responses to the M prompts at `rows`, [M, 2], scored by this scorer."""
        pair = (self.scored(each.rollouts.select(rows))[each.sample] for each in (a, b))
        return self.compare(*pair)

    def __call__(self, rollouts: Rollouts) -> Batch:
        """Return the rollouts with the scores for training, in which ties are equal (`merge_ties`).

        Rollouts that an annotator process has scored already (a `Batch`) are returned unchanged.
        """
        if isinstance(rollouts, Batch):
            return rollouts
        scores, parts = self.training_scores(rollouts)
        rounded = None if parts is None else {name: part.float() for name, part in parts.items()}
        summed = self.config.parts if parts else {}
        weights = {name: torch.full((len(rollouts),), part.weight) for name, part in summed.items()}
        scores = merge_ties(scores, self.tie_tolerance)
        rest = [(0.0, 0.0)] * (len(rollouts) - 1)
        told = {name: torch.tensor([pair, *rest], dtype=torch.double) for name, pair in self.told().items()}
        own = {"parts": rounded, "part_weights": weights or None, "figures": told or None}
        return rollouts.extend(Batch, scores=scores, **own)

    def training_scores(self, rollouts: Rollouts) -> tuple[Tensor, dict[str, Tensor] | None]:
        """Return the scores [N, K] after `at_end`, and those of the parts, if any; float64."""
        return self.at_end(self.score_once(rollouts), rollouts), None

    def at_end(self, scores: Tensor, rollouts: Rollouts) -> Tensor:
        """Return the scores [N, K] after the penalty on long responses, then the missing-EOS settings.

        The penalty rises from 0 to `overlong_factor` over the last `overlong_buffer` tokens of the largest
        length: DAPO's soft overlong punishment (Yu et al., arXiv 2503.14476, equation 13).
        """
        config, ended = self.config, rollouts.ended
        replacement, penalty = config.missing_eos_score, config.missing_eos_penalty
        if config.overlong_buffer is not None:
            over = rollouts.real.sum(-1) - self.response_length + config.overlong_buffer
            rate = config.overlong_factor / config.overlong_buffer
            scores = scores.sub(over.clamp(min=0), alpha=rate)  # in float64
        if replacement is not None:
            return torch.where(ended | scores.isnan(), scores, replacement)
        return scores if penalty is None else torch.where(ended, scores, scores - penalty)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """One response to each of N prompts, with the scores of a scorer.

    Attributes:
        rollouts: the prompts, with K responses each.
        sample: which of the K responses.
        scores: [N] float32.
    """

    rollouts: Rollouts
    sample: int
    scores: Tensor


def no_scorer(config: ScorerConfig, context: ScorerContext) -> None:
    """Return None: with `scorer@gold=none` there is no judge."""


class LabelsScorer(Scorer):
    """A scorer that returns the labels of stored completions; 0 for completions without labels."""

    merges_identical = False  # the data may label them differently

    def at_end(self, scores: Tensor, rollouts: Rollouts) -> Tensor:
        """Return the labels unchanged: a label is valid whether or not the text was truncated."""
        return scores

    def score(self, rollouts: Rollouts) -> Tensor:
        """Return the labels [N, K]."""
        if rollouts.labels is None:
            return torch.zeros(rollouts.response_ids.shape[:2])
        return rollouts.labels


class EnvironmentScorer(Scorer):
    """A scorer that returns the sum of the rewards of an episode."""

    merges_identical = False  # an environment may reward identical replies differently

    def score(self, rollouts: Rollouts) -> Tensor:
        """Return the sums [N, K]."""
        assert rollouts.rewards is not None, "validated: the run has an environment"
        return rollouts.rewards.double().sum(-1)


class TextScorer(Scorer):
    """A scorer that judges the text of each response. A subclass implements `judge`."""

    @abstractmethod
    def judge(self, prompt: str, response: str, reference: str) -> float:
        """Return the score of one response."""

    def score(self, rollouts: Rollouts) -> Tensor:
        """Return the scores [N, K] of the responses' texts."""
        texts = distinct_texts(rollouts, self.tokenizer)
        each = zip(texts.prompts, texts.responses, texts.references, strict=True)
        return texts.spread([self.judge(*one) for one in each])


def response_texts(rollouts: Rollouts, tokenizer: PreTrainedTokenizerBase) -> list[list[str]]:
    """Return the responses as N lists of K texts: what they add to the prompt, without the token that ended.

    Special tokens are left out. A model may declare an end token that its tokenizer does not mark as special.
    The text of an episode is its last reply: what a tool wrote is not the answer of the model.
    """
    N, K, T = rollouts.response_ids.shape
    text = rollouts.last_reply
    last = torch.arange(T, device=text.device) == rollouts.real.sum(-1, keepdim=True) - 1
    ids = rollouts.response_ids.flatten(0, 1)
    mask = (text & ~(last & rollouts.ended[..., None])).flatten(0, 1)
    flat = pieces(tokenizer).decode([row[kept].tolist() for row, kept in zip(ids, mask, strict=True)])
    return [flat[n * K : (n + 1) * K] for n in range(N)]


def flat_texts(
    rollouts: Rollouts, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[str], list[str], list[str]]:
    """Return prompts, responses and references, one per response: three lists of N * K texts."""
    groups = response_texts(rollouts, tokenizer)
    K = rollouts.response_ids.shape[1]
    prompts = [text for text in rollouts.texts for _ in range(K)]
    references = [text for text in map(unquoted, rollouts.references) for _ in range(K)]
    return prompts, [text for group in groups for text in group], references


@dataclass(frozen=True, slots=True)
class DistinctTexts:
    """The distinct responses of rollouts as M texts; identical responses to a prompt are one text."""

    prompts: list[str]  # M prompts
    responses: list[str]  # M responses
    references: list[str]  # M reference responses
    examples: list[int]  # M numbers of prompts, from 0 to N - 1
    places: Tensor  # [N, K] int64, place of each response in these lists

    def spread(self, scores: Sequence[float]) -> Tensor:
        """Return the scores [N, K], float64, given the scores of the M texts."""
        return torch.tensor(scores, dtype=torch.float64)[self.places]


def distinct_texts(rollouts: Rollouts, tokenizer: PreTrainedTokenizerBase) -> DistinctTexts:
    """Return the distinct responses of `rollouts` as texts, in the order of the rollouts."""
    K = rollouts.response_ids.shape[1]
    first = first_of_identical(rollouts)
    kept = (first == torch.arange(K)).flatten()  # [N * K] bool, True: not identical to an earlier response
    places = (kept.cumsum(0) - 1).view(-1, K).gather(1, first)
    columns = flat_texts(rollouts, tokenizer)
    prompts, responses, references = ([*compress(texts, kept.tolist())] for texts in columns)
    examples = torch.arange(len(rollouts)).repeat_interleave(K)[kept]
    return DistinctTexts(prompts, responses, references, examples.tolist(), places)


def first_of_identical(rollouts: Rollouts) -> Tensor:
    """Return, for each response, the first response of its prompt with the same tokens, [N, K] int64.

    Identical responses have equal tokens, messages of an environment included, and both or neither ended.
    """
    N, K, _ = rollouts.response_ids.shape
    tokens = rollouts.response_ids.masked_fill(~rollouts.real, -1).flatten(0, 1).cpu().numpy()
    ended = rollouts.ended.flatten().tolist()
    first: dict[tuple[int, bool, bytes], int] = {}
    columns = [
        first.setdefault((row // K, end, ids.tobytes()), row % K)
        for row, (ids, end) in enumerate(zip(tokens, ended, strict=True))
    ]
    return torch.tensor(columns).view(N, K)


# Scorers that consist of other scorers: their weighted sum, and one for each part of a mixture of tasks.


class PartsScorer(Scorer):
    """A scorer that consists of other scorers, its parts.

    Args:
        config: config section of the scorer, with the sections and weights of the parts.
        context: the objects of the run that a scorer needs; `context.build` builds the parts, and for a
            mixture `context.parts` names them in their order.
    """

    config: PartsScorerConfig

    def __init__(self, config: PartsScorerConfig, context: ScorerContext) -> None:
        super().__init__(config, context)
        keys = context.parts if config.of_mixture else config.parts
        self.parts = {key: context.part(key, config.parts[key]) for key in keys}
        for part in self.parts.values():
            part.alone = config.of_mixture

    def told(self) -> Figures:
        """Return the sums of the figures of the parts."""
        found = Figures()
        for part in self.parts.values():
            add(found, part.told())
        return found


class WeightedScorer(PartsScorer):
    """A scorer that returns the weighted sum of the scores of its parts."""

    def score(self, rollouts: Rollouts) -> Tensor:
        """Return the weighted sum [N, K] of the scores, before the missing-EOS settings are applied."""
        return self.total({name: part.score_once(rollouts) for name, part in self.parts.items()}, rollouts)

    def training_scores(self, rollouts: Rollouts) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the weighted sum [N, K], and the scores [N, K] of each part by the name of the part.

        The missing-EOS settings of a part apply to its score, the settings of this section to the sum.
        """
        parts = {name: part.training_scores(rollouts)[0] for name, part in self.parts.items()}
        return self.at_end(self.total(parts, rollouts), rollouts), parts

    def compare(self, a: Scored, b: Scored) -> Tensor:
        """Return two numbers for each prompt, [N, 2]; if a part compares responses, the sum of its shares."""
        if not self.config.compares:
            return super().compare(a, b)
        rows = torch.arange(len(a.rollouts))
        compared = {name: part.compared(a, b, rows).double() for name, part in self.parts.items()}
        return merge_ties(self.total(compared, a.rollouts), self.tie_tolerance)

    def total(self, parts: dict[str, Tensor], rollouts: Rollouts) -> Tensor:
        """Return the weighted sum [N, K] of the scores [N, K] in `parts`; NaN: the part does not judge it.

        Raises:
            RunError: no part with a weight judges a response.
        """
        scores = torch.stack([*parts.values()])
        weights = torch.tensor([self.parts[name].config.weight for name in parts], dtype=scores.dtype)
        weights, left_out = weights.to(scores.device)[:, None, None], scores.isnan()
        without = left_out.any(0) & ~(~left_out & (weights != 0)).any(0)
        if without.any():
            where, names = rollouts.place(int(without.nonzero()[0, 0])), ", ".join(parts)
            raise CommonError(
                f"{self.at} must have a part that judges each response (None leaves it to another one), got "
                f"none for {where}; return a number from one of {names}"
            )
        return (weights * torch.where(left_out, 0.0, scores)).sum(0)


class Members(WeightedScorer):
    """A scorer that combines the scores of the reward models of an ensemble (Coste et al., arXiv 2310.02743).

    Args:
        config: config section of the ensemble.
        members: config section of the sum of the members.
        context: the objects of the run that a scorer needs; `context.build` builds the members.
    """

    def __init__(self, config: Any, members: WeightedScorerConfig, context: ScorerContext) -> None:
        super().__init__(members, context)
        self.config = config  # without parts: the members have no weights
        self.how, self.doubt = (config.combine or Combine.mean).name, config.doubt

    def total(self, parts: dict[str, Tensor], rollouts: Rollouts) -> Tensor:
        """Return the scores [N, K] that the scores [N, K] of the members have together."""
        return combined(torch.stack([*parts.values()]), self.how, self.doubt)


def combined(members: Tensor, how: str, doubt: float) -> Tensor:
    """Return the scores [...] of an ensemble from those of its members, [M, ...] with M > 1.

    Coste et al. subtract the variance, with 1 / M. Here it is the standard deviation, with 1 / (M - 1), whose
    unit is that of the scores.

    Args:
        members: the scores of the members.
        how: mean, worst, or uncertainty: the mean minus `doubt` times the standard deviation.
        doubt: the factor.
    """
    if how == "worst":
        return members.amin(0)
    return members.mean(0) - (doubt * members.std(0) if how == "uncertainty" else 0.0)


class MixtureScorer(PartsScorer):
    """A scorer that scores the responses to the prompts of each part of the task with its own scorer."""

    def score(self, rollouts: Rollouts) -> Tensor:
        """Return the scores [N, K], before the missing-EOS settings are applied."""
        return self.by_part(rollouts, lambda scorer, rows: scorer.score_once(rollouts.select(rows)))

    def training_scores(self, rollouts: Rollouts) -> tuple[Tensor, None]:
        """Return the scores [N, K]; the missing-EOS settings of a part apply before those of this section."""
        scores = self.by_part(rollouts, lambda scorer, rows: scorer.training_scores(rollouts.select(rows))[0])
        return self.at_end(scores, rollouts), None

    def compare(self, a: Scored, b: Scored) -> Tensor:
        """Return two numbers for each prompt, [N, 2] float32, of the scorer of its part."""
        if not self.config.compares:
            return super().compare(a, b)
        return self.by_part(a.rollouts, lambda scorer, rows: scorer.compared(a, b, rows)).float()

    def by_part(self, rollouts: Rollouts, scores: Callable[[Scorer, Tensor], Tensor]) -> Tensor:
        """Return weighted numbers of each prompt [N, ...]; `scores(scorer, rows)` are those of one part."""
        assert rollouts.part is not None, "validated: the task has parts, and the rollouts are not stored"
        rows = [(rollouts.part == number).nonzero()[:, 0] for number in range(len(self.parts))]
        pairs = [pair for pair in zip(self.parts.values(), rows, strict=True) if len(pair[1])]
        found = [part.config.weight * scores(part, own).to("cpu", torch.double) for part, own in pairs]
        return torch.cat(found)[torch.cat([own for _, own in pairs]).argsort()]


# A scorer that saves scored rollouts (`save_generations`); `rlhf.core.files` has the format.


@dataclass(eq=False)
class SavingScorer(Scorer):
    """A scorer that writes each scored rollout batch to a file.

    Incomplete files in `folder`, left behind by a crash, are removed.

    Args:
        scorer: the scorer that computes the scores.
        folder: folder of the files; each update has one file.
        tokenizer: tokenizer of the policy, which decodes the responses.
        sampling: sampling settings of the rollouts; the files contain the temperature.
        state: counters of the run, which give the number of the update.
    """

    scorer: Scorer
    folder: Path
    tokenizer: PreTrainedTokenizerBase
    sampling: Sampling
    state: TrainState

    def __post_init__(self) -> None:
        self.config, self.vocabulary = self.scorer.config, vocabulary(self.tokenizer.get_vocab())
        self.folder.mkdir(parents=True, exist_ok=True)
        for file in leftovers(self.folder):
            file.unlink()

    def score(self, rollouts: Rollouts) -> Tensor:
        """Return the scores [N, K] of the wrapped scorer."""
        return self.scorer.score(rollouts)

    def __call__(self, rollouts: Rollouts) -> Batch:
        """Return the rollouts with scores, after writing them to disk."""
        batch = self.scorer(rollouts)
        write(batch, self.state.update + 1, self.folder, self.tokenizer, self.sampling, self.vocabulary)
        return batch


def write(
    batch: Batch,
    update: int,
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    sampling: Sampling,
    vocabulary: str,
) -> None:
    """Write the file of one update: one row per response, grouped by prompt.

    The file is written under a temporary name, then renamed. So a file is complete or missing.

    Args:
        batch: scored rollouts.
        update: number of the update, from 1.
        folder: folder of the files.
        tokenizer: tokenizer of the policy.
        sampling: sampling settings of the rollouts; the file contains the temperature.
        vocabulary: hash of the policy's vocabulary.
    """
    N, K, T = batch.response_ids.shape

    def each(values: list[Any]) -> list[Any]:
        return [value for value in values for _ in range(K)]

    def cut(x: Tensor, mask: Tensor) -> list[list[Any]]:
        return [row[kept].tolist() for row, kept in zip(x, mask, strict=True)]

    mask = batch.real.flatten(0, 1)
    prompts, responses, references = flat_texts(batch, tokenizer)
    columns: dict[str, Any] = {
        "update": [update] * (N * K),
        "version": [batch.version] * (N * K),
        "example": each(batch.index.tolist()),
        "sample": list(range(K)) * N,
        "prompt": prompts,
        "response": responses,
        "reference": references,
        "score": batch.scores.flatten().tolist(),
        **{
            f"score/{part}": pyarrow.array(scores.flatten().tolist(), from_pandas=True)  # NaN: not judged
            for part, scores in (batch.parts or {}).items()
        },
        **{f"episode/{name}": values.flatten().tolist() for name, values in (batch.episode or {}).items()},
        "ended": batch.ended.flatten().tolist(),
        "prompt_ids": each(cut(batch.prompt_ids, batch.prompt_mask)),
        "response_ids": cut(batch.response_ids.flatten(0, 1), mask),
    }
    for column in ("behaviour_logprobs", "token_versions", "environment_mask", "rewards"):
        if (values := getattr(batch, column)) is not None:
            columns[column] = cut(values.flatten(0, 1), mask)
    columns |= {key: [*map(in_float32, columns[key])] for key in columns if "/" in key or key == "score"}
    temperature = sampling.temperature
    shared = Shared(prompts=N, samples=K, response_length=T, temperature=temperature, vocabulary=vocabulary)
    table = pyarrow.table(columns).replace_schema_metadata(shared.metadata())
    with whole(folder / name(update)) as scratch:
        pyarrow.parquet.write_table(table, scratch)


# A scorer that computes scores with a reward model.


log = logging.getLogger(__name__)


class RewardModelScorer(Scorer):
    """A scorer that returns the output of a reward model at the last response token.

    Args:
        config: config section of the scorer.
        context: the objects of the run that a scorer needs.
        model: the reward model, on the device or divided over the ranks.
        own_tokenizer: tokenizer of the reward model, if its tokens, or its format of dialogues, differ from
            those of the policy. Prompts and responses are then decoded and tokenized again; dialogues get the
            format of the reward model's chat template, if it has one. None: the reward model gets the
            policy's ids.
    """

    config: RewardModelScorerConfig

    def __init__(
        self,
        config: RewardModelScorerConfig,
        context: ScorerContext,
        model: RewardModel,
        own_tokenizer: PreTrainedTokenizerBase | None,
    ) -> None:
        super().__init__(config, context)
        self.model = model
        self.own_tokenizer = own_tokenizer
        self.dtype = context.model.dtype

    def score(self, rollouts: Rollouts) -> Tensor:
        """Return the scores [N, K] that the reward model computes."""
        if self.own_tokenizer is not None:
            rollouts = self.retokenize(rollouts, self.own_tokenizer)
        return infer(self.model, rollouts, "rewards", Budget(self.config.batch_size), self.ranks, self.dtype)

    def retokenize(self, rollouts: Rollouts, own: PreTrainedTokenizerBase) -> Rollouts:
        """Return `rollouts` in tokens of the tokenizer `own`; only responses that had ended get an EOS.

        The chat template of `own`, if it has one, writes the whole dialogue with the response. A response
        contributes no control token of `own`, and a prompt only those that are control tokens of the policy.
        """
        responses = response_texts(rollouts, self.tokenizer)
        texts, dialogues = rollouts.texts, rollouts.dialogues if own.chat_template else None
        if dialogues is not None:
            format, tools = Dialogues(own), rollouts.tools or [None] * len(rollouts)
            answers = [[[{"role": "assistant", "content": each}] for each in row] for row in responses]
            written = [
                format.continued(messages, row, rollouts.place(i), each)
                for i, (messages, row, each) in enumerate(zip(dialogues, answers, tools, strict=True))
            ]
            texts, responses = [prompt for prompt, _ in written], [row for _, row in written]
        else:
            texts = quoted(texts, control_tokens(own, besides=self.tokenizer))
            responses = quoted(responses, control_tokens(own))
        prompts = encode_prompts(rollouts.index, texts, rollouts.references, own, dialogues is not None)
        return encode_completions(prompts, responses, own, response_length=None, ended=rollouts.ended)


def read_own(key: str, path: str, model: ModelConfig, conversational: bool) -> PreTrainedTokenizerFast:
    """Return the tokenizer of the reward model that `key=path` names.

    Raises:
        UserError: the tokenizer cannot be read, or its chat template formats no dialogue.
    """
    own = loading.read_tokenizer(path, model.trust_remote_code, key)
    set_clock(own, model.clock)
    if conversational and own.chat_template:
        end_responses_with_turns(own)
    return own


def reads_tokens_of(own: PreTrainedTokenizerFast, policy: PreTrainedTokenizerFast, dialogues: bool) -> bool:
    """Return whether a reward model with the tokenizer `own` reads the tokens of the policy as they are."""
    other_format = dialogues and own.chat_template and own.chat_template != policy.chat_template
    return loading.same_tokens(own, policy) and not other_format


def build_reward_model(config: RewardModelScorerConfig, context: ScorerContext) -> Scorer:
    """Return a scorer with the reward models and tokenizers at `config.path`, or else at `model.reward`.

    Raises:
        UserError: a model or its tokenizer cannot be loaded, or they do not fit each other or the policy.
    """
    named = config.reward_models(context.at, context.model.reward)
    assert named, "validated: a reward model is named or made"
    key, paths = named[0][0], [path for _, path in named]
    if len(paths) == 1 or config.combine is Combine.weights:
        return _scorer_of(config, context, key, *paths)
    own: dict[str, Any] = {"batch_size": config.batch_size, "pad_token": config.pad_token}
    members = {str(n): RewardModelScorerConfig(path=path, **own) for n, path in enumerate(paths, 1)}
    build_one = lambda section, _: _scorer_of(section, context, key, section.path)  # noqa: E731
    return Members(config, config.as_sum(members), replace(context, build=build_one))


def _scorer_of(
    config: RewardModelScorerConfig, context: ScorerContext, key: str, path: str, *others: str
) -> RewardModelScorer:
    """Return a scorer with one reward model: that at `path`, or the mean of its weights and the others'."""
    model = context.model
    own = read_own(key, path, model, context.conversational)
    for other in others:
        if not loading.same_tokens(own, read_own(key, other, model, context.conversational)):
            rule = f"{key} must name models with one tokenizer for {context.at}.combine=weights"
            raise UserError(f"{rule}, got that of {other!r} besides {path!r}; set {context.at}.combine=mean")

    def load() -> RewardModel:
        loaded = loading.load_mean_reward_model(
            [path, *others],
            getattr(torch, model.dtype.value),
            attention=model.loaded_attention,
            trust_remote_code=model.trust_remote_code,
            key=key,
        )
        loading.check_vocabulary(loaded, own, key)
        return RewardModel(loaded, model.shared_prefix)

    placed = context.place(load)
    loading.fill_pad_token(own, config.pad_token, f"{context.at}.pad_token")
    if context.conversational and context.tokenizer.chat_template and not own.chat_template:
        log.warning("%s=%s has no chat template: it reads the prompts in the format of the policy", key, path)
    as_it_is = reads_tokens_of(own, context.tokenizer, context.conversational)
    if context.turns is not None and not as_it_is:
        rule = f"{key} must have the tokenizer and the chat template of the policy"
        chosen = context.at if context.at == "scorer" else f"scorer@{context.at}"
        remedy = f"set {chosen}=environment or answer"
        raise UserError(f"{rule} (episodes are never tokenized again), got {path}; {remedy}")
    return RewardModelScorer(config, context, placed, None if as_it_is else own)
