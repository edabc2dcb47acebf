"""Streams of groups in the order of completion: in the time of this machine, or in virtual time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from math import inf
from queue import SimpleQueue
from statistics import mean
from threading import Condition
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rlhf.config.run import ClockConfig, Dropped, Order, Unit, VirtualConfig
from rlhf.core.batch import Batch, Begun, Prompts, Rollouts, concatenated, grouped
from rlhf.core.launched import derive
from rlhf.core.metrics import How, Metrics, Stat
from rlhf.environments.environment import LIMITS
from rlhf.generators.hf.generator import uniforms
from rlhf.training import clock, stream
from rlhf.training.clock import MESSAGE, Clock, Group, Piece, Rules, Start, Usage

# What the streams have in common in which `Rules` decide which groups start and which are trained.


@dataclass(slots=True, eq=False)
class _CompletedResponse:
    """A response that has started."""

    group: Group
    sample: int
    start: float  # seconds since the start of the run
    future: Future[Rollouts] | None = None  # None: it ended before a checkpoint
    end: float = inf
    cut: bool = False
    rollouts: Rollouts | None = None  # [1, 1, T], with token versions

    @property
    def sampled(self) -> int:
        """The number of tokens that the model sampled."""
        return 0 if self.rollouts is None else int(self.rollouts.response_mask.sum())

    @property
    def seen(self) -> Iterator[int]:
        """The versions of the weights that sampled its tokens."""
        return iter(() if self.rollouts is None else self.rollouts.versions())


_Response = clock.Sequence | _CompletedResponse


class RuledStream(stream.RolloutStream):
    """A stream that draws prompts for groups and notes what becomes of the groups.

    Args:
        context: what the stream is built from.
    """

    def __init__(self, context: stream.StreamContext) -> None:
        super().__init__(context)
        schedule, self.sampling, self.refill = context.schedule, context.sampling, context.refill
        self.rules = Rules(
            order=schedule.order,
            batch=schedule.prompts_per_update,
            samples=self.sampling.samples,
            max_lag=schedule.max_lag,
            max_age=schedule.max_age,
            stale=schedule.stale,
            total=context.state.num_updates * schedule.prompts_per_update,
            refill=self.refill.most if self.refill else 0,
        )
        self.known: dict[int, Prompts] = {}  # prompt [1] of each group that has started
        self.next: deque[Prompts] = deque()  # prompts [1] that were drawn and have no group
        self.discards: deque[Prompts] = deque()  # prompts [1] of discarded groups, which start again
        self.noted: list[dict[str, Any]] = []  # lines of groups.jsonl since the last batch

    def drawn(self, prompts: deque[Prompts]) -> Prompts:
        """Return the first of the prompts [1], after drawing a batch if there is none."""
        if not prompts:
            self.draw(prompts)
        return prompts.popleft()

    def draw(self, prompts: deque[Prompts]) -> None:
        """Add the prompts [1] of a batch."""
        batch = next(self.context.prompts)
        prompts.extend(batch.select(torch.tensor([i])) for i in range(len(batch)))

    def prompt_of(self, group: int) -> Prompts:
        """Return the prompt [1] of a group, which gets a discarded prompt or else a new one at its start.

        Before its start, a group has the prompt that it would get if all groups before it started now.
        """
        if group not in self.known and group < self.rules.started:
            self.known[group] = self.drawn(self.discards or self.next)
        if group in self.known:
            return self.known[group]
        ahead = sum(each not in self.known for each in range(self.rules.started, group))
        while ahead >= len(self.discards) + len(self.next):
            self.draw(self.next)
        return [*self.discards, *self.next][ahead]

    def forget(self, own: Sequence[_Response], fate: str, **times: float) -> Prompts:
        """Note the line of a group for groups.jsonl, forget the group, and return its prompt [1]."""
        number = own[0].group.number
        prompt = self.known.pop(number)
        versions = [version for each in own for version in each.seen]
        line = {
            "group": number,
            "row": int(prompt.index),
            "version": own[0].group.version,
            "versions": [min(versions, default=None), max(versions, default=None)],
            "lengths": [each.sampled for each in own],
            "starts": [each.start for each in own],
            "ends": [each.end for each in own],
        }
        self.noted.append({**line, **times, "fate": fate})
        return prompt

    def trained(self, groups: Sequence[Sequence[_Response]], scoring_s: float, **times: float) -> None:
        """Forget the groups of a batch, and let `lines` be theirs and those noted since the last batch.

        Args:
            groups: the responses of the groups.
            scoring_s: seconds from the end of a group to its scores.
            times: what the lines say besides, in seconds.
        """
        for own in groups:
            fate = "cut" if any(each.cut for each in own) else "trained"
            self.forget(own, fate, ready=max(each.end for each in own) + scoring_s, **times)
        self.lines, self.noted = self.noted, []

    def discarded(self, sequences: Sequence[_Response]) -> None:
        """Forget a group that was given up; its prompt may start again."""
        prompt = self.forget(sequences, "dropped")
        if self.context.schedule.dropped is Dropped.again:
            self.discards.append(prompt)

    def figures(self, groups: Sequence[Sequence[_Response]], now: float, slots: int, usage: Usage) -> Metrics:
        """Return the metrics of an update.

        Args:
            groups: the responses of its groups.
            now: seconds since the start of the run.
            slots: responses that are sampled at a time.
            usage: what happened since the last update.
        """
        span = max(usage.span, 1e-9)
        ages = sorted(self.rules.version - own[0].group.version for own in groups)
        kept = sum(each.end - each.start for own in groups for each in own) / len(groups)
        lost = usage.dropped + self.rules.refilled - self.rules.before
        every = (kept * len(groups) + usage.wasted) / (len(groups) + lost)
        return {
            "rollouts/time_s": Stat(now, 1.0, How.last),
            "rollouts/update_s": Stat(usage.span),
            "rollouts/generators_busy": Stat(usage.busy / span / slots),
            "rollouts/trainer_busy": Stat(usage.trained / span),
            "rollouts/lag": Stat(mean(ages)),
            "rollouts/lag_p90": Stat(float(ages[-1 - len(ages) // 10])),
            "rollouts/oldest": Stat(float(ages[-1]), 1.0, How.max),
            "rollouts/queue": Stat(usage.queue / span),
            "rollouts/length_ratio": Stat(kept / every if every else 1.0),
            "rollouts/wasted": Stat(usage.wasted / span / slots),
            "rollouts/dropped": Stat(float(usage.dropped), 1.0, How.sum),
            "rollouts/cut": Stat(float(usage.cut), 1.0, How.sum),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return prompts, the batch that was put back and the lines of groups, as plain values."""
        return {
            "current": self.current.as_dict() if self.current is not None and self.unused else None,
            "lines": self.lines if self.unused else [],
            "noted": self.noted,
            "known": {group: self.known[group].as_dict() for group in sorted(self.known)},
            "queues": [[prompt.as_dict() for prompt in queue] for queue in (self.next, self.discards)],
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Continue with what `state_dict` of this class returned."""
        self.unused, self.lines, self.noted = saved["current"] is not None, saved["lines"], saved["noted"]
        self.current = stream.unpack(saved["current"]) if self.unused else None
        self.rules.trains = self.unused
        self.known = {group: Prompts(**prompt) for group, prompt in saved["known"].items()}
        self.next, self.discards = (deque(Prompts(**prompt) for prompt in queue) for queue in saved["queues"])


# The stream of groups in the order in which generators complete them, in the time of this machine.
#
# It takes the place of `rlhf.training.stream.Stream` with `schedule.order=completed`. `Rules` decide which
# groups start, which are trained and which are given up; the generator samples single responses, in any
# order.
#
#     new weights are loaded, a response has ended ──▶  start responses in free slots
#     all responses of a group have ended          ──▶  scores, by the annotator if there is one
#     a group has scores                           ──▶  it is ready
#     the trainer asks for a batch                 ──▶  the rules choose from the groups that are ready
#
# Answers of the generator arrive in threads of the generator. They are put into a queue; whoever holds the
# lock works on it. So rules and groups are changed by one thread at a time. Prompts are drawn by the
# trainer's thread, enough for all groups that may start until it asks again.
#
# A checkpoint has the responses that have ended. Those that run start again when the run resumes.


_LOOK_S = 0.5  # between two looks whether the generator has failed


class CompletedStream(RuledStream):
    """A stream of groups in the order of their completion.

    Args:
        context: what the stream is built from; the generator can sample single responses.
    """

    def __init__(self, context: stream.StreamContext) -> None:
        super().__init__(context)
        self.changed = Condition()
        self.own: dict[int, list[_CompletedResponse]] = {}  # responses of the groups that have started
        self.complete: dict[int, Rollouts] = {}  # groups [1] that are ready, perhaps with scores
        self.ended: SimpleQueue[tuple[_CompletedResponse | Group, Future[Rollouts]]] = SimpleQueue()
        self.running = 0  # responses in slots
        self.usage = Usage()
        self.began = time.monotonic() - context.state.wall_s
        self.passed = self.now  # until when `usage` has counted
        self.trains = False  # whether the trainer works on a batch
        self.works = False  # whether `_work` runs
        self.failure: Exception | None = None
        context.generator.when_loaded(self._wake)
        if context.saved is not None:
            self._load(context.saved)

    @property
    def now(self) -> float:
        """The seconds since the start of the run."""
        return time.monotonic() - self.began

    def next_batch(self) -> Rollouts:
        """Return the groups that the rules choose, as soon as there are enough."""
        recorder, asked = self.context.recorder, self.now
        with recorder.timer("wait"), self.context.phases("waiting for rollouts"), self.changed:
            while len(self.next) < self.rules.room() + self.rules.batch:  # until the next batch
                self.draw(self.next)
            self._count()
            self.trains = False
            self._work()
            while (taken := self._take()) is None:
                if self.failure is not None:
                    raise self.failure
                self.changed.wait(_LOOK_S)
                self._work()
            self._count()
            groups = [self.own.pop(group.number) for group in taken]
            recorder.add(self.figures(groups, self.now, self.context.generator.slots, self.usage))
            self.usage, self.trains = Usage(), True
            made = [self.complete.pop(group.number) for group in taken]
            seconds = max(each.generate_s for each in made)
            rollouts = stream.joined(made, self.context.pad_id, self.rules.version, seconds)
            self.trained(groups, 0.0, taken=self.now, waited=self.now - asked)
        return rollouts

    # -- with the lock -----------------------------------------------------------------------------

    def _work(self) -> None:
        """Note what has happened, and start responses in free slots."""
        if self.works:  # an answer came at once
            return
        self.works, generator = True, self.context.generator
        try:
            while True:
                self._count()
                while self.rules.version < self.context.state.update:
                    for group in self.rules.loaded():
                        self._discard(group)
                while not self.ended.empty():
                    self._take_answer(*self.ended.get())
                starts = self.rules.startable(
                    generator.slots - self.running if generator.oldest == self.rules.version else 0,
                    self.context.schedule.unit is Unit.group,
                )
                for number, sample in starts:
                    if number == self.rules.started:
                        if not (number in self.known or self.discards or self.next):
                            break  # only the trainer's thread draws prompts
                        self.own[self.rules.start().number] = []
                        self.prompt_of(number)
                    self._start(self.rules.running[number], sample)
                if self.ended.empty():
                    return
        except Exception as error:  # in a thread of the generator, nobody else would see it
            self.failure = self.failure or error
        finally:
            self.works = False

    def _count(self) -> None:
        """Count the time since the last call."""
        now, usage = self.now, self.usage
        passed, self.passed = now - self.passed, now
        usage.span += passed
        usage.busy += passed * self.running
        usage.queue += passed * len(self.rules.ready)
        usage.trained += passed * self.trains

    def _start(self, group: Group, sample: int) -> None:
        """Let the generator sample a response; its random numbers are those of whole requests."""
        request = group.number // self.rules.batch
        asked = replace(self.sampling, samples=1, request=request, begun=[Begun(request, sample, [], [])])
        response = _CompletedResponse(group, sample, self.now)
        self.own[group.number].append(response)
        group.begun += 1
        self.running += 1
        response.future = self.context.generator.submit(self.known[group.number], asked)
        response.future.add_done_callback(partial(self._note, response))

    def _note(self, what: _CompletedResponse | Group, answer: Future[Rollouts]) -> None:
        """Note an answer of the generator, in any thread."""
        self.ended.put((what, answer))
        self._wake()

    def _wake(self) -> None:
        """Work on what the generator has noted, in any thread."""
        with self.changed:
            self._work()
            self.changed.notify_all()

    def _take_answer(self, what: _CompletedResponse | Group, answer: Future[Rollouts]) -> None:
        if isinstance(what, Group):
            if what.number in self.own:  # else it was given up
                self.complete[what.number] = stream.with_token_versions(answer.result())
                self.rules.complete(what)
            return
        self.running -= 1
        rollouts = stream.with_token_versions(answer.result())
        if what.group.number not in self.own:  # it was given up
            return
        what.end, what.rollouts = self.now, rollouts
        what.cut &= not bool(rollouts.ended)
        what.group.left -= 1
        if what.group.left == 0:
            self._score(what.group)

    def _score(self, group: Group) -> None:
        """Let the annotator, if there is one, score a group whose responses have ended."""
        own = sorted(self.own[group.number], key=lambda each: each.sample)
        rollouts = grouped([each.rollouts for each in own if each.rollouts is not None])
        self.context.generator.resume(rollouts).add_done_callback(partial(self._note, group))

    def _take(self) -> list[Group] | None:
        """Return the groups that the idle trainer gets, if the rules allow it."""
        for group in self.rules.expired():
            self._discard(group)
        for group in self.rules.to_cut():
            self._cut(group)
        taken = self.rules.take()
        self._work()  # what was discarded or taken makes room
        return taken

    def _cut(self, group: Group) -> None:
        """End the running responses of a group with the tokens that they have."""
        running = [each for each in self.own[group.number] if each.end == inf and not each.cut]
        self.usage.cut += bool(running)
        for each in running:
            each.cut = True
            if each.future is not None:
                self.context.generator.cut(each.future)

    def _discard(self, group: Group) -> None:
        """Forget a group that the rules gave up."""
        self.usage.dropped += 1
        own = self.own.pop(group.number)
        self.complete.pop(group.number, None)
        for each in own:
            if each.end == inf and each.future is not None:
                self.context.generator.cut(each.future)
                each.end = self.now
            self.usage.wasted += each.end - each.start
        self.discarded(own)

    # -- checkpoints -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the groups and the responses that have ended, for `torch.load(weights_only=True)`."""
        with self.changed:
            self._work()
            return {
                **super().state_dict(),
                "rules": self.rules.state_dict(),
                "responses": [
                    [number, each.sample, each.start, each.end, each.cut, each.rollouts.as_dict()]
                    for number, own in self.own.items()
                    for each in own
                    if each.rollouts is not None
                ],
                "complete": {number: group.as_dict() for number, group in self.complete.items()},
            }

    def _load(self, saved: dict[str, Any]) -> None:
        self.load_state_dict(saved)
        groups = self.rules.load_state_dict(saved["rules"])
        self.own = {number: [] for number in groups}
        for number, sample, start, end, cut, rollouts in saved["responses"]:
            response = _CompletedResponse(
                groups[number], sample, start, None, end, cut, stream.unpack(rollouts)
            )
            self.own[number].append(response)
            groups[number].begun += 1
        self.complete = {number: stream.unpack(group) for number, group in saved["complete"].items()}
        with self.changed:
            for number, group in self.rules.running.items():
                ended = {each.sample for each in self.own[number]}
                group.left = self.rules.samples - len(ended)
                if not ended:
                    group.version = self.rules.version
                for sample in {*range(self.rules.samples)} - ended:
                    self._start(group, sample)
                if not group.left:
                    self._score(group)


# The stream of rollouts in the order of virtual time; it takes the place of `rlhf.training.stream.Stream`.
#
# The clock decides which weights sample which tokens and which groups the trainer gets. This module gives the
# clock prompts and a sampler, makes batches of the trained groups, and keeps the state for checkpoints.


_Group = Sequence[clock.Sequence]  # the sequences of a group that have started
_PADDING = -2  # in place of a version


class VirtualStream(RuledStream):
    """A stream of rollouts in virtual time.

    Args:
        config: virtual seconds.
        context: what the stream is built from.
    """

    def __init__(self, config: VirtualConfig, context: stream.StreamContext) -> None:
        super().__init__(context)
        schedule = context.schedule
        self.clock = Clock(
            self.rules,
            config,
            self,
            length=self.sampling.response_length,
            seed=context.seed,
            in_flight=schedule.in_flight,
            whole=schedule.unit is Unit.group,
        )
        self.scored: dict[int, Batch] = {}  # groups [1] that have ended, with `schedule.refill`
        self.spare: deque[Prompts] = deque()  # prompts [1] that were drawn to replace others
        self.generate_s = 0.0  # seconds of sampling since the last batch
        if context.saved is not None:
            self._load(context.saved)

    @property
    def resumable(self) -> bool:
        """Whether `state_dict` can be called: not while the clock runs on to a load."""
        return self.taken > self.rules.version or self.unused

    def next_batch(self) -> Rollouts:
        """Run the clock until the next load, and return the batch of its update."""
        recorder, made = self.context.recorder, self.clock
        with recorder.timer("wait"), self.context.phases("waiting for rollouts"):
            if self.taken > self.rules.version:  # the loop has loaded the weights of the last update
                made.loaded()
            soon = self.rules.room() + self.rules.batch * self.rules.drops - len(self.discards)
            while len(self.next) < soon:  # the groups that may start until the load
                self.draw(self.next)
            groups = made.next_batch()
        recorder.add(self.figures(groups, made.now, made.slots, made.usage))
        if self.refill is None:
            rollouts = replace(self._rollouts(groups), generate_s=self.generate_s)
        else:
            scored = [self.scored[own[0].group.number] for own in groups]
            rollouts = batch = stream.joined(scored, self.context.pad_id, self.rules.version, self.generate_s)
            recorder.add(self.refill.figures(batch.scores, self.rules.refilled - self.rules.before))
        self.generate_s = 0.0
        taken = made.now - made.costs.sync_s - made.update_s
        self.trained(groups, made.costs.score_s, taken=taken, loaded=made.now)
        return rollouts

    # -- what the clock asks -----------------------------------------------------------------------

    def begin(self, starts: Sequence[Start], most: Sequence[int]) -> list[Piece]:
        """Return the first tokens of sequences, at most `most` of each.

        Whole requests are sampled as `Stream` samples them; other sequences are sampled in one call.
        """
        size, count = self.rules.batch, self.rules.batch * self.rules.samples
        if len(starts) % count or starts[0] != (starts[0].group // size * size, 0):
            count = len(starts)
        found: list[Piece] = []
        for first in range(0, len(starts), count):
            some = slice(first, first + count)
            found += self._sampled(starts[some], most[some])
        return found

    def go_on(self, sequences: _Group, most: Sequence[int]) -> list[Piece]:
        """Return the next tokens of sequences, at most `most` of each.

        Keys and values of earlier tokens are computed again, so a token has the log-prob that the present
        weights give it after all tokens before it.
        """
        return self._sampled([each.key for each in sequences], most, sequences)

    def prompt(self, group: int) -> tuple[int, int]:
        """Return the row of the prompt of a group in the data, and its number of tokens."""
        prompt = self.prompt_of(group)
        return int(prompt.index), int(prompt.prompt_mask.sum())

    def signal(self, group: _Group) -> bool:
        """Return whether the scores of a group differ, given its ended sequences."""
        assert self.refill is not None
        batch, signal = self.refill.score(self._rollouts([group]))
        self.scored[group[0].group.number] = stream.with_token_versions(batch)
        return bool(signal)

    def replaced(self, group: _Group, by: int) -> None:
        """Forget a group without signal, and draw a prompt for the group that starts in its place."""
        self.forget(group, "replaced")
        self.known[by] = self.drawn(self.spare)

    # -- prompts and samples -----------------------------------------------------------------------

    def _sampled(self, keys: Sequence[Start], most: Sequence[int], before: _Group = ()) -> list[Piece]:
        """Return the next tokens of sequences, sampled in one call; `before`: those that have tokens.

        The uniform numbers of a group are those that `Stream` would use for its prompt.
        """
        k, pad_id = self.rules.samples, self.context.pad_id
        if before or keys != [Start(group, sample) for group, _ in keys[::k] for sample in range(k)]:
            k = 1  # each sequence is a row; else each row has all samples of a prompt
        seed = derive(self.context.seed, "sample", self.sampling.purpose)
        shape = self.sampling.samples, self.sampling.response_length
        uniform = {
            group: uniforms(seed, group // self.rules.batch, self.prompt_of(group).index, *shape)[0]
            for group in dict.fromkeys(key.group for key in keys)
        }
        begun, numbers = [], []
        for (group, sample), each in zip_longest(keys, before):
            ids, sampled = (each.ids, [v != MESSAGE for v in each.versions]) if each else ([], [])
            begun.append(Begun(group // self.rules.batch, sample, ids, sampled))
            numbers.append(uniform[group][sample, len(ids) :])
        prompts = concatenated([self.prompt_of(key.group) for key in keys[::k]], pad_id)
        asked = replace(
            self.sampling,
            samples=k,
            numbers=pad_sequence(numbers, batch_first=True).unflatten(0, (-1, k)),
            most=torch.tensor(most).view(-1, k),
            begun=begun,
        )
        found = self.context.generator.submit(Prompts(**prompts), asked).result()
        self.generate_s += found.generate_s
        assert found.behaviour_logprobs is not None
        fields = (found.response_ids, found.behaviour_logprobs, found.real.sum(-1), found.ended)
        pieces = [
            Piece(ids[:count], logprobs[:count], ended)
            for ids, logprobs, count, ended in zip(*(x.flatten(0, 1).tolist() for x in fields), strict=True)
        ]
        if found.episode is None:
            return pieces
        assert found.rewards is not None
        tables = (found.response_mask, found.rewards, torch.stack([*found.episode.values()], -1))
        rows = zip(pieces, *(x.flatten(0, 1).tolist() for x in tables), strict=True)
        return [
            piece._replace(
                stopped=piece.ended or any(figures[name] for name in LIMITS),
                sampled=sampled[: len(piece.ids)],
                rewards=rewards[: len(piece.ids)],
                figures=figures,
            )
            for piece, sampled, rewards, values in rows
            for figures in [dict(zip(found.episode, values, strict=True))]
        ]

    def forget(self, own: Sequence[_Response], fate: str, **times: float) -> Prompts:
        """Note the line of a group for groups.jsonl, forget the group, and return its prompt [1]."""
        self.scored.pop(own[0].group.number, None)
        return super().forget(own, fate, **times)

    def _rollouts(self, groups: Sequence[_Group]) -> Rollouts:
        """Return groups whose sequences have ended as rollouts."""

        def padded(name: str, fill: float, dtype: torch.dtype | None = None) -> Tensor:
            """Return one value per token of each sequence, [N, K, T]."""
            length = self.sampling.response_length
            rows = [[getattr(each, name) for each in own] for own in groups]
            full = [[row + [fill] * (length - len(row)) for row in own] for own in rows]
            return torch.tensor(full, dtype=dtype)

        if cut := [each for own in groups for each in own if each.cut and each.figures]:
            pieces = self._sampled([each.key for each in cut], [0] * len(cut), cut)
            for each, piece in zip(cut, pieces, strict=True):  # figures without the turns that were lost
                each.figures = {**piece.figures, "cut": 1.0}
        versions = padded("versions", _PADDING)
        mask = versions >= 0
        seen = versions[mask].unique()
        episodes: dict[str, Any] = {}
        if groups[0][0].figures:
            names = dict.fromkeys(name for own in groups for each in own for name in each.figures)
            episodes = {
                "environment_mask": versions == MESSAGE,
                "rewards": padded("rewards", 0.0, torch.float64),
                "episode": {
                    name: torch.tensor([[each.figures.get(name, 0.0) for each in own] for own in groups])
                    for name in names
                },
            }
        return Rollouts(
            **episodes,
            **concatenated([self.known[own[0].group.number] for own in groups], self.context.pad_id),
            response_ids=padded("ids", self.context.pad_id),
            response_mask=mask,
            ended=torch.tensor([[each.ended for each in own] for own in groups]),
            behaviour_logprobs=padded("logprobs", 0.0),
            version=int(seen.min()),
            trainer_version=self.rules.version,
            token_versions=versions * mask if len(seen) > 1 else None,
        )

    # -- checkpoints -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the load of an update, for `torch.load(weights_only=True)`."""
        return {
            **super().state_dict(),
            "clock": self.clock.state_dict(),
            "spare": [prompt.as_dict() for prompt in self.spare],
            "scored": {group: batch.as_dict() for group, batch in self.scored.items()},
        }

    def _load(self, saved: dict[str, Any]) -> None:
        self.clock.load_state_dict(saved["clock"])
        self.load_state_dict(saved)
        self.scored = {group: Batch(**batch) for group, batch in saved["scored"].items()}
        self.spare = deque(Prompts(**prompt) for prompt in saved["spare"])


# The streams of rollouts in the time of this machine.


def build(config: ClockConfig, context: stream.StreamContext) -> stream.RolloutStream:
    """Return the stream of a run."""
    if context.schedule.order is Order.completed:
        return CompletedStream(context)
    return stream.Stream(context) if context.refill is None else stream.RefilledStream(context)
