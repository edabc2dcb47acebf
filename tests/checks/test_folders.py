"""Tests of the rules for the folders that a run writes."""

from __future__ import annotations

import shutil

import pytest

from rlhf.checks import check, data
from rlhf.words.compose import compose


@pytest.mark.parametrize("key", ["output_dir", "cache_dir"])
def test_a_file_in_place_of_a_folder_is_refused(tmp_path, key):
    (tmp_path / "o").touch()
    (found,) = check.problems(compose([f"{key}={tmp_path}/o"]))
    assert found.startswith(f"{key} must be a folder that can be written ({tmp_path}/o is not a folder), got")


def test_an_evaluation_does_not_check_the_folders_of_the_run(tmp_path):
    (tmp_path / "o").touch()
    assert not check.problems(compose([f"output_dir={tmp_path}/o"]), training=False)


@pytest.mark.parametrize(
    ("free", "said"),
    [(2**16, "neither can be saved"), (2**21, "checkpoints may not be saved"), (2**40, None)],
)
def test_a_disk_without_room_for_model_or_checkpoint_gives_a_warning(tmp_path, monkeypatch, free, said):
    monkeypatch.setattr(data.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(0, 0, free))
    found = check.warnings(compose([f"output_dir={tmp_path}/new"]))
    assert [said in text for text in found] == ([True] if said else [])
