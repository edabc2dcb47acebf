"""Forwards over rollouts: placement, precision, prompts encoded once, flash attention, compiled blocks."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

from rlhf.config.models import Dtype
from rlhf.core.batch import Budget, Rollouts, microbatches, moved_to
from rlhf.core.errors import UserError
from rlhf.models import folder
from rlhf.processes.ranks import Ranks

# Where and in which precision a model computes, with and without values.


Placed = TypeVar("Placed", bound=nn.Module)

# Memory layout of linear weights on a CPU.
#
# A linear layer multiplies by the transpose of its weight [out, in]. If in > out, as in the second layer of
# an MLP, the CPU's matrix product is faster when the weight is stored transposed in memory. With in = 512 and
# out = 128 the product took 66 instead of 167 microseconds for 64 rows, and 2.9 instead of 3.7 milliseconds
# for 3,072 rows (MKL, float32, one thread). Forward and backward together take the same time in both layouts.
# Shapes, values and names of the weights do not change.


@torch.no_grad()
def place(module: Placed, device: torch.device) -> Placed:
    """Move `module` to `device` and return it; on a CPU, store weights with in > out transposed in memory."""
    module = module.to(device)
    if device.type != "cpu":
        return module
    for layer in module.modules():
        if isinstance(layer, nn.Linear) and layer.in_features > layer.out_features:
            layer.weight.data = layer.weight.data.t().contiguous().t()
    return module


# Autocast and the dtype of matrix products.


def autocast(device: torch.device, dtype: Dtype, cached: bool = True) -> AbstractContextManager[Any]:
    """Return a context in which forwards on `device` compute in `dtype`.

    With float32, the context changes nothing. A 16-bit dtype uses autocast: stored weights keep their dtype.
    Autocast keeps the 16-bit copies of weights that require a gradient until its outermost context ends,
    unless `cached` is False.
    """
    if dtype is Dtype.float32:
        return nullcontext()
    return torch.autocast(device.type, getattr(torch, dtype.value), cache_enabled=cached)


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
    module: Callable[[Rollouts], Any],
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
        module: a module, or a served teacher, that maps rollouts to `Outputs`.
        rollouts: N prompts with K responses of at most T tokens; all ranks pass the same rollouts.
        field: name of the output: "logprobs", "values", "rewards" or "candidates".
        budget: the limits of one forward on one rank.
        ranks: the ranks that divide the rollouts; the forwards run on `ranks.device`.
        dtype: dtype of the forwards; a 16-bit dtype uses autocast.
        done: function to call with the number of sequences after each forward; the last forward may repeat
            sequences, so that all ranks make the same number of forwards.

    Returns:
        float32 on the device of `rollouts`: log-probs [N, K, T], values [N, K, T+1], rewards [N, K] or
        candidates [N, K, T, 1 + 2C]. Positions beyond the longest response of a micro-batch are 0.
    """
    home = rollouts.response_ids.device
    whole: Tensor | None = None
    divided = getattr(module, "whole", False)  # copies of all weights would stay although ranks divide them
    # Not inference_mode: weights that ZeRO-3 gathers in inference mode cannot be trained later.
    with torch.no_grad(), autocast(ranks.device, dtype, cached=not divided):
        for rows, micro, counts in microbatches(rollouts, budget, ranks.rank, ranks.size):
            out = getattr(module(micro.to(ranks.device)), field).float()
            if whole is None:
                shape = [*rollouts.response_ids.shape[: out.dim()], *out.shape[3:]]
                if out.dim() >= 3:  # T log-probs, or T+1 values
                    shape[2] += out.shape[2] - micro.response_ids.shape[2]
                whole = torch.zeros(shape, dtype=torch.float32, device=ranks.device)
            rows = moved_to(ranks.device, rows)
            if counts:
                whole[(rows, slice(None), slice(out.shape[2])) if out.dim() >= 3 else rows] = out
            if done is not None:
                done(len(rows) * rollouts.response_ids.shape[1])
    assert whole is not None, "infer needs at least one prompt"
    return ranks.sum(whole).to(home)  # one copy, so that micro-batches do not wait for one another


# Copies of modules whose parameters have shapes but no values, for ranks that receive the values later.


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


# Faster forwards over rollouts: prompts encoded once, flash attention, compiled blocks.


# Shared-prefix forward: hidden states of K responses, with the prompt encoded once.
#
#     prompts without their last token [N, P-1] --backbone--> keys and values of every block
#                                                                   |
#     last prompt token and responses [N, K, T] -----------------backbone--> states that predict tokens 0 ..
#     T-1
#
# The forward over prompts stops as soon as the last block has its keys and values. Responses that are short
# compared with their prompt share a row of the batch, and so one copy of the prompt's keys. For longer
# responses, each block copies the prompt's keys into every row. Autograd adds up the K gradients of the
# prompt's keys and values.
#
# Log-probs agree with the plain forward over rows of prompt and response to 2e-6, gradients to 5e-7
# (relative). The work on prompt tokens falls by a factor of K. With K = 1 nothing is shared, but the last
# block skips most of its work on the prompt. In a shallow model, this saves more time than the second forward
# costs.


KeysValues = tuple[Tensor, Tensor]  # of a layer, both [B, heads, S, head size]

_OLD_NAME = "past_key_values"
_names: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()  # of the argument of forward for the cache
ALIGNED = 16  # attention on a GPU copies a mask unless its row stride is a multiple of this many elements


def encode(
    backbone: PreTrainedModel,
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    response_ids: Tensor,
    real: Tensor,
    shared_prefix: bool,
    last: bool,
    whole: bool = False,
    always: bool = False,
) -> Tensor:
    """Return the hidden states [N, K, T, H] that predict the response tokens.

    Position t predicts response token t; position 0 is the last prompt token's state. States of padding
    positions are meaningless, and token ids at padding have no influence.

    Args:
        backbone: the model without its head (`model.base_model`).
        prompt_ids: [N, P] int64, padded left.
        prompt_mask: [N, P] bool.
        response_ids: [N, K, T] int64, padded right.
        real: [N, K, T] bool, False at padding.
        shared_prefix: whether each prompt may be encoded once for its K responses.
        last: whether to return also the state after the last token: [N, K, T+1, H], where position t is the
            state after t response tokens.
        whole: True if no forward may stop early, because hooks of the model run at the end of a forward.
        always: True if prompts are encoded once even where this does not save time.

    Raises:
        NoSharedPrefix: `shared_prefix` does not work with the cache of this model.
    """
    n, k, t = response_ids.shape
    inputs = t if last else t - 1  # without `last`, the last token is not fed to the model
    prompts = prompt_ids.masked_fill(~prompt_mask, 0)
    responses = response_ids.masked_fill(~real, 0)[..., :inputs]
    real = real[..., :inputs]
    apart = folder.prompt_apart(
        k,
        prompts.numel(),
        layers=getattr(backbone.config, "num_hidden_layers", math.inf),
        hidden=getattr(backbone.config, "hidden_size", math.inf),
        gpu=prompts.device.type == "cuda",
        whole=whole,
    )
    if shared_prefix and (apart or always) and prompts.shape[1] > 1:
        return _encode_shared(backbone, prompts, prompt_mask, responses, real, whole)
    rows = torch.cat([prompts.repeat_interleave(k, 0), responses.flatten(0, 1)], 1)
    mask = torch.cat([prompt_mask.repeat_interleave(k, 0), real.flatten(0, 1)], 1)
    ids, _ = padded_right(rows, mask)
    states = backbone(input_ids=ids, use_cache=False).last_hidden_state  # no mask: padding is last
    end = prompt_mask.sum(1).repeat_interleave(k, 0)[:, None] - 1
    place = (end + torch.arange(inputs + 1, device=ids.device)).clamp_(min=0)  # 0: row without prompt
    chosen = states.gather(1, place[..., None].expand(-1, -1, states.shape[2]))
    return chosen.unflatten(0, (n, k))


def _encode_shared(
    backbone: PreTrainedModel,
    prompts: Tensor,
    prompt_mask: Tensor,
    responses: Tensor,
    real: Tensor,
    whole: bool,
) -> Tensor:
    """Return the hidden states [N, K, 1+S, H] of the last prompt token and the response tokens.

    Args:
        backbone: the model without its head.
        prompts: [N, P] int64, padded left.
        prompt_mask: [N, P] bool.
        responses: [N, K, S] int64, padded right.
        real: [N, K, S] bool, True at real response tokens.
        whole: True if no forward may stop early.

    Raises:
        NoSharedPrefix: the cache of this model cannot be repeated for the responses.
    """
    like = DynamicCache(config=backbone.config)
    if not plain(like):
        kinds = {type(layer).__name__ for layer in like.layers} - {DynamicLayer.__name__}
        raise NoSharedPrefix(backbone.config, ", ".join(sorted(kinds)))
    cache = _PromptCache(like, whole)
    ids, known = padded_right(prompts[:, :-1], prompt_mask[:, :-1])
    with suppress(_Filled):
        backbone(  # no mask: attention is causal and padding is last
            input_ids=ids,
            position_ids=torch.arange(ids.shape[1], device=ids.device).expand_as(ids),
            **cache_argument(backbone, cache),
            use_cache=True,
        )
    if any(layer.get_seq_length() != ids.shape[1] for layer in cache.kept):
        raise NoSharedPrefix(backbone.config, "none of them")
    n, k, _ = responses.shape
    end, seen = prompts[:, None, -1:].expand(-1, k, -1), prompt_mask[:, None, -1:].expand(-1, k, -1)
    tokens, real = torch.cat([end, responses], 2), torch.cat([seen, real], 2)
    place = known.sum(1)[:, None, None] + positions(real)
    group = folder.in_forward(k, known.shape[1], real.shape[2]) if takes_any_mask(backbone) else 1
    rows = (n * k // group, group * real.shape[2])
    states = backbone(
        input_ids=tokens.reshape(rows),
        attention_mask=_mask_of_rows(
            backbone, known.repeat_interleave(k // group, 0), real.reshape(rows), group
        ),
        position_ids=place.reshape(rows),
        **cache_argument(backbone, Cache(layers=[_ResponseLayer(layer, k // group) for layer in cache.kept])),
        use_cache=True,
    ).last_hidden_state
    return states.view(*tokens.shape, -1)


def cache_argument(model: nn.Module, cache: Cache) -> dict[str, Cache]:
    """Return the cache by the name that forward has for it: "cache" from transformers 5.24 on.

    Each model is asked once. Behind a forward of any arguments, the first module that names it decides.
    """
    if model not in _names:
        forwards = (inspect.signature(module.forward).parameters for module in model.modules())
        known = (name for named in forwards for name in ("cache", _OLD_NAME) if name in named)
        _names[model] = next(known, _OLD_NAME)
    return {_names[model]: cache}


def padded_right(ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return tokens and mask [N, P] with the padding moved behind the real tokens of each row."""
    order = torch.argsort((~mask).int(), dim=1, stable=True)
    return ids.gather(1, order), mask.gather(1, order)


def takes_any_mask(model: PreTrainedModel) -> bool:
    """Return True if the model passes a mask [B, 1, Q, S] to attention unchanged."""
    return model.is_backend_compatible() and model.config._attn_implementation == "sdpa"


def _mask_of_rows(model: PreTrainedModel, known: Tensor, real: Tensor, group: int) -> Tensor:
    """Return the attention mask of rows that contain several samples of one prompt.

    A token attends to the prompt, to the earlier tokens of its own sample, and to itself.

    Args:
        model: the model that runs the rows.
        known: [B, P] bool, True at real tokens of the prompts.
        real: [B, G*S] bool, True at real tokens of the samples.
        group: samples per row, G.

    Returns:
        An additive mask [B, 1, G*S, P+G*S] (see `additive`). For a model that builds the additive mask
        itself, the bool mask [B, P+S] of real tokens (G is then 1).
    """
    if not takes_any_mask(model):
        return torch.cat([known, real], 1)
    length = real.shape[1] // group
    causal = torch.ones(length, length, dtype=torch.bool, device=real.device).tril()
    own = torch.block_diag(*[causal] * group).expand(len(real), -1, -1)
    return additive(model, torch.cat([known[:, None].expand(-1, real.shape[1], -1), own], 2)[:, None])


def additive(model: PreTrainedModel, seen: Tensor) -> Tensor:
    """Return the bool mask `seen` as an additive mask in the dtype of matrix products: 0 if True, else -inf.

    Given a bool mask, sdpa would convert the mask in every layer, and autograd would keep every copy.
    """
    dtype = product_dtype(seen.device, model.dtype)
    *others, width = seen.shape
    stride = -(-width // ALIGNED) * ALIGNED if seen.device.type == "cuda" else width
    mask = torch.zeros(*others, stride, dtype=dtype, device=seen.device)[..., :width]
    return mask.masked_fill_(~seen, -torch.inf)


class _Filled(Exception):
    """An exception that ends a forward over prompts as soon as the cache has the keys and values."""


class _PromptCache(Cache):
    """A cache that stores the keys and values of prompts.

    Unless `whole` is True, the cache ends the forward by raising `_Filled` as soon as all layers have keys
    and values, because the output of the last block on the prompt is not used.

    Args:
        like: an empty cache of the model; the new cache has as many layers.
        whole: True if the forward must not stop early.
    """

    def __init__(self, like: DynamicCache, whole: bool) -> None:
        self.kept = [_PromptLayer() for _ in like.layers]
        super().__init__(layers=[*self.kept])
        self.whole = whole

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store and return the keys and values [N, heads, P, head size] of a layer.

        Raises:
            Filled: all layers have keys and values, so the forward can end.
        """
        again = self.kept[layer_idx].is_initialized  # True in the backward pass, which needs the output
        states = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if not (again or self.whole) and all(layer.is_initialized for layer in self.kept):
            raise _Filled
        return states


class _PromptLayer(DynamicLayer):
    """A cache layer that stores the keys and values of prompts at its first update.

    Later updates, by blocks that are recomputed for the backward pass, do not change the layer.
    """

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> KeysValues:
        """Return the given keys and values [N, heads, P, head size]; the first call also stores them."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states, value_states
        return key_states, value_states


class _ResponseLayer(DynamicLayer):
    """A cache layer that puts the keys and values of the prompt before the keys and values of the responses.

    The keys and values of the responses are not stored.

    Args:
        prompt: the layer with the keys and values of N prompts.
        rows: rows of responses per prompt.
    """

    def __init__(self, prompt: _PromptLayer, rows: int) -> None:
        super().__init__()
        self.keys, self.values, self.is_initialized = prompt.keys, prompt.values, True
        self.rows = rows

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> KeysValues:
        """Return keys and values [N*rows, heads, P+S, head size] of prompts and responses.

        Args:
            key_states: keys of the responses [N*rows, heads, S, head size].
            value_states: values of the responses [N*rows, heads, S, head size].
            args: not used.
            kwargs: not used.
        """
        assert self.keys is not None and self.values is not None
        return self._behind(self.keys, key_states), self._behind(self.values, value_states)

    def _behind(self, prompts: Tensor, responses: Tensor) -> Tensor:
        """Return `prompts` [N, heads, P, size], repeated, then `responses` [N*rows, heads, S, size]."""
        repeated = prompts[:, None].expand(-1, self.rows, -1, -1, -1)
        return torch.cat([repeated, responses.unflatten(0, (-1, self.rows))], -2).flatten(0, 1)


def checkpoint_blocks(model: PreTrainedModel) -> None:
    """Turn on gradient checkpointing: blocks store only their inputs; the backward pass recomputes the rest.

    The switch of transformers is not used, because the switch disables the cache and so the shared prefix.
    Without dropout a recomputed block gives the same output, so gradients do not change
    (Chen et al., arXiv 1604.06174).

    Raises:
        UserError: no module of the model is a `GradientCheckpointingLayer`.
    """
    blocks = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not blocks:
        raise UserError(
            f"model.gradient_checkpointing must be false for a {model.config.model_type} model (its code "
            "does not mark blocks that can be recomputed), got true; set model.gradient_checkpointing=false"
        )
    for block in blocks:
        setattr(block, "forward", partial(_run_again, block.forward))  # noqa: B010 (mypy: it is a method)


def _run_again(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return `forward(*args, **kwargs)`; if gradients are enabled, store only the inputs."""
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)

    def recomputed(*inputs: Any) -> Any:
        try:
            return forward(*inputs, **kwargs)
        except _Filled as filled:  # an exception must not pass through `checkpoint`
            return filled

    output = checkpoint(recomputed, *args, use_reentrant=False, preserve_rng_state=False)
    if isinstance(output, _Filled):
        raise output
    return output


def positions(mask: Tensor) -> Tensor:
    """Return the position [B, S] of each token: the number of real tokens (`mask` [B, S]) before."""
    counts = mask.long()
    return counts.cumsum(-1) - counts


def plain(cache: DynamicCache) -> bool:
    """Return True if every layer of the cache stores all keys and values (no window, no recurrent state)."""
    return all(type(layer) is DynamicLayer for layer in cache.layers)


class NoSharedPrefix(UserError):
    """An error: the cache of a model cannot be repeated for the responses of a prompt.

    Args:
        config: the config of the model.
        cache: what the cache has instead of all keys and values.
    """

    def __init__(self, config: PreTrainedConfig, cache: str) -> None:
        self.fault = f"only all keys and values of a prompt can be repeated, and the cache has {cache}"
        super().__init__(
            f"model.shared_prefix must be false for a {config.model_type} model ({self.fault}), got true; "
            "set model.shared_prefix=false"
        )


# Flash attention by the packages that transformers uses: which one is installed, and which models use it.
#
# These kernels take no mask. For a batch with padding, transformers removes the padding of queries and keys
# (`_upad_input` in transformers) and attends from the last queries to all keys of a row, so padding may also
# be between a prompt and its response. A row then contains one sample (`rlhf.models.forward`).


def installed(device: torch.device, dtype: Dtype) -> str | None:
    """Return the newest installed flash attention for forwards in `dtype` on `device`, or None."""
    if device.type != "cuda" or dtype is Dtype.float32:
        return None
    if is_flash_attn_3_available():
        return "flash_attention_3"
    return "flash_attention_2" if is_flash_attn_2_available() else None


@contextmanager
def attention_of(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Return a context in which `model` uses the attention function `name`."""
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def with_sdpa(model: PreTrainedModel) -> AbstractContextManager[None]:
    """Return a context in which a model with flash attention uses sdpa instead, which takes any mask."""
    flash = str(model.config._attn_implementation).startswith("flash_attention")
    return attention_of(model, "sdpa") if flash else nullcontext()


# Compilation of the blocks of a Hugging Face model with torch.compile, for forwards over rollouts.
#
#     with CompiledBlocks(model).used():      # the blocks run compiled code
#         model(...)
#     model.generate(...)                     # the blocks run as usual
#
# The blocks of a model share their code, so a block is compiled once, and not once per block. Code that reads
# the number of its layer would be compiled for every layer. A block reads this number only to find its layer
# in the cache, so compiled blocks get the layer of the cache instead of the whole cache. Lengths and batch
# sizes are dynamic, the numbers of features are not.
#
# Sampling, saving and hooks never see compiled code: outside the context, the model has its own forwards.


_Forward = Callable[..., Any]

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
            recomputed in the backward pass (`rlhf.models.forward.checkpoint_blocks`), the recomputed
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
        self.blocks = [(block, _outermost(block.forward, place)) for place, block in enumerate(blocks)]

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


def _outermost(forward: _Forward, place: int) -> _Forward:
    """Return the compiled form of a block's forward; checkpointing stays outside the compiled code."""
    if not isinstance(forward, partial):
        return _with_layer(forward, place)
    (inner,) = forward.args  # of `run_again`
    return partial(forward.func, _with_layer(inner, place))


def _with_layer(forward: _Forward, place: int) -> _Forward:
    """Return the compiled forward of the block number `place`, which gets its layer of the cache only."""
    compiled = torch.compile(forward, dynamic=True)

    def run(*args: Any, **kwargs: Any) -> Any:
        _fix_features(*args, *(kwargs.get("position_embeddings") or ()))
        name = next((name for name, value in kwargs.items() if isinstance(value, Cache)), None)
        if name is None:
            return compiled(*args, **kwargs)
        layers = kwargs[name].layers
        if not isinstance(layers[place], _PromptLayer):
            return compiled(*args, **{**kwargs, name: layers[place]})
        if place == len(layers) - 1:  # this forward ends inside the last block, by an exception
            return forward(*args, **kwargs)
        # An empty layer, also if the block is recomputed in the backward pass: the same code must run again.
        layer = _PromptLayer()
        output = compiled(*args, **{**kwargs, name: layer})
        layers[place].update(layer.keys, layer.values)
        return output

    return run


def _fix_features(*states: Any) -> None:
    """Let the compiler know the last size of states [..., H]: code for one number of features is faster."""
    for each in states:
        if isinstance(each, Tensor) and each.is_floating_point():
            torch._dynamo.mark_static(each, each.ndim - 1)


def raise_errors(raised: bool) -> None:
    """Raise errors of the compiler if `raised` is True; otherwise log them and run the block as usual."""
    torch._dynamo.config.suppress_errors = not raised
