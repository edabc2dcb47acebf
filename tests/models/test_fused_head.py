"""Log-probs by Liger: equal to those of the tiles, with gradients for a different weight of each token."""

import sys
from types import ModuleType

import pytest
import torch
from torch.nn.functional import cross_entropy, linear

from rlhf.models.logprobs import fused_logprobs, token_outputs
from rlhf.models.modules import Policy
from tests import needs
from tests.tiny_models import tiny_lm, tiny_rollouts

FUNCTIONAL = "liger_kernel.transformers.functional"


def plain(input, weight, target, bias, reduction, accum_dtype):
    """Compute the function of Liger with torch."""
    assert input.dtype == weight.dtype and accum_dtype is torch.float32
    return cross_entropy(linear(input, weight, bias).float(), target, reduction=reduction)


@pytest.fixture(params=["plain", "liger"])
def library(request, monkeypatch):
    """Use Liger itself, if it is installed, in the interpreter of Triton; or a plain function."""
    if request.param == "liger":
        pytest.importorskip("liger_kernel", reason=needs.LIGER)
        if torch.cuda.is_available():
            pytest.skip("the interpreter is for CPUs")
        return
    for name in ("liger_kernel", "liger_kernel.transformers", FUNCTIONAL):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules[FUNCTIONAL], "liger_fused_linear_cross_entropy", plain, raising=False)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_results_and_gradients_are_those_of_the_tiles(library, biased, dtype, tolerance):
    draw = torch.Generator().manual_seed(0)
    rows, width, words = 13, 16, 97
    values = [torch.randn(shape, generator=draw) for shape in ((rows, width), (words, width), (words,))]
    targets, slopes = torch.randint(0, words, (rows,), generator=draw), torch.randn(rows, generator=draw)
    found = []
    for logprobs in (fused_logprobs, lambda *given: token_outputs(*given).logprobs):
        hidden, weight, bias = (x.clone().requires_grad_() for x in values)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
            output = logprobs(hidden, weight, bias if biased else None, targets, 0.7)
        output.backward(slopes)
        assert output.dtype == hidden.grad.dtype == weight.grad.dtype == torch.float32
        found.append([output.detach(), hidden.grad, weight.grad, *([bias.grad] if biased else [])])
    for one, other in zip(*found, strict=True):
        assert (one - other).norm() <= tolerance * other.norm()


def test_a_policy_uses_the_fused_head_for_rows_without_extras(library, monkeypatch):
    batch = tiny_rollouts()
    policy = Policy(tiny_lm(), 0.7, shared_prefix=True)
    expected = policy(batch).logprobs
    policy.model.get_output_embeddings().fused = True
    torch.testing.assert_close(policy(batch).logprobs, expected, rtol=0, atol=1e-5)
    outputs = policy(batch, "entropy")
    assert torch.equal(outputs.logprobs, expected) and outputs.entropy is not None
    empty = policy.model.get_output_embeddings()(
        torch.zeros(0, 32), targets=torch.zeros(0, dtype=torch.int64)
    )
    assert empty.logprobs.shape == (0,)
