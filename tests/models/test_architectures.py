"""Every causal LM of transformers gives right log-probs and samples, or is refused before training."""

import pytest
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from rlhf.core.errors import UserError
from rlhf.generators.hf.generator import sample
from rlhf.models.modules import Policy
from rlhf.trials.trials import ragged_example, sampling_fault, sharing_fault
from tests.models.architectures import CANNOT_BE_BUILT, tiny

LONGEST = 26  # tokens of prompt and response: more than all windows of the tiny models
TEMPERATURE = 0.7
COMMON = (
    "bloom", "falcon", "gemma", "gpt2", "gpt_bigcode", "gpt_neox", "gptj", "llama", "olmo2", "opt", "phi",
    "qwen2", "qwen3", "stablelm",
)  # fmt: skip


def expected_logprobs(model, prompt, response):
    """Return the log-probs [T] from the logits of the model itself, without padding and cache."""
    logits = model(input_ids=torch.cat([prompt, response])[None], use_cache=False).logits
    logprobs = (logits[0, len(prompt) - 1 : -1].float() / TEMPERATURE).log_softmax(-1)
    return logprobs.gather(-1, response[:, None])[:, 0]


def outcome(kind: str) -> tuple[str, float]:
    """Return what a run does with a tiny model, and the largest error of its log-probs.

    The first result is "refused", or the settings of forward and sampling.
    """
    model = tiny(kind)
    batch = ragged_example(model, LONGEST, torch.device("cpu"))
    with torch.no_grad():
        try:
            policy = Policy(model, TEMPERATURE, shared_prefix=True)
            policy.shared_prefix = policy.always_apart = sharing_fault(policy, batch) is None
        except UserError:
            return "refused", 0.0
        cached = sampling_fault(model, batch) is None
        n, k, t = batch.response_ids.shape
        numbers = torch.rand((n, k, t), dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        given = model, batch.prompt_ids, batch.prompt_mask, k, t, TEMPERATURE, numbers
        ids, _, sampled, _ = sample(*given, stop_ids=[], pad_id=0, cached=cached)
        computed = policy(batch).logprobs
        errors = []
        for i in range(n):
            prompt = batch.prompt_ids[i][batch.prompt_mask[i]]
            for j in range(k):
                response = batch.response_ids[i, j][batch.response_mask[i, j]]
                errors.append(computed[i, j, : len(response)] - expected_logprobs(model, prompt, response))
                errors.append(sampled[i, j] - expected_logprobs(model, prompt, ids[i, j]))
    found = ("shared prefix" if policy.shared_prefix else "plain") + (", cache" if cached else ", no cache")
    return found, float(torch.cat(errors).abs().max())


@pytest.mark.parametrize("kind", MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
def test_log_probs_and_samples_equal_the_forward_of_each_sequence_or_the_model_is_refused(kind):
    if kind in CANNOT_BE_BUILT:
        pytest.skip(CANNOT_BE_BUILT[kind])
    found, error = outcome(kind)
    assert error < 1e-4, found
    if kind in COMMON:
        assert found == "shared prefix, cache"
