"""Rules that decide when the samples of a prompt share the encoding of the prompt, from plain numbers.

Forwards (`rlhf.models.shared_prefix`), sampling and the memory plan call the same functions. This module
imports no torch.
"""

from __future__ import annotations

import math

_SHALLOW = 8  # number of blocks up to which a CPU encodes the prompt in a separate pass if K = 1
_GPU_LAYER = 3e11  # FLOPs of a GPU while one layer is launched: 0.75 ms at 400 TFLOP/s
_TOGETHER = 8  # smallest target for the number of samples in one decoding row


def prompt_apart(samples: int, tokens: int, *, layers: float, hidden: float, gpu: bool, whole: bool) -> bool:
    """Return True if the prompts of a micro-batch are encoded in a separate pass before their responses.

    If K > 1, the separate pass encodes each prompt once instead of K times. If K = 1, the pass saves most of
    the last block's work on the prompt and costs a second copy of the prompt's keys. With prompts of 384
    tokens, two passes took 0.70 of the time of one pass in a model with 2 blocks, and 0.89 with 6 blocks. A
    deep model gains nothing. On a GPU, a pass costs the time to launch its operations: see
    `prompt_pass_pays_from`.

    Args:
        samples: samples per prompt, K.
        tokens: prompt tokens of the micro-batch, padding included.
        layers: blocks of the model.
        hidden: hidden size of the model.
        gpu: whether the forward runs on a GPU.
        whole: True if no forward may stop early. Then the result depends on K only, so that all ranks of a
            sharded model get the same result.
    """
    if whole:
        return samples > 1
    return tokens >= prompt_pass_pays_from(samples, hidden) if gpu else samples > 1 or layers <= _SHALLOW


def prompt_pass_pays_from(samples: int, hidden: float) -> float:
    """Return the number of prompt tokens in a micro-batch from which a separate prompt pass pays on a GPU.

    Launching the operations of a layer takes the same time for any number of tokens. The pass pays if it
    saves `_GPU_LAYER` or more FLOPs per layer. A layer of hidden size H has 12 H^2 weights, so the pass saves
    2 * 12 H^2 * (K - 1) FLOPs per prompt token.

    Args:
        samples: samples per prompt, K.
        hidden: hidden size of the model, H.
    """
    return _GPU_LAYER / (2 * 12 * hidden**2 * (samples - 1)) if samples > 1 else math.inf


def in_forward(samples: int, known: int, response: int) -> int:
    """Return how many samples of a prompt share one row of a forward, and so one copy of the prompt's keys.

    A sample in a shared row also computes attention to the keys of the other samples, which are masked. The
    result is the largest divisor of `samples` for which the masked keys add at most a quarter to the keys of
    a sample (prompt and own response).

    Args:
        samples: samples per prompt, K.
        known: prompt tokens already encoded.
        response: response tokens of one sample.
    """
    most = 1 + (known + response) // (4 * response)
    return max(g for g in _divisors(samples) if g <= most)


def in_decoding(samples: int, prompt: int, response: int) -> int:
    """Return how many samples of a prompt are decoded in one row, and so read one copy of the prompt's keys.

    A sample in a shared row also computes attention to the tokens of the other samples, which are masked. The
    target is 4 * prompt / response, but at least `_TOGETHER`. The result is the divisor of `samples` whose
    ratio to the target is nearest to 1.

    Args:
        samples: samples per prompt, K.
        prompt: prompt length in tokens.
        response: response length in tokens.
    """
    wanted = max(_TOGETHER, 4 * prompt // response)
    return min(_divisors(samples), key=lambda g: max(g / wanted, wanted / g))


def _divisors(samples: int) -> list[int]:
    """Return the divisors of `samples`: the group sizes that fill all rows equally."""
    return [g for g in range(1, samples + 1) if samples % g == 0]
