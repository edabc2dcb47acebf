"""Tests of the sum of gradients over ranks, with a second rank that has the same gradients."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from rlhf.engines import engine
from rlhf.engines.engine import GradientSum
from rlhf.processes import ranks
from rlhf.processes.ranks import Ranks


@pytest.fixture
def sums(monkeypatch):
    """Double tensors instead of summing them over two ranks, and return the asynchronous sums in order."""
    started = []

    def all_reduce(tensor, async_op=False):
        if not async_op:
            tensor *= 2
            return None
        started.append(tensor)
        return SimpleNamespace(wait=lambda: tensor.mul_(2))

    monkeypatch.setattr(engine.dist, "all_reduce", all_reduce)
    monkeypatch.setattr(ranks, "BUCKET", 20)
    return started


class Layers(nn.Module):
    """Three layers with 16 weights each, of which the third is not used, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.unused = (nn.Linear(4, 4, bias=False) for _ in range(3))
        self.frozen = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x):
        return self.frozen(self.second(self.first(x))).square().sum()


def gradients(module):
    return {name: p.grad for name, p in module.named_parameters()}


def test_gradients_are_summed_and_those_of_unused_weights_stay_none(sums):
    module, alone = Layers(), Layers()
    x = torch.ones(2, 4)
    alone(x).backward()
    for scale in (1, 2):  # gradients of an earlier micro-batch are summed as well
        with GradientSum(module.parameters(), Ranks(size=2)).summed():
            module(x).backward()
        expected = {"first.weight": alone.first.weight.grad, "second.weight": alone.second.weight.grad}
        for name, gradient in gradients(module).items():
            if name in expected:
                assert torch.equal(gradient, expected[name] * (2 if scale == 1 else 6))
            else:
                assert gradient is None


def test_a_bucket_is_sent_before_the_backward_pass_reaches_earlier_layers(sums):
    module = Layers()
    del module.unused
    seen = []
    module.first.weight.register_post_accumulate_grad_hook(lambda weight: seen.append(len(sums)))
    with GradientSum(module.parameters(), Ranks(size=2)).summed():
        module(torch.ones(2, 4)).backward()
    assert seen == [1] and len(sums) == 2, "the second layer is sent before the first has a gradient"


def test_buckets_are_sent_in_the_same_order_if_this_rank_does_not_use_a_weight(sums):
    module = Layers()
    with GradientSum(module.parameters(), Ranks(size=2)).summed():
        module(torch.ones(2, 4)).backward()
        assert not sums, "the last layer has no gradient yet, and is sent first"
        before = {
            name: gradient.clone() for name, gradient in gradients(module).items() if gradient is not None
        }
    assert [bool(bucket.any()) for bucket in sums] == [False, True, True]
    assert torch.equal(sums[1].view(4, 4), 2 * before["second.weight"])


def test_summed_gradients_use_the_memory_of_their_bucket(sums):
    module = Layers()
    with GradientSum(module.parameters(), Ranks(size=2)).summed():
        module(torch.ones(2, 4)).backward()
    assert module.first.weight.grad.data_ptr() == sums[2].data_ptr()


def test_a_single_rank_sends_nothing(sums):
    module = Layers()
    with GradientSum(module.parameters(), Ranks()).summed():
        module(torch.ones(2, 4)).backward()
    assert not sums
