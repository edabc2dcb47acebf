"""Copies of modules whose parameters have shapes but no values, for ranks that receive the values later."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from rlhf.processes.ranks import Ranks

M = TypeVar("M", bound=nn.Module)


def build_on_first(build: Callable[[], M], ranks: Ranks) -> M:
    """Return the module that `build` returns on the first rank; other ranks get a copy without values.

    The copy has the buffers and attributes of the module, and placeholders as parameters. The other ranks
    read no checkpoint and need no memory for the weights.

    Raises:
        RunError, UserError, Interrupted: on every rank, if `build` raised it on the first rank.
    """
    built: list[M] = []

    def describe() -> M:
        built.append(build())
        return without_values(built[0])

    described = ranks.from_first(describe)
    return built[0] if ranks.first else described


def without_values(module: M) -> M:
    """Return a copy of a module with placeholders as parameters; buffers are copied."""
    placeholders = {id(each): _placeholder(each) for each in module.parameters()}
    return copy.deepcopy(module, placeholders)


def _placeholder(parameter: nn.Parameter) -> nn.Parameter:
    """Return a parameter with the shape and dtype of `parameter` that stores one number."""
    return nn.Parameter(
        torch.zeros((), dtype=parameter.dtype).expand(parameter.shape), parameter.requires_grad
    )


def is_placeholder(parameter: Tensor) -> bool:
    """Return whether a parameter stores less than its shape needs."""
    return parameter.untyped_storage().nbytes() < parameter.nbytes
