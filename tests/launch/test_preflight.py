"""Tests of the checks before a sweep."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from rlhf.config import root
from rlhf.core.machine import Machine
from rlhf.launch.command_line import multirun_config
from rlhf.launch.preflight import folders_outside, generator_of_jobs, sweep_jobs
from rlhf.sweeping import jobs
from rlhf.words.compose import initialized


@pytest.mark.parametrize(
    ("subdir", "outside"),
    [("${run_name:}", False), ("seeds/${seed}", False), ("../x", True), ("a/../../x", True), ("/x", True)],
)
def test_run_folders_of_a_sweep_must_be_below_its_folder(subdir, outside):
    config = OmegaConf.create({"hydra": {"sweep": {"dir": "outputs", "subdir": subdir}}})
    found = list(folders_outside(config))
    assert len(found) == outside
    assert not outside or f"got {subdir}; set hydra.sweep.dir=<folder>" in found[0]


def test_a_run_that_cannot_upload_its_model_is_refused_before_its_folder_exists(command, tmp_path):
    answer = command("push_to=model")
    assert answer.code == 2 and not answer.runs and not list(tmp_path.iterdir())
    for text in ("push_to= must be <owner>/<name>", "push_to= needs a token", "got HF_HUB_OFFLINE=1"):
        assert text in answer.err


def test_a_sweep_must_not_upload_the_model_of_each_job(command, tmp_path):
    answer = command("-m", "seed=1,2", "push_to=me/it")
    assert answer.code == 2 and not answer.runs and not list(tmp_path.iterdir())
    assert "push_to must be null in a sweep" in answer.err


def test_the_folder_of_each_job_is_known_before_the_sweep(command, tmp_path):
    found = jobs(["seed=1,2", f"hydra.sweep.dir={tmp_path}", "hydra.sweep.subdir=seeds/${seed}"])
    assert [run.folder for run in found] == [tmp_path / "seeds" / "1", tmp_path / "seeds" / "2"]
    answer = command("-m", "seed=1,2", "hydra.sweep.subdir=seeds/${sed}")
    assert answer.code == 2 and not answer.runs and "seed=1: " in answer.err and not list(tmp_path.iterdir())


SLURM = ["hydra/launcher=slurm", "hydra.launcher.gpus_per_node=8"]


@pytest.mark.parametrize(
    ("gpus", "overrides", "expected"),
    [
        (1, ["seed=1,2"], "vllm_colocated"),
        (1, ["schedule.max_lag=0,1"], "hf"),  # with a lag, vllm_colocated is refused
        (2, ["schedule.max_lag=0,1"], "vllm"),
        (0, [*SLURM, "hydra.launcher.tasks_per_node=7", "seed=1,2"], "vllm"),  # on a login node
        (0, [*SLURM, "hydra.launcher.tasks_per_node=8", "seed=1,2"], "hf"),
        (2, ["hydra/launcher=slurm", "hydra.launcher.gpus_per_node=0", "seed=1,2"], "hf"),
    ],
)
def test_auto_selects_one_generator_for_all_jobs_of_a_sweep(gpus, overrides, expected, monkeypatch):
    monkeypatch.delenv(root.SELECTED, raising=False)
    monkeypatch.setattr(root, "this_machine", lambda: Machine(2**36, (2**36,) * gpus))
    with initialized() as search:
        config = multirun_config([*search, "model=pythia_410m", "task=tldr", *overrides])
        assert generator_of_jobs(config, sweep_jobs(config)) == expected
