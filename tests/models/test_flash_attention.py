"""Flash attention: the padding that transformers removes, the choice of `auto`, and sampling.

The kernels need a GPU (`tests/gpu` runs them). Here the functions of the package are replaced by plain torch
functions with the same arguments; masks and the removal of padding are those of transformers.
"""

import logging

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface, modeling_flash_attention_utils
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.masking_utils import flash_attention_mask
from transformers.modeling_flash_attention_utils import _pad_input, _unpad_input

from rlhf.config.models import Dtype
from rlhf.generators.hf.generator import sample, uniforms
from rlhf.models import forward
from rlhf.models.forward import installed
from rlhf.models.modules import Policy
from rlhf.processes.ranks import ALONE
from rlhf.trials import trials
from rlhf.trials.trials import compared
from rlhf.words.compose import compose
from tests.tiny_models import tiny_lm, tiny_rollouts

KIND = "flash_attention_plain"
calls = []  # names of the called functions


def attend(q, k, v, scale):
    """Return causal attention [Q, heads, D] of the last Q positions of one sequence of S positions."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    later = torch.ones(len(q), len(k), dtype=torch.bool).triu(1 + len(k) - len(q))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(later, -torch.inf).softmax(-1), v)


def dense(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, **_):
    calls.append("dense")
    assert causal or q.shape[1] == 1
    return torch.stack([attend(*row, softmax_scale) for row in zip(q, k, v, strict=True)])


def ragged(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=None, causal=False, **_
):
    calls.append("ragged")
    assert causal or max_seqlen_q == 1
    parts = [
        x.tensor_split(ends[1:-1].long())
        for x, ends in ((q, cu_seqlens_q), (k, cu_seqlens_k), (v, cu_seqlens_k))
    ]
    return torch.cat([attend(*row, softmax_scale) for row in zip(*parts, strict=True)])


@pytest.fixture(autouse=True)
def plain_functions(monkeypatch):
    """Let transformers call `dense` and `ragged` for the implementation `KIND`."""
    module = modeling_flash_attention_utils
    for name in ("_loaded_implementation", "_flash_fn", "_flash_varlen_fn", "_flash_with_kvcache_fn"):
        monkeypatch.setattr(module, name, None)
    for name in ("_pad_fn", "_unpad_fn", "_process_flash_kwargs_fn", "_process_with_kvcache_kwargs_fn"):
        monkeypatch.setattr(module, name, None)
    found = dense, ragged, None, _pad_input, _unpad_input
    monkeypatch.setattr(module, "_lazy_imports", lambda *_, **__: found)
    calls.clear()


AttentionInterface.register(KIND, flash_attention_forward)
AttentionMaskInterface.register(KIND, flash_attention_mask)


@pytest.mark.parametrize("kind", ["gpt_neox", "llama"])
@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("apart", [False, True])
def test_log_probs_and_gradients_are_those_of_sdpa_with_padding_in_prompts_and_responses(
    kind, samples, apart
):
    batch = tiny_rollouts(4, samples)
    assert not batch.prompt_mask.all() and not batch.response_mask.all()
    found = []
    for implementation in ("sdpa", KIND):
        policy = Policy(tiny_lm(kind), 0.7, shared_prefix=apart)
        policy.always_apart = apart
        policy.model.set_attn_implementation(implementation)
        logprobs = policy(batch).logprobs
        logprobs.sin().sum().backward()
        found.append((logprobs.detach(), torch.cat([p.grad.flatten() for p in policy.parameters()])))
    assert ("ragged" in calls) == apart, "only responses behind padded prompts need a mask"
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_sampling_uses_sdpa_and_keeps_the_attention_of_the_model():
    batch, tokens = tiny_rollouts(4, 1), []
    for implementation in ("sdpa", KIND):
        model = tiny_lm("llama")
        model.set_attn_implementation(implementation)
        numbers = uniforms(1, 0, batch.index, 3, 5)
        tokens.append(sample(model, batch.prompt_ids, batch.prompt_mask, 3, 5, 1.0, numbers, [], 0))
        assert model.config._attn_implementation == implementation
    assert not calls
    for one, other in zip(*tokens, strict=True):
        assert torch.equal(one, other)


def own(caplog):
    """Return the messages of the project; transformers reports casts of its own."""
    return [record.getMessage() for record in caplog.records if record.name.startswith("rlhf")]


@pytest.fixture
def cfg(tmp_path, monkeypatch):
    monkeypatch.setattr(trials, "KNOWN", {})
    sizes = ["task.max_prompt_tokens=20", "generator.response_length=6"]
    return compose(
        [f"cache_dir={tmp_path / 'cache'}", *sizes, "model.attention=auto", "model.dtype=bfloat16"]
    )


def test_auto_uses_an_installed_flash_attention_whose_outputs_are_right(cfg, monkeypatch, caplog):
    monkeypatch.setattr(forward, "installed", lambda *_: KIND)
    policy = compared(Policy(tiny_lm(), 0.7, True), cfg, ALONE)
    assert policy.model.config._attn_implementation == KIND and policy.shared_prefix
    assert not own(caplog)


def test_auto_uses_sdpa_with_a_warning_if_the_outputs_of_flash_attention_are_wrong(cfg, monkeypatch, caplog):
    monkeypatch.setattr(forward, "installed", lambda *_: KIND)
    found = dense, lambda q, *_, **__: q, None, _pad_input, _unpad_input
    monkeypatch.setattr(modeling_flash_attention_utils, "_lazy_imports", lambda *_, **__: found)
    with caplog.at_level(logging.WARNING):
        policy = compared(Policy(tiny_lm(), 0.7, True), cfg, ALONE)
    assert policy.model.config._attn_implementation == "sdpa" and policy.shared_prefix
    (warning,) = own(caplog)
    assert warning.startswith(
        f"model.attention=auto uses sdpa instead of {KIND} for a gpt_neox model (outputs"
    )


def test_auto_uses_sdpa_on_a_cpu_without_a_message(cfg, caplog):
    assert installed(torch.device("cpu"), Dtype.bfloat16) is None
    policy = compared(Policy(tiny_lm(), 0.7, True), cfg, ALONE)
    assert policy.model.config._attn_implementation == "sdpa" and not own(caplog)


def test_float32_has_no_flash_attention(monkeypatch):
    monkeypatch.setattr(forward, "is_flash_attn_2_available", lambda: True)
    assert installed(torch.device("cuda"), Dtype.float32) is None
    assert installed(torch.device("cuda"), Dtype.bfloat16) == "flash_attention_2"
