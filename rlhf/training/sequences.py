"""A response that is being decoded, in pieces, and what samples the pieces."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field, fields
from math import floor, inf
from typing import NamedTuple, Protocol

from rlhf.training.staleness import Group

_ROUNDING = 1e-9  # of a token


class Start(NamedTuple):
    """A sequence that starts: the number of its group, and which of the group's samples it is."""

    group: int
    sample: int


class Piece(NamedTuple):
    """Sampled tokens, with their log-probs; `ended`: the last one is an end token."""

    ids: list[int]
    logprobs: list[float]
    ended: bool


@dataclass(slots=True, eq=False)
class Sequence:
    """A response. Token i is complete at step `begin + factor * (i + 1) ** stretch`.

    Attributes:
        group: its group.
        sample: which sample of the group it is.
        begin: step at which its first token began, later by the steps of each encoding at a load.
        factor: steps of the first token.
        stretch: 1: all tokens take as long; above 1: later tokens take longer.
        start: time in seconds at which it got its slot.
        end: time at which it left the slot; infinity while it runs.
        ids, logprobs, versions: of its tokens; tokens after the present may be replaced at a load.
        kept: tokens that no load can replace any more.
        ended: whether the last token is an end token.
        stopped: whether no further token is sampled.
        cut: whether it ended before its end token because its group was due.
        planned: counts its planned events; earlier ones are void.
    """

    group: Group
    sample: int
    begin: float
    factor: float
    stretch: float
    start: float
    end: float = inf
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    kept: int = 0
    ended: bool = False
    stopped: bool = False
    cut: bool = False
    planned: int = 0

    @property
    def steps(self) -> float:
        """The decoding steps of its known tokens."""
        return self.factor * len(self.ids) ** self.stretch

    @property
    def last_step(self) -> float:
        """The step at which its last known token is complete."""
        return self.begin + self.steps

    def tokens(self, step: float) -> float:
        """Return how many tokens fit between its begin and a step."""
        return (max(0.0, step - self.begin) / self.factor) ** (1 / self.stretch)

    def done(self, step: float) -> int:
        """Return the tokens that are complete at a step."""
        return min(len(self.ids), max(self.kept, floor(self.tokens(step) + _ROUNDING)))

    def keep(self, tokens: int) -> None:
        """Forget all tokens after the first `tokens`."""
        if tokens < len(self.ids):
            del self.ids[tokens:], self.logprobs[tokens:], self.versions[tokens:]
            self.ended = self.stopped = False


SAVED = [each.name for each in fields(Sequence) if each.name not in ("group", "planned")]


class Sampler(Protocol):
    """Samples tokens with the weights that were loaded last, and knows the prompts of the groups."""

    def begin(self, starts: Ordered[Start], most: Ordered[int]) -> list[Piece]:
        """Return the first tokens of sequences, at most `most` of each."""

    def go_on(self, sequences: Ordered[Sequence], most: Ordered[int]) -> list[Piece]:
        """Return the next tokens of sequences, at most `most` of each."""

    def prompt(self, group: int) -> tuple[int, int]:
        """Return the row of the prompt of a group and its number of tokens."""

    def discarded(self, sequences: Ordered[Sequence]) -> None:
        """Note that the group of these sequences was given up."""

    def signal(self, group: Ordered[Sequence]) -> bool:
        """Return whether the scores of a group differ, given its ended sequences."""

    def replaced(self, group: Ordered[Sequence], by: int) -> None:
        """Forget a group without signal, and draw a prompt for the group that starts in its place."""
