"""Tests of the folder of a run: the lock, damage while nobody runs, and removal if the run is refused."""

from __future__ import annotations

import os
import shutil

import pytest

from rlhf.core.errors import RunError, UserError
from rlhf.report.runs import find_runs
from rlhf.report.tables import remarks, sections
from rlhf.runs import lock
from rlhf.runs.folder import COMPLETE, RunFolder, complete_checkpoints
from rlhf.runs.resuming import prepare
from rlhf.stages.run import run
from rlhf.training.checkpoint import seal
from rlhf.training.recorder import Recorder
from rlhf.words.compose import run_name
from tests.end_to_end.conftest import assert_same_end

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
    monkeypatch.setattr(lock, "_WAIT_S", 0.0)
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


@pytest.fixture
def interrupted(tmp_path, finished) -> RunFolder:
    """Return the folder of a run that was interrupted after its last checkpoint."""
    folder = RunFolder(shutil.copytree(finished(*SAVED).path, tmp_path / "run"))
    shutil.rmtree(folder.model)
    folder.state.unlink()
    return folder


def test_damaged_metrics_and_a_deleted_model_are_restored_by_a_resume(tiny, interrupted, finished):
    lines = interrupted.metrics.read_text().splitlines(keepends=True)
    damaged = "".join([*lines[:1], "garbage\n", *lines[1:]])
    interrupted.metrics.write_text(damaged)
    run(tiny(*SAVED), interrupted)
    assert_same_end(interrupted, finished(*SAVED))
    assert "garbage\n" in (interrupted.path / "metrics.jsonl.damaged").read_text()


@pytest.mark.parametrize("lost", ["removed", "truncated"])
def test_rows_lost_before_the_checkpoint_are_restored_by_a_resume(tiny, interrupted, finished, lost, capsys):
    for file in (interrupted.metrics, interrupted.completions):
        file.unlink() if lost == "removed" else os.truncate(file, 100)
    run(tiny(*SAVED), interrupted)
    assert_same_end(interrupted, finished(*SAVED))
    said = " ".join(capsys.readouterr().out.split())
    last = interrupted.last_checkpoint()
    assert said.count(f"rows were restored from {last}") == 2 and not interrupted.read_state()["lost_rows"]
    assert interrupted.log.read_text().count("rows were restored from") == 2


def test_rows_lost_during_the_run_are_restored(tiny, tmp_path, monkeypatch, finished):
    cfg, folder = tiny(*SAVED), RunFolder(tmp_path / "run")
    finished(*SAVED)

    def lose():
        folder.metrics.unlink()
        os.truncate(folder.completions, 100)

    during(monkeypatch, lose)
    run(cfg, folder)
    assert_same_end(folder, finished(*SAVED))


def test_rows_without_a_copy_are_reported_as_lost_in_the_state_and_in_the_report(tiny, interrupted):
    for checkpoint in complete_checkpoints(interrupted.path):  # as an earlier version wrote them
        shutil.rmtree(checkpoint / "history")
        (checkpoint / COMPLETE).unlink()
        seal(checkpoint)
    interrupted.metrics.unlink()
    run(tiny(*SAVED), interrupted)
    assert interrupted.log.read_text().count("these rows are lost") == 1
    assert interrupted.read_state()["lost_rows"] == ["metrics.jsonl"]
    found = find_runs([str(interrupted.path)])
    (note,) = [note for note in remarks(sections(found.runs), found) if "lost" in note]
    assert note == "Rows are lost: run (rows of metrics.jsonl from before a resume)."


def test_a_file_of_the_run_that_becomes_a_folder_stops_the_run_without_a_traceback(
    tiny, tmp_path, monkeypatch, finished
):
    finished(*SAVED)
    cfg, folder = tiny(*SAVED, "schedule.save_every=3"), RunFolder(tmp_path / "run")
    during(monkeypatch, lambda: (folder.metrics.unlink(), folder.metrics.mkdir()))
    with pytest.raises(RunError, match=f"cannot read or write {folder.metrics}: Is a directory; .* resumes"):
        run(cfg, folder)
    with pytest.raises(UserError, match=f"{folder.metrics} must be a file .* got a folder; .*: mv "):
        run(cfg, folder)


def test_a_model_of_a_stage_that_is_missing_is_named_with_the_remedy(tiny, tmp_path, finished):
    finished(*SAVED)
    cfg = tiny(*SAVED)
    cache = tmp_path / "artefacts"
    shutil.copytree(cfg.cache_dir, cache)
    for model in cache.glob("sft-*/model"):
        shutil.rmtree(model)
    with pytest.raises(
        UserError,
        match=r"must have a complete model, got: .*model is missing; .*: rm -r .*/sft-.*_state.json",
    ):
        run(tiny(*SAVED, f"cache_dir={cache}"), RunFolder(tmp_path / "run"))


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


def test_a_constant_reward_gives_one_warning(tiny, tmp_path):
    file = tmp_path / "own.py"
    file.write_text("def score(prompt, response, reference):\n    return 1.0\n")
    folder = RunFolder(tmp_path / "run")
    settings = ("algo=rloo", "scorer=function", f"scorer.path={file}:score", "scorer.missing_eos_score=null")
    run(tiny(*settings, "schedule.total_episodes=32"), folder)
    assert (
        folder.log.read_text().count("warning: all samples of each prompt have the same score (mean 1;") == 1
    )
