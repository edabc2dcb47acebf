"""A step of decoding as a CUDA graph: recorded once, then launched as one piece.

One token a row is little work, and launching its hundreds of operations one by one takes the CPU ten times as
long as the GPU needs to carry them out. A graph repeats them on the same memory, so all that a step reads and
writes stays in its place: it attends to the whole of the cache that its graph may fill, behind a mask that
shows more of it with every step, and rows that have ended stay until the next graph.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf.generators.hf.decoding import LengthAsked, RoomyLayer, Step
from rlhf.models.shared_prefix import ALIGNED

log = logging.getLogger(__name__)


T = TypeVar("T")


STEPS = 128  # that a graph serves; the next has fewer rows, where some have ended, and a longer cache


REFUSED: WeakSet[PreTrainedModel] = WeakSet()  # models of which that failed; it is tried once


LOOK = 16  # steps after which is looked whether any row goes on: the CPU waits for the GPU there


class GraphStep(Step):
    """A `Step` whose first call for some rows is carried out as it is, the second recorded, others replayed.

    The cache must be of `RoomyLayer`, the mask additive and as wide as their room. Where a model cannot be
    recorded (it looks at a number on the CPU, or asks for the length of the cache) it is a plain `Step`.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.length = self.cache.get_seq_length()
        self.left = 0  # steps of the graph
        self.carry_out: Callable[[], tuple[Tensor, Tensor]] | None = None
        self.fresh = True  # nothing of these rows was carried out yet

    @property
    def recordable(self) -> bool:
        """Whether it did not fail so far."""
        return self.model not in REFUSED

    @property
    def layers(self) -> list[RoomyLayer]:
        """Those of the cache."""
        return [layer for layer in self.cache.layers if isinstance(layer, RoomyLayer)]

    @property
    def settled(self) -> bool:
        """Whether rows may leave: between two graphs."""
        return not (self.recordable and self.left)

    def looks(self, t: int) -> bool:
        """Not in every step: it waits for the GPU."""
        return self.settled or t % LOOK == 0

    def keep(self, rows: Tensor) -> None:
        """Go on with the rows `rows` [B'] alone."""
        self.free()
        super().keep(rows)

    def free(self) -> None:
        """Let the cache be one that grows again."""
        self.left, self.carry_out = 0, None
        for layer in self.layers:
            layer.free(self.length)

    def __call__(self, token: Tensor, place: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens and log-probs [B, G], as of `Step`."""
        if self.recordable:
            try:
                return self.fixed(token, place, numbers)
            except (RuntimeError, LengthAsked) as why:
                log.warning("decoding is not recorded as a CUDA graph, and slower: %s", why)
                REFUSED.add(self.model)
                self.free()
        return super().__call__(token, place, numbers)

    def fixed(self, token: Tensor, place: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """The step, on memory that stays."""
        if not self.left:
            self.begin(token, place, numbers)
        end = self.length + self.group
        self.seen[..., self.length : end] = self.mask[..., self.length : end]
        for own, given in zip(self.inputs, (token, place, numbers), strict=True):
            own.copy_(given)
        if self.carry_out is not None:
            found = self.carry_out()
        elif self.fresh:
            self.fresh, found = False, self.run()
        else:
            self.carry_out = record(self.run)
            found = self.carry_out()
        self.slots += self.group
        self.length, self.left = end, self.left - 1
        return found[0].clone(), found[1].clone()

    def begin(self, token: Tensor, place: Tensor, numbers: Tensor) -> None:
        """Make what the steps of the next graph have in common."""
        self.free()
        room = self.mask.shape[-1]
        self.left = min(STEPS, (room - self.length) // self.group)
        until = min(room, -(-(self.length + self.left * self.group) // ALIGNED) * ALIGNED)
        self.seen = self.mask[..., :until].clone(memory_format=torch.contiguous_format)
        self.seen[..., self.length :] = -torch.inf
        self.inputs = [x.clone(memory_format=torch.contiguous_format) for x in (token, place, numbers)]
        self.slots = torch.arange(self.length, self.length + self.group, device=token.device)
        self.fresh = True
        for layer in self.layers:
            layer.fix(self.slots, until)

    def run(self) -> tuple[Tensor, Tensor]:
        """What is recorded."""
        token, place, numbers = self.inputs
        return self.choose(self.logits(token, place, self.seen), numbers=numbers)


def can_record(device: torch.device) -> bool:
    """Whether there are graphs of what `device` does."""
    return device.type == "cuda"


def record(run: Callable[[], T]) -> Callable[[], T]:
    """`run` as a graph; called, it carries out what `run` did, and gives what lies where its result lay."""
    graph, side = torch.cuda.CUDAGraph(), side_stream(torch.cuda.current_device())
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        graph.capture_begin(capture_error_mode="thread_local")  # other threads may use the GPU meanwhile
        try:
            found = run()
        finally:
            graph.capture_end()
    torch.cuda.current_stream().wait_stream(side)

    def replay() -> T:
        graph.replay()
        return found

    return replay


@cache
def side_stream(device: int) -> torch.cuda.Stream:
    """Where graphs are recorded: always the same, whose workspace of matrix products stays."""
    return torch.cuda.Stream(device)
