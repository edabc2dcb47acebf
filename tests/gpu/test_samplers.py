"""Tests of the limits with which the GPU tests compare a sampler with the trained model."""

from collections.abc import Callable
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.gpu.samplers import LIMITS, change, copy_of, rounded
from tests.gpu.shapes import HEADS, prompts, tiny


def tf32(x: Tensor) -> Tensor:
    """Round float32 numbers to the 10 bits of mantissa that TF32 has."""
    return ((x.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def test_the_limit_of_float32_on_a_gpu_admits_attention_in_tf32_but_no_other_weights():
    limit, given = LIMITS["cuda", "float32"], prompts(8, 100)
    model, attention = rounded(tiny("llama", **HEADS)), F.scaled_dot_product_attention

    def logprobs(model: Callable[..., object]) -> Tensor:
        with torch.no_grad():
            logits = model(input_ids=given.prompt_ids, attention_mask=given.prompt_mask).logits
        return logits[:, -12:].log_softmax(-1).amax(-1)  # of the most likely tokens, as in the stages

    def low(q: Tensor, k: Tensor, v: Tensor, **settings: object) -> Tensor:
        return attention(tf32(q), tf32(k), tf32(v), **settings)

    exact = logprobs(copy_of(model))
    assert (logprobs(model) - exact).abs().max() < limit / 100
    with patch.object(F, "scaled_dot_product_attention", low):
        assert limit / 10 < (logprobs(model) - exact).abs().max() < limit
    change(model, 1)
    assert (logprobs(model) - exact).abs().max() > 5 * limit
