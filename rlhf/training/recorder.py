"""The recorder of metrics, and what it watches: first values, collapse, repetition."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from rlhf.core.batch import Batch, Rollouts
from rlhf.core.formatting import rate, wilson
from rlhf.core.metrics import Evaluation, How, Metrics, Row, Stat, Timer, mean, merge, plain
from rlhf.core.state import TrainState
from rlhf.engines.engine import Engine
from rlhf.generators.generator import Generator
from rlhf.loggers.logger import Logger
from rlhf.scorers.scorer import merge_ties

# Metrics whose values at the first on-policy update are known in advance, for every algorithm: sampler,
# trainer and reference are the same model.
EXPECTED = {
    "objective/kl": 0.0,  # only if the initial policy is the reference
    "policy/ratio": 1.0,  # sampler and trainer compute the same log-probs
    "policy/clipfrac": 0.0,
    "mismatch/kl": 0.0,
}
_SUMS = ("objective/kl", "policy/ratio")  # computed from a sum over the tokens of a response
_TOKENS = 10  # tokens of a response whose rounding errors are within the tolerance
PHASES = ("wait", "score", "annotate", "train", "sync")  # the timed phases of an update


def expected(starts_as_reference: bool) -> set[str]:
    """Return the names of the metrics to check, given whether the initial policy is the reference."""
    return set(EXPECTED) - (set() if starts_as_reference else {"objective/kl"})


class Recorder:
    """A collector of metrics; each row summarizes all updates since the previous row.

    Args:
        log_every: number of updates between rows; below 1: a fraction of the run; 0: no rows.
        metric: name of the evaluation metric whose best value is stored in `TrainState.best`.
        tolerance: largest difference from `EXPECTED` without a warning, for responses of up to `_TOKENS`
            tokens; depends on the dtype. The bound of a metric in `_SUMS` grows with the number of tokens, as
            rounding errors do.
        expected: names of the metrics in `EXPECTED` that are checked at the first update.
        minimised: whether the lowest value of `metric` is the best; otherwise the highest value.
        tie_tolerance: largest relative difference of a tie, as in `rlhf.scorers.scorer`.
        collapse: the rule that warns of a collapse; None: the default rule.
        repetition: the rule that hints at responses which repeat themselves; None: the default rule.
    """

    def __init__(
        self,
        log_every: float,
        metric: str,
        tolerance: float,
        expected: Iterable[str] = EXPECTED,
        minimised: bool = False,
        tie_tolerance: float = 0.0,
        collapse: CollapseRule | None = None,
        repetition: RepetitionRule | None = None,
    ) -> None:
        self.loggers: list[Logger] = []
        self.generator: Generator | None = None
        self.log_every, self.metric, self.minimised = log_every, metric, minimised
        self.tolerance, self.tie_tolerance = tolerance, tie_tolerance
        self.collapse, self.repetition = collapse or CollapseRule(), repetition or RepetitionRule()
        self.judge = JudgeRule()
        self.timer = Timer()
        self.unchecked = set(expected)  # names of metrics in EXPECTED that are still to check
        self.tokens = 1.0  # mean number of tokens of a response of the first update
        self.figures: Metrics = {}  # the unfinished row
        self.first: Row = {}  # metrics of the evaluation before training
        self.initial_scores: list[float] | None = None  # scores of the completions before training
        self.evaluated: Row = {}  # metrics of the last evaluation
        self.evaluated_on = 0  # number of held-out examples of the last evaluation

    def open(self, loggers: list[Logger], generator: Generator | None = None) -> None:
        """Send rows to `loggers` from now on, including the metrics of `generator`."""
        self.loggers = loggers
        self.generator = generator

    def add(self, figures: Metrics) -> None:
        """Add metrics to the unfinished row, and compare first values with `EXPECTED`."""
        if self.unchecked and (length := figures.get("objective/response_tokens")) is not None:
            self.tokens = length.value() or 1.0
        for name in EXPECTED:
            if name not in self.unchecked & figures.keys() or (value := figures[name].value()) is None:
                continue
            self.unchecked.remove(name)
            bound = self.tolerance * (max(1.0, self.tokens / _TOKENS) if name in _SUMS else 1.0)
            if abs(value - EXPECTED[name]) > bound:
                self.warn(
                    f"{name} is {value:.3g} at the first update, expected {EXPECTED[name]:g} (within "
                    f"{bound:.2g}): sampler, trainer and reference disagree on the log-probs of the same "
                    "tokens"
                )
        merge(self.figures, figures)

    def groups(self, rows: list[dict[str, Any]]) -> None:
        """Send the times, lengths and fates of groups to the loggers."""
        for logger in self.loggers:
            logger.groups(rows)

    def flush(self, state: TrainState, rollouts: Rollouts, engine: Engine) -> None:
        """End an update: add times, throughput, token lag and memory, and send the row if it is due."""
        figures = self.timer.drain()
        timed = [figures[name] for phase in PHASES if (name := f"time/{phase}_s") in figures]
        seconds = sum(float(each.total) for each in timed)
        state.wall_s += seconds
        if self.generator is not None:
            figures |= self.generator.figures()
        if isinstance(rollouts, Batch) and rollouts.annotate_ahead_s:
            figures["time/annotate_ahead_s"] = Stat(rollouts.annotate_ahead_s, 1.0, How.sum)
        if rollouts.episode and "seconds" in rollouts.episode:
            in_environment = float(rollouts.episode["seconds"].sum())
            figures["time/environment_s"] = Stat(in_environment, 1.0, How.sum)
        if rollouts.token_versions is not None:
            lag = state.lag + rollouts.version - rollouts.token_versions
            figures["mismatch/token_lag"] = mean(lag, rollouts.response_mask)
        figures |= {
            "time/generate_s": Stat(rollouts.generate_s, 1.0, How.sum),
            "time/update_s": Stat(seconds, 1.0, How.sum),
            "throughput/episodes_per_s": Stat(float(rollouts.episodes), seconds),
            "throughput/tokens_per_s": Stat(float(rollouts.response_mask.sum()), seconds),
            "memory/peak_gib": Stat(engine.peak_gib(), 1.0, How.max),
        }
        self.add(figures)
        self.repetition.add(rollouts.response_ids, rollouts.response_mask)
        # Plain floats, because a checkpoint stores floats: sums are then the same with and without a resume.
        self.figures = plain(self.figures)
        for logger in self.loggers:
            logger.updated(self.figures, state)
        if state.due(self.log_every, at_end=True):
            row = state.position()
            for name, stat in self.figures.items():
                if (value := stat.value()) is not None and math.isfinite(value):
                    row[name] = value
                elif value is not None:
                    self.warn(f"{name} is {value} at update {state.update}; the row does not contain it")
            hints = self.judge.observe(self.figures, self.first, self.evaluated)
            self.figures = {}
            for warning in (self.collapse.observe(row), self.repetition.observe(row), *hints):
                if warning is not None:
                    self.warn(warning)
            if self.collapse.warned:
                row["warning/collapse"] = 1.0
            for logger in self.loggers:
                logger.log(row, state)

    def evaluation(self, state: TrainState, evaluation: Evaluation) -> None:
        """Send metrics and completions of an evaluation to the loggers, and update the best value.

        If completions have scores, the metrics get the win rate against the evaluation before training.
        """
        if state.update == 0:
            self.first, self.initial_scores = evaluation.figures, evaluation.scores
        elif evaluation.scores is not None and self.initial_scores is not None:
            compared = against_initial(evaluation.scores, self.initial_scores, self.tie_tolerance)
            evaluation = replace(evaluation, figures=evaluation.figures | compared)
        self.evaluated, self.evaluated_on = evaluation.figures, evaluation.examples
        value = evaluation.figures.get(self.metric)
        if value is not None:
            best = value if state.best is None else state.best
            state.best = min(best, value) if self.minimised else max(best, value)
        for logger in self.loggers:
            logger.evaluation({**state.position(), **evaluation.figures}, evaluation, state)
        state.unevaluated = False
        self.timer.drain()  # the time of an evaluation does not belong to an update

    def warn(self, text: str) -> None:
        """Send a warning to every logger."""
        for logger in self.loggers:
            logger.warn(text)

    def save(self, checkpoint: Path) -> None:
        """Write what the loggers need when the run resumes into the folder of a checkpoint."""
        for logger in self.loggers:
            logger.save(checkpoint)

    def saved(self, checkpoint: Path, state: TrainState) -> None:
        """Report a complete checkpoint to the loggers."""
        for logger in self.loggers:
            logger.saved(checkpoint, state)

    def state_dict(self) -> dict[str, Any]:
        """Return the unfinished row and the results of the first and last evaluation, for a checkpoint."""
        figures = {
            name: [stat.total, stat.count, stat.how.value, stat.squares]
            for name, stat in self.figures.items()
        }
        return {
            "figures": figures,
            "first": self.first,
            "initial_scores": self.initial_scores,
            "evaluated": self.evaluated,
            "evaluated_on": self.evaluated_on,
            "collapse": self.collapse.state_dict(),
            "repetition": self.repetition.state_dict(),
            "judge": self.judge.state_dict(),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        self.figures = {
            name: Stat(total, count, How(how), squares)
            for name, (total, count, how, squares) in saved["figures"].items()
        }
        self.first, self.initial_scores = saved["first"], saved.get("initial_scores")
        self.evaluated, self.evaluated_on = saved["evaluated"], saved.get("evaluated_on", 0)
        for name in ("collapse", "repetition", "judge"):
            if name in saved:  # earlier versions had no rule
                rule: _Rule = getattr(self, name)
                rule.load_state_dict(saved[name])
        self.unchecked = set()  # the first update was before the checkpoint

    def close(self) -> None:
        """Close every logger."""
        for logger in self.loggers:
            logger.close()


def against_initial(scores: Sequence[float], initial: Sequence[float], tie_tolerance: float = 0.0) -> Row:
    """Return `eval/win_rate_vs_initial` with the bounds of its 95 % interval.

    The rate is the fraction of prompts whose completion scores strictly higher than the completion of the
    initial policy, plus half the fraction of ties. So an unchanged policy has a rate of 0.5. The Wilson
    interval counts every prompt as one trial, and is too wide if there are many ties.

    Args:
        scores: score of the completion of each prompt.
        initial: score of the initial policy's completion of the same prompts.
        tie_tolerance: largest relative difference of a tie, as in `rlhf.scorers.scorer`.
    """
    now, before = merge_ties(torch.tensor([*zip(scores, initial, strict=True)]), tie_tolerance).T
    points = (now > before).sum().item() + 0.5 * (now == before).sum().item()
    return rate("eval/win_rate_vs_initial", points / len(scores), len(scores))


class _Rule:
    """A rule on the rows of metrics of one run, which warns once.

    Attributes:
        saved: the names of the attributes that are its state.
        warned: whether the rule has warned.
    """

    saved: ClassVar[tuple[str, ...]]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the rule, for a checkpoint."""
        return {name: getattr(self, name) for name in self.saved}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        for name in self.saved:
            setattr(self, name, saved[name])


# The warning of collapse: a rule on the metrics of training that finds a policy which leaves its reference.
#
# A run collapses if the win rate of the policy falls and does not recover, while the training reward may
# still rise (Gao et al., arXiv 2210.10760). The rule observes `SIGNALS` of each training row, KL and entropy
# in nats per response token:
#
# | signal | value | unit | warns |
# |---|---|---|---|
# | `kl` | `objective/kl` per response token + `mismatch/kl`, minus its first | nats per token | above |
# | `rise` | increase of the average of `kl` per update | nats per token | above |
# | `entropy` | `objective/entropy` per response token, divided by its first | share | below |
# | `ess` | `mismatch/ess` | share | below |
# | `gradient` | `policy/grad_norm`, divided by its first | factor | above |
#
# `kl` estimates the KL of the trained policy to the reference. `objective/kl` alone is that of the sampler,
# which is far behind the trained policy if the lag is large.
#
# All signals but `rise` are averaged over the last updates with exponential weights, starting from their
# first values. The first value beyond its limit gives the warning. `benchmarks/collapse.py` selects the
# limits on one half of many runs and measures the rule on the other half (docs/results.md).


class _Signal(NamedTuple):
    """A number that the rule computes from a row of metrics."""

    metric: str  # of the row; of `objective/` per response token
    text: str  # of the warning, with value and limit
    above: bool = True  # whether values above the limit warn; otherwise values below
    relative: bool = False  # whether the value is divided by its first value


SIGNALS = {
    "kl": _Signal("objective/kl", "KL to the reference of {:.2g} nats per token, limit {:.2g}"),
    "rise": _Signal("", "KL to the reference rises by {:.2g} nats per token and update, limit {:.2g}"),
    "entropy": _Signal(
        "objective/entropy", "entropy per token at {:.2g} of its first value, limit {:.2g}", False, True
    ),
    "ess": _Signal(
        "mismatch/ess", "effective sample size of {:.2g} of the responses, limit {:.2g}", above=False
    ),
    "gradient": _Signal(
        "policy/grad_norm", "gradient norm at {:.2g} times its first value, limit {:.2g}", relative=True
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The constants of the rule; a limit of None ignores the signal.

    Attributes:
        kl: largest average increase of the KL to the reference, in nats per token.
        rise: largest increase of that average per update.
        entropy: smallest average entropy per token, as a share of its first value.
        ess: smallest average effective sample size, as a share of the responses.
        gradient: largest average gradient norm, as a multiple of its first value.
        memory: time constant of the averages, in updates.
    """

    kl: float | None = None
    rise: float | None = None
    entropy: float | None = None
    ess: float | None = None
    gradient: float | None = None
    memory: float = 1.0


LIMITS = Limits(kl=0.6, memory=2.0)  # selected by benchmarks/collapse.py


class CollapseRule(_Rule):
    """The rule that warns of a collapse.

    Args:
        remedy: the settings that the warning recommends, as text.
        limits: the constants of the rule.
    """

    saved = ("first", "averages", "update", "warned")

    def __init__(self, remedy: str = "set a lower optim.lr", limits: Limits = LIMITS) -> None:
        self.remedy = remedy
        self.limits = limits
        self.first: dict[str, float] = {}  # value of each signal in the first row that has it
        self.averages: dict[str, float] = {}  # of the signals, with `rise`
        self.update = 0.0  # update of the last row
        self.warned = False

    def observe(self, row: Mapping[str, float]) -> str | None:
        """Update the averages with a row of training metrics, and return the warning when a limit is passed.

        Args:
            row: metrics of the updates since the previous row, with the column `update`.
        """
        tokens = row.get("objective/response_tokens", 0.0)
        updates, self.update = row["update"] - self.update, row["update"]
        share = 1 - math.exp(-updates / self.limits.memory)
        for name, signal in SIGNALS.items():
            per_token = signal.metric.startswith("objective/")
            if signal.metric not in row or (per_token and not tokens > 0):
                continue
            value = row[signal.metric] / (tokens if per_token else 1.0)
            if name == "kl":
                value += row.get("mismatch/kl", 0.0)
                value -= self.first.setdefault(name, value)
            elif signal.relative:
                value /= max(self.first.setdefault(name, value), 1e-6)
            before = self.averages.setdefault(name, value)
            self.averages[name] = before + share * (value - before)
            if name == "kl" and updates > 0:
                self.averages["rise"] = (self.averages["kl"] - before) / updates
        for name, signal in SIGNALS.items():
            limit, value = getattr(self.limits, name), self.averages.get(name, math.nan)
            if self.warned or limit is None or not (value > limit if signal.above else value < limit):
                continue
            self.warned = True
            return (
                f"the policy may collapse: {signal.text.format(value, limit)}, at update "
                f"{row['update']:.0f}; compare eval/ metrics with earlier ones, and if they fall, "
                f"{self.remedy}"
            )
        return None


# The hint that responses repeat themselves more and more while the reward rises.
#
# A policy may learn to repeat text because the reward likes it. The rule observes two numbers of each row of
# training metrics:
#
# | number     | value                                                                           |
# |------------|---------------------------------------------------------------------------------|
# | score      | `objective/scores`                                                              |
# | repetition | share of the 4-grams of tokens that occurred before, within the last 64 tokens  |
#
# The repetition is measured in at most 64 responses of each update, evenly spaced, and of these in the
# responses with at least 32 tokens, all together. A row with less than a quarter of such responses is left
# out. Repetitions that are farther apart do not count, so that long responses have no larger share than short
# ones. (With the whole response in place of 64 tokens, the number would be seq-rep-4 of Welleck et al., arXiv
# 1908.04319.)
#
# The rule compares 16 points: the last 16 rows, or the means of 4 or 16 consecutive rows of the last 64 or
# 256 rows. A number rises if, of the 120 pairs of points, those that rise outnumber those that fall by 67 or
# more: three standard deviations of Kendall's test (Mann, 1945), which noise without a trend exceeds in 1 of
# 700 windows. The rule gives its hint once, when both numbers rise, the mean repetition of the last 4 points
# is at least 0.2, and this is at least 0.1 more than that of the first 4 points.


_N_GRAM = 4  # tokens
_SPAN = 64  # tokens in which an n-gram must have occurred before
_SHORTEST = 32  # tokens of a response that counts
_RESPONSES = 64  # largest number of responses of an update that are measured
_ENOUGH = 0.25  # share of the responses that must count
POINTS = 16
_WIDTHS = (1, 4, 16)  # rows per point
_TREND = 67  # rising minus falling pairs of points
_LEVEL = 0.2  # smallest repetition at the end
_RISE = 0.1  # smallest increase of the repetition
_ENDS = POINTS // 4  # points at the beginning and at the end that are compared
_FACTORS = (1, 0x9E3779B1, 0x85EBCA77C2B2AE35 - (1 << 64), 0x27D4EB2F165667C5)  # of a hash of N_GRAM tokens


def repeated(ids: Tensor, mask: Tensor) -> Tensor:
    """Count the n-grams that occurred before within `_SPAN` tokens, all n-grams, and responses that count.

    Args:
        ids: [R, T] int64, tokens of the responses.
        mask: [R, T] bool; n-grams with a token whose mask is False do not count.

    Returns:
        [3] int64: the sums over the responses with at least `_SHORTEST` tokens.
    """
    counts = mask.sum(-1) >= _SHORTEST
    ids, mask = ids[counts], mask[counts]
    if len(ids) == 0:
        return torch.zeros(3, dtype=torch.int64, device=ids.device)
    length = ids.shape[1] - _N_GRAM + 1
    grams = torch.stack([ids[:, i : i + length] * _FACTORS[i] for i in range(_N_GRAM)]).sum(0)
    whole = torch.stack([mask[:, i : i + length] for i in range(_N_GRAM)]).all(0)
    grams, order = grams.sort(dim=1, stable=True)  # equal n-grams side by side, in the order of the text
    whole_there = whole.gather(1, order)
    near = order[:, 1:] - order[:, :-1] <= _SPAN
    again = (grams[:, 1:] == grams[:, :-1]) & near & whole_there[:, 1:] & whole_there[:, :-1]
    return torch.stack([again.sum(), whole.sum(), counts.sum()])


class RepetitionRule(_Rule):
    """The rule that hints at responses which repeat themselves.

    Args:
        given: whether the hint was given already, or is never due, because no response is sampled.
    """

    saved = ("counts", "rows", "given")

    def __init__(self, given: bool = False) -> None:
        self.counts = [0, 0, 0, 0]  # of the unfinished row: those of `repeated`, responses measured
        self.rows: list[list[float]] = []  # score and repetition of the last rows
        self.given = given

    def add(self, ids: Tensor, mask: Tensor) -> None:
        """Add the responses of an update to the unfinished row.

        Args:
            ids: [N, K, T] int64, tokens of the responses.
            mask: [N, K, T] bool, True for tokens of the response.
        """
        if self.given:
            return
        every = -(-ids.shape[0] * ids.shape[1] // _RESPONSES)
        ids, mask = ids.flatten(0, 1)[::every], mask.flatten(0, 1)[::every]
        new = [*repeated(ids, mask).tolist(), len(ids)]
        self.counts = [before + more for before, more in zip(self.counts, new, strict=True)]

    def observe(self, row: Mapping[str, float]) -> str | None:
        """End a row, and return the hint if it is due.

        Args:
            row: metrics of the updates since the previous row, with the column `update`.
        """
        again, grams, counted, responses = self.counts
        self.counts = [0, 0, 0, 0]
        if self.given or "objective/scores" not in row or counted < max(1, _ENOUGH * responses):
            return None
        self.rows = [*self.rows, [row["objective/scores"], again / grams]][-POINTS * _WIDTHS[-1] :]
        for width in _WIDTHS:
            last = self.rows[-POINTS * width :]
            if len(last) < POINTS * width:
                break
            groups = [last[place : place + width] for place in range(0, len(last), width)]
            scores, repeats = ([sum(each[i] for each in group) / width for group in groups] for i in (0, 1))
            low, high = (sum(part) / _ENDS for part in (repeats[:_ENDS], repeats[-_ENDS:]))
            if high < _LEVEL or high - low < _RISE or not (rises(scores) and rises(repeats)):
                continue
            self.given = True
            before, after = (sum(part) / _ENDS for part in (scores[:_ENDS], scores[-_ENDS:]))
            return (
                f"responses repeat themselves more while the reward rises: {high:.0%} of their "
                f"{_N_GRAM}-grams occurred in the {_SPAN} tokens before (earlier {low:.0%}), and "
                f"objective/scores is {after:.3g} (earlier {before:.3g}), over the last {len(last)} rows of "
                f"metrics, at update {row['update']:.0f}; this is a hint: read responses "
                "(completions.jsonl), and if they degenerate, lower the reward of repetition, or strengthen "
                "the KL penalty"
            )
        return None


# The hints at a judge that a policy can exploit, or that gives no signal; each is given once.


_FIRST = (0.3, 0.7)  # share of comparisons that the response shown first wins
_LONGER = 0.7  # largest share of decided pairs that the longer response wins, if responses grow
_GROWTH = 1.25  # factor of the tokens of responses before training
_MET, _MANY = 0.99, 64  # share of the answers of a row that meet a criterion, and their smallest number


class JudgeRule(_Rule):
    """The rule that hints at a judge which prefers a position or length, and at criteria that all meet."""

    saved = ("sums", "given")

    def __init__(self) -> None:
        self.sums: dict[str, list[float]] = {}  # total and count of shares, of all rows
        self.given: list[str] = []

    def observe(self, figures: Metrics, first: Row, last: Row) -> Iterator[str]:
        """Add a row of training metrics, and yield the hints that are due.

        Args:
            figures: the metrics of the row.
            first, last: metrics of the evaluation before training, and of the last one.
        """
        due = dict[str, str]()
        for name, stat in ((name, stat) for name, stat in figures.items() if name.startswith("judge/")):
            before, count, share = self.sums.get(name, [0.0, 0.0]), float(stat.count), stat.value() or 0.0
            self.sums[name] = [before[0] + float(stat.total), before[1] + count]
            if "/met/" in name and count >= _MANY and share >= _MET:
                who = f"criterion {name.rpartition('/')[2]} of the rubric is met by {share:.0%} of responses"
                due[name] = f"{who}: it gives no signal; make it stricter, or leave it out"
        names = ("judge/first", "judge/consistent", "judge/longer")
        (won, answers), (same, pairs), (longer, decided) = (self.sums.get(each, [0.5, 1.0]) for each in names)
        low, high = wilson(won / answers, int(answers))
        if not (_FIRST[0] <= won / answers <= _FIRST[1] or low <= 0.5 <= high):
            due["first"] = (
                f"the judge prefers a position: the response shown first won {won / answers:.0%} of "
                f"{answers:,.0f} comparisons (unbiased: 50%), and {same / pairs:.0%} of pairs are decided; "
                "use another judge, or kind=grade"
            )
        old, now = (row.get("eval/response_tokens", 0.0) for row in (first, last))
        if longer > _LONGER * decided and now > _GROWTH * old > 0:
            due["longer"] = (
                f"the judge prefers longer responses ({longer / decided:.0%} of {decided:,.0f} pairs), "
                f"and responses grow ({old:.1f} tokens before training, now {now:.1f}); this is a hint: see "
                "eval/win_rate_lc, or set a length penalty"
            )
        for name in due.keys() - {*self.given}:
            self.given.append(name)
            yield due[name]


def rises(values: Sequence[float]) -> bool:
    """Return whether values have a rising trend: rising minus falling pairs are at least `_TREND`."""
    return sum((later > earlier) - (later < earlier) for earlier, later in combinations(values, 2)) >= _TREND
