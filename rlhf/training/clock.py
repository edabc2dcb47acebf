"""A virtual clock: generators and trainer of a cluster, computed in one process, the same on every machine.

Decoding, training and the load of weights take virtual time, given by `VirtualConfig`. The order of events in
virtual time decides which weights sample a token, which groups the trainer takes, and how old they are.
Generators count time in decoding steps; n tokens of a sequence take n steps times its factor, or, stretched,
T (n / T)^stretch steps, so that a response of T tokens, the longest, takes as long as before.

One set of weights is enough. A batch that the trainer takes at time t is trained until t + d, and its weights
are loaded at t + d + sync. All that starts before this load is sampled by the current weights. So the clock
first runs on to the load, sampling with the current weights, and only then returns the batch. The caller
trains on it, loads the weights into the sampler, and calls `Clock.loaded`; then the clock goes on.

    batch = clock.next_batch() ─▶ train, load ─▶ clock.loaded() ─▶ batch = clock.next_batch() ─▶ ...

How long a response is, is known only after it was sampled, and one response at a time is slow. But the
weights cannot change before the load of the update that is trained, or, if the trainer is idle, before an
update could be trained. All slots that become free until then will be filled, so these sequences are sampled
in one call. Tokens depend on version, prompt and the numbers of a sequence, not on the time of its start: a
look ahead that is too long samples in vain, one that is too short makes calls smaller, and neither changes a
token. What was sampled ahead and has not started is forgotten at every load.

Events at the same time are processed one by one, in this order: load, scores, ends of sequences by group and
sample. After each event, free slots are filled; then an idle trainer chooses its batch; then the slots that
the choice freed are filled, at the same time. Times that differ by less than a millionth of a step are the
same, so rounding decides nothing. There is no random state, so a run and its repetition are equal.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, InitVar, dataclass, fields
from functools import lru_cache
from heapq import heappop, heappush
from math import ceil, exp, inf, sqrt
from random import Random
from typing import Any

from rlhf.config.clock import VirtualConfig
from rlhf.core.seeding import derive
from rlhf.training.sequences import MESSAGE, Piece, Sampler, Sequence, Start, tokens_in
from rlhf.training.staleness import Group, Rules

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
    sampler: Sampler  # samples tokens
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
            ends_at = self._time_of(end.last_step) if end else inf
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
        for number, group in self.rules.running.items():
            if not self.sequences[number]:  # a replacement without a slot will have the new version
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
            if sequence.end == inf:
                self.running[sequence.key] = sequence
                heappush(self._ends, (round(sequence.plan(), _DIGITS), sequence.key))

    # -- time --------------------------------------------------------------------------------------

    def _rate(self) -> float:
        return self.costs.seconds_of_step(len(self.running))

    def _time_of(self, step: float) -> float:
        """Return the time of a later step, if the number of running sequences stays the same."""
        return max(self.now, self.resumes) + max(0.0, step - self.step) * self._rate()

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
        for group in self.rules.to_cut(self._begun):
            self._cut(group)
        if batch := self.rules.take():
            sequences = [each for group in batch for each in self.sequences[group.number]]
            steps, tokens = sum(each.steps() for each in sequences), sum(len(each.ids) for each in sequences)
            self.update_s = self.costs.seconds_of_update(steps, tokens, self.slots)
            self.batch, self.load_at = batch, self.now + self.update_s + self.costs.sync_s

    # -- sequences ---------------------------------------------------------------------------------

    def _startable(self, slots: int) -> list[Start]:
        """Return the sequences that start next if `slots` slots are free, in order."""
        return [Start(*each) for each in self.rules.startable(slots, self._begun, self.whole)]

    def _begun(self, group: int) -> int:
        """Return the number of sequences of a group that have started."""
        return len(self.sequences[group])

    def _fill(self) -> None:
        """Start sequences in all free slots, as far as the rules allow."""
        for start in self._startable(self.slots - len(self.running)):
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
        starts = [start for start in self._startable(slots) if start not in self._ahead]
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
        tokens = tokens_in(steps - self.costs.prefill * messages, factor, self.costs.stretch)
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
