"""Decoding steps as CUDA graphs: a step is recorded once, then replayed with a single launch.

A decoding step computes one token per row, which is little work. Launching its hundreds of operations one by
one takes the CPU ten times as long as the GPU needs to execute them. A graph repeats the operations on the
same memory, so every tensor that a step reads or writes must keep its address. Each step computes attention
over all cache slots that its graph may fill, and the mask excludes the slots that are still empty. Rows that
have ended stay in the batch until the next graph.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf.generators.hf.decoding import LengthAsked, RoomyLayer, Step
from rlhf.models.forward import ALIGNED

log = logging.getLogger(__name__)
T = TypeVar("T")

STEPS = 128  # steps of one graph; before the next graph, ended rows are removed and the cache grows
_REFUSED: WeakSet[PreTrainedModel] = WeakSet()  # models whose recording failed; it is tried once per model
_LOOK = 16  # steps between checks whether any row is running; at a check the CPU waits for the GPU


class GraphStep(Step):
    """A `Step` that runs as a CUDA graph.

    For a given set of rows, the first call runs normally, the second call is recorded, and later calls are
    replayed. The layers of the cache must be `RoomyLayer`, and the mask must be additive and have a column
    for every slot of the layers. If a model cannot be recorded (it reads a number on the CPU, or asks for the
    length of the cache), the step runs as a plain `Step`. If there is too little memory for a graph, the
    steps of these rows run as plain steps, and later batches are recorded again.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.blocks: Callable[[], AbstractContextManager[None]] = nullcontext  # context of the forward passes
        self.fits = True  # False: there was too little memory for a graph
        self.left = 0  # steps left until the end of the graph
        self.replay: Callable[[], tuple[Tensor, Tensor]] | None = None
        self.fresh = True  # no step of the current graph has run yet

    @property
    def recordable(self) -> bool:
        """Return True unless the recording of this model or of these rows has failed."""
        return self.fits and self.model not in _REFUSED

    @property
    def layers(self) -> list[RoomyLayer]:
        """Return the layers of the cache."""
        return [layer for layer in self.cache.layers if isinstance(layer, RoomyLayer)]

    @property
    def settled(self) -> bool:
        """Return True if rows may be removed, which is the case only between two graphs."""
        return not (self.recordable and self.left)

    def looks(self, t: int) -> bool:
        """Return True every `_LOOK` steps and between graphs; a check at every step would be slow."""
        return self.settled or t % _LOOK == 0

    def keep(self, rows: Tensor) -> None:
        """End the graph, and remove all rows of the batch except `rows` [B']."""
        self.free()
        super().keep(rows)

    def free(self) -> None:
        """End the graph, so that the cache grows with every step again."""
        self.left, self.replay = 0, None
        for layer in self.layers:
            layer.free(self.length)

    def __call__(self, token: Tensor, place: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Return the next tokens and their log-probs [B, G]; the arguments are those of `Step.__call__`."""
        if self.recordable:
            try:
                return self.fixed(token, place, numbers)
            except (RuntimeError, LengthAsked) as error:
                self.free()
                if _out_of_memory(error):
                    self.fits = False
                    log.warning(
                        "too little memory for a CUDA graph of %d rows; this batch is slower", len(token)
                    )
                else:
                    _REFUSED.add(self.model)
                    log.warning("decoding is not recorded as a CUDA graph and is slower: %s", error)
            torch.cuda.empty_cache()  # after the handler, which keeps the memory of the failed step alive
        return super().__call__(token, place, numbers)

    def fixed(self, token: Tensor, place: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Return the next tokens and their log-probs [B, G], computed in the fixed tensors of a graph.

        Raises:
            RuntimeError, LengthAsked: the model cannot be recorded.
        """
        if not self.left:
            self.begin(token, place, numbers)
        end = self.length + self.group
        self.seen[..., self.length : end] = self.mask[..., self.length : end]
        for fixed, given in zip(self.inputs, (token, place, numbers), strict=True):
            fixed.copy_(given)
        if self.replay is not None:
            outputs = self.replay()
        elif self.fresh:
            self.fresh, outputs = False, self.run()
        else:
            self.replay = record(self.run)
            outputs = self.replay()
        self.slots += self.group
        self.length, self.left = end, self.left - 1
        return outputs[0].clone(), outputs[1].clone()

    def begin(self, token: Tensor, place: Tensor, numbers: Tensor) -> None:
        """Create the fixed tensors of the next graph: inputs, mask, cache slots and cache length."""
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
        """Run one step on the fixed tensors: the operations that a graph records."""
        token, place, numbers = self.inputs
        with self.blocks() if len(token) > 1 else nullcontext():  # code for one row would be compiled apart
            return self.choose(self.logits(token, place, self.seen), numbers=numbers)


def _out_of_memory(error: BaseException | None) -> bool:
    """Return whether an error is, or hides, an error of too little GPU memory.

    The end of an interrupted recording raises an error of its own, whose context is the cause.
    """
    while error is not None and not isinstance(error, torch.OutOfMemoryError):
        error = error.__context__
    return error is not None


def can_record(device: torch.device) -> bool:
    """Return True if operations on `device` can be recorded as CUDA graphs."""
    return device.type == "cuda"


def record(run: Callable[[], T]) -> Callable[[], T]:
    """Record `run` as a graph and return a function that replays the graph.

    Every call of the function returns the same tensor objects, with new values.
    """
    graph, side = torch.cuda.CUDAGraph(), _side_stream(torch.cuda.current_device())
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        graph.capture_begin(capture_error_mode="thread_local")  # other threads may use the GPU meanwhile
        try:
            outputs = run()
        finally:
            graph.capture_end()
    torch.cuda.current_stream().wait_stream(side)

    def replay() -> T:
        graph.replay()
        return outputs

    return replay


@cache
def _side_stream(device: int) -> torch.cuda.Stream:
    """Return the stream of `device` on which graphs are recorded.

    The stream is reused for all graphs, so that only one workspace for matrix products is allocated.
    """
    return torch.cuda.Stream(device)
