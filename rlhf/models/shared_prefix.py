"""Hidden states at response positions: the prompt is encoded once for its K responses.

    prompts without their last token [N, P-1] --backbone--> keys and values, where the last block is left
                                                                  |
    last prompt token and responses [N, K, T] -----------------backbone--> states that predict tokens 0 .. T-1

Responses of a prompt share a row of the batch, and so one copy of the prompt's keys, as long as they are
short beside it; beyond that its keys are repeated, block by block. Autograd adds up the K gradients that
arrive at them. Log-probs agree with the plain forward over concatenated rows to 2e-6 and gradients to 5e-7
relative; the work on prompt tokens falls by K. With K = 1 nothing is shared, but the last block still leaves
out most of its work on the prompt, which two passes are worth in a model of few blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer
from transformers.modeling_layers import GradientCheckpointingLayer

from rlhf.core.errors import UserError
from rlhf.models import sharing_rules as sharing
from rlhf.models.precision import product_dtype

ALIGNED = 16  # rows of a mask that lie a multiple of this apart are not copied by attention on a GPU


def encode(
    backbone: PreTrainedModel,
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    response_ids: Tensor,
    response_mask: Tensor,
    shared_prefix: bool,
    last: bool,
    whole: bool = False,
) -> Tensor:
    """Hidden states around the response tokens: [N, K, T, H], position t PREDICTS response token t.

    Position 0 is the last prompt token's state. With `last` there is one position more, [N, K, T+1, H]:
    position t is then the state after t response tokens. `backbone` is the model without its head
    (`model.base_model`); prompt_ids and prompt_mask [N, P] are padded left, response_ids and response_mask
    [N, K, T] right. What padding holds has no influence. States of padding positions are there, and mean
    nothing. `whole`: no forward may be left before its end, which hooks in the model wait for.
    """
    n, k, t = response_ids.shape
    inputs = t if last else t - 1  # the last token's own state predicts nothing
    prompts = prompt_ids.masked_fill(~prompt_mask, 0)
    responses = response_ids.masked_fill(~response_mask, 0)[..., :inputs]
    real = response_mask[..., :inputs]
    apart = sharing.prompt_apart(
        k,
        prompts.numel(),
        layers=getattr(backbone.config, "num_hidden_layers", math.inf),
        hidden=getattr(backbone.config, "hidden_size", math.inf),
        gpu=prompts.device.type == "cuda",
        whole=whole,
    )
    if shared_prefix and apart and prompts.shape[1] > 1:
        return encode_shared(backbone, prompts, prompt_mask, responses, real, whole)
    rows = torch.cat([prompts.repeat_interleave(k, 0), responses.flatten(0, 1)], 1)
    mask = torch.cat([prompt_mask.repeat_interleave(k, 0), real.flatten(0, 1)], 1)
    ids, _ = padded_right(rows, mask)
    states = backbone(input_ids=ids, use_cache=False).last_hidden_state  # no token comes after padding
    end = prompt_mask.sum(1).repeat_interleave(k, 0)[:, None] - 1
    place = (end + torch.arange(inputs + 1, device=ids.device)).clamp_(min=0)  # no prompt: a row of padding
    found = states.gather(1, place[..., None].expand(-1, -1, states.shape[2]))
    return found.unflatten(0, (n, k))


def encode_shared(
    backbone: PreTrainedModel,
    prompts: Tensor,
    prompt_mask: Tensor,
    responses: Tensor,
    real: Tensor,
    whole: bool,
) -> Tensor:
    """States [N, K, 1+S, H] of the last prompt token and of responses [N, K, S], which are `real`."""
    if problem := shared_prefix_problem(backbone.config):
        raise UserError(problem)
    cache = PromptCache(DynamicCache(config=backbone.config), whole)
    ids, known = padded_right(prompts[:, :-1], prompt_mask[:, :-1])
    with suppress(Filled):
        backbone(  # no token comes after padding, so attention is causal and needs no mask
            input_ids=ids,
            position_ids=torch.arange(ids.shape[1], device=ids.device).expand_as(ids),
            past_key_values=cache,
            use_cache=True,
        )
    if any(layer.get_seq_length() != ids.shape[1] for layer in cache.kept):
        raise UserError(refused(backbone.config, "none here"))
    n, k, _ = responses.shape
    end, seen = prompts[:, None, -1:].expand(-1, k, -1), prompt_mask[:, None, -1:].expand(-1, k, -1)
    tokens, real = torch.cat([end, responses], 2), torch.cat([seen, real], 2)
    place = known.sum(1)[:, None, None] + positions(real)
    group = samples_a_row(backbone, k, known.shape[1], real.shape[2])
    rows = (n * k // group, group * real.shape[2])
    states = backbone(
        input_ids=tokens.reshape(rows),
        attention_mask=mask_of_rows(
            backbone, known.repeat_interleave(k // group, 0), real.reshape(rows), group
        ),
        position_ids=place.reshape(rows),
        past_key_values=Cache(layers=[ResponseLayer(layer, k // group) for layer in cache.kept]),
        use_cache=True,
    ).last_hidden_state
    return states.view(*tokens.shape, -1)


def padded_right(ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens [N, P] and their mask with the padding behind the tokens, whose order stays."""
    order = torch.argsort((~mask).int(), dim=1, stable=True)
    return ids.gather(1, order), mask.gather(1, order)


def samples_a_row(backbone: PreTrainedModel, samples: int, prompt: int, response: int) -> int:
    """How many of a prompt's samples go into one row of the batch, and so read one copy of its keys."""
    return sharing.in_forward(samples, prompt, response) if takes_any_mask(backbone) else 1


def takes_any_mask(model: PreTrainedModel) -> bool:
    """Whether the model hands a mask [B, 1, Q, S] to attention as it is."""
    return model.is_backend_compatible() and model.config._attn_implementation == "sdpa"


def mask_of_rows(model: PreTrainedModel, known: Tensor, real: Tensor, group: int) -> Tensor:
    """What tokens of rows `real` [B, G*S] attend to, behind prompts `known` [B, P], G samples a row: the
    prompt, and the tokens before of the same sample.

    As `additive` gives it, [B, 1, G*S, P+G*S], or [B, P+S] for a model that makes more of that itself.
    """
    if not takes_any_mask(model):
        return torch.cat([known, real], 1)
    length = real.shape[1] // group
    causal = torch.ones(length, length, dtype=torch.bool, device=real.device).tril()
    own = torch.block_diag(*[causal] * group).expand(len(real), -1, -1)
    return additive(model, torch.cat([known[:, None].expand(-1, real.shape[1], -1), own], 2)[:, None])


def additive(model: PreTrainedModel, seen: Tensor) -> Tensor:
    """A mask `seen` as attention adds it, 0 or -inf in the dtype of its products.

    From a bool mask sdpa makes it in every layer, where autograd then keeps it.
    """
    dtype = product_dtype(seen.device, model.dtype)
    *others, width = seen.shape
    room = -(-width // ALIGNED) * ALIGNED if seen.device.type == "cuda" else width
    mask = torch.zeros(*others, room, dtype=dtype, device=seen.device)[..., :width]
    return mask.masked_fill_(~seen, -torch.inf)


class Filled(Exception):
    """The cache has what the forward was made for."""


class PromptCache(Cache):
    """Keeps the keys and values of prompts.

    Unless the forward is to be `whole`, it is left (`Filled`) as soon as all layers have some: nobody reads
    what the last block makes of the prompt beyond them.
    """

    def __init__(self, like: DynamicCache, whole: bool) -> None:
        self.kept = [PromptLayer() for _ in like.layers]
        super().__init__(layers=[*self.kept])
        self.whole = whole

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Keys and values [N, heads, P, head size] of a layer as they are."""
        again = self.kept[layer_idx].is_initialized  # a block that is run again is not left, but ends
        found = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if not (again or self.whole) and all(layer.is_initialized for layer in self.kept):
            raise Filled
        return found


class PromptLayer(DynamicLayer):
    """Keeps the keys and values of prompts, as they come first: a block that is run again changes nothing."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Keys and values [N, heads, P, head size] as they are."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states, value_states
        return key_states, value_states


class ResponseLayer(DynamicLayer):
    """Puts the keys and values of `prompt` before those of its responses, in so many `rows`; keeps none."""

    def __init__(self, prompt: PromptLayer, rows: int) -> None:
        super().__init__()
        self.keys, self.values, self.is_initialized = prompt.keys, prompt.values, True
        self.rows = rows

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Keys and values [N*rows, heads, P+S, head size] of both, given those of responses."""
        assert self.keys is not None and self.values is not None
        return self.behind(self.keys, key_states), self.behind(self.values, value_states)

    def behind(self, prompts: Tensor, responses: Tensor) -> Tensor:
        """`responses` [N*rows, heads, S, size] behind `prompts` [N, heads, P, size], each in one copy."""
        shape = (len(prompts), self.rows)
        repeated = prompts[:, None].expand(-1, self.rows, -1, -1, -1)
        return torch.cat([repeated, responses.unflatten(0, shape)], -2).flatten(0, 1)


def checkpoint_blocks(model: PreTrainedModel) -> None:
    """Have the blocks of `model` keep their inputs alone for the backward pass, which runs them again.

    Not with the switch of transformers: that takes the cache away, and so the shared prefix. Without dropout
    a block gives the same again, so gradients are the same (Chen et al., arXiv 1604.06174).

    Raises:
        UserError: transformers does not know which are its blocks.
    """
    blocks = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not blocks:
        raise UserError(
            f"model.gradient_checkpointing must be false for a {model.config.model_type} model (its code "
            "does not say which blocks can be run again), got true; set model.gradient_checkpointing=false"
        )
    for block in blocks:
        setattr(block, "forward", partial(run_again, block.forward))  # noqa: B010 (mypy: it is a method)


def run_again(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`forward` of these inputs, which keeps them alone for the backward pass."""
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)

    def again(*inputs: Any) -> Any:
        try:
            return forward(*inputs, **kwargs)
        except Filled as filled:  # it must not pass through `checkpoint`
            return filled

    found = checkpoint(again, *args, use_reentrant=False, preserve_rng_state=False)
    if isinstance(found, Filled):
        raise found
    return found


def positions(mask: Tensor) -> Tensor:
    """Positions [B, S] of the tokens of `mask` [B, S]: how many real tokens come before."""
    counts = mask.long()
    return counts.cumsum(-1) - counts


def plain(cache: DynamicCache) -> bool:
    """Whether every layer keeps the keys and values of all tokens: no window, no recurrent state."""
    return all(type(layer) is DynamicLayer for layer in cache.layers)


def shared_prefix_problem(config: PreTrainedConfig) -> str | None:
    """What forbids `model.shared_prefix` for a model with this config, or None."""
    kinds = {type(layer).__name__ for layer in DynamicCache(config=config).layers} - {DynamicLayer.__name__}
    return refused(config, f"a cache with {', '.join(sorted(kinds))}") if kinds else None


def refused(config: PreTrainedConfig, kind: str) -> str:
    """The error for a model with a cache of another `kind`."""
    return (
        f"model.shared_prefix must be false for a {config.model_type} model (only a cache of all keys and "
        f"values can be repeated for the responses of a prompt; this model has {kind}), got true; set "
        "model.shared_prefix=false"
    )
