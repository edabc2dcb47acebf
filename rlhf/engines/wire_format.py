"""The number format in which ZeRO-3 gathers weights.

Ranks store the weights in float32. With `model.dtype=bfloat16`, autocast rounds the weights of linear layers
to bfloat16 before every use, so ranks may exchange these weights in bfloat16: half of the bytes, and the
forward computes the same numbers. DeepSpeed 0.19.8 then reduces the gradients of these weights in bfloat16,
too, and adds them up in float32. Embeddings, norms, biases and heads that compute in float32 stay float32.

DeepSpeed's own choice, `torch_autocast.lower_precision_safe_modules`, selects all layers of a class. It would
also round embeddings that are tied to the head, heads that compute in float32, and exported weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rlhf.models.modules import LogprobHead, RewardModel, ValueModel, score_head

_ATTRIBUTE = "comm_dtype"  # attribute of a parameter: the dtype in which DeepSpeed sends it


def rounded_weights(module: nn.Module) -> dict[str, Any]:
    """Return the weights that autocast rounds to 16 bits before every use, by name.

    These are the weights of linear layers, except weights that another layer uses as well and the weights of
    heads that compute in float32.
    """
    users = Counter(id(own) for part in module.modules() for own in part.parameters(recurse=False))
    exact = {
        id(own)
        for part in module.modules()
        if isinstance(part, RewardModel | ValueModel)
        for own in score_head(part.model).parameters()
    }
    return {
        f"{name}.weight": part.weight
        for name, part in module.named_modules()
        if (type(part) is nn.Linear or (isinstance(part, LogprobHead) and not part.float32))
        and users[id(part.weight)] == 1
        and id(part.weight) not in exact
    }


def send_rounded(module: nn.Module, dtype: torch.dtype, persistent: int) -> None:
    """Let DeepSpeed send the weights that autocast rounds in a 16-bit `dtype`.

    Args:
        module: a module whose parameters are divided over the ranks.
        dtype: dtype of the autocast.
        persistent: parameters of at most this many elements stay gathered between steps, and stay exact.
    """
    for weight in rounded_weights(module).values():
        if weight.dtype == torch.float32 and weight.ds_numel > persistent:
            setattr(weight, _ATTRIBUTE, dtype)


@contextmanager
def exact(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Gather parameters in the dtype in which the ranks store them, within the block."""
    sent: dict[Any, torch.dtype] = {p: getattr(p, _ATTRIBUTE) for p in parameters if hasattr(p, _ATTRIBUTE)}
    for parameter in sent:
        if parameter.ds_status.name == "AVAILABLE":  # gathered before, in 16 bits
            parameter.partition()
        delattr(parameter, _ATTRIBUTE)
    try:
        yield
    finally:
        for parameter, dtype in sent.items():
            setattr(parameter, _ATTRIBUTE, dtype)
