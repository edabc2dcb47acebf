"""The forward that encodes a prompt once for all its samples, and gradient checkpointing of blocks."""

import inspect
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from transformers import DynamicCache, MistralConfig, MistralForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from rlhf.config.models import LoRAConfig
from rlhf.core.batch import trim
from rlhf.core.errors import UserError
from rlhf.memory.uses import Tokens
from rlhf.models import folder
from rlhf.models import forward as forward
from rlhf.models.forward import cache_argument, checkpoint_blocks, encode
from rlhf.models.modules import Policy, adapt
from tests.tiny_models import KINDS, tiny_lm, tiny_rollouts


def states(model, batch, shared_prefix, last=False):
    return encode(
        model.base_model,
        batch.prompt_ids,
        batch.prompt_mask,
        batch.response_ids,
        batch.response_mask,
        shared_prefix,
        last,
    )


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad])


def kept_bytes(model, forward):
    """Return the bytes saved for the backward pass, without parameters; each storage counts once."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def pack(x):
        kept[x.untyped_storage().data_ptr()] = x
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        out = forward()
    assert out.requires_grad
    return sum(x.untyped_storage().nbytes() for pointer, x in kept.items() if pointer not in own)


@pytest.mark.parametrize("samples", [1, 2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_shared_prefix_equals_the_plain_forward_in_value_and_gradient(kind, samples):
    batch = tiny_rollouts(samples=samples)
    found = {}
    for shared in (False, True):
        policy = Policy(tiny_lm(kind), temperature=0.7, shared_prefix=shared)
        logprobs = policy(batch).logprobs
        weights = torch.linspace(-1, 1, logprobs.numel()).view_as(logprobs)
        found[shared] = logprobs.detach(), gradients(policy, (weights * logprobs).sum())
    torch.testing.assert_close(found[True][0], found[False][0], rtol=0, atol=1e-4)
    difference = (found[True][1] - found[False][1]).norm() / found[False][1].norm()
    assert difference < 1e-4


@pytest.mark.parametrize("shared_prefix", [False, True])
@pytest.mark.parametrize("content", [0, -100, 10**6])
def test_token_ids_at_padding_have_no_influence(shared_prefix, content):
    policy, batch = Policy(tiny_lm(), 0.7, shared_prefix), tiny_rollouts()
    expected = policy(batch).logprobs
    batch.prompt_ids = batch.prompt_ids.masked_fill(~batch.prompt_mask, content)
    batch.response_ids = batch.response_ids.masked_fill(~batch.response_mask, content)
    assert torch.equal(policy(batch).logprobs, expected)


@pytest.mark.parametrize("shared_prefix", [False, True])
def test_more_padding_changes_nothing(shared_prefix):
    policy, batch = Policy(tiny_lm(), 0.7, shared_prefix), tiny_rollouts()
    rows = torch.tensor([3])  # shorter than the first
    with torch.no_grad():
        padded, trimmed = policy(batch.select(rows)).logprobs, policy(trim(batch.select(rows))).logprobs
    assert trimmed.shape != padded.shape
    torch.testing.assert_close(trimmed, padded[..., : trimmed.shape[-1]], rtol=0, atol=1e-5)


@pytest.mark.parametrize("shared_prefix", [False, True])
def test_a_response_of_one_token_is_predicted_by_the_prompt_alone(shared_prefix):
    policy, batch = Policy(tiny_lm(), 0.7, shared_prefix), tiny_rollouts()
    expected = policy(batch).logprobs[..., :1]
    batch.response_ids, batch.response_mask = batch.response_ids[..., :1], batch.response_mask[..., :1]
    torch.testing.assert_close(policy(batch).logprobs, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_fully_masked_rows_of_padding_give_no_nan(attention):
    model, batch = tiny_lm(), tiny_rollouts()
    model.set_attn_implementation(attention)
    for shared_prefix in (False, True):
        policy = Policy(model, 0.7, shared_prefix)
        assert gradients(policy, policy(batch).logprobs.sum()).isfinite().all()


def test_the_prompt_is_encoded_once_for_its_samples():
    model, batch = tiny_lm(), tiny_rollouts(prompts=4, samples=4)
    tokens = []
    model.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: tokens.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    states(model, batch, shared_prefix=True)
    n, p = batch.prompt_ids.shape
    # The last token of each prompt is encoded in the pass of the responses.
    assert tokens == [n * (p - 1), n * 4 * batch.response_ids.shape[-1]]


@pytest.mark.parametrize(
    ("hidden", "samples", "tokens", "apart"),
    [(1024, 2, 12_000, True), (1024, 2, 11_000, False), (1024, 4, 4000, True), (4096, 2, 800, True)]
    + [(4096, 1, 10**6, False)],
)
def test_a_gpu_encodes_prompts_separately_only_if_that_saves_enough_work(hidden, samples, tokens, apart):
    def decided(gpu: bool, whole: bool = False) -> bool:
        return folder.prompt_apart(samples, tokens, layers=2, hidden=hidden, gpu=gpu, whole=whole)

    assert decided(gpu=True) == apart and decided(gpu=False)
    assert decided(gpu=True, whole=True) == (samples > 1), "all ranks decide the same"


@pytest.mark.parametrize("samples", [1, 3])
def test_a_row_without_a_prompt_is_no_error_and_changes_no_other_row(samples):
    model, batch = tiny_lm(), tiny_rollouts(prompts=3, samples=samples)
    expected = states(model, batch, shared_prefix=False)
    empty = replace(batch, prompt_mask=batch.prompt_mask & torch.tensor([[True], [False], [True]]))
    found = states(model, empty, shared_prefix=False)
    assert found.isfinite().all()
    torch.testing.assert_close(found[[0, 2]], expected[[0, 2]], rtol=0, atol=1e-5)


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_last_block_computes_only_keys_and_values_of_a_prompt(kind, autocast):
    batch, found, runs = tiny_rollouts(samples=4), {}, []
    for whole in (False, True):
        policy = Policy(tiny_lm(kind), 0.7, shared_prefix=True)
        policy.whole = whole
        ended = []
        for block in blocks(policy.model):
            block.register_forward_hook(lambda block, args, output, ended=ended: ended.append(block))
        with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
            logprobs = policy(batch).logprobs
        weights = torch.linspace(-1, 1, logprobs.numel()).view_as(logprobs)
        found[whole] = logprobs.detach(), gradients(policy, (weights * logprobs).sum())
        runs.append(len(ended))
    assert runs[0] == runs[1] - 1
    assert torch.equal(found[False][0], found[True][0])
    assert torch.equal(found[False][1], found[True][1])


def blocks(model):
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


@pytest.mark.parametrize("kind", KINDS)
def test_samples_that_share_a_row_do_not_attend_to_each_other(kind, monkeypatch):
    batch, found = tiny_rollouts(samples=4), []
    for group in (1, 2, 4):
        monkeypatch.setattr(folder, "in_forward", lambda *_, group=group: group)
        policy, rows = Policy(tiny_lm(kind), 0.7, shared_prefix=True), []
        policy.model.base_model.register_forward_pre_hook(
            lambda module, args, kwargs, rows=rows: rows.append(len(kwargs["input_ids"])), with_kwargs=True
        )
        logprobs = policy(batch).logprobs
        assert rows[1] == len(batch) * 4 // group
        weights = torch.linspace(-1, 1, logprobs.numel()).view_as(logprobs)
        found.append((logprobs.detach(), gradients(policy, (weights * logprobs).sum())))
    for logprobs, slopes in found[1:]:
        torch.testing.assert_close(logprobs, found[0][0], rtol=0, atol=1e-5)
        assert (slopes - found[0][1]).norm() < 1e-5 * found[0][1].norm()


@pytest.mark.parametrize(
    ("samples", "prompt", "response", "group"),
    [(4, 24, 48, 1), (2, 384, 53, 2), (4, 256, 53, 2), (4, 640, 53, 4), (6, 600, 50, 3), (1, 999, 1, 1)],
)
def test_samples_share_a_row_if_that_adds_at_most_a_quarter_of_the_keys(samples, prompt, response, group):
    assert folder.in_forward(samples, prompt, response) == group
    planned = Tokens(prompts=3, samples=samples, prompt=prompt + 1, response=response)
    assert planned.a_row(eager=False) == group and planned.a_row(eager=True) == 1


@pytest.mark.parametrize("samples", [1, 2])
def test_prefix_sharing_has_no_effect_for_prompts_of_one_token(samples):
    batch = tiny_rollouts(samples=samples)
    batch.prompt_ids, batch.prompt_mask = batch.prompt_ids[:, -1:], batch.prompt_mask[:, -1:]
    with torch.no_grad():
        one, other = (Policy(tiny_lm(), 0.7, shared)(batch).logprobs for shared in (False, True))
    assert torch.equal(one, other)


class Named(torch.nn.Module):
    def forward(self, ids, cache=None):
        return cache


class NamedBefore(torch.nn.Module):
    def forward(self, ids, past_key_values=None):
        return past_key_values


class Wrapped(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


def replaced(model):
    """Return a model whose forward is replaced by a function, as hooks of libraries do."""
    model.forward = partial(model.forward)
    return model


@pytest.mark.parametrize("kind", [Named, NamedBefore])
@pytest.mark.parametrize(
    "wrap", [nullcontext, Wrapped, lambda model: Wrapped(Wrapped(model)), torch.compile, replaced],
    ids=["model", "wrapped", "twice", "compiled", "replaced"],
)  # fmt: skip
def test_a_cache_has_the_name_that_the_forward_of_the_model_has_for_it(kind, wrap):
    model = kind() if wrap is nullcontext else wrap(kind())
    for cache in (object(), object()):
        (name,) = given = cache_argument(model, cache)
        assert kind().forward(None, **given) is cache is given[name]


def test_a_shared_prefix_of_a_sliding_window_model_is_refused_with_the_remedy():
    config = MistralConfig(
        vocab_size=97,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        sliding_window=8,
    )
    model = MistralForCausalLM(config)
    with pytest.raises(ValueError, match="set model.shared_prefix=false"):
        states(model, tiny_rollouts(), shared_prefix=True)


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("rank", [0, 4], ids=["full", "lora"])
@pytest.mark.parametrize("shared_prefix", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_checkpointed_blocks_give_the_same_log_probs_and_gradients_bit_for_bit(
    kind, shared_prefix, rank, autocast
):
    batch, found = tiny_rollouts(samples=4), []
    for checkpointed in (False, True):
        policy = Policy(tiny_lm(kind), 0.7, shared_prefix)
        if rank:
            adapt(policy.model, LoRAConfig(rank=rank), seed=1)
        if checkpointed:
            checkpoint_blocks(policy.model)
        with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
            logprobs = policy(batch).logprobs
        weights = torch.linspace(-1, 1, logprobs.numel()).view_as(logprobs)
        found.append((logprobs.detach(), gradients(policy, (weights * logprobs).sum())))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1].norm() > 0 and torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("rank", [0, 4], ids=["full", "lora"])
@pytest.mark.parametrize("shared_prefix", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_checkpointed_blocks_save_less_than_a_quarter_for_the_backward_pass(kind, shared_prefix, rank):
    batch, layers = tiny_rollouts(samples=4), 6
    model = tiny_lm(kind, num_hidden_layers=layers)
    policy = Policy(model, 0.7, shared_prefix)
    if rank:
        adapt(model, LoRAConfig(rank=rank), seed=1)
    before = kept_bytes(model, lambda: policy(batch).logprobs)
    checkpoint_blocks(model)
    after = kept_bytes(model, lambda: policy(batch).logprobs)
    config = model.config  # gives the size of the cached keys and values of prompts
    heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    cache = (
        layers * 2 * batch.prompt_ids.numel() * heads * config.hidden_size // config.num_attention_heads * 4
    )
    assert after + cache * shared_prefix < before / 4


def test_checkpointing_does_not_change_generation_and_inference():
    model, batch = tiny_lm(), tiny_rollouts()
    ids = batch.prompt_ids[:1]
    with torch.no_grad():
        before, responses = Policy(model, 0.7, True)(batch).logprobs, model.generate(ids, max_new_tokens=5)
        checkpoint_blocks(model)
        assert torch.equal(Policy(model, 0.7, True)(batch).logprobs, before)
        assert torch.equal(model.generate(ids, max_new_tokens=5), responses)


def test_checkpointing_a_model_with_unknown_blocks_is_refused_with_the_remedy():
    model = tiny_lm()
    del model.base_model.layers[:]
    with pytest.raises(UserError, match="set model.gradient_checkpointing=false"):
        checkpoint_blocks(model)


@pytest.mark.parametrize("kind", KINDS)
def test_models_read_the_cache_by_a_name_of_their_forward(kind):
    model = tiny_lm(kind)
    for module in (model, model.base_model):
        cache = DynamicCache(config=model.config)
        given = cache_argument(module, cache)
        assert given.keys() <= inspect.signature(module.forward).parameters.keys()
        module(torch.tensor([[2, 3]]), use_cache=True, **given)
        assert cache.get_seq_length() == 2
