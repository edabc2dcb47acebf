"""Tests of `schedule.update=in_flight`, which loads weights while the generator samples a request."""

import pytest
import torch

from rlhf.core.files import read_lines
from rlhf.runs.folder import RunFolder
from rlhf.stages.run import run
from rlhf.training.stream import unpack
from rlhf.words.compose import run_name

RUN = [
    "algo=grpo",
    "algo.correction.kind=truncate",
    "algo.correction.cap=1",
    "optim.lr=3e-3",
    "scorer=facts",
    "scorer.missing_eos_score=null",  # the samples of a prompt must have different scores
    "schedule.max_lag=1",
    "schedule.total_episodes=160",
    "schedule.eval_every=0",
    "schedule.save_every=1",
    "generator.batch_size=4",  # one prompt at once, so that a request is running at each update
]
IN_FLIGHT = "schedule.update=in_flight"


def test_a_batch_mixes_weight_versions_and_a_checkpoint_saves_the_versions(tiny, tmp_path):
    cfg = tiny(*RUN, IN_FLIGHT)
    assert run_name(cfg) != run_name(tiny(*RUN))
    folder = RunFolder(tmp_path / "run")
    run(cfg, folder)

    rows = read_lines(folder.metrics)
    assert [row["update"] for row in rows] == list(range(1, len(rows) + 1)) and len(rows) >= 4
    assert all(0 <= row["mismatch/token_lag"] <= row["lag"] <= 1 for row in rows)
    assert any(0 < row["mismatch/token_lag"] < 1 for row in rows), (
        "no batch has tokens of two weight versions"
    )
    assert max(row["mismatch/kl"] for row in rows) > 1e-3 > rows[0]["mismatch/kl"]
    assert all(0 < row["correction/truncated"] < 1 for row in rows[1:]), (
        "the correction must truncate some tokens of each later batch"
    )

    packed = torch.load(folder.last_checkpoint() / "in_flight.pt", weights_only=True)
    (kept,) = map(unpack, packed)
    assert kept.version == min(kept.versions()) and kept.token_versions.shape == kept.response_ids.shape

    folder.state.unlink()  # as if the trainer was killed after its last checkpoint
    run(cfg, folder)
    again = read_lines(folder.metrics)
    assert again[:-1] == rows[:-1] and again[-1]["update"] == len(rows)
    lag = kept.token_versions[kept.response_mask].double().mean()
    assert again[-1]["mismatch/token_lag"] == pytest.approx(len(rows) - 1 - float(lag))


def test_replicas_load_weights_while_they_sample(tiny, tmp_path):
    folder = RunFolder(tmp_path / "run")
    run(tiny(*RUN, IN_FLIGHT, "schedule.max_lag=2", "schedule.save_every=0", "generator.replicas=2"), folder)
    rows = read_lines(folder.metrics)
    assert all(0 <= row["mismatch/token_lag"] <= row["lag"] <= 2 for row in rows)
    assert any(row["mismatch/token_lag"] % 1 > 0 for row in rows), (
        "no batch has tokens of two weight versions"
    )
