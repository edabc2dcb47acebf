"""Stage 1: forward passes and decoding of one model, compared with the CPU in float64.

Shows that fingerprints, log-probs, gradients, checkpointing, LoRA and decoding by CUDA graphs give the same
numbers on the device, and that too little memory leaves the sampler and the store of weights usable.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from unittest.mock import patch

import torch
from torch import Tensor

from rlhf.config.models import Dtype, LoRAConfig
from rlhf.core.batch import Rollouts
from rlhf.core.errors import RunError
from rlhf.generators.hf import decoding
from rlhf.generators.hf import generator as sampling
from rlhf.generators.hf.generator import sample, uniforms
from rlhf.generators.weights import CHUNK, GpuWeights, fingerprint
from rlhf.models import forward
from rlhf.models.forward import checkpoint_blocks
from rlhf.models.modules import Policy, adapt
from rlhf.trials import trials
from tests.gpu.report import Report, Skip, difference, relative
from tests.gpu.shapes import HEADS, KINDS, PAD, large, tiny
from tests.tiny_models import tiny_rollouts

TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int8, torch.bool)
LENGTH, SAMPLES, TEMPERATURE = 12, 3, 0.7
STOPS = range(2, 25)  # many, so that rows end at different steps


def run(report: Report) -> None:
    """Run the stage."""
    with report.part("fingerprints"):
        check_fingerprints(report)
    for kind in KINDS:
        with report.part(f"log-probs of {kind}"):
            check_logprobs(report, kind)
    with report.part("gradient checkpointing"):
        check_checkpointing(report)
    with report.part("flash attention"):
        check_flash(report)
    with report.part("fused head"):
        check_fused_head(report)
    with report.part("LoRA"):
        check_lora(report)
    for kind in KINDS:
        with report.part(f"decoding of {kind}"):
            check_decoding(report, kind)
    with report.part("too little memory for a CUDA graph"):
        check_full_graph(report)
    with report.part("too little memory for the weights in transfer"):
        check_full_store(report)


def check_fingerprints(report: Report) -> None:
    """Compare fingerprints on the device with those on the CPU, also of tensors of several chunks."""
    draw = torch.Generator().manual_seed(1)
    wrong = []
    for dtype in TYPES:
        tensor = torch.randint(0, 2 if dtype is torch.bool else 100, (64, 33), generator=draw).to(dtype)
        for each in (tensor, tensor.t(), tensor[1:, 3:], tensor[:0], tensor[0, 0]):
            if int(fingerprint(each.to(report.device))) != int(fingerprint(each)):
                wrong.append(f"{dtype} {tuple(each.shape)}")
    report.equal("fingerprints that differ from the CPU", wrong, [])
    long = torch.randn(CHUNK + 1000, generator=draw)
    on_device, on_cpu = int(fingerprint(long.to(report.device))), int(fingerprint(long))
    report.equal("fingerprint of several chunks", on_device == on_cpu, True)


def gradient(policy: Policy, batch: Rollouts) -> tuple[Tensor, Tensor]:
    """Return the log-probs [N, K, T] of a batch, and the gradient of their weighted sum, both on the CPU."""
    policy.zero_grad()
    logprobs = policy(batch).logprobs
    slopes = torch.linspace(-1, 1, logprobs.numel()).view_as(logprobs).to(logprobs)
    (slopes * logprobs).sum().backward()
    grads = [p.grad.flatten() for p in policy.parameters() if p.grad is not None]
    return logprobs.detach().cpu(), torch.cat(grads).cpu()


def check_logprobs(report: Report, kind: str) -> None:
    """Compare log-probs and gradients, with and without a shared prefix, with float64 on the CPU."""
    batch = tiny_rollouts()
    exact = Policy(tiny(kind).double(), TEMPERATURE, shared_prefix=False)
    expected, slope = gradient(exact, batch)
    for shared in (False, True):
        policy = Policy(tiny(kind).to(report.device), TEMPERATURE, shared_prefix=shared)
        policy.always_apart = shared
        found, grad = gradient(policy, batch.to(report.device))
        name = f"{kind}, shared prefix" if shared else f"{kind}, plain"
        report.near(f"log-probs of {name}", found, expected, 1e-4)
        report.at_most(f"gradient of {name}, relative", relative(grad, slope), 1e-4)
    with torch.no_grad(), torch.autocast(report.device.type, torch.bfloat16):
        found = policy(batch.to(report.device)).logprobs
    mean = float((found.cpu().double() - expected).abs().mean())
    report.at_most(f"log-probs of {kind} in bfloat16, mean", mean, 0.05)


def check_checkpointing(report: Report) -> None:
    """Compare log-probs and gradients with and without gradient checkpointing."""
    batch, found = tiny_rollouts().to(report.device), []
    for checkpointed in (False, True):
        policy = Policy(tiny("llama").to(report.device).train(), TEMPERATURE, shared_prefix=True)
        if checkpointed:
            checkpoint_blocks(policy.model)
        found.append(gradient(policy, batch))
    report.near("log-probs with checkpointing", found[1][0], found[0][0], 1e-6)
    report.at_most("gradient with checkpointing, relative", relative(found[1][1], found[0][1]), 1e-6)


def check_flash(report: Report) -> None:
    """Compare log-probs of flash attention with sdpa in bfloat16, with padding in prompts and responses."""
    kind = forward.installed(report.device, Dtype.bfloat16)
    if kind is None:
        raise Skip("needs a GPU and flash-attn")
    batch, found = tiny_rollouts().to(report.device), []
    for shared in (False, True):
        policy = Policy(tiny("llama", **HEADS).to(report.device), TEMPERATURE, shared_prefix=shared)
        policy.always_apart = shared
        for name in ("sdpa", kind):
            policy.model.set_attn_implementation(name)
            with torch.autocast(report.device.type, torch.bfloat16):
                found.append(gradient(policy, batch))
        (sdpa, slope), (flash, flash_slope) = found[-2:]
        name = "shared prefix" if shared else "plain"
        mean = float((sdpa - flash).abs().mean())
        report.at_most(f"log-probs of {kind} against sdpa, {name}, mean", mean, 0.05)
        report.at_most(
            f"gradient of {kind} against sdpa, {name}, relative", relative(flash_slope, slope), 0.1
        )


def check_fused_head(report: Report) -> None:
    """Compare log-probs and gradients of Liger's head with the tiles, at the shape of the large model.

    The head of `large` does not serve: its special tokens have logits of hundreds, which bfloat16 rounds to
    whole numbers, so their log-probs depend on the order of the product and the division by the temperature.
    """
    report.need_gpu()
    if importlib.util.find_spec("liger_kernel") is None:
        raise Skip("needs liger-kernel")
    model = large(report.full, report.device, torch.float32)
    head = Policy(model, TEMPERATURE, shared_prefix=False).model.get_output_embeddings()
    torch.nn.init.normal_(head.weight, std=model.config.initializer_range)
    trial = trials.compare_heads(head, 4096, TEMPERATURE, report.device, Dtype.bfloat16)
    report.equal("fault of the fused head", trials.HEAD.fault(trial, Dtype.bfloat16), None)
    report.figure("fused head", trial.differences)


def check_lora(report: Report) -> None:
    """Compare a model with adapters with float64 on the CPU, and its reference with the model before."""
    if importlib.util.find_spec("peft") is None:
        raise Skip("needs peft")
    batch = tiny_rollouts()
    policy = Policy(tiny("llama"), TEMPERATURE, shared_prefix=True)
    adapt(policy.model, LoRAConfig(rank=4), seed=1)
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=draw))
        expected = deepcopy(policy).double()(batch).logprobs
        policy.to(report.device)
        there = batch.to(report.device)
        found, before = policy(there).logprobs, policy.before_adapters()(there).logprobs
        plain = Policy(tiny("llama").to(report.device), TEMPERATURE, shared_prefix=True)(there).logprobs
    report.near("log-probs with adapters", found, expected, 1e-4)
    report.near("log-probs of the reference without adapters", before, plain, 1e-6)
    report.at_least("effect of the adapters", difference(found, before), 0.05)


@contextmanager
def graphs(report: Report, wanted: bool) -> Iterator[list[int]]:
    """Decode with or without CUDA graphs of 4 steps; a CPU runs the same steps without recording."""
    recorded: list[int] = []
    real = decoding.record

    def record(step):
        recorded.append(1)
        return real(step) if report.gpu else step

    with (
        patch.object(sampling, "can_record", lambda device: wanted),
        patch.object(decoding, "record", record),
        patch.object(decoding, "STEPS", 4),
    ):
        yield recorded


def decoded(
    model, device: torch.device, dtype: torch.dtype = torch.float32, compiled: bool = False
) -> tuple[Tensor, ...]:
    """Return ids, mask, log-probs and ends of samples of a model, on the CPU."""
    batch = tiny_rollouts(prompts=6).to(device)
    numbers = uniforms(1, 0, batch.index.cpu(), SAMPLES, LENGTH)
    given = batch.prompt_ids, batch.prompt_mask, SAMPLES, LENGTH, TEMPERATURE, numbers, STOPS, PAD
    with torch.autocast(device.type, dtype, enabled=dtype is not torch.float32):
        found = sample(model, *given, compiled=compiled)
    return tuple(x.cpu() for x in found)


def check_decoding(report: Report, kind: str) -> None:
    """Compare decoding by graphs with plain decoding, and the sampled log-probs with the trainer's."""
    model = tiny(kind).to(report.device)
    with graphs(report, True) as recorded:
        by_graphs = decoded(model, report.device)
    with graphs(report, False):
        plain = decoded(model, report.device)
    report.at_least(f"recorded graphs of {kind}", len(recorded), 2)
    report.equal(f"tokens of {kind} by graphs", torch.equal(by_graphs[0], plain[0]), True)
    report.near(f"log-probs of {kind} by graphs", by_graphs[2], plain[2], 1e-4)
    ids, mask, logprobs, ended = by_graphs
    batch = tiny_rollouts(prompts=6)
    sampled = replace(batch, response_ids=ids, response_mask=mask, ended=ended)
    with torch.no_grad():
        trained = Policy(deepcopy(model).cpu().double(), TEMPERATURE, False)(sampled).logprobs
    report.near(f"sampled log-probs of {kind} against the trainer", logprobs, trained, 1e-4)
    with graphs(report, False):
        plain = decoded(model, report.device, torch.bfloat16)
    for way, compiled in (("graphs", False), ("compiled steps", True)):
        if compiled and not report.gpu:
            continue  # a CPU compiles for a minute
        with graphs(report, True):
            found = decoded(model, report.device, torch.bfloat16, compiled)
        report.equal(f"{kind} by {way}: fell back", model in decoding._REFUSED, False)
        # Rounding may choose another token, after which the responses differ.
        same = (found[0] == plain[0]).long().cumprod(-1).bool() & found[1]
        mean = float((found[2] - plain[2])[same].abs().mean())
        report.at_most(f"log-probs of {kind} by {way} in bfloat16, mean", mean, 0.05)
        report.figure(f"equal tokens of {kind} by {way} in bfloat16", float(same.sum() / found[1].sum()))


def check_full_graph(report: Report) -> None:
    """Run out of memory in a recording: decoding continues, and the next batch is recorded again."""
    model = tiny("gpt_neox").to(report.device)
    with graphs(report, False):
        expected = decoded(model, report.device)
    with graphs(report, True):
        real = decoding.record

        def full(step):
            def too_large():
                if not report.gpu:
                    raise torch.OutOfMemoryError("not enough memory")
                torch.empty(2**44, device=report.device)  # 64 TiB
                return step()

            return real(too_large) if report.gpu else too_large()

        with patch.object(decoding, "record", full):
            found = decoded(model, report.device)
        report.equal("tokens without memory for a graph", torch.equal(found[0], expected[0]), True)
    with graphs(report, True) as recorded:
        found = decoded(model, report.device)
    report.equal("tokens of the next batch", torch.equal(found[0], expected[0]), True)
    report.at_least("recorded graphs of the next batch", len(recorded), 1)


def check_full_store(report: Report) -> None:
    """Write weights to a GPU that is full: the store reports an error with a remedy, and works afterwards."""
    report.need_gpu()
    store, tensor = GpuWeights(report.device, torch.float32), torch.zeros(2**28, device=report.device)
    torch.cuda.empty_cache()
    share = (torch.cuda.memory_reserved(report.device) + 2**28) / torch.cuda.get_device_properties(
        report.device
    ).total_memory
    torch.cuda.set_per_process_memory_fraction(share, report.device)
    try:
        store.write([("a", tensor)], 1)
        said = "no error"
    except RunError as error:
        said = str(error)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, report.device)
    report.equal("error names the remedy", "generator.transfer=shared_memory" in said, True)
    manifest = store.write([("a", tensor)], 2)
    report.equal("the store works afterwards", manifest.entries[0].checksum != 0, True)
    store.close()
