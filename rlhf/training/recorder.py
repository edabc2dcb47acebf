"""The recorder, which collects the metrics of updates and sends rows of metrics to every logger."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rlhf.core.batch import Batch
from rlhf.core.metrics import How, Stat, Timer, mean, merge, plain
from rlhf.training.collapse import METRIC, CollapseRule
from rlhf.training.comparison import against_initial
from rlhf.training.invariants import EXPECTED, broken_invariants
from rlhf.training.repetition import RepetitionRule

if TYPE_CHECKING:
    from pathlib import Path

    from rlhf.core.batch import Rollouts
    from rlhf.core.metrics import Evaluation, Metrics, Row
    from rlhf.core.state import TrainState
    from rlhf.engines.engine import Engine
    from rlhf.generators.generator import Generator
    from rlhf.loggers.logger import Logger

PHASES = ("wait", "score", "annotate", "train", "sync")  # the timed phases of an update


class Recorder:
    """A collector of metrics; each row summarizes all updates since the previous row.

    Args:
        log_every: number of updates between rows; below 1: a fraction of the run; 0: no rows.
        metric: name of the evaluation metric whose best value is stored in `TrainState.best`.
        minimised: whether the lowest value of `metric` is the best; otherwise the highest value.
        tolerance: largest difference from `EXPECTED` without a warning; depends on the dtype.
        expected: names of the metrics in `EXPECTED` that are checked at the first update.
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
        self.log_every = log_every
        self.metric = metric
        self.minimised = minimised
        self.tolerance = tolerance
        self.tie_tolerance = tie_tolerance
        self.collapse = collapse or CollapseRule()
        self.repetition = repetition or RepetitionRule()
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
        seen = {
            name: value
            for name in self.unchecked & figures.keys()
            if (value := figures[name].value()) is not None
        }
        self.unchecked -= seen.keys()
        for text in broken_invariants(seen, self.tolerance, self.tokens):
            self.warn(text)
        merge(self.figures, figures)

    def groups(self, rows: list[dict[str, Any]]) -> None:
        """Send the times, lengths and fates of groups to the loggers."""
        for logger in self.loggers:
            logger.groups(rows)

    def flush(self, state: TrainState, rollouts: Rollouts, engine: Engine) -> None:
        """End an update: add times, throughput, token lag and memory, and send the row if it is due."""
        times = self.timer.drain()
        seconds = sum(float(times[f"time/{phase}_s"].total) for phase in PHASES if f"time/{phase}_s" in times)
        tokens = float(rollouts.response_mask.sum())
        state.wall_s += seconds
        self.add(times)
        if self.generator is not None:
            self.add(self.generator.figures())
        if isinstance(rollouts, Batch) and rollouts.annotate_ahead_s:
            self.add({"time/annotate_ahead_s": Stat(rollouts.annotate_ahead_s, 1.0, How.sum)})
        if rollouts.episode and "seconds" in rollouts.episode:
            self.add({"time/environment_s": Stat(float(rollouts.episode["seconds"].sum()), 1.0, How.sum)})
        if rollouts.token_versions is not None:
            lag = state.lag + rollouts.version - rollouts.token_versions
            self.add({"mismatch/token_lag": mean(lag, rollouts.response_mask)})
        self.add(
            {
                "time/generate_s": Stat(rollouts.generate_s, 1.0, How.sum),
                "time/update_s": Stat(seconds, 1.0, How.sum),
                "throughput/episodes_per_s": Stat(float(rollouts.episodes), seconds),
                "throughput/tokens_per_s": Stat(tokens, seconds),
                "memory/peak_gib": Stat(engine.peak_gib(), 1.0, How.max),
            }
        )
        self.repetition.add(rollouts.response_ids, rollouts.response_mask)
        # Plain floats, because a checkpoint stores floats: sums are then the same with and without a resume.
        self.figures = plain(self.figures)
        for logger in self.loggers:
            logger.updated(self.figures, state)
        if state.due(self.log_every, at_end=True):
            row = state.position()
            for name, stat in self.figures.items():
                value = stat.value()
                if value is None:
                    continue
                if math.isfinite(value):
                    row[name] = value
                else:
                    self.warn(f"{name} is {value} at update {state.update}; the row does not contain it")
            self.figures = {}
            for rule in (self.collapse, self.repetition):
                if (warning := rule.observe(row)) is not None:
                    self.warn(warning)
            if self.collapse.warned:
                row[METRIC] = 1.0
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
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        self.figures = {
            name: Stat(total, count, How(how), squares)
            for name, (total, count, how, squares) in saved["figures"].items()
        }
        self.first, self.initial_scores = saved["first"], saved.get("initial_scores")
        self.evaluated, self.evaluated_on = saved["evaluated"], saved.get("evaluated_on", 0)
        for name, rule in (("collapse", self.collapse), ("repetition", self.repetition)):
            if name in saved:  # earlier versions had no rule
                rule.load_state_dict(saved[name])
        self.unchecked = set()  # the first update was before the checkpoint

    def close(self) -> None:
        """Close every logger."""
        for logger in self.loggers:
            logger.close()
