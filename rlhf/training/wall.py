"""The streams of rollouts in the time of this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf.config.schedule import Order
from rlhf.training.completed import CompletedStream
from rlhf.training.stream import RefilledStream, Stream

if TYPE_CHECKING:
    from rlhf.config.clock import ClockConfig
    from rlhf.training.stream import RolloutStream, StreamContext


def build(config: ClockConfig, context: StreamContext) -> RolloutStream:
    """Return the stream of a run."""
    if context.schedule.order is Order.completed:
        return CompletedStream(context)
    return Stream(context) if context.refill is None else RefilledStream(context)
