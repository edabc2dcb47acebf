"""Tests of the folder of a run: the lock, damage while nobody runs, and removal if the run is refused."""

from __future__ import annotations

import shutil

import pytest

from rlhf.config.identity import run_name
from rlhf.core.errors import RunError, UserError
from rlhf.runs import lock
from rlhf.runs.folder import RunFolder
from rlhf.runs.resuming import prepare
from rlhf.stages.run import run
from rlhf.training.recorder import Recorder
from tests.end_to_end.conftest import assert_same_end, rows

pytestmark = pytest.mark.forks

SAVED = ("schedule.total_episodes=64", "schedule.save_every=1", "schedule.eval_every=2", "algo.ties=keep")


def during(patch, strike):
    """Call `strike()` after the first update."""
    flush = Recorder.flush

    def struck(self, state, *rest):
        flush(self, state, *rest)
        if state.update == 1:
            strike()

    patch.setattr(Recorder, "flush", struck)


def test_a_second_run_in_the_folder_of_an_active_run_is_refused(tiny, tmp_path, monkeypatch, finished):
    monkeypatch.setattr(lock, "WAIT_S", 0.0)
    whole = finished(*SAVED)  # makes the SFT model and the reward model, which are runs, too
    cfg, folder, refused = tiny(*SAVED), RunFolder(tmp_path / "run"), []

    def second():
        for start in (run, lambda cfg, folder: prepare(folder, cfg)):
            with pytest.raises(UserError, match="one process that writes to it") as error:
                start(cfg, folder)
            refused.append(error)

    during(monkeypatch, second)
    run(cfg, folder)
    assert len(refused) == 2 and not (folder.path / lock.LOCK).exists()
    assert_same_end(folder, whole)


def test_a_run_whose_folder_is_deleted_stops_with_one_sentence(tiny, tmp_path, monkeypatch, finished):
    finished(*SAVED)
    folder = RunFolder(tmp_path / "run")
    during(monkeypatch, lambda: shutil.rmtree(folder.path))
    with pytest.raises(RunError, match=f"the run folder {folder.path} was deleted or moved during the run"):
        run(tiny(*SAVED), folder)


def test_damaged_metrics_and_a_deleted_model_are_restored_by_a_resume(tiny, tmp_path, finished):
    whole = finished(*SAVED)
    folder = RunFolder(shutil.copytree(whole.path, tmp_path / "run"))
    shutil.rmtree(folder.model)
    folder.state.unlink()
    lines = folder.metrics.read_text().splitlines(keepends=True)
    folder.metrics.write_text("".join([*lines[:1], "garbage\n", *lines[1:]]))
    run(tiny(*SAVED), folder)
    assert_same_end(folder, whole)
    assert rows(folder) == rows(whole)
    assert (folder.path / "metrics.jsonl.damaged").read_text() == "garbage\n"


def test_a_damaged_config_is_written_again_only_if_the_name_of_the_folder_identifies_the_run(
    tiny, tmp_path, finished, capsys
):
    whole, cfg = finished(*SAVED), tiny(*SAVED)
    folder = RunFolder(shutil.copytree(whole.path, tmp_path / run_name(cfg)))
    folder.state.unlink()
    folder.config.write_text(": : [")
    other = RunFolder(shutil.copytree(folder.path, tmp_path / "other"))
    with pytest.raises(UserError, match=f"{other.config} must be the config that a run wrote"):
        prepare(other, cfg)
    run(cfg, folder)
    assert f"warning: {folder.config} was damaged; it is written again" in " ".join(
        capsys.readouterr().out.split()
    )
    assert "resumed from update" in folder.log.read_text() and folder.read_config()["seed"] == cfg.seed


def test_a_refused_run_leaves_no_folder(tiny, tmp_path):
    folder = RunFolder(tmp_path / "run")
    (tmp_path / "model").mkdir()
    with pytest.raises(UserError):
        run(tiny(f"model.policy={tmp_path}/model", "scorer=facts"), folder)
    assert not folder.path.exists()


def test_the_traceback_of_a_reward_function_is_in_train_log(tiny, tmp_path):
    file = tmp_path / "own.py"
    file.write_text("def score(prompt, response, reference):\n    return {}[response]\n")
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(RunError, match=f"raised KeyError.*{file}, line 2.*row "):
        run(tiny("scorer=function", f"scorer.path={file}:score"), folder)
    log = folder.log.read_text()
    assert "Traceback" in log and f'File "{file}", line 2, in score' in log


def test_a_constant_reward_gives_one_warning(tiny, tmp_path, capsys):
    file = tmp_path / "own.py"
    file.write_text("def score(prompt, response, reference):\n    return 1.0\n")
    folder = RunFolder(tmp_path / "run")
    settings = ("algo=rloo", "scorer=function", f"scorer.path={file}:score", "scorer.missing_eos_score=null")
    run(tiny(*settings, "schedule.total_episodes=32"), folder)
    assert (
        folder.log.read_text().count("warning: all samples of each prompt have the same score (mean 1;") == 1
    )
