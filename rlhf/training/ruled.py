"""What the streams have in common in which `Rules` decide which groups start and which are trained."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from statistics import mean
from typing import TYPE_CHECKING, Any, Protocol

import torch

from rlhf.config.schedule import Dropped
from rlhf.core.batch import Prompts
from rlhf.core.metrics import How, Stat
from rlhf.training.staleness import Rules
from rlhf.training.stream import RolloutStream, unpack

if TYPE_CHECKING:
    from rlhf.core.metrics import Metrics
    from rlhf.training.clock import Usage
    from rlhf.training.staleness import Group
    from rlhf.training.stream import StreamContext


class Response(Protocol):
    """A response that has started."""

    group: Group
    start: float  # seconds
    end: float  # infinity while it runs
    cut: bool  # whether it ended before its end token because its group was due

    @property
    def sampled(self) -> int:
        """The number of tokens that the model sampled."""

    @property
    def seen(self) -> Iterable[int]:
        """The versions of the weights that sampled its tokens."""


class RuledStream(RolloutStream):
    """A stream that draws prompts for groups and notes what becomes of the groups.

    Args:
        context: what the stream is built from.
    """

    def __init__(self, context: StreamContext) -> None:
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

    def forget(self, own: Sequence[Response], fate: str, **times: float) -> Prompts:
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

    def discarded(self, sequences: Sequence[Response]) -> None:
        """Forget a group that was given up; its prompt may start again."""
        prompt = self.forget(sequences, "dropped")
        if self.context.schedule.dropped is Dropped.again:
            self.discards.append(prompt)

    def figures(self, groups: Sequence[Sequence[Response]], now: float, slots: int, usage: Usage) -> Metrics:
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
        self.current = unpack(saved["current"]) if self.unused else None
        self.rules.trains = self.unused
        self.known = {group: Prompts(**prompt) for group, prompt in saved["known"].items()}
        self.next, self.discards = (deque(Prompts(**prompt) for prompt in queue) for queue in saved["queues"])
