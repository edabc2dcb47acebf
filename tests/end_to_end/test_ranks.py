"""Tests of runs on two ranks of one machine (gloo): same results as one rank, and the loss of a rank."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

from rlhf.runs.folder import RunFolder
from rlhf.stages.run import run
from rlhf.words.compose import compose
from tests.end_to_end.conftest import TINY, rows
from tests.end_to_end.test_environments import EPISODES

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
LIMIT_S = 500

# By default a run on one rank starts an annotator process, and a run on two ranks does not.
ALIKE = ["schedule.max_lag=1", "generator.annotate=false"]

NO_TIES = ["scorer.missing_eos_score=null", "schedule.minibatches=2", "schedule.max_lag=1"]

# The runs that are trained on one rank and on two, by name. Some batches do not divide evenly by two.
RUNS = {
    "dpo": [
        *("algo=dpo", "algo.ties=keep", "backend.micro_batch=2", "schedule.minibatches=2"),
        *("schedule.prompts_per_update=6", "schedule.total_episodes=24"),
    ],
    "ppo": ["algo=ppo", "schedule.minibatches=2", "schedule.epochs=2", "save_generations=true"],
    "grpo, a generator for both": ["algo=grpo", *ALIKE, "generator.per_rank=false"],
    "rloo, a generator each": ["algo=rloo", *ALIKE, "generator.per_rank=true"],
    "replay, and corrections that couple the tokens of a batch": [
        *("algo=dapo", "schedule.replay=2", "schedule.minibatches=2", "schedule.total_episodes=96"),
        *("correction=truncate", "algo.correction.normalise=true", "algo.correction.reject=token"),
        *("algo.correction.reject_low=0.9", "algo.covariance.kind=clip", "algo.covariance.share=0.1"),
        *("algo.covariance.low=-9", "algo.covariance.high=9"),
    ],
    "episodes": [*EPISODES, "algo=grpo"],
    "offline dpo": ["algo=dpo", "generator=dataset"],
    "reward": ["algo=reward"],
    "zero3 with vllm": ["algo=dpo", "algo.ties=keep", "backend=zero3", "generator=vllm"],
    "a loss in a loop": ["algo=grpo", *NO_TIES, "loop=tests.end_to_end.own_loop:loop"],
    "the same loss as an algorithm": ["algo=dapo", *NO_TIES],
    "in flight": ["algo=cispo", "schedule.max_lag=1", "schedule.update=in_flight"],
}
PAIR = ("a loss in a loop", "the same loss as an algorithm")
NIGHTLY = ("grpo, a generator for both", "offline dpo", "reward", "zero3 with vllm", "in flight")
REPEATABLE = [
    pytest.param(name, marks=pytest.mark.nightly if name in NIGHTLY else ())
    for name in RUNS
    if name not in (*PAIR, "in flight", "zero3 with vllm")
]


def launched(*words: object) -> subprocess.Popen:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    return subprocess.Popen(
        [*TORCHRUN, *map(str, words)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ended(process: subprocess.Popen) -> str:
    out, _ = process.communicate(timeout=LIMIT_S)
    return out


class OnTwoRanks(dict):
    """The arguments, the folder and the output of each run of RUNS on two ranks.

    When a test needs a run, one command trains all nightly runs or all others.
    """

    def __init__(self, base: Path, common: list[str]) -> None:
        super().__init__()
        self.base, self.common = base, common

    def __missing__(self, name: str) -> tuple[list[str], Path, str]:
        names = [each for each in RUNS if (each in NIGHTLY) == (name in NIGHTLY)]
        jobs = {each: ([*self.common, *RUNS[each]], self.base / each) for each in names}
        listed = self.base / "jobs.json"
        listed.write_text(json.dumps([[words, str(folder)] for words, folder in jobs.values()]))
        process = launched("-m", "tests.end_to_end.rank_runs", listed)
        out = ended(process)
        assert process.returncode == 0, out
        self.update({each: (*job, out) for each, job in jobs.items()})
        return self[name]


@pytest.fixture(scope="module")
def on_two_ranks(cache_dir, tmp_path_factory):
    """Return the arguments, the folder and the output of each run of RUNS on two ranks."""
    return OnTwoRanks(tmp_path_factory.mktemp("ranks"), [*TINY, f"cache_dir={cache_dir}"])


@pytest.mark.parametrize("name", REPEATABLE)
def test_two_ranks_give_the_metrics_and_weights_of_one_rank(name, on_two_ranks, finished):
    _, folder, _ = on_two_ranks[name]
    alone = finished(*RUNS[name])
    together = rows(folder)
    assert len(together) == len(rows(alone)) >= 3
    for row, expected in zip(together, rows(alone), strict=True):
        assert row == pytest.approx(expected, rel=1e-4, abs=2e-5)
    trained = load_file(folder / "model" / "model.safetensors")
    for tensor, weight in load_file(alone.model / "model.safetensors").items():
        assert (trained[tensor] - weight).abs().max() < 4e-5, tensor  # Adam amplifies rounding differences


def test_only_the_first_rank_prints_and_writes_files(on_two_ranks):
    _, folder, out = on_two_ranks["ppo"]
    assert out.count("dpo of pythia on tldr_mini") == 1
    updates = [row["update"] for row in rows(folder)]
    assert len(updates) == len(set(updates)) + 2, "an update has one row, or two rows if it is evaluated"
    assert sorted(file.name for file in (folder / "generations").iterdir()) == [
        "000001.parquet",
        "000002.parquet",
    ]
    assert not list(folder.glob("checkpoint-*/.tmp*")) and (folder / "checkpoint-1" / "COMPLETE").is_file()


def test_a_loop_of_ones_own_with_the_loss_of_dapo_gives_its_weights_on_two_ranks(on_two_ranks):
    own, built_in = (on_two_ranks[name][1] for name in PAIR)
    weights = [load_file(folder / "model" / "model.safetensors") for folder in (own, built_in)]
    assert all(weight.equal(weights[1][name]) for name, weight in weights[0].items())
    assert rows(own)[-1]["episode"] == rows(built_in)[-1]["episode"] > 0


@pytest.mark.nightly
def test_vllm_samples_from_the_gathered_zero3_weights(on_two_ranks, tmp_path):
    words, folder, _ = on_two_ranks["zero3 with vllm"]
    trained = [row for row in rows(folder) if "lr" in row]
    assert len(trained) == 2
    for row in trained:  # the second update samples from weights gathered after a step
        assert row["mismatch/kl"] < 1e-7 and row["mismatch/max_ratio"] < 1.001
    alone = RunFolder(tmp_path / "alone")
    run(compose([word for word in words if word != "backend=zero3"]), alone)
    assert (folder / "completions.jsonl").read_text() == alone.completions.read_text()


@pytest.mark.nightly
def test_in_flight_run_on_two_ranks_reaches_the_last_episode(on_two_ranks):
    _, folder, _ = on_two_ranks["in flight"]
    assert rows(folder)[-1]["episode"] == 64


SURVIVES = [
    *("schedule.total_episodes=160", "schedule.save_every=1", "schedule.eval_every=0.5", "algo.ties=keep"),
]


def ranks_of(process: subprocess.Popen) -> list[psutil.Process]:
    """Return the rank processes that torchrun started, in the order of their start."""
    children = psutil.Process(process.pid).children()
    ranks = [child for child in children if "rlhf.train" in child.cmdline()]
    return sorted(ranks, key=lambda rank: (rank.create_time(), rank.pid))


def wait_for_a_checkpoint(folder: RunFolder, process: subprocess.Popen) -> None:
    end = time.monotonic() + LIMIT_S
    while folder.last_checkpoint() is None:
        assert process.poll() is None, ended(process)
        assert time.monotonic() < end
        time.sleep(0.02)


# `alike`: number of updates after the kill whose rows must agree with those of one rank. Two ranks round
# differently from one rank. Within ten sampled updates the runs may draw different tokens, and then all later
# rows differ. Without sampling, all rows agree.
@pytest.mark.parametrize(
    ("generator", "alike"),
    [pytest.param("hf", 3, marks=pytest.mark.nightly), pytest.param("dataset", 10, marks=pytest.mark.smoke)],
)
def test_killed_rank_ends_the_run_and_one_rank_resumes_it(generator, alike, tiny, command, tmp_path):
    words = [*SURVIVES, f"generator={generator}"]
    folder, whole = RunFolder(tmp_path / "killed"), RunFolder(tmp_path / "whole")
    run(tiny(*words), whole)
    process = launched("-m", "rlhf.train", *command, *words, f"hydra.run.dir={folder.path}")
    wait_for_a_checkpoint(folder, process)
    ranks_of(process)[1].send_signal(signal.SIGKILL)
    out = ended(process)
    assert process.returncode != 0 and not folder.finished()
    assert "SIGKILL" in out or "Signal 9" in out, out

    last = max(row["update"] for row in rows(folder)) + alike
    run(tiny(*words), folder)

    assert len(rows(folder)) == len(rows(whole))
    for row, expected in zip(rows(folder), rows(whole), strict=True):
        assert row["update"] == expected["update"]
        if row["update"] <= last:
            assert row == pytest.approx(expected, rel=1e-3, abs=1e-4)


def test_hanging_rank_ends_the_run_after_backend_timeout(command, tmp_path):
    folder = RunFolder(tmp_path / "hangs")
    words = [*command, *SURVIVES, "backend.timeout_s=4", f"hydra.run.dir={folder.path}"]
    process = launched("-m", "rlhf.train", *words)
    wait_for_a_checkpoint(folder, process)
    first, stopped = ranks_of(process)
    stopped.send_signal(signal.SIGSTOP)
    first.wait(LIMIT_S)
    stopped.kill()  # torchrun kills this rank only after half a minute
    out = ended(process)
    assert process.returncode != 0
    assert "the connection between the ranks failed" in out and "backend.timeout_s" in out, out


def test_error_of_one_rank_is_reported_with_its_rank(command, tmp_path):
    (tmp_path / "judge.py").write_text(
        "import os\n"
        "assert os.environ['RANK'] == '0', 'only on the first rank'\n"
        "def score(prompt, response, reference):\n"
        "    return 1.0\n"
    )
    words = ["scorer=function", f"scorer.path={tmp_path}/judge.py:score"]
    process, out = launched("-m", "rlhf.train", *command, *words), ""
    while "rank 1: error:" not in out or "only on the first rank" not in out:
        line = process.stdout.readline()
        assert line, out
        out += line
    for rank in ranks_of(process):
        rank.kill()  # torchrun kills the other rank only after half a minute
    ended(process)
    assert process.returncode != 0


@pytest.mark.nightly
def test_the_launcher_of_deepspeed_starts_ranks(command):
    launcher = Path(sys.executable).with_name("deepspeed")
    words = ["--num_accelerators", "2", "--master_port", "29617", "--module", "rlhf.train", *command]
    done = subprocess.run([launcher, *words], capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "on each of 2 ranks" in done.stdout
