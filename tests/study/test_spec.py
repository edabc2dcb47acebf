"""Study files: parsing, messages with lines, cells of grids, overrides of runs, rows."""

import json
import math
import re

import pytest

from rlhf.checks.check import composed
from rlhf.core.errors import UserError
from rlhf.study import spec as cells
from rlhf.study.rows import Row, packed, read_rows, write_rows

STUDY = """\
study: lags
set: [model=pythia, optim.lr=1e-5, algo=rloo]
repeat: [seed, stages.seed]
seeds: 3
tasks:
  tldr_mini: {set: [task=tldr_mini], metric: eval/win_rate}
  arithmetic: {set: [task=arithmetic], metric: eval/gold_score, name: accuracy, at_kl: 0.5}
methods:
  dpo: [algo=dpo]
  no: {set: [algo=dpo, algo.loss_type=ipo], base: dpo}
axes:
  lag: {key: schedule.max_lag, values: [0, 4, 64], base: 0}
  N: {key: schedule.minibatches, values: [1, 4], base: 1}
  K:
    values:
      2: [algo.samples_per_prompt=2, 'schedule.prompts_per_update=${product:8,${schedule.minibatches}}']
      4: [algo.samples_per_prompt=4, 'schedule.prompts_per_update=${product:4,${schedule.minibatches}}']
    base: {tldr_mini: 2, arithmetic: 4}
grids:
  - {lag: all}
  - {N: all}
  - {task: tldr_mini, method: dpo, lag: [0, 64], K: 4}
tune: {optim.lr: [1e-4, 3e-4], seeds: [101], at: {low: {lag: 0}, high: {lag: 64}},
  reach: {high: {lag: 4, N: 4}}}
tables: [value over lag, value at_kl over lag, mismatch/ess over N]
claims:
  dpo loses least: loss(dpo) < loss(no) at lag=64
"""


@pytest.fixture
def lags(study):
    return lambda text=STUDY, name="lags": study(text, name)


def test_cells_are_the_union_of_the_grids_with_the_base_of_other_axes(lags):
    spec = lags()
    found = spec.cells()
    assert len(found) == len({*found}) == 2 * 2 * 3 + 2 * 2 + 2
    assert str(found[0]) == "tldr_mini dpo lag=0 N=1 K=2"
    assert {dict(cell.levels)["K"] for cell in found if cell.task == "arithmetic"} == {"4"}
    assert spec.folder == spec.file.parent / "studies/lags"


def test_later_layers_win_and_the_run_can_be_composed(lags):
    spec = lags()
    cell = spec.cell("arithmetic", "no", {"N": "4"})
    config = composed(spec.overrides_of(cells.Run(cell, 7, (("optim.lr", "3e-4"),), cells.TABLE)))
    assert (config.algo.name, config.algo.loss_type.name, config.optim.lr) == ("dpo", "ipo", 3e-4)
    assert (config.seed, config.stages.seed, config.schedule.prompts_per_update) == (7, 7, 16)
    assert spec.set_twice()["optim.lr"] == ["set", "tune.optim.lr"]


def test_a_cell_uses_the_tuned_values_of_the_last_point_that_it_reaches(lags):
    spec = lags()
    points = {str(cell): spec.tuning_point(cell) for cell in spec.cells()}
    assert points["arithmetic no lag=0 N=1 K=4"] == "low"
    assert points["arithmetic no lag=4 N=1 K=4"] == points["arithmetic no lag=0 N=4 K=4"] == "high"
    assert str(spec.tuning_cell(spec.cell("arithmetic", "no", {"N": "4"}))).count("lag=64")


def test_a_cell_that_reaches_two_points_uses_the_point_of_both(lags):
    reach = "reach: {high: {lag: 4}, many: {N: 4}}"
    text = STUDY.replace("reach: {high: {lag: 4, N: 4}}", reach)
    for more, expected in {
        "many: {N: 4}": "many",
        "many: {N: 4}, high+many: {lag: 4, N: 4}": "high+many",
    }.items():
        spec = lags(text.replace("high: {lag: 64}}", f"high: {{lag: 64}}, {more}}}"))
        cell = spec.cell("arithmetic", "no", {"N": "4", "lag": "4"})
        assert spec.tuning_point(cell) == expected
    assert str(spec.tuning_cell(cell)) == "arithmetic no lag=4 N=4 K=4"
    assert spec.tuning_point(spec.cell("arithmetic", "no", {"N": "4"})) == "many"
    for point in ("many+high", "far"):
        more = f"high: {{lag: 64}}, many: {{N: 4}}, {point}: {{lag: 4}}}}"
        with pytest.raises(UserError, match=re.escape(f"tune.at.{point} must be reached by a cell")):
            lags(text.replace("high: {lag: 64}}", more))


def test_all_problems_of_a_file_are_reported_together_with_their_lines(lags):
    wrong = STUDY
    for good, bad in {
        "set: [model": "sett: [model", "seeds: 3": "seeds: x", "base: dpo}": "base: dqo}",
        "base: 0}": "base: 2}",
        "{N: all}": "{lag: [0, 5]}", "over N]": "over M]", "metric: eval/win_rate": "better: lower",
    }.items():  # fmt: skip
        wrong = wrong.replace(good, bad)
    with pytest.raises(UserError) as error:
        lags(wrong + "study: again\n")
    found = [problem.partition("lags.yaml, line ")[2] for problem in error.value.problems]
    assert [int(each.partition(":")[0]) for each in found] == [1, 2, 4, 6, 10, 12, 13, 21, 25]
    assert all(" must " in each and ", got " in each and "; " in each for each in found)
    assert "2: sett must be one of study" in found[1] and "did you mean set?" in found[1]
    assert "axes.N must be used by a grid" in found[6]


def test_tasks_tuned_values_and_rows_of_another_study_are_used(lags):
    other = lags()
    long = """\
include: {lags: {grids: [{method: dpo, lag: 64}], as: {length: 1}}}
tasks: {from: lags}
methods: {dpo: [algo=dpo]}
axes:
  lag: {key: schedule.max_lag, values: [0, 64], base: 0}
  length: {values: {1: [], 8: [schedule.total_episodes=16384]}, base: 8}
grids: [{lag: all}]
tune: {from: lags, check: true}
"""
    spec = lags(long, "long")
    assert spec.name == "long" and spec.tasks == other.tasks and spec.include[0].levels == {"length": "1"}
    assert (spec.tune.values, spec.tune.seeds, spec.tune.check) == (other.tune.values, (101,), True)
    with pytest.raises(UserError, match=r"long.yaml, line 2: tasks.from must name another study, got long"):
        lags(long.replace("from: lags}\nmeth", "from: long}\nmeth"), "long")


def test_rows_are_written_sorted_and_a_damaged_line_is_named(tmp_path):
    file, outcomes = tmp_path / "x/rows.jsonl", [True, False, True] * 5
    given = dict.fromkeys(Row.__dataclass_fields__, "") | {"part": "table", "tuned": {"optim.lr": "1e-4"}}
    given |= dict.fromkeys(("inputs", "metrics", "evaluations", "means", "models"), {}) | {
        "status": "finished",
        "memory_gb": None,
    }
    given |= dict.fromkeys(("results", "seed", "cpu_s", "gpu_s"), 1)
    rows = [
        Row(**given | {"levels": {"lag": lag}, "prompts": 15, "bits": packed(outcomes)})
        for lag in ("16", "4")
    ]
    write_rows(file, rows)
    assert read_rows(file) == rows[::-1]
    assert read_rows(file)[0].outcomes.tolist() == outcomes
    good = file.read_text()
    for name, value in {
        "metrics": {"eval/kl": math.nan},
        "evaluations": {"update": ["first"]},
        "levels": {"lag": 4},
        "status": "done",
        "versions": 3,
    }.items():
        first, _, rest = good.partition("\n")
        file.write_text(json.dumps(json.loads(first) | {name: value}) + f"\n{rest}")
        with pytest.raises(UserError, match=f"must have {name} as studies write them, got .*; restore"):
            read_rows(file)
    file.write_text(good + "{\n")
    with pytest.raises(UserError, match=r"line 3; delete the line"):
        read_rows(file)
    assert read_rows(tmp_path / "none") == []
