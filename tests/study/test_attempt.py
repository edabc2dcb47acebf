"""Rows of runs: averages over the last quarter of the updates, and metrics of all evaluations."""

import json

import pytest

from rlhf.report.runs import read_run
from rlhf.study.work import row_of_files
from tests.report.test_report import write_run


def test_a_row_has_all_metrics_of_the_last_quarter_each_over_the_updates_that_have_it(tmp_path):
    folder = write_run(tmp_path / "a", updates=8)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    trained = [row for row in rows if "lr" in row]
    trained[-4]["mismatch/ess"] = 0.1  # before the last quarter
    trained[-2]["mismatch/ess"] = 0.5
    trained[-1]["rollouts/lag"] = 2.0
    evaluated = [row for row in rows if "eval/kl" in row]
    del evaluated[-1]["eval/kl"]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = row_of_files(read_run(folder), "eval/win_rate", [])
    assert found["means"]["mismatch/ess"] == 0.5 and found["means"]["rollouts/lag"] == 2.0
    assert found["means"]["objective/scores"] == pytest.approx(7.5)
    assert found["evaluations"]["eval/kl"] == [0.0, 1.0, 2.0, 3.0, None]
    assert "eval/kl" not in found["metrics"]
