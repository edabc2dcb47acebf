"""Rules that decide when the samples of a prompt share its encoding, as functions of plain numbers.

Forwards (`rlhf.models.shared_prefix`), sampling and the memory plan call the same functions. This module
imports no torch.
"""

from __future__ import annotations

import math

SHALLOW = 8  # blocks: up to this depth a CPU encodes the prompt separately for a single sample too
GPU_LAYER = 3e11  # FLOP of a GPU in the time that launching one layer takes: 0.75 ms at 400 TFLOP/s
TOGETHER = 8  # least number of samples to aim at in one decoding row


def prompt_apart(samples: int, tokens: int, *, layers: float, hidden: float, gpu: bool, whole: bool) -> bool:
    """Return True if the prompts of a micro-batch are encoded in a separate pass before their responses.

    If K > 1, the separate pass encodes each prompt once instead of K times. If K = 1, the pass saves most of
    the last block's work on the prompt and costs a second copy of the prompt's keys. Behind prompts of 384
    tokens, two passes took 0.70 of the time of one pass with 2 blocks and 0.89 with 6 blocks; a deep model
    gains nothing. On a GPU the cost of a pass is launching its operations: see `prompt_pass_pays_from`.

    Args:
        samples: samples per prompt, K.
        tokens: prompt tokens of the micro-batch, padding included.
        layers: blocks of the model.
        hidden: hidden size of the model.
        gpu: whether the forward runs on a GPU.
        whole: whether every forward must run to its end. Then the rule is K > 1 alone, so that all ranks of
            a sharded model decide alike.
    """
    if whole:
        return samples > 1
    return tokens >= prompt_pass_pays_from(samples, hidden) if gpu else samples > 1 or layers <= SHALLOW


def prompt_pass_pays_from(samples: int, hidden: float) -> float:
    """Return the number of prompt tokens in a micro-batch above which a separate prompt pass pays on a GPU.

    Launching the operations of a pass takes the same time whatever the pass computes. The pass pays if it
    saves a layer of hidden size H (12 H^2 weights) more work than a GPU does in that time (`GPU_LAYER`).
    """
    return GPU_LAYER / (2 * 12 * hidden**2 * (samples - 1)) if samples > 1 else math.inf


def in_forward(samples: int, known: int, response: int) -> int:
    """Return how many samples of a prompt share one row of a forward, and so one copy of the prompt's keys.

    A sample in a shared row also pays for attention to the other samples' keys, which are masked. The result
    is the largest divisor of `samples` for which these keys add at most a quarter.

    Args:
        samples: samples per prompt, K.
        known: prompt tokens already encoded.
        response: response tokens of one sample.
    """
    most = 1 + (known + response) // (4 * response)
    return max(g for g in divisors(samples) if g <= most)


def in_decoding(samples: int, prompt: int, response: int) -> int:
    """Return how many samples of a prompt are decoded in one row, and so read one copy of the prompt's keys.

    A sample in a shared row also computes attention to the other samples' tokens and masks it. The result is
    the divisor of `samples` that is nearest, as a ratio, to 8 or to 4 * prompt / response if that is larger.

    Args:
        samples: samples per prompt, K.
        prompt: prompt length in tokens.
        response: response length in tokens.
    """
    wanted = max(TOGETHER, 4 * prompt // response)
    return min(divisors(samples), key=lambda g: max(g / wanted, wanted / g))


def divisors(samples: int) -> list[int]:
    """Return the divisors of `samples`: the group sizes that fill all rows equally."""
    return [g for g in range(1, samples + 1) if samples % g == 0]
