"""The stream of rollouts, in the order of requests, with a bounded number of later requests in flight.

In virtual time, `rlhf.training.staleness` decides which groups are trained next (`rlhf.training.virtual`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

import torch

from rlhf.core.batch import Batch, Prompts, Rollouts, concatenated
from rlhf.core.phases import Phases
from rlhf.generators.generator import finished
from rlhf.training.replay import with_token_versions

if TYPE_CHECKING:
    from rlhf.config.clock import ClockConfig
    from rlhf.config.schedule import ScheduleConfig
    from rlhf.core.batch import Sampling
    from rlhf.core.metrics import Timer
    from rlhf.generators.generator import Generator
    from rlhf.training.recorder import Recorder
    from rlhf.training.refill import Refill


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamContext:
    """What a stream is built from, besides its config section `clock`.

    Args:
        generator: the generator of the run.
        prompts: endless batches of N prompts.
        sampling: sampling settings of the run.
        schedule: the config section `schedule`.
        update: updates that are finished.
        updates: updates of the whole run.
        trained_s: seconds of the updates that are finished.
        seed: the seed of the run.
        recorder: measures how long the loop waits, and gets the metrics of the stream.
        phases: the phases of the run, for its progress display.
        refill: which groups are replaced; None: none.
        saved: the state of the stream in a checkpoint; None: the run begins.
    """

    generator: Generator
    prompts: Iterator[Prompts]
    sampling: Sampling
    schedule: ScheduleConfig
    update: int
    updates: int
    trained_s: float
    seed: int
    recorder: Recorder
    phases: Phases
    refill: Refill | None = None
    saved: Any = None


def build(config: ClockConfig, context: StreamContext) -> Stream | RefilledStream:
    """Return the stream in the time of this machine, for all remaining updates."""
    if context.refill is not None:
        return RefilledStream(context, context.refill)
    in_flight = [unpack(packed) for packed in context.saved or []]
    first = context.update + len(in_flight)
    return Stream(
        context.generator,
        islice(context.prompts, context.updates - first),
        replace(context.sampling, request=first),
        context.schedule.max_lag,
        context.recorder.timer,
        in_flight,
        context.phases,
        context.recorder.groups,
        context.trained_s,
    )


class RolloutStream(Protocol):
    """A stream of rollouts: an iterator that a checkpoint can save."""

    def __iter__(self) -> Iterator[Rollouts]:
        """Yield the rollouts of each update."""

    @property
    def taken(self) -> int:
        """Return the number of batches that were yielded since the first update of the run."""

    @property
    def resumable(self) -> bool:
        """Return whether a checkpoint is possible now, for example after a scorer was interrupted."""

    def put_back(self) -> None:
        """Yield the rollouts yielded last again, because they were not used."""

    def state_dict(self) -> Any:
        """Return what a checkpoint saves, for `torch.load(weights_only=True)`."""


class Stream:
    """An iterator over finished rollouts, in the order of their prompts.

    While a batch is trained on, at most `max_lag` later requests are in flight. The generator processes
    requests and weights first in, first out, and gets new weights after each batch. So batch t (from 0) is
    sampled by version max(0, t - max_lag). max_lag=0 is synchronous, max_lag=1 is the asynchronous RLHF of
    Noukhovitch et al. (arXiv 2410.18252). With `schedule.update=in_flight`, a newer version may sample some
    tokens of a batch. `trainer_version` of batch t is t.

    Args:
        generator: the generator that processes the requests.
        prompts: prompts of the batches that have not been requested, in order; the stream ends after them.
        sampling: sampling settings of all requests; `sampling.request` is the number of the first request.
        max_lag: maximum number of later requests in flight while a batch is trained on.
        timer: stopwatch that measures, under the name `wait`, how long the caller waits for rollouts.
        in_flight: rollouts of a checkpoint that were not trained on; they are yielded first.
        phases: the phases of the run, for its progress display.
        groups: gets the lines of groups.jsonl of each batch.
        since: seconds of the run before this stream.
    """

    resumable = True

    def __init__(
        self,
        generator: Generator,
        prompts: Iterable[Prompts],
        sampling: Sampling,
        max_lag: int,
        timer: Timer,
        in_flight: Iterable[Rollouts] = (),
        phases: Phases | None = None,
        groups: Callable[[list[dict[str, Any]]], None] | None = None,
        since: float = 0.0,
    ) -> None:
        self.groups, self.began = groups, time.monotonic() - since
        # Seconds at which requests ended. Weak, because a request may be noted after its result was taken.
        self.ends: WeakKeyDictionary[Future[Rollouts], float] = WeakKeyDictionary()
        self.generator = generator
        self.prompts = iter(prompts)
        self.sampling = sampling
        self.max_lag = max_lag
        self.timer = timer
        self.phases = phases or Phases()
        self.pending: deque[Future[Rollouts]] = deque(generator.resume(rollouts) for rollouts in in_flight)
        self.current: Rollouts | None = None  # the rollouts yielded last

    def __iter__(self) -> Iterator[Rollouts]:
        while True:
            with self.timer("wait"):
                while len(self.pending) <= self.max_lag and (prompts := next(self.prompts, None)) is not None:
                    future = self.generator.submit(prompts, self.sampling)
                    future.add_done_callback(self._note_end)
                    self.pending.append(future)
                    self.sampling = replace(self.sampling, request=self.sampling.request + 1)
                if not self.pending:
                    return
                asked = self._now()
                with self.phases("waiting for rollouts"):
                    rollouts = (future := self.pending.popleft()).result()
            self.current = replace(rollouts, trainer_version=self.taken - 1)
            end = self.ends.get(future, self._now())
            if self.groups is not None and rollouts.behaviour_logprobs is not None:
                self.groups(self._lines(self.current, asked, end))
            yield self.current

    def _now(self) -> float:
        return time.monotonic() - self.began

    def _note_end(self, future: Future[Rollouts]) -> None:
        self.ends[future] = self._now()

    def _lines(self, rollouts: Rollouts, asked: float, ready: float) -> list[dict[str, Any]]:
        """Return the lines of groups.jsonl of a batch whose request ended at `ready`."""
        taken = self._now()
        end = ready - (rollouts.annotate_ahead_s if isinstance(rollouts, Batch) else 0.0)
        start = end - rollouts.generate_s
        lengths, versions = rollouts.response_mask.sum(-1).tolist(), rollouts.versions()
        samples = self.sampling.samples
        return [
            {
                "update": self.taken,
                "group": (self.taken - 1) * len(rollouts) + i,
                "row": row,
                "version": rollouts.version,
                "versions": [min(versions), max(versions)],
                "lengths": lengths[i],
                "starts": [start] * samples,
                "ends": [end] * samples,
                "ready": ready,
                "taken": taken,
                "waited": taken - asked,
                "fate": "trained",
            }
            for i, row in enumerate(rollouts.index.tolist())
        ]

    @property
    def taken(self) -> int:
        """Return the number of batches that were yielded since the first update of the run."""
        return self.sampling.request - len(self.pending)

    def put_back(self) -> None:
        """Put the rollouts yielded last in front of the requests in flight, because they were not used."""
        assert self.current is not None
        self.pending.appendleft(finished(self.current))

    def state_dict(self) -> list[dict[str, Any]]:
        """Wait for all requests in flight, and return the fields of their rollouts in order."""
        return [future.result().as_dict() for future in self.pending]


class RefilledStream:
    """An iterator over scored rollouts in which other groups replace those without signal.

    A batch has the next B groups with signal, in the order of their requests. A request is scored when the
    trainer needs its groups; then a further request, behind all others, replaces its groups without signal.
    So B (max_lag + 1) groups are requested or ready while the trainer waits, and a trained group is at most
    `max_lag` versions old. Which requests precede an update does not depend on the speed of the generator, so
    all batches are the same at every timing, and after a resume.

    Args:
        context: what the stream is built from.
        refill: which groups are replaced.
    """

    resumable = True

    def __init__(self, context: StreamContext, refill: Refill) -> None:
        self.context, self.refill = context, refill
        self.size, self.max_lag = context.schedule.prompts_per_update, context.schedule.max_lag
        saved = context.saved or {}
        self.taken: int = context.update  # batches that were yielded since the first update of the run
        self.requested: int = saved.get("requested", 0)  # requests of whole batches
        self.replaced: int = saved.get("replaced", 0)  # groups since the first update of the run
        self.before: int = saved.get("before", 0)  # those that were replaced for batches before the next one
        self.pending = deque(context.generator.resume(unpack(each)) for each in saved.get("pending", []))
        self.ready = [Batch(**each) for each in saved.get("ready", [])]  # groups, in the order of requests
        spare, current = saved.get("spare"), saved.get("current")
        self.spare = Prompts(**spare) if spare else None  # prompts that were drawn to replace others
        self.current = Batch(**current) if current else None  # the batch yielded last, or the next one
        self.unused = self.current is not None  # whether it was put back

    def __iter__(self) -> Iterator[Rollouts]:
        while self.taken < self.context.updates:
            if not self.unused:
                self.current = self._next()
            self.taken, self.unused = self.taken + 1, False
            assert self.current is not None
            yield self.current

    def put_back(self) -> None:
        """Yield the rollouts yielded last again, because they were not used."""
        self.taken, self.unused = self.taken - 1, True

    def state_dict(self) -> dict[str, Any]:
        """Wait for all requests in flight, and return what continues the stream."""
        return {
            "requested": self.requested,
            "replaced": self.replaced,
            "before": self.before,
            "pending": [future.result().as_dict() for future in self.pending],
            "ready": [group.as_dict() for group in self.ready],
            "spare": self.spare.as_dict() if self.spare else None,
            "current": self.current.as_dict() if self.current and self.unused else None,
        }

    def _next(self) -> Batch:
        """Return the next batch."""
        context, generate_s, ahead_s = self.context, 0.0, 0.0
        while self.requested < min(context.updates, self.taken + self.max_lag + 1):
            self._submit(next(context.prompts), self.requested)
            self.requested += 1
        while len(self.ready) < self.size:
            with context.recorder.timer("wait"), context.phases("waiting for rollouts"):
                rollouts = self.pending[0].result()
            with context.recorder.timer("score"), context.phases("scoring"):
                batch, signal = self.refill.score(rollouts)
            self.pending.popleft()  # only now: a signal may interrupt the scorer
            lost = (~signal).nonzero()[:, 0].tolist()[: self.before + self.refill.most - self.replaced]
            self._replace(len(lost))
            kept = [i for i in range(len(batch)) if i not in lost]
            self.ready += [with_token_versions(batch.select(torch.tensor([i]))) for i in kept]
            generate_s += batch.generate_s
            ahead_s += batch.annotate_ahead_s
        groups, self.ready = self.ready[: self.size], self.ready[self.size :]
        batch = Batch(
            **concatenated(groups, self.refill.pad_id), generate_s=generate_s, annotate_ahead_s=ahead_s
        )
        context.recorder.add(self.refill.figures(batch.scores, self.replaced - self.before))
        self.before = self.replaced
        one = len(batch.versions()) == 1
        return replace(
            batch, trainer_version=self.taken, token_versions=None if one else batch.token_versions
        )

    def _replace(self, groups: int) -> None:
        """Request other groups in place of groups without signal.

        Their prompts come from batches that are drawn for this purpose. The requests for prompts of batch i
        have the number -1 - i, so no prompt gets the random numbers of another request.
        """
        while groups:
            spare = self.spare or next(self.context.prompts)
            rows = torch.arange(len(spare))
            self._submit(spare.select(rows[:groups]), -1 - self.replaced // self.size)
            self.spare = spare.select(rows[groups:]) if groups < len(spare) else None
            self.replaced += min(groups, len(spare))
            groups -= min(groups, len(spare))

    def _submit(self, prompts: Prompts, request: int) -> None:
        sampling = replace(self.context.sampling, request=request)
        with self.context.recorder.timer("wait"):  # a generator in this process samples now
            self.pending.append(self.context.generator.submit(prompts, sampling))


def unpack(packed: dict[str, Any]) -> Rollouts:
    """Return saved fields as `Rollouts`, or as `Batch` if they have scores."""
    return Batch(**packed) if "scores" in packed else Rollouts(**packed)
