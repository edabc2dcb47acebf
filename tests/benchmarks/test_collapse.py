"""Tests of the study of the collapse warning: labels, selection of limits, error rates and the page."""

import hashlib
import json
import math
from dataclasses import replace

import pytest
import yaml

from benchmarks.collapse import __main__ as command
from benchmarks.collapse.cases import EARLY, Case, cases_of, collapsed_at, distinct, read, write
from benchmarks.collapse.page import MARKS, written
from benchmarks.collapse.selection import GRID, MEMORIES, crossings, measured, quality, selected, warned_by
from rlhf.core.errors import UserError
from rlhf.study.page import fill
from rlhf.training.collapse import Limits


def evaluations(*values):
    return [(5.0 * place, value) for place, value in enumerate(values)]


def test_tasks_with_right_and_wrong_answers_are_judged_by_accuracy(tmp_path):
    path = write_run(tmp_path, "sums", 0.05, (0.0,) * 6)
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    for each in rows:
        if "eval/win_rate" in each:
            each["eval/gold_score"] = 0.6 if each["update"] < 20 else 0.2
    (path / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    assert [each.collapse for each in cases_of([str(path)])] == [None]
    config = path / "config.yaml"
    config.write_text(config.read_text().replace("tldr_mini", "arithmetic"))
    assert [each.collapse for each in cases_of([str(path)])] == [20]


@pytest.mark.parametrize(
    ("values", "update"),
    [
        ((0.3, 0.6, 0.8, 0.75), None),
        ((0.3, 0.6, 0.8, 0.7), 15),
        ((0.3, 0.8, 0.5, 0.8, 0.75), None),
        ((0.3, 0.8, 0.5, 0.6, 0.75), None),
        ((0.3, 0.8, 0.71, 0.6, 0.5), 15),
        ((0.5, 0.1, 0.1), 5),
        ((0.8, 0.6, 0.9, 0.7, 0.1), 15),
    ],
)
def test_a_collapse_is_the_first_evaluation_from_which_the_metric_stays_below_its_best(values, update):
    assert collapsed_at(evaluations(*values)) == update


def case(name, kl, collapse=None, updates=40):
    """Return a case whose KL rises by `kl` nats per token in each update."""
    rows = [
        {
            "update": update,
            "objective/kl": 10 * kl * (update - 1),
            "objective/entropy": 4.0,
            "objective/response_tokens": 10.0,
        }
        for update in range(1, updates + 1)
    ]
    return Case(name, "tldr_mini dpo", 1e-4, rows, collapse)


def test_the_crossings_are_the_updates_at_which_the_rule_warns():
    one = case("a", 0.02)
    for memory in MEMORIES:
        found = crossings(one, memory)
        for limit, at in zip(GRID["kl"], found["kl"], strict=True):
            assert warned_by([one], Limits(kl=limit, memory=memory)) == [at]
        assert set(found["entropy"]) == set(found["ess"]) == {math.inf}


def test_only_a_warning_that_is_early_enough_counts_as_early():
    cases = [case("a", 0.0, 20.0), case("b", 0.0, 20.0), case("c", 0.0, 20.0), case("d", 0.0), case("e", 0.0)]
    found = quality(cases, [20.0 - EARLY, 21.0 - EARLY, math.inf, math.inf, 3.0])
    assert found.leads == [EARLY, EARLY - 1, -math.inf] and found.early == 1
    assert found.alarms == [False, True]


def test_the_selected_limit_separates_collapsed_and_stable_runs():
    cases = [case(f"bad {n}", 0.04 + 0.001 * n, 30.0) for n in range(5)]
    cases += [case(f"good {n}", 0.003 + 0.001 * n) for n in range(5)]
    limits = selected(cases)
    assert limits.entropy is limits.ess is None and (limits.kl is None) != (limits.rise is None), (
        "one signal is sufficient, and entropy and ess are constant"
    )
    found = measured(cases, limits)
    assert found.early == 5 and not any(found.alarms)


def write_run(folder, name, kl, values, finished=True, num_updates=None):
    """Write a run folder whose evaluations have the given win rates, one every 5 updates."""
    path = folder / name
    path.mkdir(parents=True)
    config = {
        "seed": 1,
        "optim": {"lr": 1e-4},
        "algo": {"name": "dpo"},
        "task": {"name": "tldr_mini"},
        "generator": {"name": "hf"},
    }
    (path / "config.yaml").write_text(yaml.safe_dump(config))
    updates = 5 * (len(values) - 1)
    rows = [row | {"lr": 1e-4} for row in case(name, kl, updates=updates).rows]
    rows += [{"update": int(at), "eval/win_rate": value} for at, value in evaluations(*values)]
    rows.sort(key=lambda row: row["update"])
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    state = {"finished": finished, "update": updates, "num_updates": num_updates or updates}
    (path / "environment.json").write_text("{}")
    (path / "trainer_state.json").write_text(json.dumps(state))
    return path


FALLS, STAYS = (0.3, 0.5, 0.6, 0.7, 0.4, 0.3), (0.3, 0.5, 0.6, 0.7, 0.7, 0.75)


def test_run_folders_become_cases(tmp_path):
    write_run(tmp_path, "falls", 0.05, FALLS)
    write_run(tmp_path, "stays", 0.001, STAYS)
    write_run(tmp_path, "running", 0.05, FALLS, finished=False)
    write_run(tmp_path, "short", 0.05, FALLS[:3])
    write_run(tmp_path, "brief", 0.05, FALLS, num_updates=EARLY)
    diverged = write_run(tmp_path, "diverged", 0.05, STAYS[:2], finished=False, num_updates=25)
    (diverged / "failed_batch.json").write_text('{"update": 6}')
    found = {each.name: each for each in cases_of([str(tmp_path)])}
    assert {name: each.collapse for name, each in found.items()} == {
        "falls": 20,
        "stays": None,
        "diverged": 5,
    }
    assert found["falls"].kind == "tldr_mini dpo" and len(found["falls"].rows) == 25


def test_the_page_gets_the_figures_of_the_half_that_did_not_select(tmp_path, monkeypatch, capsys):
    names = sorted((f"run{n}" for n in range(16)), key=lambda name: hashlib.sha256(name.encode()).digest())
    for place, name in enumerate(names):  # in the second half, stable runs have a high KL too
        falls = place % 2 == 0
        kl = (0.05 if falls or place >= 8 else 0.001) * (1 + place / 100)
        write_run(tmp_path / "runs", name, kl, FALLS if falls else STAYS)
    page = tmp_path / "collapse.md"
    page.write_text(f"# Title\n\n{MARKS[0]}\nold\n{MARKS[1]}\n\nEnd.\n")
    monkeypatch.setattr(command, "DOCUMENT", page)
    monkeypatch.setattr(command, "RUNS", tmp_path / "collapse_runs.npz")
    command.main([str(tmp_path / "runs")])
    before = page.read_text()
    page.write_text(f"{MARKS[0]}\n{MARKS[1]}\n")
    command.main([])
    assert page.read_text() in before, "the file of the runs is sufficient to make the page again"
    page.write_text(before)
    lines = page.read_text().splitlines()
    chosen, tested = (
        next(x for x in lines if x.startswith(f"| selected limits | {half}")) for half in HALVES
    )
    assert " 1.00 [0.51, 1.00] " in chosen and chosen.endswith("| 4 | 0.00 [0.00, 0.49] |")
    assert " 1.00 [0.51, 1.00] " in tested and tested.endswith("| 4 | 1.00 [0.51, 1.00] |")
    assert lines[0] == "# Title" and lines[-1] == "End." and "old" not in lines
    assert "16 runs, 8 collapsed, 0 of them" in capsys.readouterr().out


HALVES = ("selection", "test")


def test_runs_with_equal_rows_count_once():
    """Methods that are equal with lag 0 give equal runs; a copy in the other half would be no test."""
    runs = [case("a", 0.01), case("b", 0.02), case("c", 0.01), case("d", 0.03, 30.0)]
    assert [each.name for each in distinct(runs)] == ["a", "b", "d"]


def test_runs_without_a_collapse_are_refused():
    with pytest.raises(UserError, match="each half of the runs must contain collapsed and stable runs"):
        written([case(f"run{n}", 0.0) for n in range(4)])


def test_the_file_of_the_runs_keeps_the_metrics_of_the_rule(tmp_path):
    cases = [case("a", 0.02, 30.0), case("b", 0.001)]
    cases[1].rows[3]["mismatch/ess"] = 0.5
    write(tmp_path / "runs.npz", cases)
    found = sorted(read(tmp_path / "runs.npz"), key=lambda case: case.name)
    for one, other in zip(cases, found, strict=True):
        assert replace(one, rows=[]) == replace(other, rows=[])
        assert [row.keys() for row in one.rows] == [row.keys() for row in other.rows]
        for row, found_row in zip(one.rows, other.rows, strict=True):
            assert found_row == pytest.approx(row, rel=1e-3)
    with pytest.raises(UserError, match="must exist"):
        read(tmp_path / "none.npz")


def test_the_page_of_the_project_has_the_marks():
    page = command.DOCUMENT.read_text()
    assert fill(page, MARKS, "text").count("text") >= 1
