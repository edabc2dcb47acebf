"""Tests of the loggers with the real packages: Weights & Biases (offline) and TensorBoard event files."""

import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import wandb
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto.wandb_internal_pb2 import Record

from rlhf.core.errors import UserError
from rlhf.core.files import read_lines
from rlhf.loggers.dashboards import run_id
from rlhf.runs.folder import RunFolder
from rlhf.stages.run import run
from tests.end_to_end.conftest import interrupted, rows

OFFLINE = ("logger=wandb", "logger.wandb.mode=offline")
SESSIONS = ("schedule.total_episodes=64", "schedule.save_every=2", "schedule.eval_every=2", "algo.ties=keep")


def records(file: Path) -> Iterator[Record]:
    """Yield the records of a W&B run file: protocol buffers in the log format of LevelDB."""
    data, at, parts = file.read_bytes(), 7, b""  # skip the 7 bytes of W&B's header
    while at + 7 <= len(data):
        left = 32768 - at % 32768  # bytes left in the block; a header is never split across blocks
        if left < 7:
            at += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a complete record, or the last part of a record
            yield Record.FromString(parts)
            parts = b""


def sessions(folder: RunFolder) -> list[list[Record]]:
    """Return the records of each session of a run, oldest first."""
    wandb.teardown()  # flush pending records
    return [list(records(file)) for file in sorted(folder.path.glob("wandb/offline-run-*/*.wandb"))]


def history(session: list[Record]) -> list[dict]:
    """Return the logged rows of a session in order of their steps."""
    found = [record.history for record in session if record.HasField("history")]
    return [
        {(item.key or ".".join(item.nested_key)): json.loads(item.value_json) for item in row.item}
        for row in found
    ]


KEY = "0123456789012345678901234567890123456789"
SECRET = "a-secret-of-the-command-line"


@pytest.fixture(scope="module")
def logged(tiny, tmp_path_factory) -> RunFolder:
    """Return the folder of a run with Weights & Biases and TensorBoard. Tests must not change the folder."""
    folder = RunFolder(tmp_path_factory.mktemp("logged") / "run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_API_KEY", KEY)
        patch.setenv("WANDB_MODE", "offline")  # used, because logger.wandb.mode is null
        patch.setattr(sys, "argv", ["train.py", f"some.api_key={SECRET}"])
        run(tiny("logger=[wandb,tensorboard]", "logger.wandb.tags=[one]", "schedule.eval_every=2"), folder)
    return folder


def test_wandb_and_tensorboard_get_the_rows_of_metrics_jsonl_and_no_secret(logged):
    last = [row for row in rows(logged) if "lr" in row][-1]
    events = EventAccumulator(str(logged.path / "tensorboard")).Reload()
    scalars = {(e.step, round(e.value, 5)) for e in events.Scalars("objective/scores")}
    assert (2, round(last["objective/scores"], 5)) in scalars
    assert [e.step for e in events.Scalars("eval/win_rate")] == [0, 2]

    (session,) = sessions(logged)
    found = {row["_step"]: row for row in history(session)}
    for row in rows(logged):
        assert row.items() <= found[row["update"]].items()

    for file in logged.path.rglob("*"):
        if file.is_file():
            for secret in (KEY, SECRET):
                assert secret.encode() not in file.read_bytes(), file


def test_wandb_gets_the_completions_of_each_evaluation_as_a_table(logged):
    kept = read_lines(logged.completions)
    (session,) = sessions(logged)
    tables = {row["_step"]: row["completions.path"] for row in history(session) if "completions.path" in row}
    assert sorted(tables) == [0, 2]
    for update, path in tables.items():
        (file,) = logged.path.glob(f"wandb/offline-run-*/files/{path}")
        table = json.loads(file.read_text())
        expected = [
            {k: v for k, v in row.items() if k != "update"} for row in kept if row["update"] == update
        ]
        assert [dict(zip(table["columns"], row, strict=True)) for row in table["data"]] == expected


def test_wandb_gets_the_figures_of_the_report_when_the_run_ends(logged):
    (session,) = sessions(logged)
    last = history(session)[-1]
    assert last["_step"] == 2
    (path,) = [last[name] for name in last if name.startswith("report/learning_curves") and "path" in name]
    (file,) = logged.path.glob(f"wandb/offline-run-*/files/{path}")
    assert file.read_bytes().startswith(b"\x89PNG")


def test_a_resumed_run_continues_its_wandb_run(tiny, tmp_path):
    folder = RunFolder(tmp_path / "run")
    cfg = tiny(*OFFLINE, *SESSIONS)
    with interrupted(update=3):
        run(cfg, folder)
    run(cfg, folder)
    first, second = sessions(folder)

    for session in (first, second):
        (started,) = [record.run for record in session if record.HasField("run")][-1:]
        assert started.run_id == run_id(folder, "wandb") and started.display_name == "run"
        settings = {item.key: json.loads(item.value_json) for item in started.config.update}
        assert settings["algo"]["name"] == "dpo" and "packages" in settings["environment"]
        assert "defaults" not in settings
    ends = [record.exit.exit_code for one in (first, second) for record in one if record.HasField("exit")]
    assert ends == [1, 0]

    steps = [[row["_step"] for row in history(session)] for session in (first, second)]
    assert steps == [[0, 1, 2, 3], [3, 4]]
    whole = {row["_step"]: row for session in (first, second) for row in history(session)}
    for row in rows(folder):
        assert row.items() <= whole[row["update"]].items()


def test_a_folder_keeps_its_wandb_run_id_and_a_new_folder_of_that_name_gets_another_id(tmp_path):
    folder = RunFolder(tmp_path / "lag0: 50%")
    mine = run_id(folder, "wandb")
    assert run_id(folder, "wandb") == mine
    assert mine.startswith("lag0- 50-") and len(mine) <= 128
    folder.path.rename(tmp_path / "aside")  # as resume=never does
    assert run_id(folder, "wandb") != mine
    assert len(run_id(RunFolder(tmp_path / ("long" * 50)), "wandb")) <= 128


def test_a_missing_wandb_key_is_an_error_with_the_remedy(tiny, tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with pytest.raises(UserError, match=r"wandb login.*logger\.wandb\.mode=offline"):
        run(tiny("logger=wandb", "logger.wandb.mode=online"), RunFolder(tmp_path / "run"))


def test_tensorboard_shows_each_update_once_after_a_restart(tiny, tmp_path):
    for name, every in (("from a checkpoint", 2), ("from nothing", 0)):
        folder = RunFolder(tmp_path / name)
        cfg = tiny("logger=tensorboard", *SESSIONS, f"schedule.save_every={every}")
        with interrupted(update=3):
            run(cfg, folder)
        run(cfg, folder)
        events = EventAccumulator(str(folder.path / "tensorboard")).Reload()
        assert [e.step for e in events.Scalars("objective/scores")] == [1, 2, 3, 4], name
        assert [e.step for e in events.Scalars("eval/gold_score")] == [0, 2, 4], name
