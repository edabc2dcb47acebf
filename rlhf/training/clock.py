"""The virtual clock, and the rules that decide which groups start, are trained or given up. No torch."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Ordered
from dataclasses import KW_ONLY, InitVar, dataclass, field, fields
from functools import lru_cache, partial
from heapq import heappop, heappush
from itertools import islice
from math import ceil, exp, floor, inf, sqrt
from random import Random
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from rlhf.config.run import Order, Stale, VirtualConfig
from rlhf.core.launched import derive

# A response that is being decoded, in pieces, and what samples the pieces.


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
            tokens = floor(_tokens_in(step - self.begin, self.factor, self.stretch) + _ROUNDING)
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


def _tokens_in(steps: float, factor: float, stretch: float) -> float:
    """Return how many tokens of a response fit into its first decoding steps."""
    return (max(0.0, steps) / factor) ** (1 / stretch)


class _Sampler(Protocol):
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


# Which groups of rollouts may start, which are trained next, and which are given up.
#
# A group is a prompt with its K samples; B groups are a batch. The version counts finished updates. The age
# of a group is the version that trains on it minus the version of the weights at its start. `Rules` knows no
# clock, no model and no process: a virtual clock and a pool of servers call the same methods.
#
#     room() -> n          groups that may start now; start() -> group for each that gets slots (`startable`)
#     complete(group)      the last sample of the group has ended
#     replace(group)       instead, if its scores tie: returns the group that starts in its place, if any
#     expired() -> groups  (drop) complete groups that are too old, after a load
#     due() -> groups      (wait, cut) running groups that the next batch needs
#     take() -> groups     the next batch of the idle trainer, or None if it must wait
#     loaded() -> groups   the generators have the weights of one more update; (drop) running groups to stop
#
# | order, stale    | trained next                                                       | age       |
# |-----------------|--------------------------------------------------------------------|-----------|
# | fifo            | the next B groups in the order of starts                           | <= L      |
# | completed       | complete groups, oldest version first                              | no bound  |
# | completed, wait | the same; the trainer waits for running groups that are due        | <= A      |
# | completed, cut  | the same; running groups that are due end with the tokens they have | <= A     |
# | completed, drop | complete groups in the order of completion; older ones are given up | <= A     |
#
# L is `max_lag`, A is `max_age`. Admission: at most B (version + L + 1) groups have started (AReaL, Fu et
# al., arXiv 2505.24298); with `drop`, at most B (L + 1) groups exist that neither the trainer has taken nor
# were discarded, and without a lag none starts while the trainer works. So at most B (L + 2) groups are in
# memory. L bounds admission, not age: only A bounds the age of a long response.


@dataclass(slots=True, eq=False)
class Group:
    """A prompt with its samples."""

    number: int  # in the order of starts, from 0; -1, -2, ... for groups that replace others
    version: int  # version of the weights when its first sample started
    left: int  # samples that have not ended
    place: int  # place in the order of all starts
    begun: int = 0  # samples that have started


@dataclass(slots=True, kw_only=True)
class Rules:
    """The state of admission and choice."""

    order: Order  # which groups are trained next
    batch: int  # B, groups of a batch
    samples: int  # K, samples of a group
    max_lag: int  # L, batches that generation may be ahead of training
    max_age: int | None = None  # A, at least L; None: ages have no bound. It needs `Order.completed`
    stale: Stale = Stale.wait  # what happens at `max_age`
    total: int | None = None  # groups that the run trains; None: no end
    refill: int = 0  # groups without signal that are replaced between two loads, at most
    version: int = 0  # finished updates
    started: int = 0  # groups that have started, without those that replace others
    refilled: int = 0  # groups that were replaced
    before: int = 0  # `refilled` at the last load
    trains: bool = False  # whether a batch was taken since the last load
    # Groups with samples that have not ended, by number, in the order of their starts
    running: dict[int, Group] = field(default_factory=dict)
    # Complete groups that wait for the trainer, in the order of completion
    ready: list[Group] = field(default_factory=list)

    def room(self) -> int:
        """Return how many groups may start now.

        A group that is discarded makes room for another, so with `drop` more groups start than are trained.
        """
        if self.drops:
            most = 0 if self.trains and not self.max_lag else self.batch * (self.max_lag + 1)
            return most - len(self.running) - len(self.ready)
        most = self.batch * (self.version + self.max_lag + 1)
        return (most if self.total is None else min(most, self.total)) - self.started

    def startable(self, slots: int, whole: bool) -> list[Start]:
        """Return the sequences that start next in free slots, in their order.

        Args:
            slots: the free slots.
            whole: the samples of a group start together.
        """
        k = self.samples
        usable = slots - slots % k if whole else slots
        if not usable:
            return []
        starts: list[Start] = []
        for group in reversed(self.running.values()):
            if group.begun == k:
                break  # groups start in this order, so all samples of earlier groups have started
            starts[:0] = [Start(group.number, sample) for sample in range(group.begun, k)]
        groups = min(-(-(usable - len(starts)) // k), self.room())
        new = range(self.started, self.started + groups)
        starts += [Start(number, sample) for number in new for sample in range(k)]
        return starts[:usable]

    def start(self) -> Group:
        """Return the next group, which starts now."""
        self.started += 1
        return self._add(self.started - 1)

    def replace(self, group: Group) -> Group | None:
        """Remove a running group without signal, and return the group that starts in its place.

        If `refill` groups were replaced since the last load, nothing changes, and None is returned. The new
        group is the last one in the order of starts. So no batch waits for it longer than for other new
        groups, and ages have the same bounds.
        """
        if self.refilled - self.before >= self.refill:
            return None
        del self.running[group.number]
        self.refilled += 1
        return self._add(-self.refilled)

    def complete(self, group: Group) -> None:
        """Note that the last sample of a running group has ended."""
        self.ready.append(self.running.pop(group.number))

    def expired(self) -> list[Group]:
        """Remove and return the complete groups that are too old to be trained."""
        old = self._too_old(self.ready)
        self.ready = [group for group in self.ready if group not in old]
        return old

    def due(self) -> list[Group]:
        """Return the running groups without which a later batch would exceed the age A, oldest first.

        A group of version s must be trained at version s + A or before. For each j from 0 to A - 1, let c be
        the number of groups with s + A <= version + j. The j batches after the next one take at most B j of
        them, so the next one needs c - B j. It is not enough to look at j = 0: with more slots than a batch
        has sequences, too many groups of one version would be left for one batch.
        """
        if self.max_age is None or self.stale is Stale.drop:
            return []
        running = [group.version for group in self.running.values()]  # ascending: in the order of starts
        ready = sorted(group.version for group in self.ready)
        most = 0
        for j in range(self.max_age):
            newest = self.version + j - self.max_age  # newest version that is due within j further batches
            complete = bisect_right(ready, newest)
            due = complete + bisect_right(running, newest)
            most = max(most, min(due - self.batch * j, self.batch) - min(complete, self.batch))
        return list(islice(self.running.values(), most))

    def to_cut(self) -> list[Group]:
        """Return the groups with running samples that must end now, so that the idle trainer gets a batch.

        There are none before all samples of these groups have started.
        """
        due = self.due() if self.stale is Stale.cut else []
        found = [group for group in due if group.left] if len(self.ready) + len(due) >= self.batch else []
        return found if all(group.begun == self.samples for group in found) else []

    def take(self) -> list[Group] | None:
        """Return the groups of the next batch, or None if the trainer must wait."""
        if len(self.ready) < self.batch or self.due():
            return None
        if not self.drops:
            self.ready.sort(key=lambda group: group.place)  # oldest version first
        oldest = next(iter(self.running.values()), None)
        if self.order is Order.fifo and oldest and oldest.place < self.ready[self.batch - 1].place:
            return None
        taken, self.ready = self.ready[: self.batch], self.ready[self.batch :]
        self.trains = True
        return taken

    def loaded(self) -> list[Group]:
        """Note that the generators have the weights of one more update.

        Returns:
            The running groups that can no longer be trained; they are removed.
        """
        self.version += 1
        self.before, self.trains = self.refilled, False
        old = self._too_old(self.running.values())
        for group in old:
            del self.running[group.number]
        return old

    def state_dict(self) -> dict[str, Any]:
        """Return the counters and the groups, as JSON values."""
        groups = [*self.running.values(), *self.ready]
        return {
            "counters": [self.version, self.started, self.refilled, self.before],
            "groups": [[group.number, group.version, group.left, group.place] for group in groups],
            "running": len(self.running),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> dict[int, Group]:
        """Continue from a saved state, and return its groups by number."""
        self.version, self.started, self.refilled, self.before = saved["counters"]
        groups = {values[0]: Group(*values) for values in saved["groups"]}
        self.running = dict(islice(groups.items(), saved["running"]))
        self.ready = [*groups.values()][saved["running"] :]
        return groups

    @property
    def drops(self) -> bool:
        """Whether groups that are too old are given up."""
        return self.max_age is not None and self.stale is Stale.drop

    def _add(self, number: int) -> Group:
        place = self.started + self.refilled - 1
        group = self.running[number] = Group(number, self.version, self.samples, place)
        return group

    def _too_old(self, groups: Iterable[Group]) -> list[Group]:
        if self.max_age is None or self.stale is not Stale.drop:
            return []
        return [group for group in groups if self.version - group.version > self.max_age]


# A virtual clock: generators and trainer of a cluster, computed in one process, the same on every machine.
#
# Decoding, training and the load of weights take virtual time, given by `VirtualConfig`. The order of events
# in virtual time decides which weights sample a token, which groups the trainer takes, and how old they are.
# Generators count time in decoding steps; n tokens of a sequence take n steps times its factor, or,
# stretched, T (n / T)^stretch steps, so that a response of T tokens, the longest, takes as long as before.
#
# One set of weights is enough. A batch that the trainer takes at time t is trained until t + d, and its
# weights are loaded at t + d + sync. All that starts before this load is sampled by the current weights. So
# the clock first runs on to the load, sampling with the current weights, and only then returns the batch. The
# caller trains on it, loads the weights into the sampler, and calls `Clock.loaded`; then the clock goes on.
#
#     batch = clock.next_batch() ─▶ train, load ─▶ clock.loaded() ─▶ batch = clock.next_batch() ─▶ ...
#
# How long a response is, is known only after it was sampled, and one response at a time is slow. But the
# weights cannot change before the load of the update that is trained, or, if the trainer is idle, before an
# update could be trained. All slots that become free until then will be filled, so these sequences are
# sampled in one call. Tokens depend on version, prompt and the numbers of a sequence, not on the time of its
# start: a look ahead that is too long samples in vain, one that is too short makes calls smaller, and neither
# changes a token. What was sampled ahead and has not started is forgotten at every load.
#
# Events at the same time are processed one by one, in this order: load, scores, ends of sequences by group
# and sample. After each event, free slots are filled; then an idle trainer chooses its batch; then the slots
# that the choice freed are filled, at the same time. Times that differ by less than a millionth of a step are
# the same, so rounding decides nothing. There is no random state, so a run and its repetition are equal.


_LOOKAHEAD = 0.8  # share of the last update's seconds that an idle trainer takes at least until the next load
_FIRST_LOOKAHEAD = 16  # steps, before the first update
_LEAST_TOKENS = 4  # tokens that are sampled at once at least, with in-flight updates
_DIGITS = 6  # decimals in which steps are compared, because ends at the same time differ by rounding
_SAVED = [each.name for each in fields(Sequence)[2:-1]]  # all but the group, the key and the last step


@dataclass(slots=True)
class Usage:
    """What happened since the last load, in virtual seconds."""

    span: float = 0.0  # seconds that passed
    busy: float = 0.0  # seconds of slots that decoded
    trained: float = 0.0  # seconds of the trainer's work
    queue: float = 0.0  # complete groups times the seconds that they waited
    wasted: float = 0.0  # seconds of slots for groups that were given up
    dropped: int = 0  # groups that were given up
    cut: int = 0  # groups that were cut


@dataclass(eq=False)
class Clock:
    """Generators and trainer in virtual time."""

    rules: Rules  # which groups start, and which are trained
    costs: VirtualConfig  # virtual seconds
    sampler: _Sampler  # samples tokens
    _: KW_ONLY
    length: int  # largest number of tokens of a response
    seed: InitVar[int]  # seed of the durations
    in_flight: bool = False  # whether running sequences continue with the new weights at a load
    whole: bool = True  # whether the samples of a group start together

    def __post_init__(self, seed: int) -> None:
        rules, costs = self.rules, self.costs
        self.slots = costs.slots or rules.batch * rules.samples * (rules.max_lag + 1)
        self.factors = factors(costs, rules.samples, seed)
        self.first_token = self.length ** (1 - costs.stretch)  # steps, before the factor
        self.now = self.step = self.resumes = 0.0  # seconds; steps; end of the pause after a load
        self.running: dict[Start, Sequence] = {}
        self.sequences: dict[int, list[Sequence]] = {}  # of all groups that have started and are not trained
        self.scoring: deque[tuple[float, Group]] = deque()  # groups that have ended, and when they are scored
        self.batch: list[Group] = []  # what the trainer works on
        self.load_at = inf
        self.update_s = _FIRST_LOOKAHEAD * costs.seconds_of_step(1)  # seconds of the last update
        self.usage = Usage()
        self._news = True  # whether the idle trainer may find a batch that it did not find before
        self._ahead: dict[Start, Piece] = {}  # sampled by the current weights, not started
        self._ends: list[tuple[float, Start]] = []  # heap of rounded last steps; earlier plans are void

    def next_batch(self) -> list[list[Sequence]]:
        """Run until the load of an update, and return the sequences of the groups that it trained on.

        Raises:
            RuntimeError: nothing can happen any more: the rules admit no group, and the trainer waits.
        """
        while True:
            self._fill()
            if not self.batch and self._news:
                self._choose()
                continue  # the choice may have freed slots, or room for further groups
            end = self._next_end()
            ends_at = inf
            if end:  # if the number of running sequences stays the same
                steps = max(0.0, end.last_step - self.step)
                ends_at = max(self.now, self.resumes) + steps * self._rate()
            scored_at = self.scoring[0][0] if self.scoring else inf
            first = min(self.load_at, scored_at, ends_at) + self._rate() / 10**_DIGITS
            if first == inf:
                raise RuntimeError(f"the trainer waits for groups that cannot start: {self.rules}")
            if self.load_at <= first:
                self._pass(self.load_at)
                self.usage.trained += self.update_s
                batch, self.batch, self.load_at = self.batch, [], inf
                return [self.sequences.pop(group.number) for group in batch]
            if scored_at <= first:
                self._pass(scored_at)
                self._complete(self.scoring.popleft()[1])
            elif end:
                heappop(self._ends)
                self._pass(ends_at, end.last_step)
                if not end.stopped:
                    self._extend(each for each in self.running.values() if not each.stopped)
                    continue
                self._leave(end)
                if end.group.left == 0:
                    self._completed(end.group)

    def loaded(self) -> None:
        """Continue with the weights of the update whose batch was returned; the sampler has loaded them."""
        self.usage, self._news = Usage(), True
        for group in self.rules.running.values():
            if not group.begun:  # a replacement without a slot will have the new version
                group.version += 1
        for group in [*self.rules.loaded(), *self.rules.expired()]:
            self._discard(group)
        self._ahead.clear()
        self.resumes = self.now + self.costs.pause_s
        if self.in_flight:
            partial = [
                each
                for each in self.running.values()
                if not each.stopped or each.done(self.step) < len(each.ids)
            ]
            for sequence in partial:
                sequence.kept = sequence.done(self.step)
                sequence.keep(sequence.kept)
                prompt_tokens = self.sampler.prompt(sequence.group.number)[1]
                sequence.begin += self.costs.prefill * (prompt_tokens + sequence.kept)
            self._extend(partial)

    def state_dict(self) -> dict[str, Any]:
        """Return the state between `next_batch` and `loaded`, as JSON values.

        What was sampled ahead is not part of it, so a clock that continues from it makes the same calls.
        """
        assert not self.batch
        return {
            "rules": self.rules.state_dict(),
            "times": [self.now, self.step, self.resumes, self.update_s],
            "scoring": [[time, group.number] for time, group in self.scoring],
            "sequences": [
                [*each.key, *(getattr(each, name) for name in _SAVED)]
                for own in self.sequences.values()
                for each in own
            ],
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Continue from a saved state."""
        groups = self.rules.load_state_dict(saved["rules"])
        self.now, self.step, self.resumes, self.update_s = saved["times"]
        self.scoring = deque((time, groups[number]) for time, number in saved["scoring"])
        self.sequences = {number: [] for number in groups}
        for number, sample, *values in saved["sequences"]:
            sequence = Sequence(groups[number], Start(number, sample), *values)
            self.sequences[number].append(sequence)
            groups[number].begun += 1
            if sequence.end == inf:
                self.running[sequence.key] = sequence
                heappush(self._ends, (round(sequence.plan(), _DIGITS), sequence.key))

    # -- time --------------------------------------------------------------------------------------

    def _rate(self) -> float:
        return self.costs.seconds_of_step(len(self.running))

    def _step_at(self, time: float) -> float:
        """Return the step at a later time, if the number of running sequences stays the same."""
        return self.step + max(0.0, time - max(self.now, self.resumes)) / self._rate()

    def _pass(self, time: float, step: float | None = None) -> None:
        """Let time pass, until a step if it is known exactly."""
        self.step = self._step_at(time) if step is None else step
        passed = time - self.now
        self.usage.span += passed
        self.usage.busy += passed * len(self.running)
        self.usage.queue += passed * len(self.rules.ready)
        self.now = time

    def _horizon(self) -> float:
        """Return the step until which the weights cannot change (an estimate while the trainer is idle)."""
        idle = self.now + _LOOKAHEAD * self.update_s
        return self._step_at(self.load_at if self.batch else idle)

    def _next_end(self) -> Sequence | None:
        while self._ends:
            step, key = self._ends[0]
            sequence = self.running.get(key)
            if sequence is not None and round(sequence.last_step, _DIGITS) == step:
                return sequence
            heappop(self._ends)
        return None

    # -- trainer -----------------------------------------------------------------------------------

    def _choose(self) -> None:
        """Let the idle trainer take a batch, if the rules allow it."""
        self._news = False
        for group in self.rules.expired():
            self._discard(group)
        for group in self.rules.to_cut():
            self._cut(group)
        if batch := self.rules.take():
            sequences = [each for group in batch for each in self.sequences[group.number]]
            steps, tokens = sum(each.steps() for each in sequences), sum(len(each.ids) for each in sequences)
            self.update_s = self.costs.seconds_of_update(steps, tokens, self.slots)
            self.batch, self.load_at = batch, self.now + self.update_s + self.costs.sync_s

    # -- sequences ---------------------------------------------------------------------------------

    def _fill(self) -> None:
        """Start sequences in all free slots, as far as the rules allow."""
        for start in self.rules.startable(self.slots - len(self.running), self.whole):
            if start not in self._ahead:
                self._sample_ahead()
            if start.group == self.rules.started:
                self.sequences[self.rules.start().number] = []
            self._news |= not self.whole
            row, prompt_tokens = self.sampler.prompt(start.group)
            begin, factor = self.step + self.costs.prefill * prompt_tokens, self._factor(start, row)
            group, stretch = self.rules.running[start.group], self.costs.stretch
            sequence = Sequence(group, start, begin, factor, stretch, self.now, prefill=self.costs.prefill)
            self.sequences[start.group].append(sequence)
            group.begun += 1
            self.running[start] = sequence
            self._add(sequence, self._ahead.pop(start))

    def _factor(self, start: Start, row: int) -> float:
        """Return the steps of the first token of a sequence, given the row of its prompt."""
        return self.factors(start.group, row)[start.sample] * self.first_token

    def _sample_ahead(self) -> None:
        """Sample the sequences that will start before the weights change."""
        horizon = self._horizon()
        soon = sum(each.stopped and each.last_step < horizon for each in self.running.values())
        slots = self.slots - len(self.running) + soon
        starts = [start for start in self.rules.startable(slots, self.whole) if start not in self._ahead]
        most = [
            self._most(horizon - self.step, self._factor(start, self.sampler.prompt(start.group)[0]))
            if self.in_flight
            else self.length
            for start in starts
        ]
        self._ahead.update(zip(starts, self.sampler.begin(starts, most), strict=True))

    def _extend(self, partial: Iterable[Sequence]) -> None:
        """Sample further tokens of running sequences."""
        horizon = self._horizon()
        if sequences := sorted(partial, key=lambda each: each.key):
            most = [
                self._most(horizon - each.begin, each.factor, len(each.ids), each.messages)
                for each in sequences
            ]
            for sequence, piece in zip(sequences, self.sampler.go_on(sequences, most), strict=True):
                self._add(sequence, piece)

    def _most(self, steps: float, factor: float, done: int = 0, messages: int = 0) -> int:
        """Return how many further tokens of a sequence are sampled at once: those before its step `steps`.

        Of its `done` known tokens, `messages` belong to messages. Further messages are not foreseen.
        """
        tokens = _tokens_in(steps - self.costs.prefill * messages, factor, self.costs.stretch)
        return min(self.length - done, max(_LEAST_TOKENS, ceil(tokens - (done - messages))))

    def _add(self, sequence: Sequence, piece: Piece) -> None:
        """Add sampled tokens to a sequence, and plan the event at which they are complete."""
        sequence.ids += piece.ids
        sequence.logprobs += piece.logprobs
        version = self.rules.version
        if piece.rewards:  # an episode
            sequence.versions += [version if sampled else MESSAGE for sampled in piece.sampled]
            sequence.rewards += piece.rewards
            sequence.figures = dict(piece.figures)
        else:
            sequence.versions += [version] * len(piece.ids)
        sequence.ended = piece.ended
        sequence.stopped = piece.stopped or piece.ended or len(sequence.ids) >= self.length
        heappush(self._ends, (round(sequence.plan(), _DIGITS), sequence.key))

    def _leave(self, sequence: Sequence) -> None:
        del self.running[sequence.key]
        sequence.end = self.now
        sequence.group.left -= 1

    def _completed(self, group: Group) -> None:
        """Pass a group whose samples have ended to the rules, now or when its scores are known."""
        if self.costs.score_s:
            self.scoring.append((self.now + self.costs.score_s, group))
        else:
            self._complete(group)

    def _complete(self, group: Group) -> None:
        """Give a group to the trainer, or replace it if its scores tie."""
        self._news = True
        signal = not self.rules.refill or self.sampler.signal(self.sequences[group.number])
        if signal or (new := self.rules.replace(group)) is None:
            self.rules.complete(group)
        else:
            self.sampler.replaced(self._give_up(group), new.number)
            self.sequences[new.number] = []

    def _cut(self, group: Group) -> None:
        """End the running sequences of a group with the tokens that they have, at least one."""
        for sequence in self.sequences[group.number]:
            if sequence.end == inf:
                sequence.keep(max(1, sequence.done(self.step)))
                sequence.cut = not sequence.stopped
                sequence.stopped = True
                self._leave(sequence)
        self.usage.cut += any(each.cut for each in self.sequences[group.number])
        self._completed(group)

    def _discard(self, group: Group) -> None:
        """Forget a group that the rules gave up."""
        self.usage.dropped += 1
        self.scoring = deque(each for each in self.scoring if each[1] is not group)
        self.sampler.discarded(self._give_up(group))

    def _give_up(self, group: Group) -> list[Sequence]:
        """Return the sequences of a group, with their complete tokens; the clock forgets them."""
        sequences = self.sequences.pop(group.number)
        for sequence in sequences:
            if sequence.end == inf:
                sequence.keep(sequence.done(self.step))
                self._leave(sequence)
            self.usage.wasted += sequence.end - sequence.start
        return sequences


def factors(costs: VirtualConfig, samples: int, seed: int) -> Callable[[int, int], list[float]]:
    """Return the function (group, prompt) -> steps per token of each sample of a group.

    The factor is lognormal with median 1. Its part of a prompt depends on the prompt and not on the group, so
    a prompt that starts again after it was discarded is as long as before.

    Args:
        costs: the cost model, with `slots`.
        samples: samples of a group.
        seed: seed of the run.
    """
    longest = costs.longest or inf
    common, own = costs.shared * costs.spread, sqrt(1 - costs.shared**2) * costs.spread
    draw = Random()

    @lru_cache(maxsize=costs.slots or samples)
    def of_group(group: int, prompt: int) -> list[float]:
        draw.seed(derive(seed, "duration of prompt", prompt))
        of_prompt = draw.gauss(0, common)
        draw.seed(derive(seed, "duration of group", group))
        return [min(exp(of_prompt + draw.gauss(0, own)), longest) for _ in range(samples)]

    return of_group
