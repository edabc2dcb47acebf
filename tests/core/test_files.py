"""Atomic writing of files and folders, reading of JSON lines, and digests of settings."""

import os

import pytest

from rlhf.core import files
from rlhf.core.errors import UserError
from rlhf.core.files import digest, leftovers, read_json, read_lines, scratch_of, whole, write_atomically


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
    *before, after = synced
    assert sorted(before) == [(".tmp-model", False), ("parts", False), ("weights", False)]
    assert after == (tmp_path.name, True), "the folder has the new name on disk, too"


def test_processes_write_the_same_file_under_different_scratch_names(tmp_path, monkeypatch):
    used = []
    with whole(tmp_path / "file", private=True) as first:
        first.write_text("first")
        monkeypatch.setattr(os, "getpid", lambda: -1)
        write_atomically(tmp_path / "file", "second")
        used.append((tmp_path / "file").read_text())
    assert used == ["second"] and (tmp_path / "file").read_text() == "first" and names(tmp_path) == ["file"]


def test_a_file_is_on_disk_before_and_its_folder_after_the_rename(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(files, "sync", lambda path: synced.append((path.name, (tmp_path / "file").exists())))
    write_atomically(tmp_path / "file", "text")
    assert synced == [(f".tmp-file.{os.getpid()}", False), (tmp_path.name, True)]


@pytest.mark.parametrize("obstacle", ["file", "link"])
def test_a_new_folder_replaces_a_file_or_a_link(tmp_path, obstacle):
    path = tmp_path / "model"
    path.touch() if obstacle == "file" else path.symlink_to(tmp_path / "nowhere")
    with whole(path) as scratch:
        scratch.mkdir()
    assert path.is_dir() and not path.is_symlink() and names(tmp_path) == ["model"]


def test_scratch_files_of_another_running_process_are_no_leftovers(tmp_path):
    alive, dead = os.getppid(), 2**22 + 1  # above the largest process id of Linux
    paths = [".tmp-checkpoint-1", f".tmp-a.{alive}", f".tmp-a.{dead}", f".tmp-a.{os.getpid()}", "other"]
    for name in paths:
        (tmp_path / name).touch()
    assert sorted(path.name for path in leftovers(tmp_path)) == sorted([paths[0], *paths[2:4]])


@pytest.mark.parametrize("content", [b"", b"[]", b"null", b"\xff\x00", None])
def test_a_damaged_json_file_is_a_user_error_with_the_remedy(tmp_path, content):
    file = tmp_path / "x.json"
    file.mkdir() if content is None else file.write_bytes(content)
    with pytest.raises(UserError, match=r"x\.json must be a JSON object, got: .+; delete the file"):
        read_json(file, "delete the file")


def test_a_row_without_a_required_key_is_a_user_error_that_names_the_line(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"a": 1}\n{"b": 1}\n')
    with pytest.raises(UserError, match=r"JSON object with a in each line, got b.* in line 2; .*sed -i 2d"):
        read_lines(file, ["a"])


def test_a_folder_in_place_of_a_file_of_rows_is_a_user_error(tmp_path):
    with pytest.raises(UserError, match=r"must be a file that can be read, got: Is a directory; .* mv "):
        read_lines(tmp_path)


def test_a_line_that_a_crash_cut_off_is_skipped(tmp_path):
    file = tmp_path / "rows.jsonl"
    assert read_lines(file) == []
    file.write_text('{"text": "a\u2028b"}\n{"text": "c')
    assert read_lines(file) == [{"text": "a\u2028b"}]


def test_the_digest_of_settings_does_not_depend_on_the_order_of_keys():
    assert digest({"a": 1, "b": [2]}) == digest({"b": [2], "a": 1}) != digest({"a": 1, "b": [3]})
    assert len(digest(None)) == 8
