"""Tests of code for GPUs on a pretended GPU (see tests/pretended_gpu): complete runs, and `make test-gpu`."""

import json
import subprocess
import sys

import pytest

from tests import pretended_gpu
from tests.gpu.__main__ import main

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(bool(pretended_gpu.unavailable()), reason=str(pretended_gpu.unavailable())),
]

OFF_POLICY = ("schedule.minibatches=2", "schedule.epochs=2", "algo.samples_per_prompt=4")
RUNS = (  # of different objectives, anchors, corrections and optional outputs
    ("algo=dpo", "algo.weighting=wpo", "backend.micro_batch=4"),
    ("algo=ppo", "algo.entropy_coef=0.01", "model.lora.rank=4", "backend.tokens=96"),
    ("algo=grpo", "correction=seq_mask_tis", *OFF_POLICY),
    ("algo=rloo", "algo.anchor=loglinear", "algo.off_policy_mask=0.1", "algo.dual_clip=3", *OFF_POLICY),
    ("algo=dapo", "algo.covariance.kind=clip", "algo.covariance.low=0", *OFF_POLICY),
    ("algo=oapl", "schedule.replay=2", "schedule.max_lag=1", "generator.worker=false", *OFF_POLICY),
    ("algo=dppo", "algo.divergence=kl", "model.gradient_checkpointing=true", *OFF_POLICY),
    ("algo=reward", "generator=dataset"),
)
# Metrics that rounding changes: the policy and the reference are equal at first.
ROUNDED = "rewards/accuracies"


@pytest.fixture(scope="module")
def runs(cache_dir, tmp_path_factory):
    """Return for each of `RUNS` what tests/pretended_gpu/inside.py found."""
    scored = ("scorer=facts", "scorer.missing_eos_score=null")
    words = [(*run, *(() if "algo=reward" in run else scored)) for run in RUNS]
    command = [sys.executable, "-m", "tests.pretended_gpu.inside", str(cache_dir)]
    command += [str(tmp_path_factory.mktemp("runs")), json.dumps(words)]
    done = subprocess.run(
        command, env=pretended_gpu.environment(), capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return dict(zip(RUNS, map(json.loads, lines), strict=True))


@pytest.mark.parametrize("words", RUNS, ids=" ".join)
def test_a_run_on_a_gpu_has_the_metrics_of_the_run_on_the_cpu(runs, words):
    cpu, gpu = runs[words]["cpu"], runs[words]["cuda"]
    assert len(gpu) == len(cpu) >= 3
    for found, expected in zip(gpu, cpu, strict=True):
        found.pop(ROUNDED, None), expected.pop(ROUNDED, None)
        assert found == pytest.approx(expected, rel=2e-3, abs=1e-4)
    assert "slower" not in runs[words]["log"], "each decoding step is recorded as a CUDA graph"


@pytest.mark.parametrize("words", RUNS, ids=" ".join)
def test_a_training_step_waits_for_the_gpu_only_where_a_forward_begins(runs, words):
    steps = runs[words]["steps"]
    assert max(step["micro-batches"] for step in steps) > 1
    forwards = 2 if "algo=ppo" in words else 1  # of the policy, and of the value model
    for step in steps:
        waits, parts = step["waits"], step["micro-batches"]
        transformers = waits.pop("_local_scalar_dense in models/forward.py", 0)
        assert transformers <= forwards * parts
        assert waits.pop("nonzero in models/modules.py", 0) <= parts
        assert waits.pop("_local_scalar_dense in engines/engine.py") == 1, "are loss and gradient finite?"
        assert not waits


@pytest.mark.parametrize("words", RUNS, ids=" ".join)
def test_training_needs_the_memory_of_the_plan(runs, words):
    planned, last = runs[words], runs[words]["steps"][-1]  # the first step creates the optimizer's state
    assert last["kept"] == pytest.approx(planned["kept"], rel=1e-3)
    assert 0.5 * planned["training"] < last["peak"] < planned["training"]


def test_the_stages_of_the_gpu_tests_pass(tmp_path, monkeypatch):
    for name, value in pretended_gpu.environment().items():
        monkeypatch.setenv(name, value)
    file = tmp_path / "gpu.json"
    assert main(["--device", "cuda", "--stages", "1", "2", "--out", str(file)]) == 0
    facts = [fact for stage in json.loads(file.read_text())["stages"] for fact in stage["facts"]]
    skipped = {fact["name"] for fact in facts if fact["status"] == "skipped"}
    assert skipped <= {"flash attention", "fused head"}
    names = {fact["name"] for fact in facts}
    assert names >= {"recorded graphs of llama", "error names the remedy", "weights of zero3 against torch"}
