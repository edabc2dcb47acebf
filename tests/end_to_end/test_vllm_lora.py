"""Why only merged weights of LoRA are sent to vLLM: an adapter that replaces another one leaves no trace.

If the test fails with a later vLLM, updates of adapters alone may have become possible.
"""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from tests import needs
from tests.tiny_models import tiny_lm

pytest.importorskip("vllm", reason=needs.VLLM)

pytestmark = [pytest.mark.nightly, pytest.mark.forks(False)]

PROMPT = list(range(5, 45))
TOKENS, BEFORE = 12, 6  # tokens of a response, and those of them that the first adapter samples
TARGETS = ["q_proj", "v_proj", "down_proj"]


def save(folder: Path) -> None:
    """Save a model and two adapters of it."""
    model = tiny_lm("llama", hidden_size=64, num_attention_heads=2)
    model.save_pretrained(folder / "model")
    adapted = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=TARGETS))
    for version in (1, 2):
        draw = torch.Generator().manual_seed(version)
        for name, weight in adapted.named_parameters():
            if "lora_" in name:
                weight.data.normal_(0, 0.3, generator=draw)
        adapted.save_pretrained(folder / f"adapter {version}")


def start(folder: Path) -> Any:
    """Start vLLM in this process."""
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    from vllm import LLM

    return LLM(
        model=str(folder / "model"),
        dtype="float32",
        enable_lora=True,
        max_lora_rank=8,
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=64,
        max_num_seqs=8,
        max_num_batched_tokens=8192,
        kv_cache_memory_bytes=2**26,
        logprobs_mode="processed_logprobs",
        distributed_executor_backend="uni",
        enable_prefix_caching=True,
        async_scheduling=False,
    )


def replaced(folder: Path) -> tuple[list[int], list[float], list[tuple[str, int, int]]]:
    """Return tokens, log-probs and versions of a response during which the adapter is replaced."""
    from vllm import SamplingParams, TokensPrompt
    from vllm.lora.request import LoRARequest

    engine, found = start(folder).llm_engine, []
    parameters = SamplingParams(temperature=1.0, max_tokens=TOKENS, seed=5, logprobs=0, ignore_eos=True)
    first, second = (
        LoRARequest("policy", 1, str(folder / f"adapter {version}"), load_inplace=version == 2)
        for version in (1, 2)
    )
    engine.add_request("one", TokensPrompt(prompt_token_ids=PROMPT), parameters, lora_request=first)
    for step in range(TOKENS + 2):
        if step == BEFORE:
            assert engine.add_lora(second)
        found += [output.outputs[0] for output in engine.step() if output.finished]
    (one,) = found
    return (
        list(one.token_ids),
        [next(iter(token.values())).logprob for token in one.logprobs],
        [(span.version, span.start, span.end) for span in one.weight_versions],
    )


def alone(function: Any, folder: Path) -> Any:
    """Return the result of a function in a process of its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, folder).result(300)


def differences(folder: Path, version: int, ids: list[int], logprobs: list[float]) -> torch.Tensor:
    """Return the differences of log-probs to those of PEFT with an adapter, [T]."""
    base = AutoModelForCausalLM.from_pretrained(folder / "model")
    model = PeftModel.from_pretrained(base, folder / f"adapter {version}").eval()
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT + ids])).logits[0, len(PROMPT) - 1 : -1]
    right = logits.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0]
    return (right - torch.tensor(logprobs)).abs()


def test_tokens_name_no_adapter_and_after_a_new_one_have_logprobs_of_none(tmp_path):
    """Keys and values of the tokens before the load stay those of the old adapter."""
    save(tmp_path)
    ids, logprobs, versions = alone(replaced, tmp_path)
    assert versions == [("default", 0, TOKENS)]
    assert differences(tmp_path, 1, ids, logprobs)[:BEFORE].max() < 1e-4
    for version in (1, 2):
        assert differences(tmp_path, version, ids, logprobs)[BEFORE:].min() > 1e-3
