"""Tests of the estimates of time: measured figures of GPUs and CPUs, overlap, a measured run, the price."""

import json
import re
from pathlib import Path

import pytest

from rlhf.core.machine import Machine
from rlhf.memory import times
from rlhf.memory.times import DEVICES, Clock
from rlhf.memory.uses import GIB
from rlhf.words.compose import compose

ROOT = Path(__file__).parents[2]
BENCHMARKS = (ROOT / "docs/results/benchmarks.md").read_text()
GPU_FACTOR = 1.5
FLOP = 137e12 / 65_536  # of a token of the training forwards: 399 TFLOP/s in 343 ms for two of 32,768 tokens
PYTHIA = ("model=pythia_410m", "task=tldr", "scorer@gold=none", "backend.device=cuda", "algo=dpo")
ROWS = ("task.max_prompt_tokens=128", "generator.response_length=128")


def clock(gpu: str, *words: str) -> Clock:
    memory = int(DEVICES[gpu]["gib"] * GIB)
    named = ("model.policy=EleutherAI/pythia-410m", "model.reward=EleutherAI/pythia-410m")
    return Clock(compose([*PYTHIA, *named, *words]), DEVICES[gpu], Machine(2**38, (memory,) * 8))


def figures(pattern: str) -> list[float]:
    """Return the numbers of the only line of the page that matches, from its first figure on."""
    (found,) = re.findall(pattern, BENCHMARKS, re.M)
    return [float(each.replace(",", "")) for each in ([found] if isinstance(found, str) else found)]


def near(estimate: float, figure: float, factor: float = GPU_FACTOR) -> None:
    assert 1 / factor < estimate / figure < factor, f"{estimate:.3g} for {figure:.3g}"


def training_s(gpu: str, tokens: int, compiled: bool) -> float:
    """Return the seconds of two micro-batches of `tokens` tokens: 384 of a prompt and 128 of a response."""
    sequences = tokens // 512
    words = [f"backend.micro_batch={sequences}", f"schedule.prompts_per_update={sequences}"]
    words += [f"backend.compile={str(compiled).lower()}", "task.max_prompt_tokens=384"]
    words += ["generator.response_length=128", "model.shared_prefix=false", "backend.tokens=1000000"]
    return clock(gpu, "generator=hf", *words).phases()["training"]


def test_training_on_an_h100():
    for compiled, line in ((False, "training, 4,096"), (True, "the same with `backend.compile=true`")):
        rates = figures(rf"^\| {line}.*? \| (\d+), (\d+), (\d+) TFLOP/s")
        for tokens, rate in zip((4096, 16384, 32768), rates, strict=True):
            near(training_s("H100", tokens, compiled), 2 * tokens * FLOP / (rate * 1e12))


def test_training_on_an_h200():
    for line in ("before; the same measured again at the end", "the operations around the head's products"):
        near(training_s("H200", 32768, True), figures(rf"^\| {line}.*? \| (\d+)[; |]")[0] / 1e3)
    near(training_s("H200", 32768, False), figures(r"^\| without `backend.compile` \| (\d+) ")[0] / 1e3)


def test_micro_batches_with_copies_of_weights_on_an_h100():
    for figure in figures(r"^\| 8 micro-batches .* \| (\d+), (\d+) ms"):
        near(4 * training_s("H100", 4096, False), figure / 1e3)


@pytest.mark.parametrize("rows", [64, 512])
def test_decoding(rows):
    place = (64, 512).index(rows)
    own = ("generator=hf", f"generator.batch_size={rows}", *ROWS)
    tokens = rows * 128
    line = r"^\| decoding with `{}`, 64 and 512 rows \| ([\d,]+) and ([\d,]+) tokens/s"
    near(tokens / clock("H100", *own).sampling_s(rows, 1), figures(line.format("hf"))[place])
    vllm = ("generator=vllm_colocated", f"generator.max_num_seqs={rows}", *ROWS)
    near(tokens / clock("H100", *vllm).sampling_s(rows, 1), figures(line.format("vllm_colocated"))[place])
    table = figures(r"^\| CUDA graphs \| ([\d,]+) \| \d+ % \| ([\d,]+) \|")
    near(tokens / clock("H200", *own).sampling_s(rows, 1), table[place])
    compiled = figures(r"^\| with `generator.compile=true` \| ([\d,]+) \| \d+ % \| ([\d,]+) \|")
    near(tokens / clock("H200", *own, "generator.compile=true").sampling_s(rows, 1), compiled[place])


RECIPE = {  # words -> the start of the row of the table
    ("generator=hf", "generator.batch_size=16"): "`generator.batch_size=16`, as the recipe was",
    ("generator=hf", "generator.batch_size=256"): "`generator.batch_size=256`, as the recipe is",
    ("generator=vllm_colocated", "generator.memory=0.2"): "`generator=vllm_colocated generator.memory=0.2`",
}


@pytest.mark.parametrize("words", RECIPE)
def test_updates_of_a_recipe_on_an_h200(words):
    update, sampling, training = figures(
        rf"^\| {re.escape(RECIPE[words])} \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) "
    )
    made = clock("H200", "experiment=tldr_410m_dpo", *words)
    found = made.phases()
    near(times.update_s(made.cfg, found), update)
    near(found["sampling"], sampling)
    near(found["training"], training)
