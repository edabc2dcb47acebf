"""The experiment trackers, for real: Weights & Biases offline, TensorBoard event files."""

import json

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rlhf.folder import RunFolder
from rlhf.run import run
from tests.integration.conftest import rows


def test_wandb_and_tensorboard_get_the_rows_of_metrics_jsonl(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "0123456789012345678901234567890123456789")
    folder = RunFolder(tmp_path / "run")
    run(tiny("logger=[wandb,tensorboard]", "logger.wandb.mode=offline"), folder)

    last = [row for row in rows(folder) if "lr" in row][-1]
    events = EventAccumulator(str(folder.path / "tensorboard")).Reload()
    scalars = {(e.step, round(e.value, 5)) for e in events.Scalars("objective/scores")}
    assert (2, round(last["objective/scores"], 5)) in scalars
    assert [e.step for e in events.Scalars("eval/win_rate")] == [0, 1, 2]

    (kept,) = (folder.path / "wandb").glob("offline-run-*")
    written = next(kept.glob("*.wandb")).read_bytes()
    for what in ("objective/scores", "eval/win_rate", json.dumps(last["objective/scores"])):
        assert what.encode() in written, what

    secret = b"0123456789012345678901234567890123456789"
    for file in folder.path.rglob("*"):
        if file.is_file() and file.suffix in {".yaml", ".json", ".jsonl", ".log"}:
            assert secret not in file.read_bytes(), file
