"""Tests of sweeps whose jobs are processes on this machine. Sweeps on SLURM are tested in test_slurm.py."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

from rlhf.runs.folder import RunFolder
from rlhf.words.compose import compose, load_config, run_name
from tests.end_to_end.conftest import wait_for

ROOT = Path(__file__).parents[2]
SCORER = ["algo=rloo", "scorer=function", "scorer.batched=true"]
LAUNCHERS = {
    "joblib": ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"],
    "local": ["hydra/launcher=local"],
}
JOBLIB = pytest.param("joblib", marks=pytest.mark.nightly)


def train(words: list[str], **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "rlhf.train", "-m", *words],
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def scored_by(*names: str) -> str:
    return "scorer.path=" + ",".join(rf"tests.end_to_end.sweep_scorers\:{name}" for name in names)


@pytest.mark.parametrize("launcher", [JOBLIB, "local"])
def test_failed_job_is_listed_and_other_results_are_kept(launcher, command, tmp_path):
    process = train([*command, *SCORER, scored_by("fails", "length"), *LAUNCHERS[launcher]])
    out, _ = process.communicate(timeout=500)
    assert process.returncode == 2, out
    listed = out.partition("error: 1 of 2 jobs failed; the others are kept")[2]
    assert "no score for these" in listed and listed.count(f"{tmp_path}/tldr_mini-pythia-rloo") == 1
    assert sum(RunFolder(path).finished() is not None for path in tmp_path.glob("tldr_mini-*")) == 1


def test_a_search_prunes_bad_trials_and_resumes_after_a_signal(command, tmp_path):
    words = [*command, "algo=sft", "objective_metric=eval/loss", "hydra/sweeper=search"]
    words += ["optim.lr=tag(log,interval(1e-7,1e-2))", "hydra.sweeper.n_trials=5", "schedule.save_every=1"]
    words += ["hydra.sweeper.sampler=random", "hydra.sweeper.warmup_trials=1"]
    process = train(words)

    def folders() -> list[RunFolder]:
        return [RunFolder(path) for path in tmp_path.glob("tldr_mini-*")]

    wait_for(lambda: any(folder.finished() for folder in folders()) and len(folders()) > 1, process)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=500)
    assert process.returncode == os.EX_TEMPFAIL, out
    started = {folder.path for folder in folders()}

    process = train(words)
    out, _ = process.communicate(timeout=500)
    assert process.returncode == 0, out
    assert len(folders()) == 5 and started <= {folder.path for folder in folders()}
    assert "of 5 trials are done" in out and "Traceback" not in out
    losses, pruned = {}, 0
    for folder in folders():
        state = folder.read_state()
        if state["finished"]:
            losses[load_config(folder.config).optim.lr] = state["result"]["eval/loss"]
        else:
            assert state["stopped"] == "pruned" and state["update"] == 1
            assert folder.last_checkpoint() == folder.path / "checkpoint-1"
            pruned += 1
    assert pruned and f"{5 - pruned} finished, {pruned} pruned" in out, out
    assert out.partition("status")[2].count(" pruned ") >= 1
    best = yaml.safe_load((tmp_path / "optimization_results.yaml").read_text())
    assert best["best_value"] == min(losses.values()) == losses[best["best_params"]["optim.lr"]]
    assert not list((tmp_path / ".search").glob("*.lock"))


@pytest.mark.parametrize("launcher", [JOBLIB, "local"])
def test_ctrl_c_ends_a_sweep_and_every_process_of_it(launcher, command, tmp_path):
    words = [*command, *SCORER, scored_by("patient"), "schedule.total_episodes=160", "seed=1,2"]
    process = train([*words, *LAUNCHERS[launcher]], PATIENT="1")
    folders = [RunFolder(tmp_path / run_name(compose([*words[:-1], f"seed={seed}"]))) for seed in (1, 2)]
    end = time.monotonic() + 300
    while not all(folder.metrics.exists() and '"lr"' in folder.metrics.read_text() for folder in folders):
        assert time.monotonic() < end and process.poll() is None, process.communicate()[0]
        time.sleep(0.1)
    jobs = psutil.Process(process.pid).children(recursive=True)
    assert len(jobs) >= 2

    os.killpg(process.pid, signal.SIGINT)  # Ctrl-C in a terminal signals the process group
    out, _ = process.communicate(timeout=300)

    assert process.returncode == 130 and "Traceback" not in out, out
    gone, left = psutil.wait_procs(jobs, timeout=60)
    assert not left
    assert all(folder.last_checkpoint() for folder in folders)
    if launcher == "local":
        assert [folder.last_checkpoint() for folder in folders] == [f.path / "checkpoint-2" for f in folders]
