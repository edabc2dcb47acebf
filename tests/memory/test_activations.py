"""Estimates of activation memory, compared with the memory that torch allocates."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, GPTNeoXConfig, LlamaConfig, PreTrainedModel

from rlhf.config.algorithms import DistillConfig, GRPOConfig
from rlhf.config.models import Dtype
from rlhf.config.run import OptimConfig
from rlhf.core.batch import Batch, Budget
from rlhf.engines.engine import EngineSettings, TorchEngine
from rlhf.generators.hf import decoding
from rlhf.generators.hf import generator as sampling
from rlhf.generators.hf.generator import sample, uniforms
from rlhf.memory import uses
from rlhf.memory.sizes import ModelSize, config_size
from rlhf.memory.uses import AUTOCAST, FLOAT32, HEAP, Forward, Tokens
from rlhf.models import logprobs
from rlhf.models.forward import checkpoint_blocks
from rlhf.models.modules import Policy, Teacher
from rlhf.objectives.distill import Distill
from rlhf.objectives.grpo import GRPO
from rlhf.processes.ranks import ALONE

PYTHIA_14M = GPTNeoXConfig(
    vocab_size=50304, hidden_size=128, num_hidden_layers=6, num_attention_heads=4, intermediate_size=512
)
NANO = GPTNeoXConfig(
    vocab_size=250, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=512
)
LLAMA = LlamaConfig(
    vocab_size=250, hidden_size=256, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2,
    intermediate_size=896, head_dim=32,
)  # fmt: skip
DEEP = LlamaConfig(
    vocab_size=250, hidden_size=128, num_hidden_layers=24, num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=256, head_dim=32,
)  # fmt: skip
CASES = {  # model, prompts of a micro-batch, samples, prompt and response tokens, settings
    "14M, two samples": (PYTHIA_14M, 8, 2, 128, 24, {}),
    "14M, eight samples": (PYTHIA_14M, 1, 8, 128, 48, {}),
    "14M, one sample": (PYTHIA_14M, 8, 1, 128, 48, {}),
    "14M, bfloat16": (PYTHIA_14M, 8, 2, 128, 24, {"dtype": Dtype.bfloat16}),
    "nano": (NANO, 8, 2, 192, 40, {}),
    "nano, one sample": (NANO, 8, 1, 192, 40, {}),
    "nano, bfloat16": (NANO, 8, 2, 192, 40, {"dtype": Dtype.bfloat16}),
    "nano, eager": (NANO, 8, 2, 192, 40, {"eager": True}),
    "nano, long responses": (NANO, 2, 2, 64, 384, {}),
    "nano, checkpointed": (NANO, 8, 2, 192, 40, {"checkpointing": True}),
    "llama": (LLAMA, 4, 2, 192, 40, {}),
    "llama, bfloat16": (LLAMA, 4, 2, 192, 40, {"dtype": Dtype.bfloat16}),
    "deep, checkpointed": (DEEP, 4, 2, 192, 40, {"checkpointing": True}),
}
NIGHTLY = ("14M, two samples", "14M, one sample", "14M, bfloat16", "llama, bfloat16", "deep, checkpointed")


def made(config, eager=False, checkpointing=False) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager" if eager else "sdpa").eval()
    if checkpointing:
        checkpoint_blocks(model)
    return model


def batch(prompts: int, samples: int, prompt: int, response: int, words: int) -> Batch:
    """Return rows of full length, except that every second row is shorter, so that masks are needed."""
    prompt_mask = torch.ones(prompts, prompt, dtype=torch.bool)
    prompt_mask[1::2, :3] = False
    response_mask = torch.ones(prompts, samples, response, dtype=torch.bool)
    response_mask[1::2, :, -2:] = False
    zeros = torch.zeros(prompts, samples, response)
    return Batch(
        index=torch.arange(prompts),
        texts=[""] * prompts,
        references=[""] * prompts,
        prompt_ids=torch.randint(2, words, (prompts, prompt)),
        prompt_mask=prompt_mask,
        response_ids=torch.randint(2, words, (prompts, samples, response)),
        response_mask=response_mask,
        ended=torch.ones(prompts, samples, dtype=torch.bool),
        scores=torch.zeros(prompts, samples),
        behaviour_logprobs=zeros,
        ref_logprobs=zeros,
        advantages=torch.randn(prompts, samples, response),
    )


def engine_of(model: PreTrainedModel, micro_batch: int, dtype: Dtype) -> TorchEngine:
    return TorchEngine(
        Policy(model, 1.0, shared_prefix=True),
        None,
        None,
        ALONE,
        EngineSettings(
            optim=OptimConfig(lr=1e-4),
            total_steps=10,
            steps_per_batch=1,
            budget=Budget(micro_batch),
            inference=Budget(micro_batch),
            dtype=dtype,
        ),
    )


def allocated(call: Callable[[], object]) -> int:
    """Return the peak of the bytes that torch allocates during a call, minus the bytes allocated before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        call()
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def size_of(config) -> ModelSize:
    size = config_size(config.to_dict())
    assert size is not None
    return size


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.nightly if case in NIGHTLY else ()) for case in CASES]
)
@pytest.mark.process
def test_estimates_are_close_to_the_memory_that_torch_allocates(case):
    config, prompts, samples, prompt, response, settings = CASES[case]
    dtype, eager = settings.get("dtype", Dtype.float32), settings.get("eager", False)
    checkpointing = settings.get("checkpointing", False)
    model, size = made(config, eager, checkpointing), size_of(config)
    engine = engine_of(model, prompts * samples, dtype)
    objective = GRPO(GRPOConfig(samples_per_prompt=samples))
    rows = batch(2 * prompts, samples, prompt, response, config.vocab_size)  # two micro-batches
    precision = FLOAT32 if dtype is Dtype.float32 else AUTOCAST
    tokens = Tokens(prompts=prompts, samples=samples, prompt=prompt, response=response)

    engine.step(rows, objective)  # creates the optimizer states
    gradients = 4 * size.parameters
    trained = allocated(lambda: engine.step(rows, objective))
    planned = Forward(size=size, tokens=tokens, precision=precision, eager=eager)
    estimate = gradients + planned.training(checkpointing)
    assert estimate == pytest.approx(trained, rel=0.15)

    read = allocated(lambda: engine.infer(engine.policy, rows, "logprobs"))
    assert planned.inference() == pytest.approx(read, rel=0.3)

    def decode() -> None:
        numbers = uniforms(0, 0, rows.index, samples, response)
        with torch.no_grad(), engine.borrow_policy() as borrowed:
            sample(borrowed, rows.prompt_ids, rows.prompt_mask, samples, response, 1.0, numbers, [1], 0)

    both = replace(planned, tokens=replace(tokens, prompts=2 * prompts))
    assert both.sampling() == pytest.approx(allocated(decode), rel=0.3)


def test_an_exact_distillation_needs_less_than_three_tiles_more_than_grpo():
    config = GPTNeoXConfig(
        vocab_size=2**17, hidden_size=16, num_hidden_layers=1, num_attention_heads=4, intermediate_size=16
    )
    rows, needed = batch(1, 2, 8, 8, config.vocab_size), []
    for objective in (GRPO(GRPOConfig(samples_per_prompt=2)), Distill(DistillConfig(beta=0.5))):
        engine = engine_of(made(config), 2, Dtype.float32)
        engine.policy.teacher = Teacher(Policy(made(config), 1.0, shared_prefix=True), 0.5, None)
        engine.step(rows, objective)  # creates the optimizer states
        needed.append(allocated(lambda: engine.step(rows, objective)))  # noqa: B023
    assert needed[1] - needed[0] < 3 * logprobs.CPU_TILE_BYTES


def test_memory_grows_with_tokens_and_shrinks_with_gradient_checkpointing():
    tokens = Tokens(prompts=8, samples=2, prompt=512, response=128)
    planned = Forward(size=size_of(PYTHIA_14M), tokens=tokens, precision=FLOAT32)

    def needed(**changes) -> float:
        return replace(planned, tokens=replace(tokens, **changes)).training()

    assert needed() > 1.4 * needed(prompts=4)
    assert needed(apart=False) > needed() > needed(prompt=256) > needed(prompt=256, response=64)
    assert planned.training(checkpointing=True) < 0.6 * needed()


PROCESS = """
import json, re
from pathlib import Path

import torch
from tests.memory.test_activations import NANO, batch, engine_of, made
from rlhf.config.models import Dtype
from rlhf.config.algorithms import DistillConfig, GRPOConfig
from rlhf.objectives.grpo import GRPO

torch.set_num_threads(1)
peak = lambda: 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
small = engine_of(made(NANO), 2, Dtype.float32)  # what torch loads at its first step
objective = GRPO(GRPOConfig(samples_per_prompt=2))
small.step(batch(1, 2, 8, 4, 250), objective)
before = peak()
engine = engine_of(made(NANO), 128, Dtype.float32)
rows = batch(128, 2, 192, 40, 250)
for _ in range(2):
    engine.step(rows, objective)
print(json.dumps([before, peak()]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the peak memory of a process is read from Linux")
@pytest.mark.process
def test_peak_memory_of_a_training_process_grows_by_the_estimate():
    done = subprocess.run([sys.executable, "-c", PROCESS], capture_output=True, text=True, check=True)
    before, after = json.loads(done.stdout.splitlines()[-1])
    size = size_of(NANO)
    states = 16 * size.parameters  # weights, gradients and two moments
    tokens = Tokens(prompts=64, samples=2, prompt=192, response=40)
    needed = states + HEAP * Forward(size=size, tokens=tokens, precision=FLOAT32).training()
    assert after - before == pytest.approx(needed, rel=0.3)


def test_tile_and_chunk_sizes_match_the_constants_of_the_models_and_generators():
    assert uses.TILE_BYTES == {"cpu": logprobs.CPU_TILE_BYTES, "cuda": logprobs.GPU_TILE_BYTES}
    assert uses.CHOICE_CHUNK == {"cpu": sampling.CPU_CHUNK, "cuda": sampling.GPU_CHUNK}
    assert uses.PROMPT_TOKENS == decoding.TOKENS
