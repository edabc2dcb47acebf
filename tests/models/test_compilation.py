"""Compiled blocks: the same log-probs and gradients as the usual blocks, and only in their context."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D

from rlhf.models.forward import CompiledBlocks, NoBlocks, checkpoint_blocks, converted_weights
from rlhf.models.logprobs import token_outputs
from rlhf.models.modules import Policy
from tests.tiny_models import tiny_lm, tiny_rollouts


def policy_of(checkpointing=False) -> Policy:
    model = tiny_lm(hidden_size=16, num_hidden_layers=2)
    if checkpointing:
        checkpoint_blocks(model)
    return Policy(model, 0.7, shared_prefix=True)


def graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def results(policy, batch):
    """Return the log-probs and the gradient; the backward pass runs outside the context of the blocks."""
    policy.zero_grad()
    logprobs = policy(batch).logprobs
    (torch.linspace(-1, 1, logprobs.numel()).view_as(logprobs) * logprobs).sum().backward()
    return logprobs.detach(), torch.cat([each.grad.flatten() for each in policy.parameters()])


@pytest.mark.process  # the compiler tests the instructions of the processor in a process
@pytest.mark.nightly  # a minute; every run compares its compiled blocks with plain ones (rlhf/trials)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_compiled_blocks_give_the_same_log_probs_and_gradients_with_a_shared_prefix(checkpointing):
    policy, before = policy_of(checkpointing), graphs()
    for prompts, samples in ((4, 2), (3, 4)):
        batch = tiny_rollouts(prompts, samples)
        policy.use_compiled(False)
        usual = results(policy, batch)
        policy.use_compiled(True)
        compiled = results(policy, batch)
        torch.testing.assert_close(compiled[0], usual[0], rtol=0, atol=1e-5)
        assert (compiled[1] - usual[1]).norm() < 1e-5 * usual[1].norm()
    assert graphs() - before <= 2, "one graph for prompts and one for responses, for all blocks and lengths"


def tiny_gpt2():
    return GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=40, n_positions=32)).eval()


@pytest.mark.parametrize("make", [tiny_lm, tiny_gpt2])  # with linear layers, and with transposed ones
def test_converted_weights_change_no_output_and_are_gone_after_the_context(make):
    model = make()
    ids, names = torch.arange(10, 20)[None], [name for name, _ in model.named_parameters()]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = model(input_ids=ids).logits
        with converted_weights(model):
            block = next(each for each in model.modules() if isinstance(each, GradientCheckpointingLayer))
            linear = next(each for each in block.modules() if isinstance(each, torch.nn.Linear | Conv1D))
            assert linear.weight.dtype == torch.bfloat16
            assert torch.equal(model(input_ids=ids).logits, expected)
    assert linear.weight.dtype == torch.float32 and isinstance(linear.weight, torch.nn.Parameter)
    assert [name for name, _ in model.named_parameters()] == names
    with converted_weights(model):
        assert linear.weight.dtype == torch.float32, "without autocast, nothing is converted"


@pytest.mark.process
def test_a_compiled_head_gives_the_same_log_probs_and_gradients_for_any_number_of_rows():
    draw, before = torch.Generator().manual_seed(0), graphs()
    weight = torch.randn(37, 8, generator=draw).requires_grad_()
    bias = torch.zeros(37).index_fill(0, torch.tensor([5, 36]), -torch.inf)  # ids without a token
    for rows in (11, 7):
        hidden = torch.randn(rows, 8, generator=draw).requires_grad_()
        targets, slopes = torch.randint(6, 36, (rows,), generator=draw), torch.randn(rows, generator=draw)
        found = []
        for compiled in (False, True):
            given = hidden, weight, bias, targets, 0.7
            logprobs = token_outputs(*given, tile=(4, 10 if not compiled else 37), compiled=compiled).logprobs
            found.append([logprobs, *torch.autograd.grad((logprobs * slopes).sum(), (hidden, weight))])
        for usual, own in zip(*found, strict=True):
            torch.testing.assert_close(own, usual, rtol=1e-5, atol=1e-5)
    assert graphs() - before == 2, "one graph for log-probs and one for gradients"


@pytest.mark.parametrize("checkpointing", [False, True])
def test_blocks_are_as_before_outside_the_context(checkpointing):
    model = policy_of(checkpointing).model
    blocks = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    before = [vars(block).get("forward") for block in blocks]
    with pytest.raises(KeyError), CompiledBlocks(model).used():
        assert all(vars(block)["forward"] is not old for block, old in zip(blocks, before, strict=True))
        raise KeyError
    assert [vars(block).get("forward") for block in blocks] == before
    assert all(("forward" in vars(block)) == checkpointing for block in blocks)


def test_a_model_without_blocks_is_refused():
    model = tiny_lm(hidden_size=16, num_hidden_layers=2)
    model.gpt_neox.layers = torch.nn.ModuleList()
    with pytest.raises(NoBlocks, match="gpt_neox models does not mark blocks"):
        CompiledBlocks(model)
