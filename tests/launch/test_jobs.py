"""Tests of the messages about a run that is already finished."""

from __future__ import annotations

import os
import shutil

from rlhf.launch.preflight import announce
from rlhf.runs.folder import RunFolder
from rlhf.words.compose import compose
from tests.model_folders import write_model


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
    assert f"is missing; to write it again from checkpoint-3: {again}" in capsys.readouterr().out
    write_model(folder.model)
    weights = folder.model / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 1)
    announce(folder, state, "eval/win_rate")
    message = f"{folder.model} is damaged: model.safetensors is truncated "
    assert message in capsys.readouterr().out
    write_model(folder.model)
    announce(folder, state, "eval/win_rate")
    assert f"model: {folder.model}\n" in capsys.readouterr().out


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
