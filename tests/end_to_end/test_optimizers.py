"""Complete runs with other optimizers than AdamW: their metrics, and a resumed run."""

import importlib.util

import pytest

from rlhf.runs.folder import RunFolder
from rlhf.stages.run import run
from rlhf.training.recorder import Recorder
from tests.end_to_end.conftest import assert_same_end, rows

WORDS = ["algo=rloo", "schedule.total_episodes=64", "schedule.save_every=1"]


@pytest.mark.parametrize("name", ["muon", "adamw_8bit"])
def test_a_resumed_run_ends_equally_and_has_the_metrics_of_adamw(
    tiny, finished, tmp_path, monkeypatch, caplog, name
):
    if name == "adamw_8bit" and importlib.util.find_spec("bitsandbytes") is None:
        pytest.skip("bitsandbytes is not installed")
    words = [*WORDS, f"optim.optimizer={name}"]
    whole, parts = RunFolder(tmp_path / "whole"), RunFolder(tmp_path / "parts")
    run(tiny(*words), whole)
    assert not any(record.name.startswith("bitsandbytes") for record in caplog.records)
    flush = Recorder.flush

    def crash(self, state, *rest):
        flush(self, state, *rest)
        if state.update == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Recorder, "flush", crash)
        run(tiny(*words), parts)
    run(tiny(*words), parts)
    assert_same_end(whole, parts)
    plain, other = rows(finished(*WORDS)), rows(whole)
    assert [row.keys() for row in plain] == [row.keys() for row in other] and plain != other
