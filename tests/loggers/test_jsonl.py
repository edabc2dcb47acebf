"""Tests of the rows of a run: their copies in checkpoints, and what a resumed run keeps and restores."""

from __future__ import annotations

import gzip
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from rlhf.core import files
from rlhf.core.files import read_lines
from rlhf.core.metrics import Evaluation
from rlhf.core.state import TrainState
from rlhf.loggers import logger as module
from rlhf.loggers.logger import JsonlLogger
from rlhf.runs import folder as history
from rlhf.runs.folder import RunFolder

FILES = ("metrics.jsonl", "completions.jsonl")


def update(logger: JsonlLogger, number: int) -> None:
    """Log the rows of an update and of its evaluation."""
    state = logger.state
    state.update = number
    logger.log({"update": number, "lr": 0.1}, state)
    samples = [{"prompt": "p", "response": f"r\u2028{number}"}]
    logger.evaluation({"update": number, "eval/loss": 1.0}, Evaluation({}, samples), state)


def save(logger: JsonlLogger, number: int) -> Path:
    """Write the checkpoint of an update."""
    checkpoint = logger.folder.path / f"checkpoint-{number}"
    checkpoint.mkdir()
    logger.save(checkpoint)
    return checkpoint


@pytest.fixture
def saved(tmp_path) -> tuple[RunFolder, Path]:
    """Return a run folder with rows of three updates, and the checkpoint of the second update."""
    folder = RunFolder(tmp_path)
    logger = JsonlLogger(folder, TrainState(num_updates=9), None)
    update(logger, 1)
    update(logger, 2)
    checkpoint = save(logger, 2)
    update(logger, 3)
    return folder, checkpoint


def resumed(folder: RunFolder, checkpoint: Path) -> JsonlLogger:
    return JsonlLogger(folder, TrainState(num_updates=9, update=2), checkpoint)


def said(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().out.split())


def contents(folder: RunFolder) -> list[bytes]:
    return [(folder.path / name).read_bytes() for name in FILES]


def without_line(file: Path, number: int) -> None:
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:number] + lines[number + 1 :]))


def altered(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[5] ^= 1
    file.write_bytes(content)


def cut_line(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[:3] + content[content.index(b"\n") :])


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "removed": (Path.unlink, "was missing"),
    "empty": (lambda file: os.truncate(file, 0), "had 0 of"),
    "truncated": (lambda file: os.truncate(file, 15), "had 0 of"),
    "filled with zeros": (lambda file: file.write_bytes(bytes(file.stat().st_size)), "had 0 of"),
    "bit flipped": (altered, "had altered rows"),
    "cut line": (cut_line, "had altered rows"),
    "line removed": (lambda file: without_line(file, 0), ""),
    "line repeated": (lambda file: file.write_bytes(b"{}\n" + file.read_bytes()), "had altered rows"),
    "folder": (lambda file: (file.unlink(), file.mkdir()), "could not be read (Is a directory)"),
    "link to nothing": (lambda file: (file.unlink(), file.symlink_to("x")), "could not be read"),
}


def test_rows_after_the_checkpoint_or_of_an_earlier_start_are_removed_without_a_message(saved, capsys):
    folder, checkpoint = saved
    (folder.path / "metrics.jsonl").open("ab").write(b'{"upd')
    resumed(folder, checkpoint)
    assert [row["update"] for row in read_lines(folder.metrics)] == [1, 1, 2, 2]
    assert [row["response"] for row in read_lines(folder.completions)] == ["r\u20281", "r\u20282"]
    assert said(capsys) == "" and not list(folder.path.glob("*.damaged"))
    JsonlLogger(folder, TrainState(num_updates=4), None)
    assert contents(folder) == [b"", b""] and not list(folder.path.glob("*.damaged")), "a new start"


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_rows_before_the_checkpoint_are_restored_with_one_message(saved, capsys, damage, name):
    folder, checkpoint = saved
    resumed(folder, checkpoint)
    whole = contents(folder)
    update(resumed(folder, checkpoint), 3)
    strike, reason = DAMAGE[damage]
    strike(folder.path / name)
    resumed(folder, checkpoint)
    assert contents(folder) == whole
    message = said(capsys)
    assert message.count("warning") == 1 and message.startswith(f"warning: {folder.path / name} {reason}")
    assert message.endswith(f"rows were restored from {checkpoint}")
    resumed(folder, checkpoint)
    assert said(capsys) == ""


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", DAMAGE)
def test_rows_that_are_damaged_during_the_run_are_restored_at_the_next_checkpoint(
    saved, tmp_path, capsys, damage, name
):
    folder, checkpoint = saved
    logger = resumed(folder, checkpoint)
    DAMAGE[damage][0](folder.path / name)
    if damage not in ("folder", "link to nothing"):  # nothing can be appended to a folder
        update(logger, 3)
    later = save(logger, 3)
    assert said(capsys).count("it was written again with") == 1
    whole = contents(folder)
    assert [gzip.decompress((later / "history" / f"{each}.gz").read_bytes()) for each in FILES] == whole
    assert contents(resumed(folder, later).folder) == whole and said(capsys) == ""
    assert [row["update"] for row in read_lines(folder.metrics)][:4] == [1, 1, 2, 2]


def test_a_checkpoint_has_the_number_and_the_checksum_of_the_rows(saved):
    _, checkpoint = saved
    summary = json.loads((checkpoint / "history" / "rows.json").read_text())
    assert {name: entry["rows"] for name, entry in summary.items()} == {FILES[0]: 4, FILES[1]: 2}
    assert all(len(entry["xxh3"]) == 16 and entry["bytes"] > 0 for entry in summary.values())


def test_rows_are_on_disk_before_they_are_copied_into_a_checkpoint(saved, monkeypatch):
    folder, checkpoint = saved
    logger = resumed(folder, checkpoint)
    synced: list[str] = []
    for each in (files, module):
        monkeypatch.setattr(each, "sync", lambda path: synced.append(path.name))
    monkeypatch.setattr(history, "save", lambda rows, into: synced.append("copies"))
    logger.save(folder.path / "checkpoint-9")
    assert synced == [*FILES, folder.path.name, "copies"]


def test_rows_are_restored_at_the_end_of_the_run(saved, capsys):
    folder, checkpoint = saved
    state = TrainState(num_updates=9, update=2)
    logger = JsonlLogger(folder, state, checkpoint)
    whole = contents(folder)
    folder.metrics.unlink()
    logger.close()
    assert not folder.metrics.exists(), "an interrupted run restores the rows when it resumes"
    state.update = 9
    logger.close()
    assert contents(folder) == whole and "it was written again with 4 rows" in said(capsys)


def test_a_checkpoint_of_an_earlier_version_keeps_the_rows_until_its_update(saved, capsys):
    folder, checkpoint = saved
    resumed(folder, checkpoint)
    whole = contents(folder)
    update(resumed(folder, checkpoint), 3)
    shutil.rmtree(checkpoint / "history")
    logger = resumed(folder, checkpoint)
    assert contents(folder) == whole and said(capsys) == "" and logger.state.lost_rows == []
    assert contents(resumed(folder, save(logger, 4)).folder) == whole


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["removed", "cut line", "folder"])
def test_rows_without_a_copy_are_reported_as_lost(saved, capsys, damage, name):
    folder, checkpoint = saved
    shutil.rmtree(checkpoint / "history")
    DAMAGE[damage][0](folder.path / name)
    logger = resumed(folder, checkpoint)
    assert "the checkpoint has no copy, so these rows are lost" in said(capsys)
    update(logger, 3)
    state = folder.read_state()
    assert state is not None and state["lost_rows"] == [name]
    restored = TrainState(num_updates=9)
    restored.load_state_dict(logger.state.state_dict())
    assert restored.lost_rows == [name]
