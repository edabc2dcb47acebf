"""Warnings during training: empty responses, replies that are all cut, equal scores, slow scoring."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf.core.console import say
from rlhf.loggers.logger import Logger

if TYPE_CHECKING:
    from rlhf.config.root import Config
    from rlhf.core.metrics import Evaluation, Row
    from rlhf.core.state import TrainState

_EQUAL_ROWS = 3  # rows with the same mean score after which scores count as equal, with one sample a prompt
_SHARE = 0.5  # share of an update's time from which scoring counts as slow
_ENDS = ("environment/out_of_turns", "environment/cut", "environment/no_room")
_SLOW_S = 1.0  # seconds of scoring an update, below which scoring is not slow


class ScoreDoubts(Logger):
    """A logger that warns, once each, of scores and times that show a fault of the settings.

    It warns if all responses are empty, no reply to an environment ended, all scores are equal, or scoring is
    slow.

    Args:
        cfg: the config of the run.
        remedy: how to make scoring faster; None: no warning that scoring is slow.
        update: updates before this session.
    """

    def __init__(self, cfg: Config, remedy: str | None, update: int) -> None:
        self.cfg = cfg
        self.samples = cfg.algo.samples_per_prompt
        self.remedy = remedy
        self.update = update
        self.skipped = False  # the first row of a session has the time of the first calls
        self.warned: set[str] = set()
        self.means: list[float] = []  # mean scores of the last rows

    def log(self, row: Row, state: TrainState) -> None:
        """Check the row of an update."""
        self._warn("empty", _all_empty(row))
        self._warn("cut", no_reply_ended(row, self.cfg))
        if "cut" not in self.warned and self.all_equal(row):
            self._warn("equal", _equal_scores(row, self.samples))
        updates, self.update = state.update - self.update, state.update
        if self.skipped and self.remedy is not None and (seconds := _scoring_s(row)) > _SLOW_S * updates:
            self._warn("slow", slow(seconds / updates, row["time/update_s"] / updates, self.remedy))
        self.skipped = True

    def evaluation(self, row: Row, evaluation: Evaluation, state: TrainState) -> None:
        """Check the row of an evaluation."""
        self._warn("cut", no_reply_ended(row, self.cfg))

    def _warn(self, kind: str, text: str | None) -> None:
        if text is not None and kind not in self.warned:
            self.warned.add(kind)
            say(f"warning: {text}", style="yellow")

    def all_equal(self, row: Row) -> bool:
        """Return whether the samples of each prompt have equal scores; for one sample: whether all have."""
        if "objective/scores" not in row:
            return False
        if self.samples > 1:
            return row["objective/tie_rate"] == 1
        self.means = [*self.means, row["objective/scores"]][-_EQUAL_ROWS:]
        return len(self.means) == _EQUAL_ROWS and len(set(self.means)) == 1


def no_reply_ended(row: Row, cfg: Config) -> str | None:
    """Return a warning if no reply of an update or an evaluation was given to the environment; else None."""
    at, tokens = ("eval/", "eval") if "eval/environment/cut" in row else ("", "objective")
    if row.get(f"{at}environment/cut") != 1 or row[f"{at}environment/turns"] != 1:
        return None
    key, length = "environment.reply_tokens", cfg.generator.response_length
    most = getattr(cfg.environment, "reply_tokens", None) or length
    longer = min(2 * most, length)
    if most >= length:
        key, most, longer = "generator.response_length", length, 2 * length
    if row[f"{tokens}/response_tokens"] != most:  # an end token behind which the template writes no message
        return None
    return (
        f"no reply of the {'evaluation' if at else 'update'} ended: all were cut at {key}={most}, so step of "
        f"the environment was not called; set {key}={longer}"
    )


def _all_empty(row: Row) -> str | None:
    """Return a warning if all scored responses of a row are the end token alone; else None."""
    if (
        "objective/scores" not in row
        or not row["objective/response_tokens"] == row["objective/eos_rate"] == 1
    ):
        return None
    return (
        f"all responses of update {row['update']:.0f} are empty (the end token alone); the reward may favour "
        "short responses, or optim.lr is too high"
    )


def _equal_scores(row: Row, samples: int) -> str:
    """Return the warning about scores that do not depend on the response."""
    which = "all samples of each prompt have the same score" if samples > 1 else "all scores are equal"
    ends = "".join(f"; {name} {row[name]:.2g}" for name in _ENDS if row.get(name))
    return (
        f"{which} (mean {row['objective/scores']:.4g}; {row['objective/eos_rate']:.0%} of the responses have "
        f"an end token{ends}), so there is nothing to learn; check the scorer, its missing_eos settings, and "
        "generator.response_length"
    )


def _scoring_s(row: Row) -> float:
    """Return the seconds for which scoring delayed the updates of a row; 0 if less than a share of the time.

    Scores of the annotator process delay an update only if the trainer waits for them.
    """
    limit = _SHARE * row["time/update_s"]
    seconds = row.get("time/score_s", 0.0)
    if row.get("time/wait_s", 0.0) > limit:
        seconds = max(seconds, row.get("time/annotate_ahead_s", 0.0))
    return seconds if seconds > limit else 0.0


def slow(seconds: float, update: float, remedy: str) -> str:
    """Return the warning about slow scoring: `seconds` of the `update` seconds of an update."""
    return f"scoring takes {seconds:.1f} s of the {update:.1f} s of an update; to make it faster, {remedy}"
