"""The Triton kernel of decoding steps, run by Triton's interpreter on the CPU, equals torch in float64."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from tests import needs


@pytest.fixture
def kernel():
    pytest.importorskip("triton", reason=needs.TRITON)
    if torch.cuda.is_available():
        pytest.skip("the interpreter is for CPUs")
    from rlhf.generators.hf import kernel

    return kernel


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])  # the interpreter has no bfloat16 products
@pytest.mark.parametrize(
    ("heads", "shared", "queries", "size", "slots"),
    [(4, 4, 1, 64, 70), (8, 2, 3, 80, 140), (2, 1, 2, 16, 33), (4, 2, 1, 256, 40)],
)
def test_the_kernel_computes_attention(kernel, dtype, heads, shared, queries, size, slots, monkeypatch):
    monkeypatch.setattr(kernel, "SEARCH", 32)
    torch.manual_seed(0)
    rows, seen = 2, slots - 7
    query = torch.randn(rows, queries, heads, size, dtype=dtype).transpose(1, 2)
    key, value = (torch.randn(rows, shared, slots + 9, size, dtype=dtype)[:, :, :slots] for _ in range(2))
    mask = torch.zeros(rows, 1, queries, slots + 2, dtype=dtype)[..., :slots]
    mask[..., seen:] = -torch.inf
    mask[0, ..., :21] = -torch.inf  # padding in front of a prompt
    mask[:, :, 0, seen - 3 :] = -torch.inf  # slots of another sample of the row
    keys, values = (x.double().repeat_interleave(heads // shared, 1) for x in (key, value))
    expected = scaled_dot_product_attention(
        query.double(), keys, values, attn_mask=mask.double(), scale=0.2
    ).transpose(1, 2)
    key[:, :, seen:], value[:, :, seen:] = torch.nan, torch.nan  # never read
    assert kernel.fits(query, key, value)
    found = kernel.attend(query, key, value, mask, 0.2)
    assert found.shape == (rows, queries, heads, size) and found.dtype == dtype
    torch.testing.assert_close(
        found.double(), expected, rtol=0, atol=1e-5 if dtype is torch.float32 else 2e-3
    )


def test_many_queries_and_large_heads_are_left_to_torch(kernel):
    keys = torch.zeros(1, 1, 8, 16)
    assert kernel.fits(torch.zeros(1, 8, 8, 16), keys, keys)
    assert not kernel.fits(torch.zeros(1, 8, 9, 16), keys, keys)
    assert not kernel.fits(torch.zeros(1, 8, 1, 16), keys, torch.zeros(1, 1, 8, 32))
    wide = torch.zeros(1, 1, 8, 512)
    assert not kernel.fits(torch.zeros(1, 1, 1, 512), wide, wide)
