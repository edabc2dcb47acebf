"""Search for tensors of a model that loading its weights does not restore."""

from __future__ import annotations

import gc
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor


def unregistered(model: torch.nn.Module) -> list[Tensor]:
    """Return the tensors that a model refers to, but that share no memory with a parameter or a buffer.

    The search follows attributes and containers of all objects, except functions, classes and modules of
    Python.
    """
    registered = {x.untyped_storage().data_ptr() for x in (*model.parameters(), *model.buffers())}
    skipped = (type, FunctionType, ModuleType)
    found: dict[int, Any] = {id(model): model}
    todo: list[Any] = [model]
    while todo:
        for each in gc.get_referents(todo.pop()):
            if id(each) not in found and not issubclass(type(each), skipped):
                found[id(each)] = each
                todo.append(each)
    tensors = [each for each in found.values() if type(each) in (Tensor, torch.nn.Parameter)]
    return [x for x in tensors if not x.is_meta and x.untyped_storage().data_ptr() not in registered]
