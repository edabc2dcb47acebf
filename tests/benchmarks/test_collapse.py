"""The study of the collapse warning: labels, selection of limits, error rates, and the committed rows."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks import collapse
from benchmarks.collapse import EARLY, GRID, MEMORIES, UPDATES, Case, cases, collapsed_at, crossings, measured
from rlhf.study.file import read_spec
from rlhf.study.rows import DIVERGED, Results, read_rows, write_rows
from rlhf.training.recorder import LIMITS, Limits
from tests.report.test_report import write_run

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def row():
    return next(row for row in read_rows(ROOT / "studies/collapse/rows.jsonl") if row.task == "tldr_mini")


@pytest.mark.parametrize(
    ("values", "update"),
    [
        ((0.3, 0.6, 0.8, 0.75), math.inf),
        ((0.3, 0.6, 0.8, 0.7), 15),
        ((0.3, 0.8, 0.5, 0.8, 0.75), math.inf),
        ((0.3, 0.8, 0.71, 0.6, 0.5), 15),
        ((0.5, 0.1, 0.1), 5),
        ((0.8, 0.6, 0.9, 0.7, 0.1), 15),
    ],
)
def test_a_collapse_is_the_first_evaluation_from_which_the_metric_stays_below_its_best(row, values, update):
    updates = [5 * place for place in range(len(values))]
    evaluations = {"update": updates, "eval/win_rate": values, "eval/gold_score": values[::-1]}
    assert collapsed_at(replace(row, evaluations=evaluations)) == update
    sums = replace(row, task="arithmetic", evaluations={**evaluations, "eval/gold_score": values})
    assert collapsed_at(sums) == update


def case(kl, at=math.inf):
    """Return a run whose KL rises by `kl` nats per token in each update, and which collapses at an update."""
    fixed = {"objective/entropy": 4.0, "objective/response_tokens": 10.0}
    return Case(1e-4, [{"update": n, "objective/kl": 10 * kl * (n - 1), **fixed} for n in range(1, 41)], at)


def test_the_crossings_are_the_updates_at_which_the_rule_warns():
    one = case(0.02, 100.0)
    for memory in MEMORIES:
        found = crossings(one, memory)
        for limit, at in zip(GRID["kl"], found["kl"], strict=True):
            assert measured([one], Limits(kl=limit, memory=memory))[0] == [100.0 - at]
        assert set(found["entropy"]) == set(found["ess"]) == {math.inf}


def test_the_selected_limit_separates_collapsed_and_stable_runs():
    some = [case(0.04 + 0.001 * n, 30.0) for n in range(5)] + [case(0.003 + 0.001 * n) for n in range(5)]
    limits = collapse.selected(some)
    assert limits.entropy is limits.ess is None and (limits.kl is None) != (limits.rise is None), (
        "one signal is sufficient, and entropy and ess are constant"
    )
    leads, alarms = measured(some, limits)
    assert min(leads) >= EARLY and alarms == [False] * 5


def test_updates_of_run_folders_are_stored_for_the_rows(row, tmp_path):
    write_run(tmp_path / "runs/one", training={"objective/kl": 0.25})
    write_rows(tmp_path / "runs/one/row.json", [row])
    collapse.write_updates([tmp_path], tmp_path / "updates.npz")
    diverged = replace(row, status=DIVERGED, evaluations={"update": [0], "eval/win_rate": [0.5]})
    (found,) = cases([diverged], tmp_path / "updates.npz")
    assert found.rate == 1e-3 and found.updates[-1]["update"] == found.collapse == 4


@pytest.mark.nightly
def test_the_committed_rows_select_the_limits_of_this_version():
    results = Results.read(read_spec(ROOT / "studies/collapse.yaml"))
    text = collapse.selection(results.rows, UPDATES)
    assert text in (ROOT / "studies/collapse/page.md").read_text()
    assert text.count(f"`Limits(kl={LIMITS.kl}, memory={LIMITS.memory:g})`") == 2
    runs = np.load(UPDATES)["run"]
    assert set(runs) <= {each.run for each in results.rows} and len(runs) == 458
