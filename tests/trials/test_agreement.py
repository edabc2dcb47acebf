"""The comparison of a module's forwards with a forward of each sequence alone."""

import pytest
import torch

from rlhf.config.models import Dtype
from rlhf.models.modules import Policy, RewardModel, ValueModel
from rlhf.trials.agreement import (
    LONGEST,
    comparing,
    fingerprint,
    is_exact,
    ragged_example,
    sharing_fault,
    why_not,
)
from tests.tiny_models import KINDS, tiny_classifier, tiny_lm

CPU = torch.device("cpu")


def fault_of(module, longest=26):
    with comparing(module.model, CPU, Dtype.float32):
        return sharing_fault(module, ragged_example(module.model, longest, CPU))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("module", [Policy, RewardModel, ValueModel])
def test_right_forwards_have_no_fault(kind, module):
    made = Policy(tiny_lm(kind), 0.7, True) if module is Policy else module(tiny_classifier(kind), True)
    assert fault_of(made) is None
    assert made.shared_prefix and not made.always_apart, "the module is as before"


def test_a_window_that_only_long_sequences_exceed_is_found():
    model = tiny_lm("qwen2", layer_types=["full_attention"] * 2)
    attention = model.model.layers[0].self_attn
    forward = attention.forward

    def windowed(hidden_states, *args, **kwargs):
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        if cache is not None and cache.get_seq_length() > 20:
            hidden_states = hidden_states * 0.9
        return forward(hidden_states, *args, **kwargs)

    attention.forward = windowed
    assert fault_of(Policy(model, 0.7, True), longest=18) is None
    assert fault_of(Policy(model, 0.7, True), longest=40).startswith("outputs differ by up to")


def test_the_longest_sequence_has_the_given_length_up_to_a_limit():
    model = tiny_lm()
    for longest, expected in ((1, 2), (2, 2), (10, 10), (26, 26), (10**6, LONGEST["cpu"])):
        batch = ragged_example(model, longest, CPU)
        lengths = batch.prompt_mask.sum(1)[:, None] + batch.response_mask.sum(2)
        assert lengths.max() == expected and lengths.min() >= 2


def test_a_comparison_uses_no_random_number_of_the_run():
    policy = Policy(tiny_lm(), 0.7, True)
    before = torch.get_rng_state()
    with comparing(policy.model, CPU, Dtype.float32):
        torch.rand(3)  # as a model might
        sharing_fault(policy, ragged_example(policy.model, 26, CPU))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("found", "exact", "wrong"),
    [([0.0, 0.0, 0.0], True, False), ([0.0, 0.0, 0.1], True, True), ([0.0, 0.0, 0.1], False, False)]
    + [([0.0, 0.1, 0.1], False, True), ([0.0, 0.0, torch.nan], True, True)],
)
def test_the_largest_difference_counts_in_float32_and_the_median_in_16_bits(found, exact, wrong):
    pairs = [(torch.tensor(found), torch.zeros(3))]
    assert (why_not(pairs, exact) is not None) == wrong


def test_an_exception_of_the_model_is_a_fault_and_a_full_memory_is_not():
    def pairs(error):
        raise error
        yield

    fails = pairs(TypeError("no argument 'position_ids'\nmore"))
    full = pairs(torch.OutOfMemoryError("CUDA out of memory"))
    assert why_not(fails, True) == "the forward fails (TypeError: no argument 'position_ids')"
    with pytest.raises(torch.OutOfMemoryError):
        why_not(full, True)


def test_a_model_with_16_bit_weights_or_flash_attention_is_compared_as_the_run_computes():
    model = tiny_lm("llama")
    assert is_exact(model) and not is_exact(tiny_lm("llama").to(torch.bfloat16))
    with comparing(model, CPU, Dtype.bfloat16):
        assert model(torch.tensor([[5, 6]])).logits.dtype == torch.float32
    model.config._attn_implementation = "flash_attention_2"
    assert not is_exact(model)
    with comparing(model, CPU, Dtype.bfloat16):
        assert torch.is_autocast_enabled("cpu")


def test_a_bfloat16_model_has_no_fault():
    policy = Policy(tiny_lm("llama").to(torch.bfloat16), 0.7, True)
    batch = ragged_example(policy.model, 26, CPU)
    with comparing(policy.model, CPU, Dtype.bfloat16):
        assert sharing_fault(policy, batch) is None


def test_the_fingerprint_depends_on_the_config_and_not_on_labels_or_weights():
    one = fingerprint(tiny_lm("llama"), longest=10)
    other = tiny_lm("llama")
    torch.nn.init.zeros_(other.lm_head.weight)
    assert fingerprint(other, longest=10) == one == fingerprint(tiny_classifier("llama"), longest=10)
    assert fingerprint(other, longest=11) != one
    assert fingerprint(tiny_lm("llama", rope_theta=500.0), longest=10) != one
    assert fingerprint(tiny_lm("llama").to(torch.bfloat16), longest=10) != one
