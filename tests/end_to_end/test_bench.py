"""Tests of the commands of the benchmark against TRL, and of the growth benchmark."""

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import growth
from benchmarks.against_trl import bench
from benchmarks.against_trl.meter import PHASES
from benchmarks.against_trl.reward import rewards, variety
from benchmarks.against_trl.work import ENVIRONMENTS, LENGTHS, Case, cases
from benchmarks.growth import Point, work
from tests import needs

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).parents[2]
SMOKE = [sys.executable, "-m", "benchmarks.against_trl.bench", "--smoke", "--threads", "1"]


def smoke(folder: Path, *words: str) -> list[dict]:
    out = folder / "runs.jsonl"
    done = subprocess.run([*SMOKE, *words, "--out", str(out)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in out.read_text().splitlines()]


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    """Return the measurements of this project by algorithm, from one benchmark command."""
    found = smoke(tmp_path_factory.mktemp("bench"), "--side", "ours", "--algo", "dpo", "ppo")
    assert [Case(**each["case"]).algo for each in found] == ["dpo", "ppo"]
    return {Case(**each["case"]).algo: each for each in found}


@pytest.mark.parametrize("algo", ["dpo", "ppo"])
def test_our_side_reports_the_expected_counts_and_cpu_time_of_all_phases(algo, ours):
    found = ours[algo]
    figures, case = found["figures"], Case(**found["case"])
    assert found["side"] == "ours" and case.algo == algo
    assert figures["counts"] == case.counts()
    assert list(figures["counts"].values()) == [64, 64 * 24, 64 * 48, 1, 1]
    assert all(figures["phases"][phase]["cpu_s"] > 0 for phase in PHASES)
    assert sum(phase["cpu_s"] for phase in figures["phases"].values()) == pytest.approx(figures["cpu_s"])
    assert figures["memory"]["above_mib"] > 0


@pytest.mark.parametrize("algo", ["dpo", "ppo"])
def test_trl_and_our_side_do_the_same_work(algo, tmp_path):
    (case, *_) = cases(list(LENGTHS), [algo], [1])
    if not bench.python(ROOT, case).exists():
        pytest.skip(needs.TRL)
    found = smoke(tmp_path, "--algo", algo)
    ours, theirs = (run["figures"]["counts"] for run in found)
    assert [run["side"] for run in found] == ["ours", "trl"]
    assert ours == theirs


def test_a_profile_adds_up_to_the_time_of_an_update():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.against_trl.profile", "short-nano", "dpo", "--markdown"]
        + ["--operations", "3"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if line.startswith("|")]
    assert rows[0] == ["short-nano-dpo", *PHASES, "all", "share"]
    table = {row[0]: [float(cell.rstrip("%")) for cell in row[1:]] for row in rows[2:]}
    *kinds, whole = table.values()
    for column, total in zip(zip(*kinds, strict=True), whole, strict=True):
        assert sum(column) == pytest.approx(total, abs=len(kinds) / 2 + 0.5), (
            "the kinds must sum to the total, except for rounding"
        )
    assert all(ms > 0 for kind in ("matrix products", "attention") for ms in table[kind])
    assert all(ms >= 0 for row in kinds for ms in row)
    assert (
        len(re.findall(r"^ *[0-9.]+ ms  (?:generate|score|reference|train): aten::", done.stdout, re.M)) == 3
    )


def test_a_missing_environment_is_an_error_that_names_the_environment(tmp_path):
    done = subprocess.run(
        [*SMOKE, "--algo", "ppo", "--environments", str(tmp_path)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "--environments must be a folder with .venv-bench-ppo" in done.stderr
    assert "requirements/bench-ppo.txt" in done.stderr


@pytest.mark.parametrize("module", ["bench --gpu", "roofline tldr-410m dpo"])
def test_commands_that_need_a_gpu_fail_without_a_gpu(module):
    command = [sys.executable, "-m", *f"benchmarks.against_trl.{module}".split()]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 2
    assert "a GPU that torch can use" in done.stderr and "there is none" in done.stderr


def test_asynchronous_grpo_is_skipped_with_the_reason_if_there_are_no_two_gpus(tmp_path, capsys):
    both = cases(["short-nano"], ["dpo", "async_grpo"], [1])
    assert bench.runnable(both, tmp_path, argparse.ArgumentParser()) == both[:1]
    shown = "async_grpo: skipped: asynchronous GRPO needs --gpu and two GPUs"
    assert shown in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        bench.runnable(both[1:], tmp_path, argparse.ArgumentParser())
    assert "two GPUs, one of them for vLLM (found 0)" in capsys.readouterr().err


def test_asynchronous_grpo_on_two_gpus_needs_an_environment_of_trl(tmp_path, monkeypatch):
    (case,) = cases(["short-410m"], ["async_grpo"], [8], gpu=True)
    monkeypatch.setattr(bench.torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: name)
    assert ".venv-bench-async" in bench.obstacle(case, tmp_path)
    assert bench.obstacle(case, None) is None, "this project alone needs no TRL"
    monkeypatch.setattr(bench, "python", lambda *_: Path(sys.executable))
    assert bench.obstacle(case, tmp_path) is None


def test_only_asynchronous_samples_may_be_of_other_prompts():
    for algo in ("grpo", "async_grpo"):
        (case,) = cases(["tldr-410m"], [algo], [8], gpu=True)
        other = {**case.counts(), "prompt_tokens": 1}
        assert bench.same_work(case, case.counts())
        assert bench.same_work(case, other) == case.asynchronous == (algo == "async_grpo")
        assert not bench.same_work(case, {**case.counts(), "response_tokens": 1})


def test_both_sides_give_a_response_the_same_reward():
    assert rewards([[{"role": "assistant", "content": "w3 w4 w3 w3"}]]) == [variety("", "w3 w4 w3 w3", "")]
    assert variety("", "w3 w4 w3 w3", "") == 0.5


def test_each_environment_of_trl_has_a_module():
    assert set(bench.THEIRS) == {"bench", *ENVIRONMENTS.values()}
    assert all(Path(bench.__file__).with_name(f"{name}.py").exists() for name in bench.THEIRS.values())


SMALL = Point(prompts=2, samples=2, prompt=4, response=3, vocabulary=32, hidden_size=32, layers=1)


def test_a_small_sweep_is_measured_and_plotted(monkeypatch, tmp_path):
    monkeypatch.setattr(growth, "BASE", SMALL)
    monkeypatch.setattr(growth, "UPDATES", 2)
    monkeypatch.setattr(growth, "AXES", {"layers": ("layers", (1, 2)), "samples": ("samples", (2, 4))})
    out = tmp_path / "growth.json"
    for axis in ("layers", "samples"):  # the second command keeps the measurements of the first
        monkeypatch.setattr("sys.argv", ["growth", "--axis", axis, "--out", str(out)])
        growth.main()
    kept = json.loads(out.read_text())
    assert [point["value"] for point in kept["axes"]["layers"]] == [1, 2] and len(kept["axes"]) == 2
    first = kept["axes"]["layers"][0]
    assert all(0 < first["cpu_s"][phase] < 60 for phase in PHASES) and first["work"] == work(SMALL)
    assert out.with_suffix(".png").stat().st_size > 10_000
