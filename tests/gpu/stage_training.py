"""Stage 2: training steps on the device, compared with the CPU and between backends, and peak memory.

Shows that steps of DPO and PPO in float32 equal those on the CPU, that bfloat16 is near, that ZeRO on one
rank equals plain torch, that a checkpoint restores the next step, and that the memory plan is not too small.
"""

from __future__ import annotations

import importlib.util
import json
import math
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.against_trl.ours import overrides
from rlhf.memory.plan import plan
from rlhf.processes.ranks import Ranks
from rlhf.runs.folder import RunFolder
from rlhf.stages.run import run as run_training
from rlhf.words.compose import compose
from tests.end_to_end import backend_steps
from tests.end_to_end.backend_steps import OBJECTIVES, Steps
from tests.gpu.report import Report, Skip
from tests.gpu.shapes import case_of

ZERO = ("zero0", "zero1", "zero2", "zero3")
LOSSES = ("loss/", "policy/grad_norm")  # prefixes of the metrics that are compared


def run(report: Report) -> None:
    """Run the stage."""
    ranks = Ranks.join(report.device, 120.0)
    plain: dict[str, Any] = {}
    for algo in OBJECTIVES:
        with report.part(f"{algo} in float32"):
            expected = Steps("torch", Ranks(), report.folder / "cpu").trained(algo)
            plain[algo] = Steps("torch", ranks, report.folder / "device").trained(algo)
            compare(report, f"{algo} against the CPU", plain[algo], expected)
            check_resumed(report, algo, plain[algo])
    with report.part("bfloat16"):
        uncounted = patch.object(backend_steps, "counted_gathers", lambda: nullcontext({}))
        with uncounted:  # counting needs DeepSpeed
            found = Steps("torch", ranks, report.folder).bfloat16()
        check_bfloat16(report, found, plain["dpo"])
    with report.part("peak memory"):  # before DeepSpeed starts NCCL, which needs memory too
        check_memory(report)
    for name in ZERO:
        with report.part(name):
            if importlib.util.find_spec("deepspeed") is None:
                raise Skip("needs DeepSpeed")
            found = Steps(name, ranks, report.folder).trained("dpo")
            compare(report, f"{name} against torch", found, plain["dpo"])
            check_resumed(report, name, found)


def compare(report: Report, name: str, found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compare losses, gradient norms and weights of three updates."""
    report.at_most(f"losses of {name}, relative", row_difference(found["rows"], expected["rows"]), 1e-3)
    largest = max(
        float((found["weights"][key].cpu() - weight.cpu()).abs().max())
        for key, weight in expected["weights"].items()
    )
    report.at_most(f"weights of {name}", largest, 1e-3)


def row_difference(found: list[dict[str, float]], expected: list[dict[str, float]]) -> float:
    """Return the largest relative difference of losses and gradient norms; NaN if a number is not finite."""
    worst = 0.0
    for row, wanted in zip(found, expected, strict=True):
        for key in (key for key in wanted if key.startswith(LOSSES)):
            each = abs(row[key] - wanted[key]) / max(abs(wanted[key]), 1e-2)
            worst = each if math.isnan(each) else max(worst, each)
    return worst


def check_resumed(report: Report, name: str, found: dict[str, Any]) -> None:
    """Check the step after a checkpoint, and that steps that are not finite leave the weights unchanged."""
    again = row_difference([found["resumed"]["row"]], found["rows"][2:])
    report.at_most(f"step of {name} after its checkpoint, relative", again, 1e-5)
    failed = found["failed"]
    same = all(torch.equal(failed["after"][key], weight) for key, weight in failed["before"].items())
    report.equal(f"weights of {name} after failed steps", same, True)


def check_bfloat16(report: Report, found: dict[str, Any], exact: dict[str, Any]) -> None:
    """Compare two steps in bfloat16 with the steps in float32."""
    report.at_most("losses in bfloat16, relative", row_difference(found["rows"], exact["rows"][:2]), 0.1)
    report.equal(
        "dtypes of trained weights", {str(w.dtype) for w in found["weights"].values()}, {"torch.float32"}
    )
    report.equal("dtypes of the reference", found["reference"], ["torch.bfloat16"])


def check_memory(report: Report) -> None:
    """Train two updates of online DPO, on a GPU with 410M parameters, and compare the peak with the plan."""
    case = replace(case_of(report.full, report.materials), warmup=0, measured=2)
    cfg = compose(overrides(case, report.materials))
    planned = plan(cfg).uses[0]
    folder = RunFolder(report.folder / "run")
    if report.gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    run_training(cfg, folder)
    lines = (folder.path / "metrics.jsonl").read_text().splitlines()
    peaks = [row["memory/peak_gib"] for row in map(json.loads, lines) if "memory/peak_gib" in row]
    report.figure("planned memory", planned.bytes / 2**30, "GiB")
    if not report.full:  # RAM of this process, which has also run the steps above
        report.figure("peak memory of the process", peaks[-1], "GiB")
        return
    free, total = torch.cuda.mem_get_info(report.device)
    other = total - free - torch.cuda.memory_reserved(report.device)  # CUDA context and other processes
    report.figure("reserved memory", torch.cuda.max_memory_reserved(report.device) / 2**30, "GiB")
    report.figure("CUDA context and other processes", other / 2**30, "GiB")
    report.at_most("peak memory over the plan", (peaks[-1] * 2**30 + other) / planned.bytes, 1.1)
    report.at_least("peak memory over the plan, lower bound", peaks[-1] * 2**30 / planned.bytes, 0.3)
