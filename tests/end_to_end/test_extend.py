"""Tests of `python -m rlhf.extend`: an extended run equals a run of the new length."""

import json
import shutil

import pytest

from rlhf.core.errors import UserError
from rlhf.experiment import Experiment
from rlhf.runs.folder import RunFolder
from rlhf.runs.resuming import prepare
from rlhf.stages.run import run
from rlhf.tasks.task import Task
from rlhf.words.compose import load_config
from tests.end_to_end.conftest import assert_same_end, interrupted, nightly

# Without fractions of the length, and with a constant learning rate, a run does not depend on its length.
CONSTANT = ("schedule.eval_every=1", "schedule.save_every=1", "optim.schedule=constant")
LONGER = "schedule.total_episodes=64"


# Runs whose state is more than a full set of weights: adapters, rollouts in flight, a value model.
KINDS = {
    "lora": ("model.lora.rank=4", "optim.lr=1e-2"),
    "async": ("schedule.max_lag=1", "algo.ties=keep"),
    "ppo": ("algo=ppo", "algo.kl_target=1"),
}


def extend(folder: RunFolder, words: list[str]) -> None:
    Experiment.open(folder.path).extend(words)


@pytest.fixture
def short(finished, tmp_path) -> RunFolder:
    """Return a copy of a finished run of two updates with a checkpoint of the first."""
    return RunFolder(shutil.copytree(finished(*CONSTANT).path, tmp_path / "run"))


def test_an_extended_run_equals_a_run_of_the_new_length(short, finished, capsys):
    extend(short, [LONGER, "progress=off"])
    assert_same_end(short, finished(*CONSTANT, LONGER))
    assert load_config(short.config).schedule.total_episodes == 64
    said = " ".join(capsys.readouterr().out.split())
    assert "schedule.total_episodes=32 -> 64" in said
    assert "continues from checkpoint-1 (update 1); update 2 is trained again" in said
    assert "in this session; the updates of all sessions took 0:" in said


@pytest.mark.parametrize("kind", [nightly("lora"), nightly("async"), "ppo"])
def test_an_extended_run_of_any_kind_equals_a_run_of_the_new_length(kind, finished, tmp_path):
    words = (*CONSTANT, *KINDS[kind])
    short = RunFolder(shutil.copytree(finished(*words).path, tmp_path / "run"))
    extend(short, [LONGER])
    assert_same_end(short, finished(*words, LONGER))


def test_a_refused_extension_leaves_the_run_finished(short, monkeypatch):
    files = (short.config, short.state, short.metrics)
    before = [file.read_bytes() for file in files]
    monkeypatch.setattr(Task, "fingerprint", lambda self: "other data")
    with pytest.raises(UserError, match="task must give the same training examples"):
        extend(short, [LONGER])
    assert [file.read_bytes() for file in files] == before


def test_an_interrupted_extension_is_resumed_by_the_same_command(short, finished):
    with interrupted(update=3):
        extend(short, [LONGER])
    assert not short.finished()
    extend(short, [LONGER])
    assert_same_end(short, finished(*CONSTANT, LONGER))
    before = short.metrics.read_bytes()
    extend(short, [LONGER])
    assert short.metrics.read_bytes() == before, "the extension is finished"


def test_the_config_of_the_original_run_does_not_continue_an_unfinished_extension(short, tiny):
    with interrupted(update=3):
        extend(short, [LONGER])
    original = tiny(*CONSTANT)
    for start in (lambda: run(original, short), lambda: prepare(short, original)):
        with pytest.raises(UserError, match=r"total_episodes=64 instead of 32"):
            start()
    assert load_config(short.config).schedule.total_episodes == 64


def test_a_supervised_run_is_extended_in_epochs(tiny, tmp_path):
    folder = RunFolder(tmp_path / "run")
    run(tiny("algo=sft", "schedule.total_episodes=null", "schedule.total_epochs=0.25", *CONSTANT), folder)
    assert json.loads(folder.state.read_text())["update"] == 4
    extend(folder, ["schedule.total_epochs=0.5"])
    assert json.loads(folder.state.read_text())["update"] == 8


def test_a_run_without_a_valid_checkpoint_is_not_extended(short):
    (short.path / "checkpoint-1" / "optimizer.pt").write_bytes(b"")
    before = short.config.read_bytes(), short.state.read_bytes()
    with pytest.raises(UserError, match=r"must have a valid checkpoint to continue from"):
        extend(short, [LONGER])
    assert (short.config.read_bytes(), short.state.read_bytes()) == before
