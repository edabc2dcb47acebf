"""Two ranks on one machine (gloo): the run of one rank, and what happens when one of them is lost."""

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

from rlhf.config.compose import compose
from rlhf.runs.folder import RunFolder
from rlhf.stages.run import run
from tests.end_to_end.conftest import TINY, rows

pytestmark = pytest.mark.forks

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
LIMIT_S = 500

# By default one rank alone has its rollouts annotated ahead.
ALIKE = ["schedule.max_lag=1", "generator.annotate=false"]

# By name: what is trained on one rank and on two. Rows do not always come out even.
RUNS = {
    "dpo": [
        *("algo=dpo", "algo.ties=keep", "backend.micro_batch=2", "schedule.minibatches=2"),
        *("schedule.prompts_per_update=6", "schedule.total_episodes=24"),
    ],
    "ppo": ["algo=ppo", "schedule.minibatches=2", "schedule.epochs=2", "save_generations=true"],
    "grpo, a generator for both": ["algo=grpo", *ALIKE, "generator.per_rank=false"],
    "rloo, a generator each": ["algo=rloo", *ALIKE, "generator.per_rank=true"],
    "offline dpo": ["algo=dpo", "generator=dataset"],
    "reward": ["algo=reward"],
    "zero3 with vllm": ["algo=dpo", "algo.ties=keep", "backend=zero3", "generator=vllm"],
    "in flight": ["algo=cispo", "schedule.max_lag=1", "schedule.update=in_flight"],
}
REPEATABLE = [name for name in RUNS if name not in ("in flight", "zero3 with vllm")]


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


@pytest.fixture(scope="module")
def on_two_ranks(cache_dir, tmp_path_factory):
    """The runs of RUNS, by one pair of ranks: words and folder of each."""
    base = tmp_path_factory.mktemp("ranks")
    jobs = {name: ([*TINY, f"cache_dir={cache_dir}", *words], base / name) for name, words in RUNS.items()}
    listed = base / "jobs.json"
    listed.write_text(json.dumps([[words, str(folder)] for words, folder in jobs.values()]))
    process = launched("-m", "tests.end_to_end.rank_runs", listed)
    out = ended(process)
    assert process.returncode == 0, out
    return jobs, out


@pytest.mark.parametrize("name", REPEATABLE)
def test_two_ranks_train_as_one(name, on_two_ranks, finished):
    jobs, _ = on_two_ranks
    _, folder = jobs[name]
    alone = finished(*RUNS[name])
    together = rows(folder)
    assert len(together) == len(rows(alone)) >= 3
    for row, expected in zip(together, rows(alone), strict=True):
        assert row == pytest.approx(expected, rel=1e-4, abs=2e-5)
    trained = load_file(folder / "model" / "model.safetensors")
    for tensor, weight in load_file(alone.model / "model.safetensors").items():
        assert (trained[tensor] - weight).abs().max() < 4e-5, tensor  # Adam makes much of little


def test_only_the_first_rank_speaks_and_writes(on_two_ranks):
    jobs, out = on_two_ranks
    assert out.count("dpo of pythia on tldr_mini") == 3, "three runs of that name"
    _, folder = jobs["ppo"]
    updates = [row["update"] for row in rows(folder)]
    assert len(updates) == len(set(updates)) + 2, "an update has one row, and one more where it is evaluated"
    assert sorted(file.name for file in (folder / "generations").iterdir()) == [
        "000001.parquet",
        "000002.parquet",
    ]
    assert not list(folder.glob("checkpoint-*/.tmp*")) and (folder / "checkpoint-1" / "COMPLETE").is_file()


def test_vllm_samples_from_the_weights_that_zero3_has_divided(on_two_ranks, tmp_path):
    jobs, _ = on_two_ranks
    words, folder = jobs["zero3 with vllm"]
    trained = [row for row in rows(folder) if "lr" in row]
    assert len(trained) == 2
    for row in trained:  # the second is of weights that were gathered after a step
        assert row["mismatch/kl"] < 1e-7 and row["mismatch/max_ratio"] < 1.001
    alone = RunFolder(tmp_path / "alone")
    run(compose([word for word in words if word != "backend=zero3"]), alone)
    assert (folder / "completions.jsonl").read_text() == alone.completions.read_text()


def test_in_flight_every_token_is_of_a_version_that_was_loaded(on_two_ranks):
    jobs, _ = on_two_ranks
    last = rows(jobs["in flight"][1])[-1]
    assert last["episode"] == 64


SURVIVES = [
    "schedule.total_episodes=160",
    "schedule.save_every=1",
    "schedule.eval_every=0.5",
    "algo.ties=keep",
]


def ranks_of(process: subprocess.Popen) -> list[psutil.Process]:
    """The ranks below torchrun, in the order of their start."""
    children = psutil.Process(process.pid).children()
    ranks = [child for child in children if "rlhf.train" in child.cmdline()]
    return sorted(ranks, key=lambda rank: (rank.create_time(), rank.pid))


def wait_for_a_checkpoint(folder: RunFolder, process: subprocess.Popen) -> None:
    end = time.monotonic() + LIMIT_S
    while folder.last_checkpoint() is None:
        assert process.poll() is None, ended(process)
        assert time.monotonic() < end
        time.sleep(0.02)


# In ten updates of sampling a draw between two tokens may fall otherwise on one rank than on two, and all
# after it differs; without sampling nothing does.
@pytest.mark.parametrize(
    ("generator", "alike"), [("hf", 3), pytest.param("dataset", 10, marks=pytest.mark.smoke)]
)
def test_a_rank_that_is_killed_ends_the_run_and_fewer_ranks_can_go_on(
    generator, alike, tiny, command, tmp_path
):
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


def test_a_rank_that_hangs_ends_the_run_when_the_others_have_waited(command, tmp_path):
    folder = RunFolder(tmp_path / "hangs")
    words = [*command, *SURVIVES, "backend.timeout_s=4", f"hydra.run.dir={folder.path}"]
    process = launched("-m", "rlhf.train", *words)
    wait_for_a_checkpoint(folder, process)
    first, stopped = ranks_of(process)
    stopped.send_signal(signal.SIGSTOP)
    first.wait(LIMIT_S)
    stopped.kill()  # torchrun would, after half a minute
    out = ended(process)
    assert process.returncode != 0
    assert "the connection between the ranks failed" in out and "backend.timeout_s" in out, out


def test_an_error_of_one_rank_is_told(command, tmp_path):
    (tmp_path / "judge.py").write_text(
        "import os\n"
        "assert os.environ['RANK'] == '0', 'only on the first rank'\n"
        "def score(prompt, response, reference):\n"
        "    return 1.0\n"
    )
    words = ["scorer=function", f"scorer.path={tmp_path}/judge.py:score"]
    process = launched("-m", "rlhf.train", *command, *words)
    out = ended(process)
    assert process.returncode != 0
    assert "rank 1: error:" in out and "only on the first rank" in out, out


def test_the_launcher_of_deepspeed_starts_ranks(command, tmp_path):
    launcher = Path(sys.executable).with_name("deepspeed")
    words = ["--num_accelerators", "2", "--master_port", "29617", "--module", "rlhf.train", *command]
    done = subprocess.run([launcher, *words], capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "on each of 2 ranks" in done.stdout
