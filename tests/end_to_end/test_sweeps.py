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

from rlhf.config.compose import compose
from rlhf.config.identity import run_name
from rlhf.config.saved import load_config
from rlhf.runs.folder import RunFolder

pytestmark = pytest.mark.forks

ROOT = Path(__file__).parents[2]
SCORER = ["algo=rloo", "scorer=function", "scorer.batched=true"]
LAUNCHERS = {
    "joblib": ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"],
    "local": ["hydra/launcher=local"],
}


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


@pytest.mark.parametrize("launcher", ["joblib", pytest.param("local", marks=pytest.mark.smoke)])
def test_failed_job_is_listed_and_other_results_are_kept(launcher, command, tmp_path):
    process = train([*command, *SCORER, scored_by("fails", "length"), *LAUNCHERS[launcher]])
    out, _ = process.communicate(timeout=500)
    assert process.returncode == 1, out
    listed = out.partition("error: 1 of 2 jobs failed; the others are kept")[2]
    assert "no score for these" in listed and listed.count(f"{tmp_path}/tldr_mini-pythia-rloo") == 1
    assert sum(RunFolder(path).finished() is not None for path in tmp_path.glob("tldr_mini-*")) == 1


def test_optuna_minimizes_the_loss_and_resumes_its_study(command, tmp_path):
    study = [f"hydra.sweeper.storage=sqlite:///{tmp_path}/search.db", "hydra.sweeper.study_name=lr"]
    search = ["hydra/sweeper=search", "hydra.sweeper.n_trials=2", "hydra.sweeper.direction=minimize"]
    words = [*command, "algo=sft", "objective_metric=eval/loss", "optim.lr=interval(1e-5,1e-2)"]
    words += [*search, *study]
    for seed, trials in ((1, 2), (2, 4)):
        process = train([*words, f"hydra.sweeper.sampler.seed={seed}"])
        out, _ = process.communicate(timeout=500)
        assert process.returncode == 0, out
        folders = [RunFolder(path) for path in tmp_path.glob("tldr_mini-*")]
        lrs = [load_config(folder.config).optim.lr for folder in folders]
        losses = dict(zip(lrs, (f.finished()["result"]["eval/loss"] for f in folders), strict=True))
        assert len(losses) == len(set(losses.values())) == trials, (
            "each trial must have its own learning rate and loss"
        )
        best = yaml.safe_load((tmp_path / "optimization_results.yaml").read_text())
        assert best["best_value"] == min(losses.values()) == losses[best["best_params"]["optim.lr"]]


@pytest.mark.parametrize("launcher", LAUNCHERS)
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
