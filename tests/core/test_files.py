"""Atomic writing of files and folders, reading of JSON lines, and digests of settings."""

import os

import pytest

from rlhf.core import files
from rlhf.core.files import digest, read_lines, scratch_of, whole, write_atomically


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_new_folder_replaces_the_old_folder_completely(tmp_path):
    for name in ("old", "new"):
        with whole(tmp_path / "model") as scratch:
            scratch.mkdir()
            (scratch / name).touch()
            assert scratch == scratch_of(tmp_path / "model") == tmp_path / ".tmp-model"
    assert names(tmp_path) == ["model"] and names(tmp_path / "model") == ["new"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_failed_block_leaves_the_older_folder_and_no_scratch_folder(tmp_path, error):
    (tmp_path / "model").mkdir()
    with pytest.raises(error), whole(tmp_path / "model") as scratch:
        scratch.mkdir()
        (scratch / "half").touch()
        raise error
    assert names(tmp_path) == ["model"] and names(tmp_path / "model") == []


def test_scratch_files_left_by_a_crash_are_not_published(tmp_path):
    scratch_of(tmp_path / "model").mkdir()
    (scratch_of(tmp_path / "model") / "half").touch()
    with whole(tmp_path / "model") as scratch:
        scratch.mkdir()
    assert names(tmp_path) == ["model"] and names(tmp_path / "model") == []


def test_other_ranks_than_the_first_do_not_rename_or_remove_the_scratch_folder(tmp_path):
    scratch_of(tmp_path / "model").mkdir()
    with whole(tmp_path / "model", publish=False) as scratch:
        assert scratch.is_dir()
    assert names(tmp_path) == [".tmp-model"]


def test_a_durable_folder_is_synced_to_disk_before_it_is_renamed(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(files, "sync", lambda path: synced.append((path.name, (tmp_path / "model").exists())))
    with whole(tmp_path / "model", durable=True) as scratch:
        (scratch / "parts").mkdir(parents=True)
        (scratch / "parts" / "weights").touch()
    assert sorted(synced) == [(".tmp-model", False), ("parts", False), ("weights", False)]


def test_processes_write_the_same_file_under_different_scratch_names(tmp_path, monkeypatch):
    used = []
    with whole(tmp_path / "file", private=True) as first:
        first.write_text("first")
        monkeypatch.setattr(os, "getpid", lambda: -1)
        write_atomically(tmp_path / "file", "second")
        used.append((tmp_path / "file").read_text())
    assert used == ["second"] and (tmp_path / "file").read_text() == "first" and names(tmp_path) == ["file"]


def test_a_line_that_a_crash_cut_off_is_skipped(tmp_path):
    file = tmp_path / "rows.jsonl"
    assert read_lines(file) == []
    file.write_text('{"text": "a\u2028b"}\n{"text": "c')
    assert read_lines(file) == [{"text": "a\u2028b"}]


def test_the_digest_of_settings_does_not_depend_on_the_order_of_keys():
    assert digest({"a": 1, "b": [2]}) == digest({"b": [2], "a": 1}) != digest({"a": 1, "b": [3]})
    assert len(digest(None)) == 8
