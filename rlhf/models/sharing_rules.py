"""What the samples of a prompt share: rules in plain numbers, for forwards, sampling and the memory plan."""

from __future__ import annotations

import math

SHALLOW = 8  # blocks


GPU_LAYER = 3e11  # FLOP that a GPU does while the operations of a layer are launched: 0.75 ms at 400 TFLOP/s


TOGETHER = 8  # samples that are decoded in one row, whatever the lengths


def prompt_apart(samples: int, tokens: int, *, layers: float, hidden: float, gpu: bool, whole: bool) -> bool:
    """Whether a micro-batch's prompts, `tokens` together, are encoded in a pass of their own.

    They are where several samples share them; of `whole` forwards on all ranks alike. For one sample, the
    pass spares most of the last block's work on the prompt, and costs a second copy of its keys. With 2
    blocks two passes took 0.70 of the time of one behind prompts of 384 tokens, with 6 blocks 0.89; a deep
    model has nothing to gain. On a GPU a pass costs the launches of its operations: see `spared_from`.
    """
    if whole:
        return samples > 1
    return tokens >= spared_from(samples, hidden) if gpu else samples > 1 or layers <= SHALLOW


def spared_from(samples: int, hidden: float) -> float:
    """From how many tokens of prompts in a micro-batch on a pass of their own pays on a GPU.

    It costs the launches of its operations, whatever it computes, and has to spare a layer of hidden size H
    (of 12 H^2 weights) as much work as the GPU does in that time.
    """
    return GPU_LAYER / (2 * 12 * hidden**2 * (samples - 1)) if samples > 1 else math.inf


def in_forward(samples: int, known: int, response: int) -> int:
    """How many of a prompt's samples go into one row of a forward, and so read one copy of the keys of its
    `known` tokens.

    Each pays for the keys of the others, which it does not see: as many as add a quarter at most.
    """
    most = 1 + (known + response) // (4 * response)
    return max(g for g in divisors(samples) if g <= most)


def in_decoding(samples: int, prompt: int, response: int) -> int:
    """How many of a prompt's samples are decoded in one row of the batch, and so read one copy of its keys.

    Each also computes, and masks away, attention to the tokens of the others. So about eight do, or as many
    as there are quarters of a response in the prompt.
    """
    wanted = max(TOGETHER, 4 * prompt // response)
    return min(divisors(samples), key=lambda g: max(g / wanted, wanted / g))


def divisors(samples: int) -> list[int]:
    """The numbers of samples a row with which all rows have equally many."""
    return [g for g in range(1, samples + 1) if samples % g == 0]
