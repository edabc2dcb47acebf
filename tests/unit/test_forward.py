import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

from rlhf.batch import trim
from rlhf.forward import encode, positions, shared_prefix_problem
from rlhf.models import Policy
from tests.unit.tiny_models import KINDS, sequences, tiny_lm, tiny_rollouts


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
    return torch.cat([p.grad.flatten() for p in model.parameters()])


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
@pytest.mark.parametrize("kind", KINDS)
def test_states_are_those_of_each_sequence_alone_without_padding(kind, shared_prefix):
    model, batch = tiny_lm(kind), tiny_rollouts()
    with torch.no_grad():
        found = states(model, batch, shared_prefix, last=True)
        for i, group in enumerate(sequences(batch)):
            for j, (prompt, response) in enumerate(group):
                alone = model.base_model(input_ids=torch.cat([prompt, response])[None]).last_hidden_state[0]
                expected = alone[len(prompt) - 1 :]
                torch.testing.assert_close(found[i, j, : len(response) + 1], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shared_prefix", [False, True])
def test_without_last_the_state_after_the_last_token_is_left_out(shared_prefix):
    model, batch = tiny_lm(), tiny_rollouts()
    with torch.no_grad():
        longer = states(model, batch, shared_prefix, last=True)
        shorter = states(model, batch, shared_prefix, last=False)
    assert longer.shape[2] == shorter.shape[2] + 1 == batch.response_ids.shape[-1] + 1
    real = batch.response_mask
    torch.testing.assert_close(shorter[real], longer[:, :, :-1][real], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shared_prefix", [False, True])
@pytest.mark.parametrize("content", [0, -100, 10**6])
def test_what_padding_holds_has_no_influence(shared_prefix, content):
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
    model.base_model.register_forward_hook(
        lambda module, args, kwargs, output: tokens.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    states(model, batch, shared_prefix=True)
    n, p = batch.prompt_ids.shape
    assert tokens == [n * p, n * 4 * (batch.response_ids.shape[-1] - 1)]


def test_positions_count_real_tokens_before():
    mask = torch.tensor([[False, False, True, True, True, False]])
    assert positions(mask).tolist() == [[0, 0, 0, 1, 2, 3]]


def test_a_sliding_window_model_is_refused_with_the_remedy():
    config = MistralConfig(
        vocab_size=97,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        sliding_window=8,
    )
    assert "model.shared_prefix=false" in shared_prefix_problem(config)
    model = MistralForCausalLM(config)
    with pytest.raises(ValueError, match="set model.shared_prefix=false"):
        Policy(model, 0.7, shared_prefix=True)
    with pytest.raises(ValueError, match="set model.shared_prefix=false"):
        states(model, tiny_rollouts(), shared_prefix=True)
    Policy(model, 0.7, shared_prefix=False)
    assert shared_prefix_problem(tiny_lm().config) is None
