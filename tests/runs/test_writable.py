"""Tests of folders in which no files can be created, and of the messages about them."""

from __future__ import annotations

import errno
import os
import shutil
from functools import partial

import pytest

from rlhf.core.errors import RunError, UserError, explained
from rlhf.runs import lock
from rlhf.runs.lock import creating, deleted_folder, unusable_file, unwritable


def test_a_folder_below_a_file_is_not_writable(tmp_path):
    (tmp_path / "o").touch()
    assert unwritable(tmp_path / "o" / "run") == f"{tmp_path / 'o'} is not a folder"
    assert unwritable(tmp_path / "new" / "run") is None
    with (
        pytest.raises(UserError, match="output_dir must be a folder that can be written.*; set output_dir="),
        creating(tmp_path / "o" / "run"),
    ):
        (tmp_path / "o" / "run").mkdir(parents=True)


def test_a_name_that_is_too_long_is_not_writable(tmp_path):
    assert unwritable(tmp_path / ("a" * 300) / "run") == f"file name too long: {tmp_path}"


def test_a_folder_without_permission_or_on_a_full_or_read_only_disk_is_not_writable(tmp_path, monkeypatch):
    def refused(*given: object) -> None:  # root may write anywhere
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "mkdir", refused)
    for number in (errno.EACCES, errno.EROFS, errno.ENOSPC):
        assert unwritable(tmp_path / "run") == f"{os.strerror(number).lower()}: {tmp_path}"
    monkeypatch.undo()
    assert unwritable(tmp_path / "run") is None and list(tmp_path.iterdir()) == []


def test_a_folder_that_was_deleted_during_the_run_is_named_in_one_sentence(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    with pytest.raises(RunError) as stopped, explained(partial(deleted_folder, run)):
        shutil.rmtree(run)
        (run / "metrics.jsonl").open("a")
    assert str(stopped.value).startswith(f"the run folder {run} was deleted or moved during the run")


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EACCES, errno.EROFS])
def test_an_unusable_cache_of_hugging_face_is_a_user_error_that_names_hf_home(tmp_path, monkeypatch, number):
    monkeypatch.setenv("HF_HOME", "/proc/nowhere")
    with (
        pytest.raises(UserError, match="HF_HOME must be a folder.*export HF_HOME="),
        explained(partial(unusable_file, tmp_path)),
    ):
        raise OSError(number, os.strerror(number), "/proc/nowhere/hub")


def test_a_machine_without_a_temporary_folder_is_a_user_error_that_names_tmpdir(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("TMPDIR", "/nowhere")

    def missing() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/nowhere']")

    monkeypatch.setattr(lock.tempfile, "gettempdir", missing)
    with (
        pytest.raises(UserError, match="TMPDIR must be a folder.*got /nowhere; run: export TMPDIR="),
        explained(partial(unusable_file, tmp_path)),
    ):
        missing()


def test_other_errors_of_the_block_are_not_changed(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    for error in (KeyError("x"), UserError("x"), FileNotFoundError(errno.ENOENT, "no such file", "/data/x")):
        known = explained(partial(deleted_folder, tmp_path), partial(unusable_file, tmp_path))
        with pytest.raises(type(error)) as raised, known:
            raise error
        assert raised.value is error
