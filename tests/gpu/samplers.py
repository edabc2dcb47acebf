"""vLLM generators of the GPU tests, built as a run builds them, and comparisons with the trained model."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from rlhf.core.batch import Prompts, Rollouts, Sampling
from rlhf.generators.generator import GeneratorContext
from rlhf.generators.process import WorkerGenerator
from rlhf.generators.vllm.generator import build
from rlhf.models.modules import Policy
from rlhf.processes.ranks import Ranks
from rlhf.words.compose import compose
from tests.gpu.report import NO_GPU, Report, Skip
from tests.gpu.shapes import write_folder
from tests.tiny_models import sequences, tiny_tokenizer

LENGTH, PROMPT = 12, 100
# Limits for differences of log-probs. Attention kernels of GPUs compute float32 with TF32 (test_samplers.py).
LIMITS = {("cpu", "float32"): 5e-4, ("cuda", "float32"): 5e-2, ("cuda", "bfloat16"): 0.5}


def need_vllm(report: Report) -> None:
    """Skip the rest of the part if vLLM is not installed, or is not built for the device of the stage."""
    if importlib.util.find_spec("vllm") is None:
        raise Skip("needs vLLM")
    if not report.gpu and torch.version.cuda is not None:  # a vLLM for CPUs requires a torch for CPUs
        raise Skip(f"{NO_GPU}: torch and vLLM are built for CUDA")
    if report.gpu and not report.full:
        raise Skip(f"{NO_GPU}: vLLM has no kernels for a pretended GPU")


@contextmanager
def started(
    report: Report,
    model: PreTrainedModel,
    *overrides: str,
    name: str = "vllm_colocated",
    prompt: int = PROMPT,
    length: int = LENGTH,
) -> Iterator[WorkerGenerator]:
    """Start vLLM for a model on the device of the stage, and close it at the end.

    Args:
        report: the report of the stage.
        model: the model that is trained; vLLM starts with random weights.
        overrides: command-line arguments of the run, besides the generator.
        name: the generator; "vllm" uses the second GPU.
        prompt: largest number of tokens of a prompt.
        length: largest number of tokens of a response.
    """
    need_vllm(report)
    folder = Path(write_folder(model, report.folder / f"model-{id(model)}"))
    memory = 0.25 if report.gpu else 0.02
    words = [f"generator={name}", f"model.policy={folder}", f"generator.memory={memory}"]
    words += [f"generator.response_length={length}", "generator.annotate=false"]
    words += ["generator.start_limit_s=200", "generator.request_limit_s=100", *overrides]
    cfg = compose(words)
    context = GeneratorContext(
        policy=model,
        borrow=lambda: nullcontext(model),
        tokenizer=tiny_tokenizer(),
        ranks=Ranks(report.device),
        folder=folder,
        model=cfg.model,
        prompt_tokens=prompt,
        seed=7,
        max_lag=0,
        in_flight=False,
        threads=1,
        annotator=None,  # type: ignore[arg-type]
        stop_ids=[tiny_tokenizer().eos_token_id],
    )
    generator = build(cfg.generator, context)
    assert isinstance(generator, WorkerGenerator)
    try:
        yield generator
    except BaseException:
        with suppress(FileNotFoundError):  # the error came before the process
            print((folder / "generator.log").read_text(errors="replace")[-8000:])  # into the log of the stage
        raise
    finally:
        generator.close()


def rounded(model: PreTrainedModel) -> PreTrainedModel:
    """Round the weights of a model to bfloat16 in place, so that vLLM has the same weights in each dtype."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    return model


def change(model: PreTrainedModel, seed: int) -> None:
    """Add noise to the weights of a model, as a replacement for training."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=draw).to(parameter.device))
    rounded(model)


def ask(generator: WorkerGenerator, given: Prompts, **settings: Any) -> Rollouts:
    """Return the rollouts of one request."""
    defaults = {"samples": 3, "temperature": 0.7, "response_length": LENGTH, "purpose": "train"}
    return generator.submit(given, Sampling(**{**defaults, **settings})).result()


@torch.no_grad()
def differences(model: PreTrainedModel, rollouts: Rollouts, temperature: float) -> float:
    """Return the largest difference between the log-probs of the sampler and of the model in float64."""
    exact = Policy(copy_of(model), temperature, shared_prefix=False)
    found = (exact(rollouts).logprobs - rollouts.behaviour_logprobs)[rollouts.response_mask]
    return float(found.abs().max())


@torch.no_grad()
def greedy_gap(model: PreTrainedModel, rollouts: Rollouts) -> float:
    """Return the largest log-prob by which a token is less likely than the model's most likely token."""
    exact, worst = copy_of(model), 0.0
    for group in sequences(rollouts):
        for prompt, response in group:
            ids = torch.cat([prompt, response])[None]
            logits = exact(input_ids=ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            chosen = logits.gather(-1, response[:, None])[:, 0]
            worst = max(worst, float((logits.max(-1).values - chosen).max()))
    return worst


def copy_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of a model in float64 on the CPU."""
    copy = type(model)(model.config).double().eval()
    copy.load_state_dict({name: tensor.cpu().double() for name, tensor in model.state_dict().items()})
    return copy
