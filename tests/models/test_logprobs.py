"""Log-probs, entropy and sum of squares, computed from hidden states with one tile of logits at a time."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rlhf.models import logprobs
from rlhf.models.logprobs import EXTRAS, token_outputs

R, H, V = 11, 8, 37


TILES = [(1, 1), (4, 10), (R, 10), (4, V), (100, 100)]


class Watch(TorchDispatchMode):
    """A dispatch mode that records the size of the largest tensor created and counts matrix products."""

    largest = 0
    products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        self.products += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm_)
        if isinstance(made, torch.Tensor):
            self.largest = max(self.largest, made.numel())
        return made


def token_logprobs(*args):
    return token_outputs(*args).logprobs


def inputs(dtype=torch.float32, bias=True, grad=True, sizes=(R, H, V)):
    draw, (rows, width, tokens) = torch.Generator().manual_seed(0), sizes
    hidden = torch.randn(rows, width, generator=draw, dtype=dtype).requires_grad_(grad)
    weight = torch.randn(tokens, width, generator=draw, dtype=dtype).requires_grad_(grad)
    offset = torch.randn(tokens, generator=draw, dtype=dtype).requires_grad_(grad) if bias else None
    return hidden, weight, offset, torch.randint(0, tokens, (rows,), generator=draw)


def plain(hidden, weight, bias, targets, temperature):
    logits = torch.nn.functional.linear(hidden, weight, bias).float() / temperature
    return logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]


@pytest.mark.parametrize("bias", [False, True])
def test_log_probs_equal_log_softmax_of_the_full_logits_in_value_and_gradient(bias):
    slopes = torch.randn(R, generator=torch.Generator().manual_seed(1))
    results = []
    for function in (plain, token_logprobs):
        hidden, weight, offset, targets = inputs(bias=bias)
        found = function(hidden, weight, offset, targets, 0.7)
        (found * slopes).sum().backward()
        results.append([found, hidden.grad, weight.grad] + ([offset.grad] if bias else []))
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tile", [None, (3, 10)])
def test_no_gradient_is_computed_for_a_frozen_weight(tile):
    products = {}
    for frozen in (False, True):
        hidden, weight, offset, targets = inputs()
        weight.requires_grad_(not frozen)
        offset.requires_grad_(not frozen)
        found = token_logprobs(hidden, weight, offset, targets, 0.7, tile)
        with Watch() as seen:
            found.sum().backward()
        products[frozen] = seen.products
        assert hidden.grad is not None and (weight.grad is None) == frozen == (offset.grad is None)
    tiles = 1 if tile is None else 4 * 4
    assert products == {False: 3 * tiles, True: 2 * tiles}


@pytest.mark.parametrize("tile", [None, (3, 10)])
def test_autocast_multiplies_in_bfloat16_and_normalises_in_float32(tile):
    results = []
    for function in (plain, lambda *args: token_logprobs(*args, tile)):
        hidden, weight, _, targets = inputs()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = function(hidden, weight, None, targets, 0.7)
        assert found.dtype == torch.float32
        found.sum().backward()
        assert weight.grad.dtype == torch.float32
        results.append((found, hidden.grad, weight.grad))
    torch.testing.assert_close(results[1][0], results[0][0], rtol=1e-5, atol=1e-5)
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=0.02, atol=0.05)


def test_no_rows_give_no_log_probs_and_zero_gradients():
    hidden, weight, offset, targets = inputs()
    found = token_logprobs(hidden[:0], weight, offset, targets[:0], 0.7)
    found.sum().backward()
    assert found.shape == (0,)
    assert not weight.grad.any() and not hidden.grad.any()


@pytest.mark.parametrize(("rows", "tile"), [(1, (1, V)), (3, (3, 20)), (60, (12, 5))])
def test_a_tile_has_all_rows_if_enough_vocabulary_entries_fit(monkeypatch, rows, tile):
    monkeypatch.setattr(logprobs, "CPU_TILE_BYTES", 4 * 60)
    monkeypatch.setattr(logprobs, "_MIN_TILE_VOCABULARY", 5)
    assert logprobs.tile_for(torch.empty(rows, H), torch.empty(V, H), torch.bfloat16) == tile


def plain_outputs(hidden, weight, bias, targets, temperature, *_):
    """Return the three outputs, computed in float64 from the full logits."""
    logits = torch.nn.functional.linear(hidden.double(), weight.double(), bias.double()) / temperature
    logps = logits.log_softmax(-1)
    entropy = -(logps.exp() * logps).sum(-1)
    return logps.gather(-1, targets[:, None])[:, 0], entropy, (2 * logps).logsumexp(-1)


@pytest.mark.parametrize("scale", [0.1, 1.0, 4.0])  # flat, usual and peaked distributions
@pytest.mark.parametrize("tile", [None, *TILES])
def test_entropy_and_sum_of_squares_equal_those_of_the_full_logits_in_float64(tile, scale):
    draw = torch.Generator().manual_seed(1)
    slopes, other_slopes = torch.randn(2, R, generator=draw)
    results = []
    for function in (plain_outputs, token_outputs):
        hidden, weight, offset, targets = inputs()
        with torch.no_grad():
            weight *= scale
        found = function(hidden, weight, offset, targets, 0.7, tile, EXTRAS)
        (found[0] * slopes + found[1] * other_slopes).sum().backward()
        results.append([x.float() for x in (*found[:3], hidden.grad, weight.grad, offset.grad)])
    for expected, found in zip(*results, strict=True):
        size = expected.detach().abs().max().item()
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5 * max(1.0, size))


@pytest.mark.parametrize("tile", [None, (3, 10)])
def test_gradients_of_log_prob_and_entropy_pass_gradcheck_in_float64(tile):
    hidden, weight, offset, targets = inputs(torch.float64, sizes=(4, 3, 13))
    assert torch.autograd.gradcheck(
        lambda h, w, b: token_outputs(h, w, b, targets, 0.7, tile, EXTRAS)[:2], (hidden, weight, offset)
    )


def test_the_sum_of_squares_has_no_gradient():
    hidden, weight, offset, targets = inputs()
    found = token_outputs(hidden, weight, offset, targets, 0.7, None, ["log_sum_squares"])
    assert not found.log_sum_squares.requires_grad and found.logprobs.requires_grad


@pytest.mark.parametrize("extras", [["entropy"], ["log_sum_squares"], EXTRAS])
def test_extra_outputs_do_not_change_log_probs_and_their_gradients_in_any_bit(extras):
    results = []
    for names in ((), extras):
        hidden, weight, offset, targets = inputs()
        found = token_outputs(hidden, weight, offset, targets, 0.7, (4, 10), names)
        assert {name for name in EXTRAS if getattr(found, name) is not None} == set(names)
        found.logprobs.square().sum().backward()
        results.append((found.logprobs, hidden.grad, weight.grad, offset.grad))
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_extra_outputs_are_finite_if_all_logits_of_the_first_tiles_are_infinite():
    hidden, weight, offset, targets = inputs()
    with torch.no_grad():
        offset[:20] = -torch.inf  # the first two tiles completely
    targets = 20 + targets % 17
    found = token_outputs(hidden, weight, offset, targets, 0.7, (4, 10), EXTRAS)
    expected = plain_outputs(hidden, weight[20:], offset[20:], targets - 20, 0.7)
    for one, other in zip(found[:3], expected, strict=True):
        torch.testing.assert_close(one, other.float(), rtol=1e-5, atol=1e-5)
    (found.logprobs + found.entropy).sum().backward()
    assert hidden.grad.isfinite().all() and not weight.grad[:20].any()


def test_extra_outputs_need_at_most_one_tile_of_logits_in_memory(monkeypatch):
    monkeypatch.setattr(logprobs, "CPU_TILE_BYTES", 4 * 30)
    monkeypatch.setattr(logprobs, "_MIN_TILE_VOCABULARY", 10)
    hidden, weight, offset, targets = inputs()
    with Watch() as seen:
        found = token_outputs(hidden, weight, offset, targets, 0.7, None, EXTRAS)
        (found.logprobs + found.entropy).sum().backward()
    assert seen.largest == V * H
