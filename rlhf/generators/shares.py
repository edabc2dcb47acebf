"""What memory plans must know of generators: kept versions of weights, shares of a GPU. No torch."""

from __future__ import annotations

# The largest number of weight versions that a store keeps at once. This module imports no torch.


def most_versions(processes: int, in_flight: bool) -> int:
    """Return the largest number of versions of the weights that are kept for the generator processes.

    A process needs two versions: the weights that it samples with, in case it is lost, and the weights that
    it loads next. With in-flight updates a process may load several versions during one request, and confirms
    them at the end of the request. Two more versions are then kept.

    Args:
        processes: number of generator processes that load the weights from one store.
        in_flight: whether weights change while a request runs (`schedule.update=in_flight`).
    """
    return processes * (4 if in_flight else 2)


# The memory of vLLM on a GPU that it shares with the trainer.
#
# By default vLLM measures how much memory remains for keys and values. The measurement includes all processes
# on the GPU, so it fails or is wrong if the trainer allocates or frees memory meanwhile. On a shared GPU the
# size of the cache is computed instead:
#
#     keys and values = share of the GPU - weights - working memory


GIB = 2**30
_PREFILL_TOKENS = 8192  # maximum number of tokens of a forward pass
_FIXED = 3 * GIB // 2  # CUDA graphs, workspaces of libraries, buffers of NCCL; not measured


def forward_tokens(sequences: int) -> int:
    """Return the maximum number of tokens of a forward pass, at least one for each of `sequences`."""
    return max(_PREFILL_TOKENS, sequences)


def working_memory(
    *, hidden: int, intermediate: int, vocabulary: int, number_bytes: int, sequences: int
) -> int:
    """Return an estimate of the bytes that vLLM needs on a GPU besides weights, keys and values.

    Args:
        hidden: hidden size of the model.
        intermediate: width inside the MLP.
        vocabulary: number of logits.
        number_bytes: bytes of a number in vLLM's dtype.
        sequences: sequences decoded in parallel.
    """
    layer = forward_tokens(sequences) * (4 * hidden + 3 * intermediate) * number_bytes
    choice = 5 * 4 * sequences * vocabulary  # logits, log-probs and temporary tensors in float32
    return _FIXED + layer + choice
