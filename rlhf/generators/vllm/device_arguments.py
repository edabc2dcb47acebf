"""Arguments of vLLM that depend on the device: on a CPU, and on a GPU that vLLM shares with the trainer."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import psutil
import torch

from rlhf.core.errors import UserError
from rlhf.generators.shares import GIB, forward_tokens, working_memory

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# `gpu_memory_utilization` on a shared GPU. With `kv_cache_memory_bytes`, vLLM uses this share only to refuse
# its start if a smaller share of the GPU is free, but the trainer loads its models onto the same GPU at this
# time. vLLM accepts every share above 0; this share is less than 1 kB.
LEAST_SHARE = 1e-9
_TOKENS_ON_CPU = 8192  # prompt tokens that a CPU encodes in one forward pass


def on_cpu(memory: float, max_model_len: int, max_num_seqs: int) -> dict[str, Any]:
    """Return additional arguments of vLLM on a CPU.

    Prompts are never encoded in chunks: between chunks vLLM resets the request's random generator, which is
    not possible on a CPU. So a prompt and one token of each other sequence must fit into a forward pass.
    Blocks of the prefix cache have 32 tokens, because with vLLM's default of 128 tokens the keys and values
    of a shorter prompt would not be shared. The cache of keys and values has a fixed size, which does not
    depend on the weights.

    Args:
        memory: share of RAM for keys and values.
        max_model_len: maximum number of tokens of a prompt and its response.
        max_num_seqs: sequences decoded in parallel.
    """
    return {
        "kv_cache_memory_bytes": int(memory * psutil.virtual_memory().total),
        "block_size": 32,
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(_TOKENS_ON_CPU, max_model_len + max_num_seqs),
    }


def on_shared_gpu(
    config: PreTrainedConfig,
    weights: int,
    dtype: torch.dtype,
    *,
    memory: float,
    max_model_len: int,
    max_num_seqs: int,
    tensor_parallel_size: int,
) -> dict[str, Any]:
    """Return additional arguments of vLLM on the trainer's GPU: the size of the cache of keys and values.

    Args:
        config: the config of the model.
        weights: bytes of the weights on all GPUs of vLLM.
        dtype: dtype in which vLLM computes.
        memory: share of the GPU's memory.
        max_model_len: maximum number of tokens of a prompt and its response.
        max_num_seqs: sequences decoded in parallel.
        tensor_parallel_size: GPUs that share the model.

    Raises:
        UserError: the share is too small for the weights and one sequence.
    """
    from vllm.platforms import current_platform

    text = config.get_text_config()
    total = min(map(current_platform.get_device_total_memory, range(tensor_parallel_size)))
    working = working_memory(
        hidden=text.hidden_size,
        intermediate=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        vocabulary=text.vocab_size,
        number_bytes=dtype.itemsize,
        sequences=max_num_seqs,
    )
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    own_heads = -(-heads // tensor_parallel_size)
    sequence = 2 * text.num_hidden_layers * own_heads * head_size(config) * dtype.itemsize * max_model_len
    used = weights // tensor_parallel_size + working
    room = int(memory * total) - used
    if room < sequence:
        needed = math.ceil(100 * (used + sequence) / total) / 100
        raise UserError(
            "generator.memory must leave room for the weights and one sequence on the GPU that vLLM shares "
            f"with the trainer (vLLM needs {(used + sequence) / GIB:.1f} of {total / GIB:.1f} GiB), "
            f"got {memory:g}; set "
            + (f"generator.memory={needed:g}" if needed < 1 else "model.policy to a smaller model")
        )
    return {
        "kv_cache_memory_bytes": room,
        "gpu_memory_utilization": LEAST_SHARE,
        "max_num_batched_tokens": forward_tokens(max_num_seqs),
    }


def head_size(config: PreTrainedConfig) -> int:
    """Return the width of an attention head."""
    text = config.get_text_config()
    size: int = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return size


def check_head_size(config: PreTrainedConfig) -> None:
    """Raise UserError if vLLM's attention kernels for CPUs do not support the model's head size."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    size = head_size(config)
    sizes = CPUAttentionBackend.get_supported_head_sizes()
    if size not in sizes:
        raise UserError(
            "model.policy must have attention heads of a size that vLLM supports on a CPU "
            f"({', '.join(map(str, sizes))}), got {size}; set generator=hf"
        )
