"""The stream of rollouts in the order of requests, with refilled and replayed groups."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from rlhf.config.run import ScheduleConfig
from rlhf.core.batch import Batch, Prompts, R, Rollouts, Sampling, concatenated
from rlhf.core.launched import derive
from rlhf.core.metrics import How, Metrics, Stat, mean
from rlhf.core.state import TrainState
from rlhf.generators.generator import Generator
from rlhf.terminal.console import Phases
from rlhf.training.recorder import Recorder

# Other prompts in place of groups without signal: dynamic sampling of DAPO (Yu et al., arXiv 2503.14476).
#
# A group has no signal if the scores of its K samples tie. A stream scores a group before the trainer gets
# it, and samples a further prompt for each group without signal, until B groups of a batch have signal or
# `Refill.most` groups were replaced. Then groups without signal are trained like the others.


@dataclass(frozen=True, slots=True, kw_only=True)
class Refill:
    """The rule which groups are replaced."""

    most: int  # groups that are replaced for a batch, at most
    scorer: Callable[[Rollouts], Batch]  # rollouts that have scores are returned unchanged
    # Gets every scored batch: for the order of prompts, which knows the solved ones, and for the metrics.
    note: Callable[[Batch], object]

    def score(self, rollouts: Rollouts) -> tuple[Batch, Tensor]:
        """Return the rollouts with scores, and whether each group has signal, [N] bool."""
        batch = self.scorer(rollouts)
        self.note(batch)
        return replace(batch, figures=None), _signal(batch.scores)

    def figures(self, scores: Tensor, replaced: int) -> Metrics:
        """Return the metrics of an update.

        Args:
            scores: scores [N, K] of the batch.
            replaced: groups that were replaced since the last update.
        """
        left = float((~_signal(scores)).sum())
        return {
            "rollouts/refilled": Stat(float(replaced), 1.0, How.sum),
            "rollouts/refilled_share": Stat(float(replaced), replaced + left),
            "rollouts/no_signal": Stat(left, 1.0, How.sum),
        }


def _signal(scores: Tensor) -> Tensor:
    return scores.amax(1) > scores.amin(1)


# The stream of rollouts, in the order of requests, with a bounded number of later requests in flight.
#
# In virtual time, `rlhf.training.clock` decides which groups are trained next (`rlhf.training.events`).


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamContext:
    """What a stream is built from, besides its config section `clock`."""

    generator: Generator
    prompts: Iterator[Prompts]  # endless batches of N prompts
    sampling: Sampling  # sampling settings of the run
    schedule: ScheduleConfig  # the config section `schedule`
    state: TrainState  # the counters of the run, which the loop changes
    seed: int  # seed of the run
    pad_id: int  # token id of padding
    recorder: Recorder  # measures how long the loop waits; gets the metrics and the lines of groups.jsonl
    phases: Phases  # the phases of the run, for its progress display
    refill: Refill | None = None  # which groups are replaced; None: none
    saved: Any = None  # the state of the stream in a checkpoint; None: the run begins


class RolloutStream(ABC):
    """An iterator over the rollouts of all remaining updates, which a checkpoint can save.

    Args:
        context: what the stream is built from.
    """

    def __init__(self, context: StreamContext) -> None:
        self.context = context
        self.taken = context.state.update  # batches that were yielded since the first update of the run
        self.current: Rollouts | None = None  # the batch yielded last, or the next one
        self.unused = False  # whether `current` was put back
        self.lines: list[dict[str, Any]] = []  # lines of groups.jsonl that `current` adds

    def __iter__(self) -> Iterator[Rollouts]:
        while self.taken < self.context.state.num_updates:
            if not self.unused:
                self.current = self.next_batch()
            self.taken, self.unused = self.taken + 1, False
            if self.lines:
                self.context.recorder.groups([{"update": self.taken, **line} for line in self.lines])
            assert self.current is not None
            yield self.current

    @property
    def resumable(self) -> bool:
        """Whether a checkpoint is possible now, for example after a scorer was interrupted."""
        return True

    @abstractmethod
    def next_batch(self) -> Rollouts:
        """Return the rollouts of the next update, and set `lines`."""

    def put_back(self) -> None:
        """Yield the rollouts yielded last again, because they were not used."""
        self.taken, self.unused = self.taken - 1, True

    @abstractmethod
    def state_dict(self) -> Any:
        """Return what a checkpoint saves, for `torch.load(weights_only=True)`."""


class Stream(RolloutStream):
    """A stream of finished rollouts, in the order of their prompts.

    While a batch is trained on, at most `max_lag` later requests are in flight. The generator processes
    requests and weights first in, first out, and gets new weights after each batch. So batch t (from 0) is
    sampled by version max(0, t - max_lag). max_lag=0 is synchronous, max_lag=1 is the asynchronous RLHF of
    Noukhovitch et al. (arXiv 2410.18252). With `schedule.update=in_flight`, a newer version may sample some
    tokens of a batch. `trainer_version` of batch t is t.
    """

    def __init__(self, context: StreamContext) -> None:
        super().__init__(context)
        self.pending = deque(context.generator.resume(unpack(each)) for each in context.saved or [])
        self.requested = self.taken + len(self.pending)  # requests of whole batches
        self.began = time.monotonic() - context.state.wall_s
        # Seconds at which requests ended. Weak, because a request may be noted after its result was taken.
        self.ends: WeakKeyDictionary[Future[Rollouts], float] = WeakKeyDictionary()

    def next_batch(self) -> Rollouts:
        """Return the rollouts of the oldest request in flight."""
        self._request_ahead()
        asked = self._now()
        rollouts = replace(self._oldest(), trainer_version=self.taken)
        self.lines = self._trained(self._lines(rollouts, self.taken * len(rollouts)), asked)
        self.pending.popleft()
        return rollouts

    def state_dict(self) -> Any:
        """Wait for all requests in flight, and return the fields of their rollouts in order."""
        unused = [self.current] if self.current is not None and self.unused else []
        return [each.as_dict() for each in (*unused, *(future.result() for future in self.pending))]

    def _request_ahead(self) -> None:
        """Request the next batch and `max_lag` later ones, as far as they have not been requested."""
        last = self.taken + self.context.schedule.max_lag
        while self.requested < min(self.context.state.num_updates, last + 1):
            self._request(next(self.context.prompts), self.requested)
            self.requested += 1

    def _request(self, prompts: Prompts, number: int) -> None:
        with self.context.recorder.timer("wait"):  # a generator in this process samples now
            future = self.context.generator.submit(prompts, replace(self.context.sampling, request=number))
        future.add_done_callback(self._note_end)
        self.pending.append(future)

    def _oldest(self) -> Rollouts:
        with self.context.recorder.timer("wait"), self.context.phases("waiting for rollouts"):
            return self.pending[0].result()

    def _now(self) -> float:
        return time.monotonic() - self.began

    def _note_end(self, future: Future[Rollouts]) -> None:
        self.ends[future] = self._now()

    def _lines(self, rollouts: Rollouts, first: int) -> list[dict[str, Any]]:
        """Return the lines of groups.jsonl of the oldest request; its groups are numbered from `first` on."""
        if rollouts.behaviour_logprobs is None:
            return []
        ready, versions = self.ends.get(self.pending[0], self._now()), rollouts.versions()
        end = ready - (rollouts.annotate_ahead_s if isinstance(rollouts, Batch) else 0.0)
        return [
            {
                "group": number,
                "row": row,
                "version": rollouts.version,
                "versions": [min(versions), max(versions)],
                "lengths": lengths,
                "starts": [end - rollouts.generate_s] * len(lengths),
                "ends": [end] * len(lengths),
                "ready": ready,
            }
            for number, (row, lengths) in enumerate(
                zip(rollouts.index.tolist(), rollouts.response_mask.sum(-1).tolist(), strict=True), first
            )
        ]

    def _trained(self, lines: list[dict[str, Any]], asked: float) -> list[dict[str, Any]]:
        """Return the lines of groups that the trainer gets now, and asked for at `asked`."""
        taken = self._now()
        return [{**line, "taken": taken, "waited": taken - asked, "fate": "trained"} for line in lines]


class RefilledStream(Stream):
    """A stream of scored rollouts in which other groups replace those without signal.

    A batch has the next B groups with signal, in the order of their requests. A request is scored when the
    trainer needs its groups; then a further request, behind all others, replaces its groups without signal.
    So B (max_lag + 1) groups are requested or ready while the trainer waits, and a trained group is at most
    `max_lag` versions old. Which requests precede an update does not depend on the speed of the generator, so
    all batches are the same at every timing, and after a resume.
    """

    def __init__(self, context: StreamContext) -> None:
        assert context.refill is not None
        saved = context.saved or {}
        super().__init__(replace(context, saved=saved.get("pending")))
        self.refill, self.size = context.refill, context.schedule.prompts_per_update
        self.requested = saved.get("requested", 0)
        self.replaced: int = saved.get("replaced", 0)  # groups since the first update of the run
        self.before: int = saved.get("before", 0)  # those that were replaced for batches before the next one
        self.ready = [Batch(**each) for each in saved.get("ready", [])]  # groups, in the order of requests
        spare, current = saved.get("spare"), saved.get("current")
        self.spare = Prompts(**spare) if spare else None  # prompts that were drawn to replace others
        self.current, self.unused = Batch(**current) if current else None, current is not None
        self.lines = saved.get("lines", [])
        self.scored: list[dict[str, Any]] = saved.get("scored", [])  # lines of replaced groups and of `ready`

    def next_batch(self) -> Batch:
        """Return the next B groups with signal; without enough, also groups that must not be replaced."""
        recorder, generate_s, ahead_s = self.context.recorder, 0.0, 0.0
        self._request_ahead()
        asked = self._now()
        while len(self.ready) < self.size:
            rollouts = self._oldest()
            with recorder.timer("score"), self.context.phases("scoring"):
                batch, signal = self.refill.score(rollouts)
            lines = self._lines(rollouts, self.taken * self.size + len(self.ready) + self.replaced)
            self.pending.popleft()  # only now: a signal may interrupt the scorer
            lost = (~signal).nonzero()[:, 0].tolist()[: self.before + self.refill.most - self.replaced]
            self._replace(len(lost))
            kept = [i for i in range(len(batch)) if i not in lost]
            self.ready += [with_token_versions(batch.select(torch.tensor([i]))) for i in kept]
            self.scored += [
                {**line, "fate": "replaced"} if i in lost else line for i, line in enumerate(lines)
            ]
            generate_s += batch.generate_s
            ahead_s += batch.annotate_ahead_s
        groups, self.ready = self.ready[: self.size], self.ready[self.size :]
        batch = joined(groups, self.context.pad_id, trainer_version=self.taken, generate_s=generate_s)
        recorder.add(self.refill.figures(batch.scores, self.replaced - self.before))
        self.before = self.replaced
        kept_lines = [line for line in self.scored if "fate" not in line]
        replaced = [line for line in self.scored if "fate" in line]
        self.lines = replaced + self._trained(kept_lines[: self.size], asked)
        self.scored = kept_lines[self.size :]
        return replace(batch, annotate_ahead_s=ahead_s)

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
            "lines": self.lines if self.unused else [],
            "scored": self.scored,
        }

    def _replace(self, groups: int) -> None:
        """Request other groups in place of groups without signal.

        Their prompts come from batches that are drawn for this purpose. The requests for prompts of batch i
        have the number -1 - i, so no prompt gets the random numbers of another request.
        """
        while groups:
            spare = self.spare or next(self.context.prompts)
            rows = torch.arange(len(spare))
            self._request(spare.select(rows[:groups]), -1 - self.replaced // self.size)
            self.spare = spare.select(rows[groups:]) if groups < len(spare) else None
            self.replaced += min(groups, len(spare))
            groups -= min(groups, len(spare))


def joined(groups: Sequence[R], pad_id: int, trainer_version: int, generate_s: float) -> R:
    """Return groups, which have token versions, as one batch; `generate_s` is the time of all of them."""
    fields = concatenated(groups, pad_id) | {"trainer_version": trainer_version, "generate_s": generate_s}
    batch = type(groups[0])(**fields)
    return batch if len(batch.versions()) > 1 else replace(batch, token_versions=None)


def unpack(packed: dict[str, Any]) -> Rollouts:
    """Return saved fields as `Rollouts`, or as `Batch` if they have scores."""
    return Batch(**packed) if "scores" in packed else Rollouts(**packed)


# A replay buffer of the last rollout batches (`schedule.replay`).
#
# Each update adds one new batch of N prompts and trains on N prompts that are drawn from the buffer. So the
# number of samples and of optimizer steps is the same with and without a buffer.


ONCE = frozenset({"ref_logprobs"})  # needs that are computed once per prompt: no trained weights are used


@dataclass(eq=False)
class Replay:
    """A buffer of the last `size` rollout batches, from which the batch of each update is drawn.

    Prompts are drawn uniformly and without replacement, with all their samples. Seed and update determine the
    draw, so all ranks draw the same prompts. In the first updates the buffer has fewer than `size` batches.

    Args:
        size: number of batches, including the new batch; 1: every update trains on the new batch.
        seed: seed of the run.
        pad_id: token id of padding.
    """

    size: int
    seed: int
    pad_id: int

    def __post_init__(self) -> None:
        self.earlier: deque[Batch] = deque(maxlen=self.size - 1)  # before the new batch, oldest first

    def __call__(self, new: Batch) -> tuple[Batch, Metrics]:
        """Add a batch to the buffer, and return the batch to train on and its metrics.

        The result has the `version` of its oldest prompt and a version for every token. Its other numbers
        (for example seconds) are those of the new batch.

        Args:
            new: the new batch, with scores and, if the objective needs them, reference log-probs.
        """
        if self.size == 1:
            return new, {}
        batches = [*self.earlier, new]
        self.earlier.append(new)
        draw = torch.Generator().manual_seed(derive(self.seed, "replay", new.trainer_version))
        drawn = torch.randperm(sum(map(len, batches)), generator=draw)[: len(new)].sort().values
        parts, first = [], 0
        for batch in batches:
            rows = drawn[(drawn >= first) & (drawn < first + len(batch))] - first
            first += len(batch)
            if len(rows):
                parts.append(with_token_versions(batch.select(rows)))
        versions = torch.tensor([part.version for part in parts for _ in range(len(part))])
        age = mean(new.trainer_version - versions)
        return replace(new, **concatenated(parts, self.pad_id)), {"replay/age": age}

    def load(self, batches: Iterable[Batch]) -> None:
        """Fill the buffer with the batches `earlier` of a checkpoint."""
        self.earlier.extend(batches)


def with_token_versions(batch: R) -> R:
    """Return the batch with `token_versions`."""
    if batch.token_versions is not None:
        return batch
    return replace(batch, token_versions=batch.version * batch.response_mask.long())
