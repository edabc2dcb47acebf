"""Runs of the atlas: rows of finished, diverged and failed runs, repetition, worker processes."""

import os
from dataclasses import replace

import pytest

from benchmarks.atlas import executor, rates, record, rerun, worker
from benchmarks.atlas.design import SMOKE, Run
from rlhf.runs.folder import RunFolder
from tests.end_to_end.conftest import TINY, rows

pytestmark = pytest.mark.nightly

RATE = 1e-3


@pytest.fixture
def design(tmp_path, cache_dir):
    """Return a design of tiny runs, with the models that all tests share."""
    outputs = tmp_path / "outputs"
    outputs.mkdir()
    cache_dir.mkdir(exist_ok=True)
    (outputs / "models").symlink_to(cache_dir)
    return replace(SMOKE, steps=4, overrides=tuple(TINY), outputs=outputs, results=tmp_path / "runs.jsonl")


@pytest.fixture
def run(design):
    return Run(design.cell("tldr_mini", "ppo", lag=4), 1, RATE)


def test_a_row_has_the_values_of_the_run_and_a_repetition_gives_the_same_values(design, run, monkeypatch):
    row = worker.carry_out(design, run)
    folder = RunFolder(worker.folder_of(design, run))
    evaluated = [each for each in rows(folder) if "eval/kl" in each]
    assert (row.status, row.error, row.updates) == (record.FINISHED, None, 4)
    assert [each[0] for each in row.evaluations] == [0, 2, 4]
    assert row.evaluations[-1][1] == pytest.approx(evaluated[-1]["eval/kl"], abs=1e-6)
    assert row.result == pytest.approx(evaluated[-1]["eval/win_rate"], abs=1e-6)
    assert row.gold == pytest.approx(evaluated[-1]["eval/gold_score"], abs=1e-6)
    trained = [each for each in rows(folder) if "lr" in each]
    assert row.ess == pytest.approx(trained[-1]["mismatch/ess"], abs=1e-6)
    assert [each["lag"] for each in trained] == [0, 1, 2, 3], "no batch is sampled again after an update"
    assert row.cpu_s > 0 and not folder.model.exists()

    entry = {"chosen": RATE, "values": {}}
    table = {"tldr_mini": {"ppo": {str(lag): entry for lag in design.tuning_lags}}}
    monkeypatch.setattr(rates, "rate", lambda *_: RATE)
    assert rerun.repeat(design, {row.run: row}, table, "ppo:tldr_mini:4:1") == []
    changed = {row.run: replace(row, result=row.result + 0.5)}
    (difference,) = rerun.repeat(design, changed, table, "ppo:tldr_mini:4:1")
    assert difference.startswith("result: ")


def test_a_run_with_a_loss_that_is_not_finite_is_recorded_as_diverged(design, run):
    row = worker.carry_out(design, run._replace(rate=1e30))
    assert row.status == record.DIVERGED and row.collapsed and row.result == 0
    assert row.updates < 4 and row.evaluations
    assert row.error.startswith("update ") and row.error.endswith("gradient norm nan")


def test_another_error_is_recorded_as_a_failure(design, run, monkeypatch):
    def fails(*_, **__):
        raise RuntimeError("no memory\nmore lines")

    monkeypatch.setattr(worker, "train", fails)
    row = worker.carry_out(design, run)
    assert (row.status, row.error) == (record.FAILED, "RuntimeError: no memory")
    assert row.collapsed and row.result == 0


@pytest.mark.process
def test_a_worker_process_carries_out_runs_and_reports_progress(design, run, capsys):
    found = {}
    executor.execute(design, [run, run._replace(seed=2)], found, workers=1)
    assert [row.status for row in found.values()] == [record.FINISHED] * 2
    assert record.read(design.results) == found
    assert found[design.key(run)].measured() == worker.carry_out(design, run).measured()
    (first, last) = capsys.readouterr().out.splitlines()[:2]
    assert first.startswith("[1/2] tldr_mini ppo lag 4 N 1 lr 0.001 seed 1: win rate ")
    assert last.endswith("left: 0.0 CPU-hours, 0.0 hours")


@pytest.mark.process
def test_the_end_of_a_worker_process_is_recorded_as_a_failure(design, run, monkeypatch):
    monkeypatch.setattr(os, "environ", {**os.environ, **executor.ENVIRONMENT})
    started = executor.Worker(design, 0)
    started.send(run)
    started.process.kill()
    row = started.receive()
    started.stop()
    assert (row.status, row.error) == (record.FAILED, "the process ended with exit code -9")
    assert started.left == 0, "no further run is sent to it"
