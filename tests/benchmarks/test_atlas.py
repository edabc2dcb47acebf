"""Tests of the atlas: the design, the choice of learning rates, statistics, resuming, the page."""

import json
import math
import shutil
import subprocess
import zlib
from dataclasses import replace

import pytest

from benchmarks.atlas import __main__ as atlas
from benchmarks.atlas import (
    analysis,
    claims,
    executor,
    figure,
    findings,
    page,
    plan,
    rates,
    record,
    rerun,
    worker,
)
from benchmarks.atlas.design import METHODS, SMOKE, STUDY, Cell, Run
from benchmarks.atlas.findings import BASES
from benchmarks.atlas.plan import FIGURES, Selection
from benchmarks.atlas.study import Study
from rlhf.checks.check import problems
from rlhf.checks.composing import composed
from rlhf.core import statistics
from rlhf.core.errors import UserError
from rlhf.runs import environment
from rlhf.study.page import fill
from tests.docs.snapshots import objects

pytestmark = pytest.mark.nightly


def config(cell, design=STUDY, seed=1):
    return objects(*design.overrides_of(Run(cell, seed, 1e-4)))


def rows_of(design, value, seeds=None):
    """Return a row per run of the figures; `value(cell, seed)` is the final value."""
    made = {}
    for run in plan.runs(design, Selection(parts=FIGURES), {}):
        run = run._replace(rate=design.rates[0])
        if seeds is None or run.seed in seeds:
            won = value(run.cell, run.seed)
            points = [(0, 0.0, 0.2, 1.0), (8, 4.0, won, 3.0)]
            each = record.row(design, run, record.FINISHED, points, updates=8, ess=0.5, cpu_s=2.0)
            made[each.run] = each
    return made


def chosen_rates(design, rate):
    entry = {"chosen": rate, "values": {f"{rate:g}": [0.5]}}
    lags = {str(lag): entry for lag in design.tuning_lags}
    return {task: dict.fromkeys(design.methods, lags) for task in design.tasks}


@pytest.fixture
def design(tmp_path):
    """Return a design of five seeds whose files are in a temporary folder."""
    return replace(
        SMOKE,
        tasks={**SMOKE.tasks, "arithmetic": STUDY.tasks["arithmetic"]},
        methods={name: METHODS[name] for name in ("dpo", "dpo+is", "ppo", "rloo", "bok")},
        lags=(0, 4, 16),
        minibatches=(1, 4, 16),
        seeds=(1, 2, 3, 4, 5),
        overrides=("eval.prompts=256",),
        outputs=tmp_path / "outputs",
        results=tmp_path / "results/runs.jsonl",
        chosen=tmp_path / "results/rates.json",
        document=tmp_path / "results/page.md",
        tables=tmp_path / "tables.md",
        figure=tmp_path / "figures/atlas.png",
    )


# -- the design ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", STUDY.tasks)
def test_all_cells_of_a_task_have_the_same_samples_and_optimizer_steps(task):
    cells = {cell for part in FIGURES for cell in plan.cells(STUDY, part)}
    alike = {cell for cell in cells if cell.task == task and cell.method == "dpo"}
    assert {cell.lag for cell in alike} == {0, 1, 4, 16, 64}
    assert {cell.minibatches for cell in alike} == {1, 4, 16, 64}
    budgets = set()
    for cell in alike:
        cfg = config(cell)
        steps = cfg.num_updates() * cfg.schedule.minibatches
        assert (cfg.schedule.max_lag, cfg.schedule.minibatches) == (cell.lag, cell.minibatches)
        assert cfg.algo.samples_per_prompt == cell.samples and not cfg.has_worker
        budgets.add((cfg.schedule.total_episodes, steps, cfg.episodes_per_update // cell.minibatches))
    (budget,) = budgets
    assert budget[1] == STUDY.steps > max(STUDY.lags)


def test_the_settings_of_every_method_are_valid_and_different():
    assert plan.refused(STUDY) == {}
    algorithms = [config(STUDY.cell("tldr_mini", method)).algo for method in STUDY.methods]
    assert all(one != other for i, one in enumerate(algorithms) for other in algorithms[:i])


def test_the_scale_runs_are_valid():
    for cell in plan.scale_cells(STUDY):
        overrides = STUDY.overrides_of(Run(cell, 1, 1e-4))
        cfg = composed(overrides)
        assert not problems(cfg) and cfg.model.hidden_size == cell.width


def test_the_study_has_five_seeds_and_learning_rates_are_chosen_with_other_seeds():
    assert len(STUDY.seeds) >= 5 and len(STUDY.rates) >= 3 and STUDY.tuning_lags == (0, 16)
    for design in (STUDY, SMOKE):
        kinds = [set(design.seeds), set(design.tuning_seeds), set(design.collapse_seeds)]
        assert not kinds[0] & kinds[1] and not (kinds[0] | kinds[1]) & kinds[2]
        for run in plan.runs(design, Selection(parts=("tuning",)), {}):
            assert run.seed in design.tuning_seeds
        for run in plan.runs(design, Selection(parts=FIGURES), {}):
            assert run.seed in design.seeds
    for method in ("dpo", "dpo+is", "dpo+wpo", "ipo", "rloo", "ppo", "grpo", "cispo", "bok", "oapl"):
        assert method in STUDY.methods
    assert {"topr", "m2po", "geometric", "truncate"} | set(BASES) <= set(STUDY.methods)


def test_runs_that_are_made_to_collapse_have_a_larger_rate_and_are_not_in_the_figures(design):
    design = replace(design, collapse_rate=1e-3, collapse_lags=(0, 4), collapse_seeds=(201,))
    found = plan.runs(design, Selection(parts=("collapse",)), {})
    assert len(found) == 2 * 5 * 2 and {run.rate for run in found} == {1e-3}
    assert STUDY.collapse_rate > max(STUDY.rates)
    rows = {design.key(run): record.row(design, run, record.FINISHED, [(0, 0.0, 0.5, 0.5)]) for run in found}
    assert {row.part for row in rows.values()} == {"collapse"} and len(rows) == len(found)
    assert Study(design, rows, chosen_rates(design, 1e-3)).rows == []


def test_the_study_needs_at_most_16_cpu_hours():
    wanted = plan.runs(STUDY, Selection(), {})
    assert len(wanted) == 2 * 14 * (2 * 3 * 2 + 8 * 5 + 2 * 2) + 40
    assert plan.expected_s(STUDY, wanted, []) / 3600 < 16


def test_lag_0_and_one_minibatch_are_one_run():
    lag, n = (set(plan.cells(STUDY, part)) for part in ("lag", "minibatches"))
    assert len(lag & n) == len(STUDY.tasks) * len(STUDY.methods)


def test_the_key_of_a_run_changes_with_its_settings_and_not_with_the_folders(tmp_path):
    run = Run(STUDY.cell("arithmetic", "ppo", 4), 1, 1e-4)
    others = [
        run._replace(seed=2),
        run._replace(rate=3e-4),
        Run(STUDY.cell("arithmetic", "ppo", 16), 1, 1e-4),
    ]
    assert len({STUDY.key(each) for each in [run, *others]}) == 4
    assert replace(STUDY, outputs=tmp_path).key(run) == STUDY.key(run)
    assert replace(STUDY, steps=64).key(run) != STUDY.key(run)


# -- learning rates --------------------------------------------------------------------------------------


def test_the_rate_with_the_best_mean_is_chosen_and_the_smallest_of_equal_rates(design):
    design = replace(design, tuning_seeds=(101, 102), rates=(1e-5, 1e-4, 1e-3))
    won = {"dpo": (0.5, 0.8, 0.4), "ppo": (0.7, 0.6, 0.7)}
    rows = {}
    for method, values in won.items():
        for run in rates.tuning_runs(design, "tldr_mini", method, 0):
            value = values[design.rates.index(run.rate)] + (0.1 if run.seed == 101 else -0.1)
            each = record.row(design, run, record.FINISHED, [(8, 1.0, value, 1.0)])
            rows[each.run] = each
    chosen = rates.choose(design, rows)["tldr_mini"]
    assert {method: chosen[method]["0"]["chosen"] for method in won} == {"dpo": 1e-4, "ppo": 1e-5}
    assert chosen["dpo"]["0"]["values"]["0.001"] == pytest.approx([0.5, 0.3])
    rows.popitem()
    assert "ppo" not in rates.choose(design, rows)["tldr_mini"], "a run is missing"


def test_a_diverged_run_counts_as_0_in_the_choice(design):
    rows = {}
    for run in rates.tuning_runs(design, "tldr_mini", "dpo", 4):
        status = record.DIVERGED if run.rate == 1e-4 else record.FINISHED
        each = record.row(design, run, status, [(8, 1.0, 0.9 if run.rate == 1e-4 else 0.1, 1.0)])
        rows[each.run] = each
    assert rates.choose(design, rows)["tldr_mini"]["dpo"]["4"]["chosen"] == 3e-4


def test_large_lags_and_large_n_use_the_rate_of_the_larger_tuning_lag():
    table = {"tldr_mini": {"ppo": {"0": {"chosen": 1e-3}, "16": {"chosen": 1e-5}}}}
    at = {
        (lag, n): rates.rate(STUDY, table, STUDY.cell("tldr_mini", "ppo", lag, n))
        for lag, n in ((0, 1), (1, 1), (4, 1), (64, 1), (0, 4), (0, 64))
    }
    assert at == {(0, 1): 1e-3, (1, 1): 1e-3, (4, 1): 1e-5, (64, 1): 1e-5, (0, 4): 1e-5, (0, 64): 1e-5}
    assert rates.rate(STUDY, table, STUDY.cell("arithmetic", "ppo")) is None


# -- statistics ------------------------------------------------------------------------------------------


def test_values_at_a_kl_are_interpolated_in_the_square_root_of_the_kl():
    points = [(0.0, 1.0), (4.0, 3.0), (9.0, 2.0)]
    assert analysis.at_kl(points, 1.0) == pytest.approx(2.0)
    assert analysis.at_kl(points, 4.0) == pytest.approx(3.0)
    assert analysis.at_kl(points, 6.25) == pytest.approx(2.5)
    assert analysis.at_kl(points, 10.0) is None
    assert analysis.at_kl([(0.0, 1.0), (4.0, 3.0), (0.5, 9.0)], 1.0) == pytest.approx(2.0), "the first rise"


def test_differences_are_taken_within_a_seed():
    assert analysis.differences({1: 0.9, 2: 0.5, 3: 0.1}, {2: 0.25, 1: 0.5}) == [0.4, 0.25]


def test_slopes_are_per_doubling_of_n():
    values = {1: {1: 0.8, 2: 0.5}, 4: {1: 0.6, 2: 0.5}, 16: {1: 0.4, 2: 0.5}, 64: {1: 0.2}}
    assert analysis.slopes(values) == pytest.approx([-0.1])
    assert analysis.slopes({1: {1: 0.8}}) == []


def test_a_run_has_collapsed_if_it_ends_far_below_its_best_value(design):
    run = Run(design.cell("tldr_mini", "ppo"), 1, 1e-4)

    def ends(*values, status=record.FINISHED):
        return record.row(design, run, status, [(i, 1.0, value, 1.0) for i, value in enumerate(values)])

    assert ends(0.2, 0.8, 0.7).collapsed and not ends(0.2, 0.8, 0.71).collapsed
    assert not ends(0.2, 0.8, 0.5, 0.75).collapsed, "it recovered"
    diverged = ends(0.2, 0.8, status=record.DIVERGED)
    assert diverged.collapsed and diverged.result == 0 and diverged.kl is None


# -- resuming --------------------------------------------------------------------------------------------


@pytest.fixture
def started(design, monkeypatch):
    """Replace the workers; return the list of runs that were started. The best rate is the last."""
    runs = []

    def outcomes(of, todo, workers):
        for run in todo:
            runs.append(run)
            won = 0.8 if run.rate == design.rates[-1] else 0.4
            won -= 0.02 * run.cell.lag * (run.cell.method == "ppo") + 0.001 * (run.seed % 3)
            yield record.row(of, run, record.FINISHED, [(0, 0.0, 0.2, 1.0), (8, 1.0, won, 5.0)], cpu_s=2.0)

    monkeypatch.setattr(executor, "outcomes", outcomes)
    return runs


def test_only_missing_runs_are_carried_out(design, started, capsys):
    atlas.carry_out(design, Selection(seeds=(1,)), 1)
    tuning = [run for run in started if run.seed in design.tuning_seeds]
    first = len(started)
    assert started[: len(tuning)] == tuning and len(tuning) == 2 * 5 * 2 * 2
    assert first - len(tuning) == 2 * 5 * 5, "tasks, methods, lags 0 4 16 and N 4 16"
    assert {run.rate for run in started[len(tuning) :]} == {design.rates[-1]}
    assert f"[{first - len(tuning)}/{first - len(tuning)}]" in capsys.readouterr().out

    atlas.carry_out(design, Selection(seeds=(1,)), 1)
    assert len(started) == first
    atlas.carry_out(design, Selection(parts=("lag",), methods=("ppo",), tasks=("arithmetic",), lags=(4,)), 1)
    assert [(run.cell, run.seed) for run in started[first:]] == [
        (design.cell("arithmetic", "ppo", 4), seed) for seed in (2, 3, 4, 5)
    ]


def test_a_failed_run_is_repeated_and_a_diverged_run_is_a_result(design):
    runs = [Run(design.cell("tldr_mini", "ppo", lag), 1, 1e-4) for lag in design.lags]
    statuses = (record.FAILED, record.DIVERGED, record.FINISHED)
    made = [
        record.row(design, run, status, [(8, 1.0, 0.5, 1.0)])
        for run, status in zip(runs, statuses, strict=True)
    ]
    record.write(design.results, made)
    rows = record.read(design.results)
    assert sorted(rows.values(), key=lambda row: row.lag) == made
    assert plan.missing(design, runs, rows) == runs[:1]
    assert plan.missing(design, [runs[0]._replace(rate=None)], rows) == [], "no learning rate yet"


def test_runs_without_a_learning_rate_are_reported(design, started, capsys):
    atlas.carry_out(design, Selection(parts=("lag",), seeds=(1,)), 1)
    assert started == [] and "30 runs have no learning rate yet" in capsys.readouterr().out


def test_the_results_are_in_the_file_after_every_run(design, monkeypatch):
    def outcomes(of, todo, workers):
        yield record.row(of, todo[0], record.FINISHED, [(8, 1.0, 0.5, 1.0)])
        raise KeyboardInterrupt

    monkeypatch.setattr(executor, "outcomes", outcomes)
    with pytest.raises(KeyboardInterrupt):
        atlas.carry_out(design, Selection(parts=("tuning",)), 1)
    assert len(record.read(design.results)) == 1


def test_a_method_whose_settings_are_invalid_is_refused_before_any_run(design, started):
    design = replace(design, methods={**design.methods, "new": ("algo=dpo", "algo.beta=-1")})
    with pytest.raises(UserError, match=r"method new: algo.beta must be .*") as error:
        atlas.carry_out(design, Selection(), 1)
    assert error.value.problems[-1].endswith("set --method dpo dpo+is ppo rloo bok")
    assert started == [] and not design.outputs.exists()


def test_a_damaged_line_of_the_results_is_reported(design):
    design.results.parent.mkdir()
    design.results.write_text('{"run": "x"}\n')
    with pytest.raises(UserError, match=r"line 1 of .*runs.jsonl must be a row of the atlas"):
        record.read(design.results)


# -- the page --------------------------------------------------------------------------------------------


def study(design, value, seeds=None):
    rows = rows_of(design, value, seeds=seeds)
    return Study(design, rows, chosen_rates(design, design.rates[0]))


def jitter(method, level, seed):
    """Return whole prompts between 0 and 2 that differ between methods, levels and seeds."""
    return zlib.crc32(f"{method} {level} {seed}".encode()) % 3 / 256


def test_losses_and_claims_come_from_the_values_of_equal_seeds(design):
    falls = {
        "dpo": 0,
        "dpo+is": 0,
        "ppo": 4,
        "rloo": 3,
        "bok": 2,
    }  # prompts per update of lag or doubling of N

    def value(cell, seed):
        staleness = cell.lag + math.log2(cell.minibatches)
        return (220 + 3 * seed - falls[cell.method] * staleness) / 256 + jitter(cell.method, staleness, seed)

    found = study(design, value)
    losses = found.losses(design.cell("tldr_mini", "ppo", 16))
    assert list(losses) == list(design.seeds) and min(losses.values()) >= 62 / 256
    verdicts = {claim.text: claim.verdict for claim in claims.claims(found)}
    assert verdicts["Online DPO loses least of the paper's methods (tldr_mini, lag 16)"] == "holds"
    assert verdicts["The accuracy falls with log N (arithmetic)"] == "undecided", "dpo does not fall"
    assert verdicts["Goal: the best method at lag 16 loses at most 0.02 (tldr_mini)"] == "holds"
    assert verdicts["Goal: uncorrected PPO loses at least 0.1 at lag 16 (tldr_mini)"] == "holds"
    assert verdicts["A larger K gives a higher win rate"] == "undecided: runs missing"
    lines = [line for line in findings.findings(found) if line.startswith("`tldr_mini`, lag 16")]
    assert lines[0].startswith("`tldr_mini`, lag 16, loss of win rate: **supported**: `ppo` 0.2")
    assert lines[0].endswith("undecided: 2 of 5.")
    assert lines[-1].startswith("`tldr_mini`, lag 16: a loss of at most 0.02 is supported for ")


def test_a_study_of_noise_supports_nothing(design):
    noise = study(
        design, lambda cell, seed: 0.5 + 8 * jitter(cell.method, (cell.lag, cell.minibatches), seed)
    )
    family = [
        each
        for c in findings.columns(noise)
        for each in [*findings.losses(noise, c), *findings.gains(noise, c)]
    ]
    assert len(family) > 40 and not [each for each in family if each.verdict == findings.SUPPORTED]
    assert any(each.verdict == findings.SUGGESTED for each in family), "without the correction some are"
    assert "**supported**: none" in "\n".join(findings.findings(noise))


def test_differences_that_are_equal_in_all_seeds_are_undecided(design):
    """Five equal values have no spread, and one prompt would change each of them."""

    def value(cell, seed):
        return (200 + seed - (cell.method == "ppo" and cell.lag == 16)) / 256  # rows have six decimals

    found = study(design, value)
    assert len(set(found.losses(design.cell("tldr_mini", "ppo", 16)).values())) == 1
    (column,) = (c for c in findings.columns(found) if (c.task, c.label) == ("tldr_mini", "lag 16"))
    ppo, others = findings.losses(found, column)
    assert (ppo.names, ppo.verdict, ppo.p) == (["ppo"], findings.UNDECIDED, 2 / 32)
    assert others.names == ["dpo", "dpo+is", "rloo", "bok"], "methods with equal values count once"
    assert findings.gains(found, column) == [], "dpo+is equals dpo"


def test_the_loss_of_a_method_with_a_collapsed_run_cannot_be_decided_with_five_seeds():
    samples = {"ppo": [0.2, 0.21, 0.19, 0.2, 0.22], "dpo": [0.1, 0.11, 0.1, 0.12, 0.1]}
    verdicts = [[each.verdict for each in findings.tested(samples, fallen)] for fallen in ((), ("ppo",))]
    assert verdicts == [["supported"] * 2, ["cannot be decided with 5 seeds", "supported"]]
    many = {name: values * 2 for name, values in samples.items()}
    assert [each.verdict for each in findings.tested(many, ("ppo",))] == ["supported"] * 2


def test_the_best_method_is_judged_with_a_correction_because_it_is_chosen_afterwards(design):
    lost = {1: 0, 2: 2, 3: 5, 4: 0, 5: 2}  # prompts; p = 0.011 for a loss of at most 0.02

    def value(cell, seed):
        behind = {"dpo": 0, "dpo+is": 8, "ppo": 16, "rloo": 24, "bok": 32}[cell.method]
        return (200 - behind - (cell.lag == 16) * (lost[seed] + behind / 2)) / 256

    found = study(design, value)
    losses = list(found.losses(design.cell("tldr_mini", "dpo", 16)).values())
    assert statistics.p_t(losses, claims.WITHIN, "less") < 0.025
    text = "Goal: the best method at lag 16 loses at most 0.02 (tldr_mini)"
    (claim,) = (claim for claim in claims.claims(found) if claim.text == text)
    assert claim.verdict == "undecided" and claim.numbers.endswith("chosen afterwards among 5")


def test_a_study_with_missing_runs_has_no_verdict(design):
    part = study(design, lambda cell, seed: 0.9 - 0.01 * cell.lag, seeds=(1, 2, 3, 4))
    assert {claim.verdict for claim in claims.claims(part)} == {claims.MISSING}
    assert findings.findings(part) == ["Runs are missing: nothing is stated."]
    assert part.table([design.cell("tldr_mini", "ppo", 16)]) is None


def test_a_partial_study_states_how_many_runs_exist(design):
    part = study(design, lambda cell, seed: 0.5, seeds=(1,))
    text = page.written(part, "figure.png", "tables.md")
    assert "50 of 250 runs of the figures and 0 of 40 runs for learning rates" in text
    assert "Runs are missing: nothing is stated." in text
    assert "| `ppo` | 0.500 | 0.500 | 0.500 | 0.500 | 0.500 |\n" in page.all_tables(part)
    empty = page.written(Study(design, {}, {}), "figure.png", "tables.md")
    assert "0 of 250 runs" in empty and "| `ppo` |" in page.all_tables(Study(design, {}, {}))


def test_runs_that_did_not_reach_the_kl_are_counted_and_diverged_runs_are_listed(design):
    design = replace(design, tasks={"tldr_mini": design.tasks["tldr_mini"]._replace(kl=4.5)})
    rows = rows_of(design, lambda cell, seed: 0.5)
    run = Run(design.cell("tldr_mini", "ppo", 16), 3, design.rates[0])
    rows[design.key(run)] = record.row(design, run, record.DIVERGED, [(0, 0.0, 0.2, 1.0)], error="nan")
    diverged = Study(design, rows, chosen_rates(design, design.rates[0]))
    text = page.written(diverged, "figure.png", "tables.md")
    assert "1 runs diverged and count as collapsed, with value 0: `ppo` lag 16 N 1 (tldr_mini)." in text
    assert "Collapsed runs of `tldr_mini`: `ppo` lag 16 1/5." in text
    assert "| - [0/5] |" in page.all_tables(diverged)


def test_the_page_keeps_its_handwritten_text(design, started):
    atlas.carry_out(design, Selection(), 1)
    design.document.write_text(f"# Title\n\n{page.MARKS[0]}\nstale\n{page.MARKS[1]}\n\nBy hand.\n")
    atlas.draw(design)
    text = design.document.read_text()
    assert text.startswith("# Title\n") and text.endswith("\n\nBy hand.\n") and "stale" not in text
    assert "[tables.md](../tables.md)" in text and design.tables.read_text().startswith("# Tables")
    assert "../figures/atlas.png" in text and design.figure.read_bytes().startswith(b"\x89PNG")
    atlas.draw(design)
    assert design.document.read_text() == text, "a second call must not change the page"
    with pytest.raises(UserError, match="must contain"):
        fill("no marks", page.MARKS, "text")
    assert "\natlas\n" in fill(STUDY.document.read_text(), page.MARKS, "atlas")


def test_the_plan_lists_runs_that_are_done_and_missing(design, started):
    atlas.carry_out(design, Selection(parts=("tuning",), tasks=("tldr_mini",)), 1)
    lines = atlas.described(design, Selection()).splitlines()
    assert lines[2].startswith("| tuning | tldr_mini | 20 | 20 | 0 |")
    assert lines[3].startswith("| tuning | arithmetic | 20 | 0 | 20 |")
    assert lines[4].startswith("| lag | tldr_mini | 75 | 0 | 75 |")


# -- the figure ------------------------------------------------------------------------------------------


def test_the_figure_draws_the_gold_score_of_cells_where_most_runs_reach_the_kl(design):
    rows = rows_of(design, lambda cell, seed: 0.5)
    cells = [design.cell("tldr_mini", "ppo", lag) for lag in design.lags]
    for cell, missed in zip(cells, (0, 2, 3), strict=True):
        for seed in design.seeds[:missed]:
            run = Run(cell, seed, design.rates[0])
            rows[design.key(run)] = record.row(design, run, record.FINISHED, [(0, 0.0, 0.2, 1.0)])
    found = Study(design, rows, chosen_rates(design, design.rates[0]))
    (final, _), (title, gold) = figure.measured(found, "tldr_mini")
    assert (final, title) == ("win rate", "gold score at KL 0.01")
    assert [list(found.at_kl(cell).values()) for cell in cells[:2]] == [gold(cell) for cell in cells[:2]]
    assert len(gold(cells[1])) == 3 and len(found.at_kl(cells[2])) == 2 and gold(cells[2]) == []
    assert math.isnan(figure.point_of([], 2).y), "the line has a gap"


# -- one run ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        *("ppo:tldr_mini:64", "new:tldr_mini:4:1", "ppo:new:4:1", "ppo:tldr_mini:4:9", "ppo:tldr_mini:4:1:K"),
        *("ppo:tldr_mini:5:1", "ppo:tldr_mini:N8:1", "ppo:tldr_mini:4:1:K=two", "ppo:tldr_mini:4:1:beta=1"),
    ],
)
def test_an_unknown_cell_is_refused(design, text):
    with pytest.raises(UserError, match="set --cell dpo:tldr_mini:16:1"):
        rerun.parse(design, {}, text)


def test_a_cell_names_a_lag_or_n(design):
    table = chosen_rates(design, 3e-4)
    for text, cell in (
        ("ppo:tldr_mini:4:3", Cell("tldr_mini", "ppo", lag=4)),
        ("ppo:tldr_mini:4:3:rate=3e-4", Cell("tldr_mini", "ppo", lag=4)),
        ("dpo+is:tldr_mini:N16:3", Cell("tldr_mini", "dpo+is", minibatches=16)),
    ):
        assert rerun.parse(design, table, text) == Run(cell, 3, 3e-4)
    assert rerun.parse(design, {}, "ppo:tldr_mini:4:3").rate is None
    with pytest.raises(UserError, match="must name a run with a row in .*; run: make atlas"):
        rerun.repeat(design, {}, {}, "ppo:tldr_mini:4:3")


def test_every_run_of_the_study_has_its_own_cell_argument():
    table = chosen_rates(STUDY, 1e-4)
    runs = plan.runs(STUDY, Selection(), table)
    assert len({rerun.name_of(STUDY, run) for run in runs}) == len(runs)
    for run in runs[::5]:
        assert rerun.parse(STUDY, table, rerun.name_of(STUDY, run)) == run


def test_a_cell_names_other_k_and_width_and_the_runs_with_other_rates():
    table = chosen_rates(STUDY, 1e-4)
    for text, fields, rate in (
        ("ppo:tldr_mini:64:3:K=4", {"samples": 4}, 1e-4),
        ("ppo:tldr_mini:64:3:width=64", {"width": 64}, 1e-4),
        ("ppo:tldr_mini:16:101:rate=0.00003", {}, 3e-5),
        ("ppo:tldr_mini:16:201", {}, 1e-3),
        ("ppo:tldr_mini:16:201:rate=0.001", {}, 1e-3),
    ):
        run = rerun.parse(STUDY, table, text)
        assert (run.cell._replace(lag=0), run.rate) == (
            STUDY.cell("tldr_mini", "ppo")._replace(**fields),
            rate,
        )


@pytest.mark.parametrize(
    "text, rule, remedy",
    [
        ("ppo:tldr_mini:16:101", "have one learning rate", "ppo:tldr_mini:16:101:rate=3e-05"),
        ("ppo:tldr_mini:64:3:rate=0.001", "have one learning rate", "ppo:tldr_mini:64:3:rate="),
        ("ppo:tldr_mini:4:101:rate=3e-5", "name a run of the study", "ppo:tldr_mini:16:101:rate=3e-05"),
        ("ppo:tldr_mini:16:3:K=4", "name a run of the study", "ppo:tldr_mini:64:3:K=4:rate="),
        ("ppo:tldr_mini:64:3:K=4:width=64", "name a run of the study", "ppo:tldr_mini:64:3:width=64"),
        ("grpo:tldr_mini:64:3:K=4", "name a run of the study", "grpo:tldr_mini:64:3:rate="),
        ("ppo:arithmetic:N16:201", "name a run of the study", "ppo:arithmetic:16:201:rate=0.001"),
    ],
)
def test_a_cell_that_is_not_part_of_the_study_ends_the_command_with_exit_code_2(text, rule, remedy, capsys):
    with pytest.raises(SystemExit) as stopped:
        atlas.main(["--cell", text])
    message = capsys.readouterr().err.replace("\n", " ")
    assert stopped.value.code == 2 and f"--cell must {rule}" in message
    offered = message.partition("set --cell to one of: ")[2].split()
    assert any(each.startswith(remedy) for each in offered)
    for each in offered:
        assert rerun.name_of(STUDY, rerun.parse(STUDY, rates.read(STUDY), each)) == each


# -- the version of a row --------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_results_and_figures_are_no_changes_of_the_code(tmp_path, monkeypatch):
    def git(*arguments):
        identity = ("-c", "user.name=test", "-c", "user.email=test@localhost")
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    results = [tmp_path / name / "file" for name in ("docs/results", "docs/figures", "outputs")]
    code = [tmp_path / name / "file" for name in ("rlhf", "docs")]
    for file in [*results, *code]:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("before")
    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--message=first")
    for file in results:
        file.write_text("after")
    (tmp_path / "rlhf/new").write_text("not tracked")
    monkeypatch.setattr(environment, "__file__", str(code[0]))
    assert not worker.commit.__wrapped__().endswith(" + changes")
    for file in code:
        file.write_text("after")
        assert worker.commit.__wrapped__().endswith(" + changes")
        git("checkout", "--", str(file))


def test_the_version_of_a_row_is_the_commit_with_a_mark_for_changes(monkeypatch):
    for found, expected in (
        ({"commit": "0123456789abcdef", "changed": False}, "0123456789"),
        ({"commit": "0123456789abcdef", "changed": True}, "0123456789 + changes"),
        (None, "unknown"),
    ):
        monkeypatch.setattr(worker, "git_commit", lambda excluding, found=found: found)
        assert worker.commit.__wrapped__() == expected


# -- rows ------------------------------------------------------------------------------------------------


def test_the_results_file_has_one_json_object_per_run(design):
    rows = rows_of(design, lambda cell, seed: 0.123456789, seeds=(2, 1))
    record.write(design.results, rows.values())
    lines = [json.loads(line) for line in design.results.read_text().splitlines()]
    assert len(lines) == len(rows) and lines[0]["result"] == 0.123457
    assert [line["seed"] for line in lines[:2]] == [1, 2]


def test_the_expected_time_is_that_of_the_cell_else_of_the_method_else_of_the_task(design):
    runs = [
        Run(design.cell("tldr_mini", method, lag), 1, 1e-4) for method in ("ppo", "dpo") for lag in (0, 4)
    ]
    spent = {runs[0]: 10.0, runs[1]: 20.0}
    rows = [
        record.row(design, run, record.FINISHED, [(8, 1.0, 0.5, 1.0)], cpu_s=s) for run, s in spent.items()
    ]
    assert plan.expected_s(design, runs[:1], []) == design.tasks["tldr_mini"].cpu_s
    assert plan.expected_s(design, runs[:1], rows) == 10
    assert plan.expected_s(design, [Run(design.cell("tldr_mini", "ppo", 16), 1, 1e-4)], rows) == 15
    assert plan.expected_s(design, runs[2:3], rows) == 15
    other = Run(design.cell("arithmetic", "ppo"), 1, 1e-4)
    assert plan.expected_s(design, [other, *runs[:2]], rows) == design.tasks["arithmetic"].cpu_s + 30
