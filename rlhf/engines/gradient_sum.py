"""The sum of gradients over the ranks, which runs while the backward pass computes the remaining gradients.

Gradients are sent in buckets (Li et al., PyTorch Distributed, arXiv 2006.15704). A bucket is sent as soon as
it is complete and all buckets before it were sent, so that all ranks send in the same order: the last layers
first, as the backward pass reaches them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlhf.processes.ranks import buckets, together

if TYPE_CHECKING:
    from rlhf.processes.ranks import Ranks


class GradientSum:
    """The sum over the ranks of the gradients of some parameters.

    Args:
        parameters: parameters of a module; those that require no gradient are left out.
        ranks: the ranks, which all have the same parameters.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], ranks: Ranks) -> None:
        self.ranks = ranks
        self.buckets = buckets([each for each in parameters if each.requires_grad])[::-1]

    @contextmanager
    def summed(self) -> Iterator[None]:
        """Sum the gradients over the ranks, in place; a gradient that is None on all ranks stays None.

        The block must run one backward pass. Gradients are complete at the end of the block.

        Raises:
            RunError: another rank does not take part.
        """
        if self.ranks.size == 1:
            yield
            return
        place: dict[Tensor, int] = {}  # parameter -> index of its bucket
        for index, bucket in enumerate(self.buckets):
            place |= dict.fromkeys(bucket, index)
        missing = [len(bucket) for bucket in self.buckets]  # gradients that the backward pass has not reached
        sent: list[Any] = []  # handles of the sums of the first buckets
        used: list[float] = []

        def send() -> None:
            bucket = self.buckets[len(sent)]
            used.extend(float(each.grad is not None) for each in bucket)
            with together():
                sent.append(dist.all_reduce(join(bucket), async_op=True))

        def reached(parameter: Tensor) -> None:
            missing[place[parameter]] -= 1
            while len(sent) < len(self.buckets) and not missing[len(sent)]:
                send()

        hooks = [each.register_post_accumulate_grad_hook(reached) for each in place]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        while len(sent) < len(self.buckets):
            send()
        users = self.ranks.sum(torch.tensor(used)).tolist()
        with together():
            for handle in sent:
                handle.wait()
        for parameter, count in zip(place, users, strict=True):
            if not count:
                parameter.grad = None


def join(bucket: list[nn.Parameter]) -> Tensor:
    """Return the gradients of a bucket in one tensor [numel], and make each gradient a view of the tensor."""
    grads = [torch.zeros_like(each) if each.grad is None else each.grad for each in bucket]
    flat = torch.cat([grad.flatten() for grad in grads])
    for parameter, piece in zip(bucket, flat.split([grad.numel() for grad in grads]), strict=True):
        parameter.grad = piece.view_as(parameter)
    return flat
