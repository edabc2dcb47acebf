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

Events at the same time are processed in this order: load, scores, ends of sequences by group and sample.
There is no random state, so a run and its repetition are equal.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from functools import lru_cache
from heapq import heappop, heappush
from itertools import islice
from math import ceil, exp, inf, sqrt
from random import Random
from typing import Any

from rlhf.config.clock import VirtualConfig
from rlhf.core.seeding import derive
from rlhf.training.sequences import SAVED, Piece, Sampler, Sequence, Start
from rlhf.training.staleness import Group, Rules

_LOOKAHEAD = 0.8  # share of the last update's seconds that an idle trainer takes at least until the next load
_FIRST_LOOKAHEAD = 16  # steps, before the first update
_LEAST_TOKENS = 4  # tokens that are sampled at once at least, with in-flight updates


@dataclass(slots=True)
class Usage:
    """What happened since the last load, in virtual seconds.

    Attributes:
        span: seconds that passed.
        busy: seconds of slots that decoded.
        trained: seconds of the trainer's work.
        queue: complete groups times the seconds that they waited.
        wasted: seconds of slots for groups that were given up.
        dropped, cut, refilled: groups that were given up, cut, and replaced because their scores tie.
    """

    span: float = 0.0
    busy: float = 0.0
    trained: float = 0.0
    queue: float = 0.0
    wasted: float = 0.0
    dropped: int = 0
    cut: int = 0
    refilled: int = 0


class Clock:
    """Generators and trainer in virtual time.

    Args:
        rules: which groups start, and which are trained.
        costs: virtual seconds.
        sampler: samples tokens.
        length: largest number of tokens of a response.
        seed: seed of the durations.
        in_flight: whether running sequences continue with the new weights at a load.
        whole: whether the samples of a group start together.

    Raises:
        ValueError: a group needs more slots than there are.
    """

    def __init__(
        self,
        rules: Rules,
        costs: VirtualConfig,
        sampler: Sampler,
        *,
        length: int,
        seed: int,
        in_flight: bool = False,
        whole: bool = True,
    ) -> None:
        self.slots = costs.slots or rules.batch * rules.samples * (rules.max_lag + 1)
        if whole and self.slots < rules.samples:
            raise ValueError(f"{self.slots} slots are too few for groups of {rules.samples} samples")
        self.rules, self.costs, self.sampler, self.length = rules, costs, sampler, length
        self.in_flight, self.whole = in_flight, whole
        self.factors = factors(costs, rules.samples, seed)
        self.first_token = length ** (1 - costs.stretch)  # steps, before the factor
        self.now = self.step = self.resumes = 0.0  # seconds; steps; end of the pause after a load
        self.running: dict[Start, Sequence] = {}
        self.waiting: deque[Start] = deque()  # samples of started groups without a slot
        self.sequences: dict[int, list[Sequence]] = {}  # of all groups that have started and are not trained
        self.scoring: deque[tuple[float, Group]] = deque()  # groups that have ended, and when they are scored
        self.batch: list[Group] | None = None  # what the trainer works on
        self.load_at = inf
        self.update_s = _FIRST_LOOKAHEAD * costs.seconds_of_step(1)  # seconds of the last update
        self.usage = Usage()
        self._news = True  # whether the idle trainer may find a batch that it did not find before
        self._ahead: dict[Start, Piece] = {}  # sampled by the current weights, not started
        self._ends: list[tuple[float, int, int, int, Sequence]] = []  # heap of planned events

    def next_batch(self) -> list[list[Sequence]]:
        """Run until the load of an update, and return the sequences of the groups that it trained on.

        Raises:
            RuntimeError: nothing can happen any more: the rules admit no group, and the trainer waits.
        """
        while True:
            self._fill()
            if self.batch is None and self._news:
                self._choose()
                if self.batch is None and self._news:  # a group that was cut is replaced
                    continue
            end = self._next_end()
            ends_at = inf if end is None else self._time_of(self._ends[0][0])
            scored_at = self.scoring[0][0] if self.scoring else inf
            first = min(self.load_at, scored_at, ends_at)
            if first == inf:
                raise RuntimeError(f"the trainer waits for groups that cannot start: {self.rules}")
            if self.load_at == first:
                self._pass(self.load_at)
                return self._trained()
            if scored_at == first:
                self._pass(scored_at)
                self._complete(self.scoring.popleft()[1])
            elif end is not None:
                self._pass(ends_at, heappop(self._ends)[0])
                self._end(end)

    def loaded(self) -> None:
        """Continue with the weights of the update whose batch was returned; the sampler has loaded them."""
        self.usage, self._news = Usage(), True
        for number in {start.group for start in self.waiting}:
            if not self.sequences[number]:  # a replacement without a slot will have the new version
                self.rules.running[number].version += 1
        for group in self.rules.loaded():
            self._discard(group)
        self._ahead.clear()
        self.resumes = self.now + self.costs.pause_s
        if self.in_flight:
            partial = [each for each in self._in_order() if not (each.stopped and self._done(each))]
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
        assert self.batch is None
        return {
            "rules": self.rules.state_dict(),
            "times": [self.now, self.step, self.resumes, self.update_s],
            "waiting": [list(start) for start in self.waiting],
            "scoring": [[time, group.number] for time, group in self.scoring],
            "sequences": [
                [each.group.number, *(getattr(each, name) for name in SAVED)]
                for own in self.sequences.values()
                for each in own
            ],
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Continue from a saved state."""
        groups = self.rules.load_state_dict(saved["rules"])
        self.now, self.step, self.resumes, self.update_s = saved["times"]
        self.waiting = deque(Start(*start) for start in saved["waiting"])
        self.scoring = deque((time, groups[number]) for time, number in saved["scoring"])
        self.sequences = {number: [] for number in groups}
        for number, *values in saved["sequences"]:
            sequence = Sequence(group=groups[number], **dict(zip(SAVED, values, strict=True)))
            self.sequences[number].append(sequence)
            if sequence.end == inf:
                self.running[Start(number, sequence.sample)] = sequence
                self._plan(sequence)

    # -- time --------------------------------------------------------------------------------------

    def _rate(self) -> float:
        return self.costs.seconds_of_step(len(self.running))

    def _time_of(self, step: float) -> float:
        """Return the time of a later step, if the number of running sequences stays the same."""
        return max(self.now, self.resumes) + (step - self.step) * self._rate()

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
        return self._step_at(idle if self.batch is None else self.load_at)

    def _next_end(self) -> Sequence | None:
        """Return the sequence whose known tokens are complete first."""
        while self._ends and self._ends[0][3] != self._ends[0][4].planned:
            heappop(self._ends)
        return self._ends[0][4] if self._ends else None

    # -- trainer -----------------------------------------------------------------------------------

    def _choose(self) -> None:
        """Let the idle trainer take a batch, if the rules allow it."""
        self._news = False
        for group in self.rules.expired():
            self._discard(group)
        due = self.rules.to_cut()
        if not {group.number for group in due} & {start.group for start in self.waiting}:
            for group in due:
                self._cut(group)
        batch = self.rules.take()
        if batch is None:
            return
        sequences = [each for group in batch for each in self.sequences[group.number]]
        steps, tokens = sum(each.steps for each in sequences), sum(len(each.ids) for each in sequences)
        self.update_s = self.costs.seconds_of_update(steps, tokens, self.slots)
        self.batch, self.load_at = batch, self.now + self.update_s + self.costs.sync_s

    def _trained(self) -> list[list[Sequence]]:
        """Return the sequences of the batch that was trained, group by group; the trainer is idle again."""
        assert self.batch is not None
        batch, self.batch, self.load_at = self.batch, None, inf
        self.usage.trained += self.update_s
        return [self.sequences.pop(group.number) for group in batch]

    # -- sequences ---------------------------------------------------------------------------------

    def _startable(self, slots: int) -> list[Start]:
        """Return the sequences that start next if `slots` slots are free, in order."""
        usable = slots - slots % self.rules.samples if self.whole else slots
        starts = list(islice(self.waiting, usable))
        left = slots - len(starts)
        groups = left // self.rules.samples if self.whole else -(-left // self.rules.samples)
        if not groups:
            return starts
        first = self.rules.started
        numbers = range(first, first + max(0, min(groups, self.rules.room())))
        return [*starts, *(Start(n, k) for n in numbers for k in range(self.rules.samples))][:slots]

    def _fill(self) -> None:
        """Start sequences in all free slots, as far as the rules allow."""
        for start in self._startable(self.slots - len(self.running)):
            if start not in self._ahead:
                self._sample_ahead()
            if start.group == self.rules.started:
                self.sequences[self.rules.start().number] = []
                self.waiting.extend(Start(start.group, k) for k in range(self.rules.samples))
            self.waiting.popleft()
            self._news |= not self.whole
            self._start(start, self._ahead.pop(start))

    def _start(self, start: Start, piece: Piece) -> None:
        """Give a sequence its slot."""
        row, prompt_tokens = self.sampler.prompt(start.group)
        begin = self.step + self.costs.prefill * prompt_tokens
        factor = self.factors(start.group, row)[start.sample] * self.first_token
        group, stretch = self.rules.running[start.group], self.costs.stretch
        sequence = Sequence(group, start.sample, begin, factor, stretch, self.now)
        self.sequences[start.group].append(sequence)
        self.running[start] = sequence
        self._add(sequence, piece)

    def _sample_ahead(self) -> None:
        """Sample the sequences that will start before the weights change."""
        horizon = self._horizon()
        soon = sum(each.stopped and each.last_step < horizon for each in self.running.values())
        slots = self.slots - len(self.running) + soon
        starts = [start for start in self._startable(slots) if start not in self._ahead]
        most = [self.length] * len(starts)
        if self.in_flight:
            for i, start in enumerate(starts):
                factor = self.factors(start.group, self.sampler.prompt(start.group)[0])[start.sample]
                tokens = ((horizon - self.step) / factor / self.first_token) ** (1 / self.costs.stretch)
                most[i] = self._limit(tokens, self.length)
        self._ahead.update(zip(starts, self.sampler.begin(starts, most), strict=True))

    def _extend(self, sequences: Ordered[Sequence]) -> None:
        """Sample further tokens of running sequences."""
        if not sequences:
            return
        horizon = self._horizon()
        most = [
            self._limit(each.tokens(horizon) - len(each.ids), self.length - len(each.ids))
            for each in sequences
        ]
        for sequence, piece in zip(sequences, self.sampler.go_on(sequences, most), strict=True):
            self._add(sequence, piece)

    def _limit(self, tokens: float, left: int) -> int:
        """Return how many tokens are sampled at once, if `tokens` fit before the weights may change."""
        return min(left, max(_LEAST_TOKENS, ceil(tokens)))

    def _add(self, sequence: Sequence, piece: Piece) -> None:
        """Add sampled tokens to a sequence."""
        sequence.ids += piece.ids
        sequence.logprobs += piece.logprobs
        sequence.versions += [self.rules.version] * len(piece.ids)
        sequence.ended = piece.ended
        sequence.stopped = piece.ended or len(sequence.ids) >= self.length
        self._plan(sequence)

    def _plan(self, sequence: Sequence) -> None:
        """Plan the event at which the known tokens of a sequence are complete; earlier plans are void."""
        sequence.planned += 1
        key = (sequence.last_step, sequence.group.number, sequence.sample, sequence.planned)
        heappush(self._ends, (*key, sequence))

    def _end(self, sequence: Sequence) -> None:
        """End a sequence whose known tokens are complete, or sample further tokens of all that lack some."""
        if sequence.stopped:
            self._leave(sequence)
            if sequence.group.left == 0:
                self._completed(sequence.group)
        else:
            self._extend([each for each in self._in_order() if not each.stopped])

    def _leave(self, sequence: Sequence) -> None:
        """Free the slot of a sequence."""
        del self.running[Start(sequence.group.number, sequence.sample)]
        sequence.planned += 1
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
        if signal or not self.rules.may_replace():
            self.rules.complete(group)
            return
        self.usage.refilled += 1
        sequences = self.sequences.pop(group.number)
        self.usage.wasted += sum(each.end - each.start for each in sequences)
        new = self.rules.replace(group).number
        self.sampler.replaced(sequences, new)
        self.sequences[new] = []
        self.waiting.extend(Start(new, k) for k in range(self.rules.samples))

    def _cut(self, group: Group) -> None:
        """End the running sequences of a group with the tokens that they have, at least one."""
        self.usage.cut += 1
        for sequence in self.sequences[group.number]:
            if sequence.end == inf:
                sequence.keep(max(1, sequence.done(self.step)))
                sequence.cut = not sequence.stopped
                sequence.stopped = True
                self._leave(sequence)
        self._completed(group)

    def _discard(self, group: Group) -> None:
        """Forget a group that the rules gave up."""
        self.usage.dropped += 1
        self.waiting = deque(start for start in self.waiting if start.group != group.number)
        self.scoring = deque(each for each in self.scoring if each[1] is not group)
        sequences = self.sequences.pop(group.number)
        for sequence in sequences:
            if sequence.end == inf:
                sequence.keep(sequence.done(self.step))
                self._leave(sequence)
            self.usage.wasted += sequence.end - sequence.start
        self.sampler.discarded(sequences)

    def _in_order(self) -> list[Sequence]:
        return [self.running[start] for start in sorted(self.running)]

    def _done(self, sequence: Sequence) -> bool:
        return sequence.done(self.step) >= len(sequence.ids)


def factors(costs: VirtualConfig, samples: int, seed: int) -> Callable[[int, int], list[float]]:
    """Return the function (group, prompt) -> steps per token of each sample of a group.

    The factor is lognormal with median 1. Its part of a prompt depends on the prompt and not on the group, so
    a prompt that starts again after it was discarded is as long as before.

    Args:
        costs: the cost model, with `slots`.
        samples: samples of a group.
        seed: seed of the run.
    """
    size = costs.slots or samples
    common, own = costs.shared * costs.spread, sqrt(1 - costs.shared**2) * costs.spread

    @lru_cache(maxsize=size)
    def of_prompt(prompt: int) -> float:
        return Random(derive(seed, "duration of prompt", prompt)).gauss(0, common)

    @lru_cache(maxsize=size)
    def of_group(group: int, prompt: int) -> list[float]:
        if not costs.spread:
            return [1.0] * samples
        draws = Random(derive(seed, "duration of group", group))
        found = [exp(of_prompt(prompt) + draws.gauss(0, own)) for _ in range(samples)]
        return found if costs.longest is None else [min(factor, costs.longest) for factor in found]

    return of_group
