"""Where and in which precision a model computes, with and without values."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from rlhf.config.models import Dtype
from rlhf.core.batch import Budget, Rollouts, microbatches, moved_to
from rlhf.processes.ranks import Ranks

# Memory layout of linear weights on a CPU.
#
# A linear layer multiplies by the transpose of its weight [out, in]. If in > out, as in the second layer of
# an MLP, the CPU's matrix product is faster when the weight is stored transposed in memory. With in = 512 and
# out = 128 the product took 66 instead of 167 microseconds for 64 rows, and 2.9 instead of 3.7 milliseconds
# for 3,072 rows (MKL, float32, one thread). Forward and backward together take the same time in both layouts.
# Shapes, values and names of the weights do not change.


M = TypeVar("M", bound=nn.Module)


@torch.no_grad()
def place(module: M, device: torch.device) -> M:
    """Move `module` to `device` and return it; on a CPU, store weights with in > out transposed in memory."""
    module = module.to(device)
    if device.type != "cpu":
        return module
    for layer in module.modules():
        if isinstance(layer, nn.Linear) and layer.in_features > layer.out_features:
            layer.weight.data = layer.weight.data.t().contiguous().t()
    return module


# Autocast and the dtype of matrix products.


def autocast(device: torch.device, dtype: Dtype) -> AbstractContextManager[Any]:
    """Return a context in which forwards on `device` compute in `dtype`.

    With float32, the context changes nothing. A 16-bit dtype uses autocast: stored weights keep their dtype.
    Autocast keeps the 16-bit copies of weights that require a gradient until its outermost context ends.
    """
    if dtype is Dtype.float32:
        return nullcontext()
    return torch.autocast(device.type, getattr(torch, dtype.value))


def shared_copies(device: torch.device, dtype: Dtype) -> AbstractContextManager[Any]:
    """Return a context in which forwards under `autocast` share one 16-bit copy of each trained weight.

    The context itself enables no autocast. The weights must not change within the context.
    """
    # Autocast deletes its copies when the number of nested contexts falls to 0, enabled or not.
    return nullcontext() if dtype is Dtype.float32 else torch.autocast(device.type, enabled=False)


def product_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of matrix products of `dtype` inputs: the autocast dtype if active, else `dtype`."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else dtype


# Outputs of a model on a batch of rollouts, without gradient, in micro-batches formed by length.


def infer(
    module: nn.Module,
    rollouts: Rollouts,
    field: str,
    budget: Budget,
    ranks: Ranks,
    dtype: Dtype,
    done: Callable[[int], None] | None = None,
) -> Tensor:
    """Return one output of `module` for all rollouts.

    Each rank computes a part of the rollouts. Every rank returns the result for all rollouts.

    Args:
        module: a module that maps rollouts to `Outputs`.
        rollouts: N prompts with K responses of at most T tokens; all ranks pass the same rollouts.
        field: name of the output: "logprobs", "values" or "rewards".
        budget: the limits of one forward on one rank.
        ranks: the ranks that divide the rollouts; the forwards run on `ranks.device`.
        dtype: dtype of the forwards; a 16-bit dtype uses autocast.
        done: function to call with the number of sequences after each forward; the last forward may repeat
            sequences, so that all ranks make the same number of forwards.

    Returns:
        float32 on the device of `rollouts`: log-probs [N, K, T], values [N, K, T+1] or rewards [N, K].
        Positions beyond the longest response of a micro-batch are 0.
    """
    home = rollouts.response_ids.device
    whole: Tensor | None = None
    # Not inference_mode: weights that ZeRO-3 gathers in inference mode cannot be trained later.
    with torch.no_grad(), autocast(ranks.device, dtype):
        for rows, micro, counts in microbatches(rollouts, budget, ranks.rank, ranks.size):
            out = getattr(module(micro.to(ranks.device)), field).float()
            if whole is None:
                shape = list(rollouts.response_ids.shape[: out.dim()])
                if out.dim() == 3:  # T log-probs, or T+1 values
                    shape[2] += out.shape[2] - micro.response_ids.shape[2]
                whole = torch.zeros(shape, dtype=torch.float32, device=ranks.device)
            rows = moved_to(ranks.device, rows)
            if counts and out.dim() == 3:
                whole[rows, :, : out.shape[2]] = out
            elif counts:
                whole[rows] = out
            if done is not None:
                done(len(rows) * rollouts.response_ids.shape[1])
    assert whole is not None, "infer needs at least one prompt"
    return ranks.sum(whole).to(home)  # one copy, so that micro-batches do not wait for one another


# Copies of modules whose parameters have shapes but no values, for ranks that receive the values later.


Placed = TypeVar("Placed", bound=nn.Module)


def build_on_first(build: Callable[[], Placed], ranks: Ranks) -> Placed:
    """Return the module that `build` returns on the first rank; other ranks get a copy without values.

    The copy has the buffers and attributes of the module, and placeholders as parameters. The other ranks
    read no checkpoint and need no memory for the weights.

    Raises:
        RunError, UserError, Interrupted: on every rank, if `build` raised it on the first rank.
    """
    built: list[Placed] = []

    def describe() -> Placed:
        built.append(build())
        return without_values(built[0])

    described = ranks.from_first(describe)
    return built[0] if ranks.first else described


def without_values(module: Placed) -> Placed:
    """Return a copy of a module with placeholders as parameters; buffers are copied."""
    placeholders = {  # of the same shape and dtype, which store one number
        id(each): nn.Parameter(torch.zeros((), dtype=each.dtype).expand(each.shape), each.requires_grad)
        for each in module.parameters()
    }
    return copy.deepcopy(module, placeholders)


def is_placeholder(parameter: Tensor) -> bool:
    """Return whether a parameter stores less than its shape needs."""
    return parameter.untyped_storage().nbytes() < parameter.nbytes
