"""A response that is being decoded, in pieces, and what samples the pieces."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field
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
    """A response. Token i is complete at step `begin + factor * (i + 1) ** stretch`."""

    group: Group
    key: Start  # the number of its group, and which sample it is
    begin: float  # step at which its first token began, later by the steps of each encoding at a load
    factor: float  # steps of the first token
    stretch: float  # 1: all tokens take as long; above 1: later tokens take longer
    start: float  # time in seconds at which it got its slot
    end: float = inf  # time at which it left the slot; infinity while it runs
    ids: list[int] = field(default_factory=list)  # tokens after the present may be replaced at a load
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)  # of the weights that sampled each token
    kept: int = 0  # tokens that no load can replace any more
    ended: bool = False  # whether the last token is an end token
    stopped: bool = False  # whether no further token is sampled
    cut: bool = False  # whether it ended before its end token because its group was due
    last_step: float = 0.0  # step at which its last known token is complete; set by `plan`

    @property
    def steps(self) -> float:
        """The decoding steps of its known tokens."""
        return self.factor * len(self.ids) ** self.stretch

    def plan(self) -> float:
        """Note and return the step at which its last known token is complete."""
        self.last_step = self.begin + self.factor * len(self.ids) ** self.stretch
        return self.last_step

    def done(self, step: float) -> int:
        """Return the tokens that are complete at a step."""
        tokens = floor(tokens_in(step - self.begin, self.factor, self.stretch) + _ROUNDING)
        return min(len(self.ids), max(self.kept, tokens))

    def keep(self, tokens: int) -> None:
        """Forget all tokens after the first `tokens`."""
        if tokens < len(self.ids):
            del self.ids[tokens:], self.logprobs[tokens:], self.versions[tokens:]
            self.ended = self.stopped = False


def tokens_in(steps: float, factor: float, stretch: float) -> float:
    """Return how many tokens of a response fit into its first decoding steps."""
    return (max(0.0, steps) / factor) ** (1 / stretch)


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
