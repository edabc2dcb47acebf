"""The hint that responses repeat themselves more and more while the reward rises.

A policy may learn to repeat text because the reward likes it. The rule observes two numbers of each row of
training metrics:

| number     | value                                                                           |
|------------|---------------------------------------------------------------------------------|
| score      | `objective/scores`                                                              |
| repetition | share of the 4-grams of tokens that occurred before, within the last 64 tokens  |

The repetition is measured in at most 64 responses of each update, evenly spaced, and of these in the
responses with at least 32 tokens, all together. A row with less than a quarter of such responses is left
out. Repetitions that are farther apart do not count, so that long responses have no larger share than short
ones. (With the whole response in place of 64 tokens, the number would be seq-rep-4 of Welleck et al., arXiv
1908.04319.)

The rule compares 16 points: the last 16 rows, or the means of 4 or 16 consecutive rows of the last 64 or 256
rows. A number rises if, of the 120 pairs of points, those that rise outnumber those that fall by 67 or more:
three standard deviations of Kendall's test (Mann, 1945), which noise without a trend exceeds in 1 of 700
windows. The rule gives its hint once, when both numbers rise, the mean repetition of the last 4 points is at
least 0.2, and this is at least 0.1 more than that of the first 4 points.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

_N_GRAM = 4  # tokens
_SPAN = 64  # tokens in which an n-gram must have occurred before
_SHORTEST = 32  # tokens of a response that counts
_RESPONSES = 64  # largest number of responses of an update that are measured
_ENOUGH = 0.25  # share of the responses that must count
POINTS = 16
_WIDTHS = (1, 4, 16)  # rows per point
_TREND = 67  # rising minus falling pairs of points
LEVEL = 0.2  # smallest repetition at the end
_RISE = 0.1  # smallest increase of the repetition
ENDS = POINTS // 4  # points at the beginning and at the end that are compared

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


class RepetitionRule:
    """The state of the rule in one run; it gives its hint once.

    Args:
        given: whether the hint was given already, or is never due, because no response is sampled.
    """

    def __init__(self, given: bool = False) -> None:
        self.counts = [0, 0, 0, 0]  # of the unfinished row: those of `repeated`, responses measured
        self.rows: deque[tuple[float, float]] = deque(maxlen=POINTS * _WIDTHS[-1])  # score, repetition
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
        self.rows.append((row["objective/scores"], again / grams))
        for width in _WIDTHS:
            if len(self.rows) >= POINTS * width and (found := hint(points(self.rows, width))):
                self.given = True
                rows = POINTS * width
                return (
                    f"{found} over the last {rows} rows of metrics, at update {row['update']:.0f}; {_REMEDY}"
                )
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the rule, for a checkpoint."""
        return {"counts": self.counts, "rows": [list(row) for row in self.rows], "given": self.given}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        self.counts, self.given = list(saved["counts"]), saved["given"]
        self.rows.clear()
        self.rows.extend((score, repetition) for score, repetition in saved["rows"])


_REMEDY = (
    "this is a hint: read responses (completions.jsonl), and if they degenerate, lower the reward of "
    "repetition, or strengthen the KL penalty"
)


def points(rows: Sequence[tuple[float, float]], width: int) -> tuple[list[float], list[float]]:
    """Return score and repetition of the last rows, as `POINTS` means of `width` rows each."""
    last = list(rows)[-POINTS * width :]
    groups = [last[place : place + width] for place in range(0, len(last), width)]
    scores, repetitions = ([sum(each[i] for each in group) / width for group in groups] for i in (0, 1))
    return scores, repetitions


def hint(window: tuple[Sequence[float], Sequence[float]]) -> str | None:
    """Return the beginning of the hint if both numbers of a window rise; None: they do not."""
    (first_score, last_score), (first, last) = (
        (sum(values[:ENDS]) / ENDS, sum(values[-ENDS:]) / ENDS) for values in window
    )
    if last < LEVEL or last - first < _RISE or not all(map(rises, window)):
        return None
    return (
        f"responses repeat themselves more while the reward rises: {last:.0%} of their {_N_GRAM}-grams "
        f"occurred in the {_SPAN} tokens before (earlier {first:.0%}), and objective/scores is "
        f"{last_score:.3g} (earlier {first_score:.3g}),"
    )


def rises(values: Sequence[float]) -> bool:
    """Return whether values have a rising trend: rising minus falling pairs are at least `_TREND`."""
    return sum((later > earlier) - (later < earlier) for earlier, later in combinations(values, 2)) >= _TREND
