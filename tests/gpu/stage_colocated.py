"""Stage 4: vLLM on the trainer's GPU.

Shows that weights arrive by CUDA IPC after each of five sleeps, that vLLM frees its memory after its start
and during its sleep and loses none from load to load, that it wakes up although the trainer has filled the
GPU with cached blocks, and that a killed process is replaced by a process with the same weights.
"""

from __future__ import annotations

import os
import signal

import torch
from transformers import PreTrainedModel

from rlhf.generators.process import WorkerGenerator
from rlhf.processes.worker import Job
from tests.gpu.report import NO_GPU, Report
from tests.gpu.samplers import LIMITS, ask, change, greedy_gap, need_vllm, rounded, started
from tests.gpu.shapes import HEADS, prompts, tiny

ROUNDS = 5
ASLEEP = 0.1  # largest share of the GPU without keys and values; `samplers.started` allows 0.25 with them
LEAK = 64 << 20  # bytes by which the memory of the GPU may differ between rounds


def run(report: Report) -> None:
    """Run the stage."""
    with report.part("colocated vLLM"):
        need_vllm(report)
        model = rounded(tiny("llama", **HEADS).to(report.device))
        before = used(report)
        with started(report, model, "generator.dtype=float32", "generator.enforce_eager=true") as generator:
            report.figure("transfer of weights", type(generator.store).__name__)
            check_started(report, generator, before)
            check_rounds(report, generator, model, before)
            with report.part("kill -9 of vLLM"):
                check_killed(report, generator, model)
            with report.part("a trainer with a full cache"):
                check_full_cache(report, generator, model)


def used(report: Report) -> int:
    """Return the bytes in use on the GPU by all processes, without cached blocks of this process."""
    if not report.gpu:
        return 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(report.device)
    return total - free


def check_started(report: Report, generator: WorkerGenerator, before: int) -> None:
    """Wait until vLLM has started; on a GPU, measure the memory that it keeps before the first load."""
    generator.put(Job()).result()
    if report.gpu:
        share = (used(report) - before) / torch.cuda.get_device_properties(report.device).total_memory
        report.at_most("memory of vLLM before the first load", share, ASLEEP, "of the GPU")


def check_round(report: Report, generator: WorkerGenerator, model: PreTrainedModel, version: int) -> None:
    """Load a new version, sample, and compare the tokens with the model's."""
    change(model, version)
    generator.load(model.state_dict().items(), version)
    rollouts = ask(generator, prompts(8, 100), samples=1, temperature=0.0)
    limit = LIMITS[report.device.type, "float32"]
    report.equal(f"version {version} is confirmed", rollouts.version, version)
    name = f"greedy tokens of version {version}: distance to the best"
    report.at_most(name, greedy_gap(model, rollouts), limit)


def check_rounds(report: Report, generator: WorkerGenerator, model: PreTrainedModel, before: int) -> None:
    """Load and sample several times; on a GPU, measure the memory after each sleep."""
    asleep = []
    for version in range(ROUNDS):
        check_round(report, generator, model, version)
        asleep.append(used(report) - before)
    if not report.gpu:
        report.fact("memory after sleep", "skipped", reason=f"{NO_GPU}: on a CPU vLLM cannot sleep")
        return
    total = torch.cuda.get_device_properties(report.device).total_memory
    report.at_most("memory of vLLM asleep", asleep[-1] / total, ASLEEP, "of the GPU")
    report.figure("memory of vLLM asleep, in GiB", asleep[-1] / 2**30, "GiB")
    report.at_most("growth from round 2 to the last", (asleep[-1] - asleep[1]) / 2**20, LEAK / 2**20, "MiB")


def check_full_cache(report: Report, generator: WorkerGenerator, model: PreTrainedModel) -> None:
    """Load and sample while the trainer's allocator keeps nearly all free memory as cached blocks."""
    report.need_gpu()
    free, _ = torch.cuda.mem_get_info(report.device)
    blocks = [torch.empty(2**28, dtype=torch.uint8, device=report.device) for _ in range((free >> 28) - 4)]
    del blocks
    cached = torch.cuda.memory_reserved(report.device) - torch.cuda.memory_allocated(report.device)
    report.at_least("cached by the trainer", cached / free, 0.5, "of the free memory")
    assert generator.confirmed is not None
    check_round(report, generator, model, generator.confirmed.version + 1)


def check_killed(report: Report, generator: WorkerGenerator, model: PreTrainedModel) -> None:
    """Kill the process of vLLM: the next request is sampled by a new process with the same weights."""
    process = generator.process
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    rollouts = ask(generator, prompts(8, 100), samples=1, temperature=0.0)
    assert generator.confirmed is not None
    report.equal("version after the restart", rollouts.version, generator.confirmed.version)
    limit = LIMITS[report.device.type, "float32"]
    report.at_most(
        "greedy tokens after the restart: distance to the best", greedy_gap(model, rollouts), limit
    )
    report.equal("restarts", generator.restarts, 1)
    check_round(report, generator, model, rollouts.version + 1)
