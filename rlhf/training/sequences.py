"""A response that is being decoded, in pieces, and what samples the pieces."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field
from functools import partial
from math import floor, inf
from types import MappingProxyType
from typing import NamedTuple, Protocol

from rlhf.training.staleness import Group

MESSAGE = -1  # in place of a version: the token belongs to a message of an environment
_ROUNDING = 1e-9  # of a token


class Start(NamedTuple):
    """A sequence that starts: the number of its group, and which of the group's samples it is."""

    group: int
    sample: int


class Piece(NamedTuple):
    """Further tokens of a sequence, with their log-probs; `ended`: the last one is an end token.

    The last three are for episodes: whether the model sampled each token, the rewards of the tokens, and the
    figures of the whole episode. An episode may also stop at a limit other than its length.
    """

    ids: list[int]
    logprobs: list[float]
    ended: bool
    stopped: bool = False
    sampled: Ordered[bool] = ()  # (): all
    rewards: Ordered[float] = ()
    figures: Mapping[str, float] = MappingProxyType({})


@dataclass(slots=True, eq=False)
class Sequence:
    """A response or an episode.

    Token m of the model, from 1, is complete at step `begin + factor * m ** stretch + prefill * n`, with n
    tokens of messages before it. Environments take no time.
    """

    group: Group
    key: Start  # the number of its group, and which sample it is
    begin: float  # step at which its first token began, later by the steps of each encoding at a load
    factor: float  # steps of the first token
    stretch: float  # 1: all tokens take as long; above 1: later tokens take longer
    start: float  # time in seconds at which it got its slot
    end: float = inf  # time at which it left the slot; infinity while it runs
    ids: list[int] = field(default_factory=list)  # tokens after the present may be replaced at a load
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)  # of the weights that sampled each token, or `MESSAGE`
    kept: int = 0  # tokens that no load can replace any more
    ended: bool = False  # whether the last token is an end token
    stopped: bool = False  # whether no further token is sampled
    cut: bool = False  # whether it ended before its end token because its group was due
    prefill: float = 0.0  # steps of each token of a message
    rewards: list[float] = field(default_factory=list)  # of an episode, for each token
    figures: dict[str, float] = field(default_factory=dict)  # of an episode
    last_step: float = 0.0  # step at which its last known token is complete; set by `plan`

    @property
    def messages(self) -> int:
        """The number of its known tokens that belong to messages."""
        return self.versions.count(MESSAGE) if self.rewards else 0

    @property
    def sampled(self) -> int:
        """The number of its known tokens that the model sampled."""
        return len(self.ids) - self.messages

    @property
    def seen(self) -> Iterator[int]:
        """The versions of the weights that sampled its tokens."""
        return (version for version in self.versions if version != MESSAGE)

    def steps(self, tokens: int | None = None, early: float = 0.0) -> float:
        """Return the decoding steps of its first tokens (None: all known ones), less `early` tokens."""
        if not self.rewards and tokens is None:  # no episode
            return self.factor * len(self.ids) ** self.stretch
        versions = self.versions[:tokens]
        messages = versions.count(MESSAGE)
        sampled = max(0.0, len(versions) - messages - early)
        return self.factor * sampled**self.stretch + self.prefill * messages

    def plan(self) -> float:
        """Note and return the step at which its last known token is complete."""
        self.last_step = self.begin + self.steps()
        return self.last_step

    def done(self, step: float) -> int:
        """Return the tokens that are complete at a step."""
        if not self.rewards:  # no episode
            tokens = floor(tokens_in(step - self.begin, self.factor, self.stretch) + _ROUNDING)
            return min(len(self.ids), max(self.kept, tokens))
        counts, passed = range(1, len(self.ids) + 1), step - self.begin
        return max(self.kept, bisect_right(counts, passed, key=partial(self.steps, early=_ROUNDING)))

    def keep(self, tokens: int) -> None:
        """Forget all tokens after the first `tokens`, and a message that no token of the model follows."""
        while self.rewards and tokens and self.versions[tokens - 1] == MESSAGE:
            tokens -= 1
        if tokens < len(self.ids):
            del self.ids[tokens:], self.logprobs[tokens:], self.versions[tokens:], self.rewards[tokens:]
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
        """Return the row of the prompt of a group and its number of tokens.

        A group gets its prompt at its start; before, it has the prompt that it would get now.
        """

    def discarded(self, sequences: Ordered[Sequence]) -> None:
        """Note that the group of these sequences was given up."""

    def signal(self, group: Ordered[Sequence]) -> bool:
        """Return whether the scores of a group differ, given its ended sequences."""

    def replaced(self, group: Ordered[Sequence], by: int) -> None:
        """Forget a group without signal, and draw a prompt for the group that starts in its place."""
