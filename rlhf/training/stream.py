"""The stream of rollouts, in the order of requests, with a bounded number of later requests in flight."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

from rlhf.core.batch import Batch, Rollouts
from rlhf.core.phases import Phases
from rlhf.generators.generator import finished

if TYPE_CHECKING:
    from rlhf.config.clock import ClockConfig
    from rlhf.config.schedule import ScheduleConfig
    from rlhf.core.batch import Prompts, Sampling
    from rlhf.core.metrics import Timer
    from rlhf.generators.generator import Generator
    from rlhf.training.recorder import Recorder


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
    saved: Any = None


def build(config: ClockConfig, context: StreamContext) -> Stream:
    """Return the stream in the time of this machine, for all remaining updates."""
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
        self.ends: dict[Future[Rollouts], float] = {}  # seconds at which requests ended
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
            end = self.ends.pop(future, self._now())
            if self.groups is not None and rollouts.behaviour_logprobs is not None:
                self.groups(self._lines(self.current, asked, end))
            yield self.current

    def _now(self) -> float:
        return time.monotonic() - self.began

    def _note_end(self, future: Future[Rollouts]) -> None:
        self.ends[future] = self._now()

    def _lines(self, rollouts: Rollouts, asked: float, end: float) -> list[dict[str, Any]]:
        """Return the lines of groups.jsonl of a batch whose request ended at `end`."""
        taken = self._now()
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
                "ready": end,
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


def unpack(packed: dict[str, Any]) -> Rollouts:
    """Return saved fields as `Rollouts`, or as `Batch` if they have scores."""
    return Batch(**packed) if "scores" in packed else Rollouts(**packed)
