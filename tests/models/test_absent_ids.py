"""Tests of ids that no token has: no part samples them, and no probability is spent on them."""

from dataclasses import fields, replace

import pytest
import torch

from rlhf.config.models import Dtype
from rlhf.core.batch import Batch, Prompts, Sampling
from rlhf.core.errors import RunError
from rlhf.core.files import vocabulary
from rlhf.engines.deepspeed_engine import hollow
from rlhf.generators.generator import ReplayGenerator
from rlhf.generators.hf.generator import HFSamplerFactory, HFSettings, respond
from rlhf.models.modules import Policy, absent_ids, logit_scale, set_head, token_ids
from rlhf.scorers.scorer import write
from rlhf.trials.trials import comparing, ragged_example, sampling_fault, sharing_fault
from tests.tiny_models import VOCABULARY, sequences, tiny_lm, tiny_rollouts, tiny_tokenizer

TEMPERATURE = 0.7
SETTINGS = HFSettings(stop_ids=[5], pad_id=0, batch_size=16, seed=1)
TOKENS = {
    "none": range(VOCABULARY),
    "few at the end": range(VOCABULARY - 3),
    "most": range(2, 9),
    "a hole": sorted({*range(VOCABULARY)} - {*range(20, 60)}),
    "a hole at the start": range(50, VOCABULARY),
}
KINDS = ("gpt_neox", "llama")


def policy_over(tokens, kind="llama", bias=False):
    model = tiny_lm(kind)
    if bias:
        head = model.get_output_embeddings()
        head.bias = torch.nn.Parameter(torch.linspace(-1, 1, VOCABULARY))
    return Policy(model, TEMPERATURE, shared_prefix=True, tokens=tokens)


def rollouts_over(tokens):
    batch, known = tiny_rollouts(), torch.tensor(list(tokens))
    return replace(batch, response_ids=known[batch.response_ids % len(known)] * batch.response_mask)


def prompts():
    batch = tiny_rollouts()
    return Prompts(**{f.name: getattr(batch, f.name) for f in fields(Prompts)})


def expected_logprobs(model, batch, tokens, i, j):
    """Return the log-probs [T, V] of one response, from the logits of an unmasked model."""
    prompt, response = sequences(batch)[i][j]
    logits = model(input_ids=torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1].float()
    known = torch.full((VOCABULARY,), -torch.inf)
    known[list(tokens)] = 0.0
    return (logits / TEMPERATURE + known).log_softmax(-1), response


@pytest.mark.parametrize("tokens", TOKENS.values(), ids=TOKENS)
@pytest.mark.parametrize(("kind", "bias"), [("gpt_neox", True), ("gpt_neox", False), ("llama", False)])
def test_probability_is_spent_on_tokens_only(kind, tokens, bias):
    policy, batch = policy_over(tokens, kind, bias), rollouts_over(tokens)
    plain = tiny_lm(kind)
    if bias:
        plain.get_output_embeddings().bias = policy.model.get_output_embeddings().bias
    out = policy(batch, "entropy", "log_sum_squares")
    with torch.no_grad():
        for i, j in ((0, 0), (1, 1), (3, 0)):
            each, response = expected_logprobs(plain, batch, tokens, i, j)
            probs = each.exp()
            wanted = {
                "logprobs": each.gather(-1, response[:, None])[:, 0],
                "entropy": torch.special.entr(probs).sum(-1),
                "log_sum_squares": probs.square().sum(-1).log(),
            }
            for name, values in wanted.items():
                found = getattr(out, name)[i, j, : len(response)]
                torch.testing.assert_close(found, values, rtol=0, atol=1e-5)


@pytest.mark.parametrize("tokens", TOKENS.values(), ids=TOKENS)
def test_rows_of_ids_without_a_token_get_no_gradient_and_the_others_that_of_the_softmax(tokens):
    policy, batch = policy_over(tokens), rollouts_over(tokens)
    out = policy(batch, "entropy")
    (out.logprobs.sum() + out.entropy.sum()).backward()
    slope = policy.model.get_output_embeddings().weight.grad
    absent = absent_ids(policy.model)
    assert slope.isfinite().all() and not slope[absent].any()
    assert slope[token_ids(policy.model)].any(-1).all()


def test_a_model_whose_ids_all_have_tokens_computes_what_it_did_without_the_tokens():
    batch = tiny_rollouts()
    for kind in KINDS:
        with_tokens, without = policy_over(range(VOCABULARY), kind), Policy(tiny_lm(kind), TEMPERATURE, True)
        assert with_tokens.model.get_output_embeddings().absent is None
        assert torch.equal(with_tokens(batch).logprobs, without(batch).logprobs)


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("tokens", TOKENS.values(), ids=TOKENS)
def test_samples_consist_of_tokens_and_their_logprobs_are_those_of_the_trainer(tokens, cached):
    policy, batch = policy_over(tokens), prompts()
    sampling = Sampling(samples=8, temperature=TEMPERATURE, response_length=10, purpose="train")
    sampled = respond(policy.model, batch, sampling, replace(SETTINGS, stop_ids=[tokens[-1]], cached=cached))
    assert set(sampled.response_ids[sampled.response_mask].tolist()) <= {*tokens}
    with torch.no_grad():
        trained = policy(sampled).logprobs
    torch.testing.assert_close(sampled.behaviour_logprobs, trained, rtol=0, atol=1e-5)


def test_a_sampler_in_its_own_process_samples_the_same_tokens():
    policy, batch = policy_over(TOKENS["a hole"]), prompts()
    sampling = Sampling(samples=4, temperature=TEMPERATURE, response_length=10, purpose="train")
    factory = HFSamplerFactory(
        config=policy.model.config.to_json_string(use_diff=False),
        attention="sdpa",
        remote=None,
        device="cpu",
        dtype=Dtype.float32,
        settings=SETTINGS,
        absent_ids=absent_ids(policy.model),
    )
    sampler = factory.build()
    sampler.model.load_state_dict(policy.model.state_dict())  # the mask is no tensor of the checkpoint
    found = sampler.sample(batch, sampling)
    wanted = respond(policy.model, batch, sampling, SETTINGS)
    assert torch.equal(found.response_ids, wanted.response_ids)
    assert absent_ids(hollow(policy.model)) == absent_ids(policy.model)  # the copy that ZeRO-3 samples with


@pytest.mark.parametrize("tokens", TOKENS.values(), ids=TOKENS)
def test_comparisons_with_plain_forwards_agree(tokens):
    policy = policy_over(tokens)
    batch = ragged_example(policy.model, 40, torch.device("cpu"))
    assert set(batch.response_ids[batch.response_mask].tolist()) <= {*tokens}
    assert logit_scale(policy.model) == 1
    with comparing(policy.model, torch.device("cpu"), Dtype.float32):
        assert sharing_fault(policy, batch) is None
        assert sampling_fault(policy.model, batch) is None
        assert sampling_fault(policy.model, batch, cached=False) is None


def test_the_scale_of_logits_is_found_behind_a_mask():
    model = tiny_lm("llama")
    set_head(model, float32=False, tokens=TOKENS["most"])
    model.config.logit_scale = 0.25
    forward = model.forward

    def scaled(*args, **kwargs):
        out = forward(*args, **kwargs)
        out.logits = out.logits * 0.25
        return out

    model.forward = scaled
    assert logit_scale(model) == 0.25


def test_saved_rollouts_with_ids_that_no_token_has_are_refused(tmp_path):
    tokenizer = tiny_tokenizer()
    tokens = torch.tensor(sorted(tokenizer.get_vocab().values()))
    batch = tiny_rollouts()
    known = replace(batch, response_ids=tokens[batch.response_ids % len(tokens)] * batch.response_mask)
    sampling = Sampling(samples=2, temperature=0.7, response_length=7, purpose="train")
    unknown = replace(known, response_ids=known.response_ids.clone())
    unknown.response_ids[0, 0, 0] = len(tokenizer) + 1
    for update, each in ((1, known), (2, unknown)):
        scored = each.extend(Batch, scores=torch.zeros(4, 2))
        scored = replace(scored, behaviour_logprobs=torch.zeros(batch.response_ids.shape))
        write(scored, update, tmp_path, tokenizer, sampling, vocabulary(tokenizer.get_vocab()))
    generator = ReplayGenerator(tmp_path, tokenizer)
    generator.submit(prompts(), sampling)
    with pytest.raises(RunError, match="ids that no token has"):
        generator.submit(prompts(), replace(sampling, request=1))
