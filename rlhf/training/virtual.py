"""The stream of rollouts in the order of virtual time; it takes the place of `rlhf.training.stream.Stream`.

The clock decides which weights sample which tokens and which groups the trainer gets. This module gives the
clock prompts and a sampler, makes batches of the trained groups, and keeps the state for checkpoints.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from statistics import mean
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlhf.config.schedule import Dropped, Unit
from rlhf.core.batch import Batch, Prompts, Rollouts, concatenated
from rlhf.core.encoding import pad_prompts
from rlhf.core.metrics import How, Stat
from rlhf.core.phases import Phases
from rlhf.training import sequences
from rlhf.training.clock import Clock
from rlhf.training.sequences import Piece, Start
from rlhf.training.staleness import Rules
from rlhf.training.stream import unpack

if TYPE_CHECKING:
    from rlhf.config.clock import VirtualConfig
    from rlhf.core.batch import Sampling
    from rlhf.core.metrics import Metrics
    from rlhf.generators.generator import PartSampler
    from rlhf.training.recorder import Recorder
    from rlhf.training.refill import Refill
    from rlhf.training.stream import StreamContext


def build(config: VirtualConfig, context: StreamContext) -> VirtualStream:
    """Return the stream in virtual time, for all remaining updates."""
    schedule = context.schedule
    rules = Rules(
        order=schedule.order,
        batch=schedule.prompts_per_update,
        samples=context.sampling.samples,
        max_lag=schedule.max_lag,
        max_age=schedule.max_age,
        stale=schedule.stale,
        total=context.updates * schedule.prompts_per_update,
        refill=context.refill.most if context.refill else 0,
    )
    stream = VirtualStream(
        context.generator.parts(),
        context.prompts,
        context.sampling,
        rules,
        config,
        context.recorder,
        updates=context.updates,
        seed=context.seed,
        in_flight=schedule.in_flight,
        whole=schedule.unit is Unit.group,
        again=schedule.dropped is Dropped.again,
        refill=context.refill,
        phases=context.phases,
    )
    if context.saved is not None:
        stream.load_state_dict(context.saved)
    return stream


class VirtualStream:
    """An iterator over the rollouts of the updates of a run, in virtual time.

    Args:
        parts: samples parts of responses.
        prompts: endless batches of B prompts.
        sampling: sampling settings; `sampling.samples` is K.
        rules: which groups start, and which are trained.
        costs: virtual seconds.
        recorder: measures, under the name `wait`, the time of sampling, and gets the figures of the clock.
        updates: updates of the whole run.
        seed: the seed of the run.
        in_flight: whether running responses continue with new weights.
        whole: whether the samples of a group start together.
        again: whether the prompt of a discarded group starts again before new prompts.
        refill: which groups are replaced; None: none.
        phases: the phases of the run, for its progress display.
    """

    def __init__(
        self,
        parts: PartSampler,
        prompts: Iterator[Prompts],
        sampling: Sampling,
        rules: Rules,
        costs: VirtualConfig,
        recorder: Recorder,
        *,
        updates: int,
        seed: int,
        in_flight: bool,
        whole: bool,
        again: bool,
        refill: Refill | None = None,
        phases: Phases | None = None,
    ) -> None:
        self.parts, self.prompts, self.sampling = parts, prompts, sampling
        self.recorder, self.updates, self.again, self.refill = recorder, updates, again, refill
        self.phases = phases or Phases()
        self.rules = rules
        self.clock = Clock(
            rules, costs, self, length=sampling.response_length, seed=seed, in_flight=in_flight, whole=whole
        )
        self.known: dict[int, Prompts] = {}  # prompt [1] of each group that has started or is sampled ahead
        self.next: deque[Prompts] = deque()  # prompts [1] that were drawn and have no group
        self.discards: deque[Prompts] = deque()  # prompts [1] of discarded groups, which start again
        self.spare: deque[Prompts] = deque()  # prompts [1] that were drawn to replace others
        self.scored: dict[int, dict[str, Any]] = {}  # `scores` and `parts` of the groups that have ended
        self.current: Rollouts | None = None  # the rollouts yielded last
        self.taken = 0  # batches that were yielded since the first update of the run
        self.trained = False  # whether the weights of an update were loaded and the clock does not know it
        self.generate_s = 0.0  # seconds of sampling since the last batch
        self.lines: list[dict[str, Any]] = []  # lines of groups.jsonl since the last batch
        self._numbers: dict[int, Tensor] = {}  # uniform numbers [K, T] of the groups in `known`

    def __iter__(self) -> Iterator[Rollouts]:
        while self.taken < self.updates:
            with self.recorder.timer("wait"), self.phases("waiting for rollouts"):
                if self.trained:
                    self.clock.loaded()
                    self.trained = False
                if self.current is None:
                    self.current = self._next()
            self.taken += 1
            self.trained = True
            self.recorder.groups([{"update": self.taken, **line} for line in self.lines])
            yield self.current
            self.current, self.lines = None, []

    @property
    def resumable(self) -> bool:
        """Whether `state_dict` can be called: not while the clock runs on to a load."""
        return self.trained or self.current is not None

    def put_back(self) -> None:
        """Yield the rollouts yielded last again after a resume, because they were not used."""
        self.taken -= 1
        self.trained = False

    # -- what the clock asks -----------------------------------------------------------------------

    def begin(self, starts: Sequence[Start], most: Sequence[int]) -> list[Piece]:
        """Return the first tokens of sequences, at most `most` of each.

        Whole requests are sampled as `Stream` samples them; other sequences are sampled in one call.
        """
        k, size = self.sampling.samples, self.rules.batch
        if len(starts) % (k * size) == 0 and starts[0] == (starts[0].group // size * size, 0):
            return [
                piece
                for at in range(0, len(starts), k * size)
                for piece in self._sampled(starts[at : at + k * size], most[at : at + k * size])
            ]
        return self._sampled(starts, most)

    def go_on(self, sequences: Sequence[sequences.Sequence], most: Sequence[int]) -> list[Piece]:
        """Return the next tokens of sequences, at most `most` of each."""
        rows, limit = [], max(most)
        numbers = torch.zeros(len(sequences), 1, limit, dtype=torch.float64)
        for i, each in enumerate(sequences):
            prompt = self._prompt(each.group.number)
            rows.append(prompt.prompt_ids[0][prompt.prompt_mask[0]].tolist() + each.ids)
            own = self._uniforms(each.group.number)[each.sample, len(each.ids) :][:limit]
            numbers[i, 0, : len(own)] = own
        ids, mask = pad_prompts(rows, self.parts.pad_id)
        limits = torch.tensor(most)[:, None]
        return self._extended(ids, mask, numbers, limits)

    def prompt(self, group: int) -> tuple[int, int]:
        """Return the row of the prompt of a group in the data, and its number of tokens."""
        prompt = self._prompt(group)
        return int(prompt.index), int(prompt.prompt_mask.sum())

    def discarded(self, sequences: Sequence[sequences.Sequence]) -> None:
        """Forget a group that was given up; its prompt may start again."""
        prompt = self._forget(sequences, "dropped")
        if self.again:
            self.discards.append(prompt)

    def signal(self, group: Sequence[sequences.Sequence]) -> bool:
        """Return whether the scores of a group differ, given its ended sequences."""
        assert self.refill is not None
        batch, signal = self.refill.score(self._rollouts([group]))
        self.scored[group[0].group.number] = {"scores": batch.scores, "parts": batch.parts}
        return bool(signal)

    def replaced(self, group: Sequence[sequences.Sequence], by: int) -> None:
        """Forget a group without signal, and draw a prompt for the group that starts in its place."""
        self._forget(group, "replaced")
        if not self.spare:
            self.spare.extend(_singles(next(self.prompts)))
        self.known[by] = self.spare.popleft()

    # -- prompts and samples -----------------------------------------------------------------------

    def _prompt(self, group: int) -> Prompts:
        """Return the prompt [1] of a group; new groups get discarded prompts first, then new ones."""
        while group not in self.known:
            number = max(self.rules.started, max(self.known, default=-1) + 1)
            if not self.discards and not self.next:
                self.next.extend(_singles(next(self.prompts)))
            self.known[number] = (self.discards or self.next).popleft()
        return self.known[group]

    def _uniforms(self, group: int) -> Tensor:
        """Return the uniform numbers [K, T] of a group: those that `Stream` would use for its prompt."""
        if group not in self._numbers:
            request = replace(self.sampling, request=group // self.rules.batch)
            self._numbers[group] = self.parts.numbers(request, self._prompt(group).index)[0]
        return self._numbers[group]

    def _sampled(self, starts: Sequence[Start], most: Sequence[int]) -> list[Piece]:
        """Return the first tokens of sequences, sampled in one call."""
        k, limit = self.sampling.samples, max(most)
        groups = [(group, [each.sample for each in own]) for group, own in groupby(starts, lambda x: x.group)]
        if any(len(samples) < k for _, samples in groups):  # each sample is a row
            groups, k = [(group, [sample]) for group, sample in starts], 1
        prompts = concatenated([self._prompt(group) for group, _ in groups], self.parts.pad_id)
        numbers = torch.stack([self._uniforms(group)[samples, :limit] for group, samples in groups])
        limits = None if min(most) == self.sampling.response_length else torch.tensor(most).view(-1, k)
        return self._extended(prompts["prompt_ids"], prompts["prompt_mask"], numbers, limits)

    def _extended(self, ids: Tensor, mask: Tensor, numbers: Tensor, most: Tensor | None) -> list[Piece]:
        """Return K continuations of each row of tokens, row by row, and measure the time."""
        start = time.perf_counter()
        found = self.parts.extend(ids, mask, numbers, most, self.sampling.temperature)
        self.generate_s += time.perf_counter() - start
        return [Piece(*piece) for own in found for piece in own]

    def _forget(self, own: Sequence[sequences.Sequence], fate: str, **times: float) -> Prompts:
        """Add the line of a group to groups.jsonl, forget the group, and return its prompt [1]."""
        number = own[0].group.number
        prompt = self.known.pop(number)
        self._numbers.pop(number, None)
        self.scored.pop(number, None)
        versions = [version for each in own for version in each.versions]
        line = {
            "group": number,
            "row": int(prompt.index),
            "version": own[0].group.version,
            "versions": [min(versions, default=None), max(versions, default=None)],
            "lengths": [len(each.ids) for each in own],
            "starts": [each.start for each in own],
            "ends": [each.end for each in own],
        }
        self.lines.append({**line, **times, "fate": fate})
        return prompt

    def _next(self) -> Rollouts:
        """Run the clock until the next load, and return the batch of its update."""
        groups = self.clock.next_batch()
        generate_s, self.generate_s = self.generate_s, 0.0
        rollouts = replace(self._rollouts(groups), generate_s=generate_s)
        self.recorder.add(self._figures(groups))
        if self.refill is not None:
            found = [self.scored[own[0].group.number] for own in groups]
            scores = torch.cat([each["scores"] for each in found])
            parts = {
                name: torch.cat([each["parts"][name] for each in found]) for name in found[0]["parts"] or {}
            }
            self.recorder.add(self.refill.figures(scores, self.clock.usage.refilled))
            rollouts = rollouts.extend(Batch, scores=scores, parts=parts or None)
        made = self.clock
        taken = made.now - made.costs.sync_s - made.update_s
        for own in groups:
            ready = max(each.end for each in own) + made.costs.score_s
            fate = "cut" if any(each.cut for each in own) else "trained"
            self._forget(own, fate, ready=ready, taken=taken, loaded=made.now)
        return rollouts

    def _rollouts(self, groups: Sequence[Sequence[sequences.Sequence]]) -> Rollouts:
        """Return groups whose sequences have ended as rollouts."""
        prompts = [self.known[own[0].group.number] for own in groups]
        shape = (len(groups), self.sampling.samples, self.sampling.response_length)
        ids, mask = torch.full(shape, self.parts.pad_id), torch.zeros(shape, dtype=torch.bool)
        logprobs, versions = torch.zeros(shape), torch.zeros(shape, dtype=torch.int64)
        ended = torch.zeros(shape[:2], dtype=torch.bool)
        for i, own in enumerate(groups):
            for each in own:
                place = i, each.sample, slice(len(each.ids))
                ids[place], mask[place] = torch.tensor(each.ids), True
                logprobs[place], versions[place] = torch.tensor(each.logprobs), torch.tensor(each.versions)
                ended[i, each.sample] = each.ended
        seen = versions[mask].unique()
        return Rollouts(
            **concatenated(prompts, self.parts.pad_id),
            response_ids=ids,
            response_mask=mask,
            ended=ended,
            behaviour_logprobs=logprobs,
            version=int(seen.min()),
            trainer_version=self.rules.version,
            token_versions=versions if len(seen) > 1 else None,
        )

    def _figures(self, groups: Sequence[Sequence[sequences.Sequence]]) -> Metrics:
        """Return the metrics of an update, at its load."""
        made, usage = self.clock, self.clock.usage
        span = max(usage.span, 1e-9)
        busy, trainer = usage.busy / span / made.slots, usage.trained / span
        ages = sorted(self.rules.version - own[0].group.version for own in groups)
        kept = sum(each.end - each.start for own in groups for each in own) / len(groups)
        every = (kept * len(groups) + usage.wasted) / (len(groups) + usage.dropped + usage.refilled)
        return {
            "rollouts/time_s": Stat(made.now, 1.0, How.last),
            "rollouts/update_s": Stat(usage.span),
            "rollouts/generators_busy": Stat(busy),
            "rollouts/trainer_busy": Stat(trainer),
            "rollouts/lag": Stat(mean(ages)),
            "rollouts/lag_p90": Stat(float(ages[-1 - len(ages) // 10])),
            "rollouts/oldest": Stat(float(ages[-1]), 1.0, How.max),
            "rollouts/queue": Stat(usage.queue / span),
            "rollouts/length_ratio": Stat(kept / every if every else 1.0),
            "rollouts/wasted": Stat(usage.wasted / span / made.slots),
            "rollouts/dropped": Stat(float(usage.dropped), 1.0, How.sum),
            "rollouts/cut": Stat(float(usage.cut), 1.0, How.sum),
        }

    # -- checkpoints -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the load of an update, for `torch.load(weights_only=True)`."""
        return {
            "clock": self.clock.state_dict(),
            "known": {group: self.known[group].as_dict() for group in sorted(self.known)},
            "next": [prompt.as_dict() for prompt in self.next],
            "discards": [prompt.as_dict() for prompt in self.discards],
            "spare": [prompt.as_dict() for prompt in self.spare],
            "scored": self.scored,
            "current": None if self.trained or self.current is None else self.current.as_dict(),
            "lines": [] if self.trained else self.lines,
            "taken": self.taken,
            "trained": self.trained,
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Continue from a saved state."""
        self.clock.load_state_dict(saved["clock"])
        self.known = {group: Prompts(**prompt) for group, prompt in saved["known"].items()}
        self.next = deque(Prompts(**prompt) for prompt in saved["next"])
        self.discards = deque(Prompts(**prompt) for prompt in saved["discards"])
        self.spare = deque(Prompts(**prompt) for prompt in saved["spare"])
        self.scored = saved["scored"]
        self.current = None if saved["current"] is None else unpack(saved["current"])
        self.lines = saved["lines"]
        self.taken, self.trained = saved["taken"], saved["trained"]


def _singles(prompts: Prompts) -> list[Prompts]:
    """Return a batch of prompts as batches of one prompt."""
    return [prompts.select(torch.tensor([i])) for i in range(len(prompts))]
