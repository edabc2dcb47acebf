"""Sweeps and their jobs without runs: checks before them, titles, the table, messages about finished runs."""

from __future__ import annotations

import os
import shutil

import pytest
from omegaconf import OmegaConf

from rlhf.config import root
from rlhf.core.errors import RunError
from rlhf.core.machine import Machine
from rlhf.launch import sweep
from rlhf.launch.command_line import multirun_config
from rlhf.launch.preflight import Job, announce, folders_outside, generator_of_jobs, sweep_jobs
from rlhf.launch.sweep import Sweep, begin_job, lines
from rlhf.runs.folder import RunFolder
from rlhf.sweeping import jobs
from rlhf.terminal import console
from rlhf.words.compose import compose, initialized
from tests.model_folders import write_model


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


def row(number, folder, win_rate=None, **more):
    folder.mkdir()
    given = {"number": number, "label": f"seed={number}", "metric": "eval/win_rate"}
    job = Job(**given, folder=RunFolder(folder), **more)
    if win_rate is not None:
        job.folder.write_state({"finished": True, "result": {"eval/win_rate": win_rate}})
    return job


def test_the_table_has_result_status_values_and_folder_of_every_job(tmp_path):
    rows = [
        row(1, tmp_path / "a", 0.8478),
        row(2, tmp_path / "b", error=RunError("it stopped")),
        row(3, tmp_path / "c"),
        row(4, tmp_path / "d", 0.5, status="finished before"),
        row(6, tmp_path / "e"),
        Job(number=5, label="seed=5 optim.lr=0", error=RunError("it stopped")),
    ]
    rows[4].folder.write_state({"finished": False, "stopped": "pruned"})
    assert list(lines(rows)) == [
        "job  eval/win_rate  status           values",
        "  1          0.848  finished         seed=1",
        f"     {tmp_path}/a",
        "  2                 failed           seed=2",
        f"     {tmp_path}/b",
        "  3                 unfinished       seed=3",
        f"     {tmp_path}/c",
        "  4          0.500  finished before  seed=4",
        f"     {tmp_path}/d",
        "  6                 pruned           seed=6",
        f"     {tmp_path}/e",
        "  5                 failed           seed=5 optim.lr=0",
    ]


def test_jobs_with_different_metrics_name_the_metric_in_each_row(tmp_path):
    other = row(2, tmp_path / "b")
    other.metric = "eval/accuracy"
    assert next(lines([row(1, tmp_path / "a", 0.5), other])).split() == ["job", "result", "status", "values"]
    assert "eval/win_rate 0.500" in list(lines([row(3, tmp_path / "c", 0.5), other]))[1]


def test_the_title_of_a_job_has_its_number_and_the_values_that_differ():
    made = Sweep()
    made.total, made.jobs = 4, [Job(number=n, label=f"seed={n}", overrides=[f"seed={n}"]) for n in (3, 6)]
    assert made.title(["seed=3"]) == "job 3 of 4: seed=3"
    assert made.title(["seed=6"]) == "job 6: seed=6", "the number of trials is not known"


def test_jobs_that_share_a_terminal_have_numbers_in_their_titles(monkeypatch, capsys):
    monkeypatch.setattr(console, "job", "")
    begin_job(1, ["algo=dpo", "seed=2"])  # in a process of a launcher
    assert console.prefix() == "job 2 " and capsys.readouterr().out == "job 2: algo=dpo seed=2\n"
    monkeypatch.setattr(sweep, "current", Sweep())
    begin_job(1, ["seed=2"])
    assert console.prefix() == ""


def test_the_message_about_a_finished_run_names_the_model_or_how_to_write_it_again(tmp_path, capsys):
    folder = RunFolder(tmp_path / "run")
    state = {"finished": True, "result": {"eval/win_rate": 0.5}}
    folder.write_state(state)
    announce(folder, state, "eval/win_rate")
    again = f"rm -r {folder.state}, then the same command"
    assert f"warning: {folder.model} is missing; to train it again: {again}" in capsys.readouterr().out
    checkpoint = folder.path / "checkpoint-3"
    checkpoint.mkdir()
    (checkpoint / "COMPLETE").touch()
    announce(folder, state, "eval/win_rate")
    assert f"to write it again from checkpoint-3: {again}" in capsys.readouterr().out
    write_model(folder.model)
    announce(folder, state, "eval/win_rate")
    assert f"model: {folder.model}\n" in capsys.readouterr().out
    weights = folder.model / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 1)
    announce(folder, state, "eval/win_rate")
    assert f"{folder.model} is damaged: model.safetensors is truncated " in capsys.readouterr().out


def test_the_message_about_a_finished_run_has_the_command_that_trains_it_longer(tmp_path, capsys):
    folder = RunFolder(tmp_path / "run")
    state = {"finished": True, "result": {}}
    folder.write_state(state)
    epochs = ["algo=sft", "schedule.total_episodes=null", "schedule.total_epochs=0.25"]
    for words, longer in (
        (["schedule.total_episodes=640"], "schedule.total_episodes=1280"),
        (epochs, "schedule.total_epochs=0.5"),
        (["task=local", "task.path=data"], "schedule.total_epochs=6"),
    ):
        folder.write_config(compose(words))
        announce(folder, state, "eval/win_rate")
        assert "to train longer" not in capsys.readouterr().out, "there is no checkpoint"
        (folder.path / "checkpoint-3").mkdir()
        (folder.path / "checkpoint-3" / "COMPLETE").touch()
        announce(folder, state, "eval/win_rate")
        said = capsys.readouterr().out
        assert said.endswith(f"to train longer: python -m rlhf.extend run={folder.path} {longer}\n")
        shutil.rmtree(folder.path / "checkpoint-3")
