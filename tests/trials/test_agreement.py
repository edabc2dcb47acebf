"""The comparison of forwards and of sampling with a forward of each sequence alone, and what follows."""

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rlhf.config.models import Dtype
from rlhf.core.errors import UserError
from rlhf.models.modules import Policy, RewardModel, ValueModel
from rlhf.processes.ranks import ALONE
from rlhf.trials import trials
from rlhf.trials.trials import (
    LONGEST,
    compared,
    comparing,
    fingerprint,
    is_exact,
    ragged_example,
    samples_with_cache,
    sharing_fault,
    why_not,
)
from rlhf.words.compose import compose
from tests.models.architectures import tiny
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

    assert "TypeError" in why_not(pairs(TypeError("no argument 'position_ids'\nmore")), True)
    with pytest.raises(torch.OutOfMemoryError):
        why_not(pairs(torch.OutOfMemoryError("CUDA out of memory")), True)


def test_a_model_with_16_bit_weights_or_flash_attention_is_compared_as_the_run_computes():
    model, half = tiny_lm("llama"), tiny_lm("llama").to(torch.bfloat16)
    assert is_exact(model) and not is_exact(half)
    with comparing(model, CPU, Dtype.bfloat16):
        assert model(torch.tensor([[5, 6]])).logits.dtype == torch.float32
    with comparing(half, CPU, Dtype.bfloat16):
        assert sharing_fault(Policy(half, 0.7, True), ragged_example(half, 26, CPU)) is None
    model.config._attn_implementation = "flash_attention_2"
    assert not is_exact(model)
    with comparing(model, CPU, Dtype.bfloat16):
        assert torch.is_autocast_enabled("cpu")


def test_the_fingerprint_depends_on_the_config_and_not_on_labels_or_weights():
    one = fingerprint(tiny_lm("llama"), longest=10)
    other = tiny_lm("llama")
    torch.nn.init.zeros_(other.lm_head.weight)
    assert fingerprint(other, longest=10) == one == fingerprint(tiny_classifier("llama"), longest=10)
    assert fingerprint(other, longest=11) != one
    assert fingerprint(tiny_lm("llama", rope_theta=500.0), longest=10) != one
    assert fingerprint(tiny_lm("llama").to(torch.bfloat16), longest=10) != one


@pytest.fixture
def cfg(tmp_path, monkeypatch):
    monkeypatch.setattr(trials, "KNOWN", {})
    sizes = ["task.max_prompt_tokens=20", "generator.response_length=6"]
    return compose([f"cache_dir={tmp_path / 'cache'}", *sizes])


def files(cfg):
    return sorted((Path(cfg.cache_dir) / "agreement").glob("*"))


@pytest.fixture
def compare(cfg):
    """`compare(model)` compares a model, and returns the number of forwards of its blocks."""

    def count(model=None, ranks=ALONE, forget=False):
        if forget:
            trials.KNOWN.clear()
        policy, called = Policy(model or tiny_lm(), 0.7, True), []
        policy.model.base_model.register_forward_pre_hook(lambda *_: called.append(1))
        assert compared(policy, cfg, ranks).shared_prefix
        return len(called)

    return count


def test_a_model_that_cannot_share_a_prompt_runs_without_with_one_warning(cfg, caplog):
    compared(Policy(tiny("mpt"), 0.7, shared_prefix=False), cfg, ALONE)
    assert not caplog.messages, "it is off already"
    trials.KNOWN.clear()
    for file in files(cfg):
        file.unlink()
    policies = [Policy(tiny("mpt"), 0.7, shared_prefix=True) for _ in range(2)]
    with caplog.at_level(logging.WARNING):
        assert [compared(each, cfg, ALONE) for each in policies] == policies
    assert not any(each.shared_prefix for each in policies)
    (warning,) = caplog.messages
    assert "set model.shared_prefix=false" in warning


def test_a_model_with_the_same_config_is_compared_once(cfg, compare, caplog):
    assert compare() and not caplog.messages
    assert not compare(), "this process knows the result"
    assert not compare(forget=True), "the result is in cache_dir"
    assert compare(tiny_lm(num_hidden_layers=1)) and len(files(cfg)) == 2


@pytest.mark.parametrize("content", ["", "null", "[1]", '{"padded": n'])
def test_a_damaged_result_is_measured_again(cfg, compare, content):
    compare()
    (file,) = files(cfg)
    file.write_text(content)
    assert compare(forget=True)


def test_ranks_exchange_the_result_also_if_one_of_them_knows_it(compare):
    exchanged = []
    ranks = SimpleNamespace(device=ALONE.device, first=True)
    ranks.from_first = lambda make: exchanged.append(make()) or exchanged[-1]
    # the first rank may have compared the model alone, in a stage before the run
    assert compare(ranks=ranks) and not compare(ranks=ranks)
    assert exchanged == [{}, {"fault": None}, {"fault": None}]


def test_a_cache_folder_that_cannot_be_written_is_no_error(compare, tmp_path):
    (tmp_path / "cache").write_text("a file")
    assert compare()


def bidirectional(attention):
    forward = attention.forward
    return lambda hidden, *args, **kwargs: forward(hidden + hidden.mean(1, keepdim=True), *args, **kwargs)


def test_a_model_that_reads_later_tokens_or_has_a_short_context_is_refused(cfg):
    with pytest.raises(UserError, match="must be <= 16"):
        compared(Policy(tiny_lm(max_position_embeddings=16), 0.7, True), cfg, ALONE)
    policy = Policy(tiny_lm("llama"), 0.7, shared_prefix=True)
    for layer in policy.model.model.layers:
        layer.self_attn.forward = bidirectional(layer.self_attn)
    with pytest.raises(UserError, match="choose another model"):
        compared(policy, cfg, ALONE)


def test_a_model_whose_cache_gives_other_samples_is_sampled_without_cache(cfg, caplog):
    assert samples_with_cache(tiny("llama"), cfg, ALONE) and not caplog.messages
    assert not samples_with_cache(tiny("bart"), cfg, ALONE)
    (warning,) = caplog.messages
    assert "bart" in warning


def test_the_weights_and_the_random_state_are_as_before(cfg):
    policy = Policy(tiny_lm(), 0.7, True)
    policy.model.register_forward_pre_hook(lambda *_: torch.rand(1) and None)  # as a model might
    weights = {name: weight.clone() for name, weight in policy.model.state_dict().items()}
    random = torch.get_rng_state()
    compared(policy, cfg, ALONE)
    samples_with_cache(policy.model, cfg, ALONE)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(weight, weights[name]) for name, weight in policy.model.state_dict().items())
