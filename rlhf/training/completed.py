"""The stream of groups in the order in which generators complete them, in the time of this machine.

It takes the place of `rlhf.training.stream.Stream` with `schedule.order=completed`. `Rules` decide which
groups start, which are trained and which are given up; the generator samples single responses, in any order.

    new weights are loaded, a response has ended ──▶  start responses in free slots
    all responses of a group have ended          ──▶  scores, by the annotator if there is one
    a group has scores                           ──▶  it is ready
    the trainer asks for a batch                 ──▶  the rules choose from the groups that are ready

Answers of the generator arrive in threads of the generator. They are put into a queue; whoever holds the lock
works on it. So rules and groups are changed by one thread at a time. Prompts are drawn by the trainer's
thread, enough for all groups that may start until it asks again.

A checkpoint has the responses that have ended. Those that run start again when the run resumes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from queue import SimpleQueue
from threading import Condition
from typing import TYPE_CHECKING, Any

from rlhf.config.schedule import Unit
from rlhf.core.batch import Batch, Begun, Rollouts, concatenated, grouped
from rlhf.training.clock import Usage
from rlhf.training.replay import with_token_versions
from rlhf.training.ruled import RuledStream
from rlhf.training.stream import joined, unpack

if TYPE_CHECKING:
    from rlhf.training.staleness import Group
    from rlhf.training.stream import StreamContext

_LOOK_S = 0.5  # between two looks whether the generator has failed


@dataclass(slots=True, eq=False)
class Response:
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


class CompletedStream(RuledStream):
    """A stream of groups in the order of their completion.

    Args:
        context: what the stream is built from; the generator can sample single responses.
    """

    def __init__(self, context: StreamContext) -> None:
        super().__init__(context)
        self.changed = Condition()
        self.own: dict[int, list[Response]] = {}  # responses of the groups that have started
        self.complete: dict[int, Rollouts] = {}  # groups [1] that are ready, perhaps with scores
        self.ended: SimpleQueue[tuple[Response | Group, Future[Rollouts]]] = SimpleQueue()
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
            rollouts = self._rollouts([self.complete.pop(group.number) for group in taken])
            for own in groups:
                fate = "cut" if any(each.cut for each in own) else "trained"
                ready = max(each.end for each in own)
                self.forget(own, fate, ready=ready, taken=self.now, waited=self.now - asked)
            self.lines, self.noted = self.noted, []
        return rollouts

    def _rollouts(self, groups: list[Rollouts]) -> Rollouts:
        """Return the groups of a batch as one batch; with scores if all have them."""
        seconds = max(each.generate_s for each in groups)
        if all(isinstance(each, Batch) for each in groups):
            return joined(groups, self.context.pad_id, self.rules.version, seconds)  # type: ignore[arg-type]
        fields = Rollouts.__dataclass_fields__
        plain = [Rollouts(**{name: getattr(each, name) for name in fields}) for each in groups]
        rollouts = Rollouts(
            **concatenated(plain, self.context.pad_id),
            trainer_version=self.rules.version,
            generate_s=seconds,
        )
        return rollouts if len(rollouts.versions()) > 1 else replace(rollouts, token_versions=None)

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
                    lambda number: len(self.own[number]),
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
        response = Response(group, sample, self.now)
        self.own[group.number].append(response)
        self.running += 1
        response.future = self.context.generator.submit(self.known[group.number], asked)
        response.future.add_done_callback(partial(self._note, response))

    def _note(self, what: Response | Group, answer: Future[Rollouts]) -> None:
        """Note an answer of the generator, in any thread."""
        self.ended.put((what, answer))
        self._wake()

    def _wake(self) -> None:
        """Work on what the generator has noted, in any thread."""
        with self.changed:
            self._work()
            self.changed.notify_all()

    def _take_answer(self, what: Response | Group, answer: Future[Rollouts]) -> None:
        if isinstance(what, Response):
            self._end(what, answer)
        elif what.number in self.own:  # else it was given up
            self.complete[what.number] = with_token_versions(answer.result())
            self.rules.complete(what)

    def _end(self, response: Response, answer: Future[Rollouts]) -> None:
        """Take a response that has ended."""
        self.running -= 1
        rollouts = with_token_versions(answer.result())
        if response.group.number not in self.own:  # it was given up
            return
        response.end, response.rollouts = self.now, rollouts
        response.cut &= not bool(rollouts.ended)
        response.group.left -= 1
        if response.group.left == 0:
            self._score(response.group)

    def _score(self, group: Group) -> None:
        """Let the annotator, if there is one, score a group whose responses have ended."""
        own = sorted(self.own[group.number], key=lambda each: each.sample)
        rollouts = grouped([each.rollouts for each in own if each.rollouts is not None])
        self.context.generator.resume(rollouts).add_done_callback(partial(self._note, group))

    def _take(self) -> list[Group] | None:
        """Return the groups that the idle trainer gets, if the rules allow it."""
        for group in self.rules.expired():
            self._discard(group)
        for group in self.rules.to_cut(lambda number: len(self.own[number])):
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
            response = Response(groups[number], sample, start, None, end, cut, unpack(rollouts))
            self.own[number].append(response)
        self.complete = {number: unpack(group) for number, group in saved["complete"].items()}
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
