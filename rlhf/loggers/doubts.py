"""Warnings during training: empty responses, equal scores, slow scoring."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf.core.console import say
from rlhf.loggers.logger import Logger

if TYPE_CHECKING:
    from rlhf.core.metrics import Row
    from rlhf.core.state import TrainState

_EQUAL_ROWS = 3  # rows with the same mean score after which scores count as equal, with one sample a prompt
_SHARE = 0.5  # share of an update's time from which scoring counts as slow
_SLOW_S = 1.0  # seconds of scoring an update, below which scoring is not slow


class ScoreDoubts(Logger):
    """A logger that warns, once each, if all responses are empty, all scores are equal, or scoring is slow.

    Args:
        samples: samples of a prompt.
        remedy: how to make scoring faster; None: no warning that scoring is slow.
        update: updates before this session.
    """

    def __init__(self, samples: int, remedy: str | None, update: int) -> None:
        self.samples = samples
        self.remedy = remedy
        self.update = update
        self.skipped = False  # the first row of a session has the time of the first calls
        self.empty = False  # True after the warning about empty responses
        self.constant = False  # True after the warning about equal scores
        self.means: list[float] = []  # mean scores of the last rows

    def log(self, row: Row, state: TrainState) -> None:
        """Check the row of an update."""
        if not self.empty and _all_empty(row):
            self.empty = True
            say(f"warning: {_empty_responses(row)}", style="yellow")
        if not self.constant and self.all_equal(row):
            self.constant = True
            say(f"warning: {_equal_scores(row, self.samples)}", style="yellow")
        updates, self.update = state.update - self.update, state.update
        if self.skipped and self.remedy is not None and (seconds := _scoring_s(row)) > _SLOW_S * updates:
            text = slow(seconds / updates, row["time/update_s"] / updates, self.remedy)
            say(f"warning: {text}", style="yellow")
            self.remedy = None
        self.skipped = True

    def all_equal(self, row: Row) -> bool:
        """Return whether the samples of each prompt have equal scores; for one sample: whether all have."""
        if "objective/scores" not in row:
            return False
        if self.samples > 1:
            return row["objective/tie_rate"] == 1
        self.means = [*self.means, row["objective/scores"]][-_EQUAL_ROWS:]
        return len(self.means) == _EQUAL_ROWS and len(set(self.means)) == 1


def _all_empty(row: Row) -> bool:
    """Return whether all scored responses of a row are the end token alone."""
    return "objective/scores" in row and row["objective/response_tokens"] == row["objective/eos_rate"] == 1


def _empty_responses(row: Row) -> str:
    """Return the warning about empty responses."""
    return (
        f"all responses of update {row['update']:.0f} are empty (the end token alone); the reward may favour "
        "short responses, or optim.lr is too high"
    )


def _equal_scores(row: Row, samples: int) -> str:
    """Return the warning about scores that do not depend on the response."""
    which = "all samples of each prompt have the same score" if samples > 1 else "all scores are equal"
    return (
        f"{which} (mean {row['objective/scores']:.4g}; {row['objective/eos_rate']:.0%} of the responses have "
        "an end token), so there is nothing to learn; check the scorer, its missing_eos settings, and "
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
