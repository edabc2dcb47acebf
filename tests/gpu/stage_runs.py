"""Stage 6: complete runs of three updates on the embedded task.

Shows that DPO and PPO run to their end on plain torch and ZeRO-2, sampled by the Hugging Face model and by
vLLM, that sampler and trainer agree on the log-probs, and that a run resumed from a checkpoint gives the
metrics of the uninterrupted run.
"""

from __future__ import annotations

import importlib.util
import json
import math
import shutil
from itertools import product
from pathlib import Path
from typing import Any

from rlhf.runs.folder import RunFolder
from rlhf.stages.run import run as run_training
from rlhf.words.compose import compose
from tests.gpu.report import Report, Skip
from tests.gpu.samplers import need_vllm

UPDATES = 3
TINY = ["debug=tiny", "task.train_size=128", "task.validation_size=32", "task.test_size=8", "progress=off"]
VARIES = (
    "time/",
    "throughput/",
    "memory/",
    "generator/",
)  # families of metrics that differ between equal runs
EPISODES = 8 * 2  # of an update
ALGOS, GENERATORS, BACKENDS = ("dpo", "ppo"), ("hf", "vllm_colocated"), ("torch", "zero2")
# Runs that are not resumed, because vLLM starts slowly.
UNRESUMED = {("dpo", "vllm_colocated", "zero2"), ("ppo", "vllm_colocated", "torch")}
# Largest relative differences of the metrics of a resumed run. A GPU may add numbers in another order.
EXACT, ON_GPU = 0.0, 0.05


def run(report: Report) -> None:
    """Run the stage."""
    cache = report.folder / "cache"
    for generator, backend, algo in product(GENERATORS, BACKENDS, ALGOS):
        name = f"{algo}, {generator}, {backend}"
        with report.part(name):
            if generator.startswith("vllm"):
                need_vllm(report)
            if backend.startswith("zero") and importlib.util.find_spec("deepspeed") is None:
                raise Skip("needs DeepSpeed")
            resumed = (algo, generator, backend) not in UNRESUMED
            check_run(report, name, algo, [f"generator={generator}", f"backend={backend}"], cache, resumed)


def check_run(report: Report, name: str, algo: str, words: list[str], cache: Path, resumed: bool) -> None:
    """Execute a run; if `resumed`, resume a copy of its folder from its checkpoint."""
    words = [*TINY, f"algo={algo}", *words, f"backend.device={report.device.type}", f"cache_dir={cache}"]
    words += [f"schedule.total_episodes={EPISODES * UPDATES}", "generator.annotate=false"]
    words += ["scorer.missing_eos_score=null"] if algo == "dpo" else []  # otherwise most pairs are ties
    if "generator=vllm_colocated" in words:  # a compiled vLLM starts slowly
        words += [f"generator.memory={0.2 if report.gpu else 0.02}", "generator.enforce_eager=true"]
    cfg = compose(words)
    whole, again = report.folder / f"{name}-whole", report.folder / f"{name}-resumed"
    run_training(cfg, RunFolder(whole))
    found = rows(whole)
    report.equal(f"updates: {name}", found[-1]["update"], UPDATES)
    if algo == "dpo":  # the policy still equals the reference
        first = next(row["loss/policy"] for row in found if "loss/policy" in row)
        report.at_most(f"first loss against log 2: {name}", abs(first - math.log(2)), 1e-4)
    else:
        mismatch = max(row["mismatch/kl"] for row in found if "mismatch/kl" in row)
        report.at_most(f"KL of sampler and trainer: {name}", mismatch, 1e-2 if report.gpu else 1e-6)
    if not resumed:
        return
    shutil.copytree(whole, again)
    (again / "trainer_state.json").unlink()
    shutil.rmtree(again / "model")
    (again / "train.log").write_text("")
    run_training(cfg, RunFolder(again))
    said = (again / "train.log").read_text()
    report.equal(f"resumed from a checkpoint: {name}", "resumed from update" in said, True)
    limit = ON_GPU if report.gpu else EXACT
    report.at_most(f"metrics of the resumed run, relative: {name}", row_difference(rows(again), found), limit)


def rows(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl without the metrics that differ between equal runs."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if not k.startswith(VARIES)} for line in lines]


def row_difference(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> float:
    """Return the largest relative difference of two lists of rows; infinite if a row is missing."""
    if [row.keys() for row in found] != [row.keys() for row in expected]:
        return float("inf")
    return max(
        abs(row[name] - wanted[name]) / max(abs(wanted[name]), 1.0)
        for row, wanted in zip(found, expected, strict=True)
        for name in wanted
        if isinstance(wanted[name], int | float)
    )
