"""Tests of the rows that a resumed run keeps in its JSON-lines files."""

from __future__ import annotations

import json

import pytest

from rlhf.core.errors import UserError
from rlhf.core.files import read_lines
from rlhf.core.state import TrainState
from rlhf.loggers.jsonl import JsonlLogger
from rlhf.runs.folder import RunFolder

DAMAGED = [b"garbage", b"\xff\xfe", b"5", b""]


@pytest.fixture
def folder(tmp_path) -> RunFolder:
    """Return a run folder whose metrics have rows of updates 1 to 3, and damaged lines among them."""
    rows = [json.dumps({"update": update}).encode() for update in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join([rows[0], *DAMAGED, rows[1], rows[2], b'{"upd']))
    return RunFolder(tmp_path)


def test_a_resumed_run_moves_damaged_lines_aside_and_keeps_the_rows_before_its_checkpoint(folder, capsys):
    JsonlLogger(folder, TrainState(num_updates=4, update=2))
    assert read_lines(folder.metrics) == [{"update": 1}, {"update": 2}]
    assert (folder.path / "metrics.jsonl.damaged").read_bytes() == b"\n".join([*DAMAGED, b""])
    assert "had lines that are no JSON objects (2, 3, 4, 5), moved to" in " ".join(
        capsys.readouterr().out.split()
    )


def test_a_run_that_starts_again_keeps_no_rows(folder):
    JsonlLogger(folder, TrainState(num_updates=4))
    assert folder.metrics.read_bytes() == b"" and not list(folder.path.glob("*.damaged"))


def test_a_damaged_line_of_another_file_is_a_user_error_that_names_the_line(folder):
    with pytest.raises(UserError, match=r"metrics.jsonl must have .* got b'garbage' in line 2; .*sed -i 2d"):
        read_lines(folder.metrics)
