"""Tests of the estimates of time: measured figures of GPUs and CPUs, overlap, a measured run, the price."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from rlhf import plan as command
from rlhf.core.errors import UserError
from rlhf.core.machine import Machine
from rlhf.memory import times
from rlhf.memory.times import DEVICES, Clock
from rlhf.memory.uses import GIB
from rlhf.runs.folder import RunFolder
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
    compiled, plain = figures(
        r"^On an H200 .* 32,768 tokens per forward took (\d+) ms .* and\n(\d+) ms without"
    )
    near(training_s("H200", 32768, True), compiled / 1e3)
    near(training_s("H200", 32768, False), plain / 1e3)


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
    ("experiment=tldr_410m_dpo", "generator.batch_size=16"): "`generator.batch_size=16`",
    ("experiment=tldr_410m_dpo",): "`generator.batch_size=256`, as in the recipe",
    ("experiment=tldr_410m_dpo_vllm", "schedule.prompts_per_update=128"): "`generator=vllm_colocated`",
}


@pytest.mark.parametrize("words", RECIPE)
def test_updates_of_a_recipe_on_an_h200(words):
    update, sampling, training = figures(
        rf"^\| {re.escape(RECIPE[words])}.*? \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) "
    )
    made = clock("H200", *words)
    found = made.phases()
    near(times.update_s(made.cfg, found), update)
    near(found["sampling"], sampling)
    near(found["training"], training)


def test_the_head_on_both_gpus():
    made = clock("H100", "generator=hf")
    tokens = made.trainer.tokens(2, 2)
    size = replace(made.trainer.policy, layers=0)
    logits = tokens.sequences * tokens.response  # their part of 8,192
    for gpu, pattern in (("H100", r"torch \| ([\d.]+), "), ("H200", r"tiles took ([\d.]+) ms")):
        found = clock(gpu, "generator=hf").pass_s(size, tokens, made.trainer.models[0]) * 8192 / logits
        near(found, figures(pattern)[0] / 1e3)


def test_rates_of_measured_gpus_are_those_of_the_page():
    product, copies = figures(r"copy within the GPU \| (\d+) TFLOP/s; ([\d,]+) GB/s")
    assert DEVICES["H100"]["flops"] == pytest.approx(0.9 * product * 1e12, rel=1e-3)
    assert DEVICES["H100"]["bytes"] == pytest.approx(0.55 * copies * 1e9, rel=1e-3)
    assert DEVICES["H100"]["transfer"] == figures(r"CUDA IPC; .* \| ([\d.]+); [\d.]+ GB/s")[0] * 1e9
    measured = {name for name, rates in DEVICES.items() if rates.get("factor") == GPU_FACTOR}
    assert measured == {"H100", "H200"}, "others have a larger factor"


def test_growth_on_a_cpu():
    pytest.importorskip("benchmarks.growth")
    from benchmarks.growth import AXES, BASE, Point

    kept = json.loads((ROOT / "docs/figures/growth.json").read_text())["axes"]
    points = [(replace(BASE, **{axis: row["value"]}), row["cpu_s"]) for axis in AXES for row in kept[axis]]

    usual = compose(["algo=rloo", "generator=hf", "model=pythia", "backend.device=cpu", "model.heads=1"])

    def estimated(point: Point) -> float:
        changes = {
            "algo.samples_per_prompt": point.samples,
            "model.hidden_size": point.hidden_size,
            "model.layers": point.layers,
            "task.max_prompt_tokens": point.prompt,
            "generator.response_length": point.response,
            "backend.micro_batch": max(32, point.samples),
            "schedule.prompts_per_update": point.prompts,
        }
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(usual.task), "vocabulary_size", point.vocabulary)
            made = Clock(usual.with_(changes), DEVICES["cpu"], Machine(2**38))
        return times.update_s(made.cfg, made.phases())

    factors = [estimated(point) / sum(cpu_s.values()) for point, cpu_s in points]
    assert all(1 / 1.35 < factor < 1.35 for factor in factors), factors
    assert sum(1 / 1.2 < factor < 1.2 for factor in factors) > 0.8 * len(factors)


def test_sampling_overlaps_with_training_if_there_is_a_lag():
    phases = {"sampling": 6.0, "log-probs and scores": 1.0, "training": 3.0, "weights": 0.0}
    assert times.update_s(compose([]), phases) == 10
    assert times.update_s(compose(["schedule.max_lag=1"]), phases) == 6
    assert times.update_s(compose(["schedule.max_lag=1"]), {**phases, "training": 7.0}) == 8


def test_phases_of_a_run_scale_the_estimate(tmp_path):
    folder, cfg = RunFolder(tmp_path / "run"), compose([])
    folder.write_config(cfg)
    machine = Machine(2**38)
    usual = Clock(cfg, DEVICES["cpu"], machine).phases()
    rows = [{"time/train_s": 100.0}] + 3 * [
        {"time/train_s": 2.0, "time/generate_s": 1.0, "time/score_s": 0.5}
    ]
    folder.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    same = times.from_run(folder, DEVICES["cpu"], machine, usual)
    assert (same["training"], same["sampling"]) == (pytest.approx(2), pytest.approx(1))
    longer = compose(["generator.response_length=80"])
    wanted = Clock(longer, DEVICES["cpu"], machine).phases()
    found = times.from_run(folder, DEVICES["cpu"], machine, wanted)
    assert found["sampling"] == pytest.approx(wanted["sampling"] / usual["sampling"])
    folder.metrics.write_text("")
    with pytest.raises(UserError, match="two updates"):
        times.from_run(folder, DEVICES["cpu"], machine, usual)


def plan_of(monkeypatch, capsys, *words: str) -> str:
    monkeypatch.setattr("sys.argv", ["rlhf.plan", *words])
    monkeypatch.setattr(command.console, "width", 160)
    command.main()
    return capsys.readouterr().out


def numbers(text: str, row: str) -> list[float]:
    (line,) = (line for line in text.splitlines() if line.strip().startswith(row))
    return [float(each) for each in re.findall(r"(?<=\s)\d[\d.e+-]*(?= )", line.partition(row)[2])]


def test_the_price_is_that_of_the_hours_and_the_gpus(monkeypatch, capsys):
    words = ("experiment=gsm8k_qwen3_0_6b_grpo_async", "price_per_gpu_hour=3")
    monkeypatch.setattr(command, "checked", lambda cfg: cfg)
    text = plan_of(monkeypatch, capsys, *words)
    hours = numbers(text, "the run: 128 updates")
    price = numbers(text, "its price with 2 GPUs")
    assert price[0] == pytest.approx(6 * hours[0], rel=0.02)
    assert hours[1] < hours[0] < hours[2]
    wider = numbers(plan_of(monkeypatch, capsys, *words, "gpu=A100"), "the run: 128 updates")
    assert wider[0] > hours[0] and wider[2] / wider[0] > hours[2] / hours[0]


ON_GPU, ON_CPU = ("generator=hf", "backend.device=cuda"), ("backend.device=cpu",)
WRONG = [(ON_GPU, "gpu=H100x"), (ON_GPU, "price_per_gpu_hour=cheap"), (ON_GPU, "run=nowhere")]
WRONG += [(ON_CPU, "gpu=H100"), (ON_CPU, "price_per_gpu_hour=3"), (ON_CPU, "run=nowhere")]


@pytest.mark.parametrize(("words", "wrong"), WRONG)
def test_wrong_arguments_of_the_time_end_with_exit_code_2_before_a_table(monkeypatch, capsys, words, wrong):
    monkeypatch.setattr(command, "checked", lambda cfg: cfg)
    with pytest.raises(SystemExit) as ended:
        plan_of(monkeypatch, capsys, *words, wrong)
    assert ended.value.code == 2 and not capsys.readouterr().out
