"""Compilation of the blocks of a Hugging Face model with torch.compile, for forwards over rollouts.

    with CompiledBlocks(model).used():      # the blocks run compiled code
        model(...)
    model.generate(...)                     # the blocks run as usual

The blocks of a model share their code, so a block is compiled once, and not once per block. Code that reads
the number of its layer would be compiled for every layer. A block reads this number only to find its layer in
the cache, so compiled blocks get the layer of the cache instead of the whole cache. Lengths and batch sizes
are dynamic, the numbers of features are not.

Sampling, saving and hooks never see compiled code: outside the context, the model has its own forwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D

from rlhf.models.precision import product_dtype
from rlhf.models.shared_prefix import PromptLayer

Forward = Callable[..., Any]

# Graphs of a block: with and without gradients, with and without a cache, for batches of 1 and of more
# sequences, of models with several dtypes. Without a graph, a block runs as usual.
_GRAPHS = 32


_COMPILED: WeakKeyDictionary[PreTrainedModel, CompiledBlocks] = WeakKeyDictionary()


class NoBlocks(RuntimeError):
    """An error: a model has no blocks that can be compiled."""


class CompiledBlocks:
    """The blocks of a model with a compiled forward each, which is compiled at its first use.

    Args:
        model: a model whose blocks are instances of `GradientCheckpointingLayer`. If the blocks are
            recomputed in the backward pass (`rlhf.models.shared_prefix.checkpoint_blocks`), the recomputed
            forward is compiled too.

    Raises:
        NoBlocks: the model has no such blocks.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        torch._dynamo.config.recompile_limit = _GRAPHS
        torch.fx.experimental._config.use_duck_shape = False  # equal sizes may be a coincidence
        blocks = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
        if not blocks:
            raise NoBlocks(f"the code of {model.config.model_type} models does not mark blocks")
        self.blocks = [(block, outermost(block.forward, place)) for place, block in enumerate(blocks)]

    @contextmanager
    def used(self) -> Iterator[None]:
        """Return a context in which the blocks of the model run compiled code."""
        own = [vars(block).get("forward") for block, _ in self.blocks]
        for block, forward in self.blocks:
            vars(block)["forward"] = forward
        try:
            yield
        finally:
            for (block, _), before in zip(self.blocks, own, strict=True):
                if before is None:
                    del vars(block)["forward"]
                else:
                    vars(block)["forward"] = before


def compiled_blocks(model: PreTrainedModel) -> CompiledBlocks:
    """Return the compiled blocks of a model, the same object in every call.

    Raises:
        NoBlocks: the model has no blocks that can be compiled.
    """
    if model not in _COMPILED:
        _COMPILED[model] = CompiledBlocks(model)
    return _COMPILED[model]


@contextmanager
def converted_weights(model: PreTrainedModel) -> Iterator[None]:
    """Return a context in which the linear layers of the blocks have weights in the dtype of autocast.

    Outside of compiled code, autocast keeps the converted weights. Compiled code would convert them at every
    call, which takes a decoding step longer than its products. The context is for forwards without gradients,
    and the weights must not change within it.
    """
    own = [
        (module, name, parameter)
        for block in model.modules()
        if isinstance(block, GradientCheckpointingLayer)
        for module in block.modules()
        if isinstance(module, (torch.nn.Linear, Conv1D))
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.dtype != product_dtype(parameter.device, parameter.dtype)
    ]
    for module, name, parameter in own:  # an attribute of the object hides the parameter of the same name
        vars(module)[name] = parameter.detach().to(product_dtype(parameter.device, parameter.dtype))
    try:
        yield
    finally:
        for module, name, _ in own:
            del vars(module)[name]


def outermost(forward: Forward, place: int) -> Forward:
    """Return the compiled form of a block's forward; checkpointing stays outside the compiled code."""
    if not isinstance(forward, partial):
        return _with_layer(forward, place)
    (inner,) = forward.args  # of `run_again`
    return partial(forward.func, _with_layer(inner, place))


def _with_layer(forward: Forward, place: int) -> Forward:
    """Return the compiled forward of the block number `place`, which gets its layer of the cache only."""
    compiled = torch.compile(forward, dynamic=True)

    def run(*args: Any, **kwargs: Any) -> Any:
        fix_features(*args, *(kwargs.get("position_embeddings") or ()))
        name = next((name for name, value in kwargs.items() if isinstance(value, Cache)), None)
        if name is None:
            return compiled(*args, **kwargs)
        layers = kwargs[name].layers
        if not isinstance(layers[place], PromptLayer):
            return compiled(*args, **{**kwargs, name: layers[place]})
        if place == len(layers) - 1:  # this forward ends inside the last block, by an exception
            return forward(*args, **kwargs)
        # An empty layer, also if the block is recomputed in the backward pass: the same code must run again.
        layer = PromptLayer()
        output = compiled(*args, **{**kwargs, name: layer})
        layers[place].update(layer.keys, layer.values)
        return output

    return run


def fix_features(*states: Any) -> None:
    """Let the compiler know the last size of states [..., H]: code for one number of features is faster."""
    for each in states:
        if isinstance(each, Tensor) and each.is_floating_point():
            torch._dynamo.mark_static(each, each.ndim - 1)


def raise_errors(raised: bool) -> None:
    """Raise errors of the compiler if `raised` is True; otherwise log them and run the block as usual."""
    torch._dynamo.config.suppress_errors = not raised
