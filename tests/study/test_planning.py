"""Plans: configs, identities and states of runs, without a run."""

import json
from dataclasses import replace

import pytest

from rlhf.checks.check import composed
from rlhf.core.errors import UserError
from rlhf.core.files import read_json, write_json
from rlhf.study import plan
from rlhf.study.__main__ import main
from rlhf.study.plan import DONE, MISSING, STALE, Collection, Configs, Plan
from rlhf.study.rows import DIVERGED, FINISHED, Row, read_rows, write_rows
from rlhf.study.spec import TABLE, TUNE
from rlhf.study.study import Study
from rlhf.study.work import price_of, row_of
from tests.study.conftest import STUDY

TUNED = STUDY + "tune: {optim.lr: [3e-5, 1e-4, 3e-4], seeds: [101], at: {low: {lag: 0}}, extend: 1}\n"


def row(planned, value=0.5, status=FINISHED):
    metrics = {"eval/win_rate": value}
    return row_of(planned, status=status, error=None, metric="eval/win_rate", metrics=metrics)


def test_configs_are_those_of_the_command_line(study):
    configs = Configs(study())
    for planned in (plan := Plan(study(), [], configs)).runs:
        cfg = configs.config(planned.run)
        typed = composed([*plan.spec.overrides_of(planned.run), "backend.threads=1", "eval.samples=0"])
        assert cfg == typed.with_({name: getattr(cfg, name) for name in ("output_dir", "progress")})
    assert [each.run.seed for each in plan.runs] == [1] * 6 + [2] * 6  # seed by seed


def test_a_price_is_of_runs_with_the_same_cost_and_otherwise_of_the_pilot_times_its_error(study):
    """Runs that choose rates have shorter evaluations: the price of the table is not that of their rows."""
    spec = study(TUNED.replace("tune: {", "tune: {set: [eval.prompts=2], ").replace("seeds: 2", "seeds: 1"))
    first, *_ = (plan := Plan(spec, [])).runs
    rows = [replace(row(first), cpu_s=10.0)]
    found = price_of(Plan(spec, rows))
    tuned = sum(run.part == TUNE and run.cell.method == "dpo" for run in plan.missing)
    assert found.done_s == 10 and found.left_s == 10 * (tuned - 1)
    assert found.unknown == len(plan.missing) - tuned

    pilot = {"start": 5.0, "episode": 0.0, "evaluation": 0.0, "stages": 0.0, "examples": None}
    costs = {plan.configs.cost(run) for run in plan.missing}
    assert len(costs) == 4  # two methods, two numbers of prompts
    spec.folder.mkdir(parents=True)
    write_json(spec.folder / "price.json", {cost: pilot | {"memory_gb": 1.0, "disk": 0} for cost in costs})
    others = len(plan.missing) - tuned
    assert price_of(Plan(spec, rows)).left_s == 10 * (tuned - 1) + 5 * others

    table = study(STUDY.replace("seeds: 2", "seeds: 1").replace("short", "table"))
    first, *rest = (plan := Plan(table, [])).runs
    table.folder.mkdir(parents=True)
    write_json(table.folder / "price.json", read_json(spec.folder / "price.json", ""))
    same = sum(each.run.cell.method == "dpo" for each in rest)
    found = price_of(Plan(table, [replace(row(first), cpu_s=15.0)]))
    assert found.left_s == 15 * same + 5 * (len(rest) - same)  # runs of DPO take three times the pilot


def test_damaged_prices_and_choices_are_errors(study):
    spec = study(TUNED)
    spec.folder.mkdir(parents=True)
    for name, tree in {"price.json": {"x": {"start": 1}}, "rates.json": {"short": {"dpo": [3]}}}.items():
        write_json(spec.folder / name, tree)
        with pytest.raises(UserError, match=f"{name} must have .* as studies write them, got: .*rm -r"):
            price_of(Plan(spec, []))
        (spec.folder / name).unlink()


def test_a_plan_shows_whole_names(study):
    long = "arithmetic_with_a_name_of_31_ch"
    tasks = f"tasks: {{{long}: {{set: [task=arithmetic]}}, {long}2: {{set: [task=arithmetic, seed=3]}}}}\n"
    text = STUDY.replace("set: [task=arithmetic, ", tasks + "set: [").replace("seeds: 2", "seeds: 1")
    head, *lines = [line for line in Plan(study(text), []).lines() if line.startswith("  ")]
    rows = [["lag=0/1/4", task, "0", "0", "6"] for task in (long, f"{long}2")]
    assert [line.split() for line in lines] == rows and {len(line) for line in lines} == {len(head)}


def test_rows_belong_to_runs_by_settings_and_not_by_names(study):
    rows = [row(each) for each in Plan(study(), []).runs]
    renamed = study(STUDY.replace("dpo: [algo=dpo]", "online: [algo=dpo]").replace("lag:", "delay:"))
    plan = Plan(renamed, rows)
    assert [each.state for each in plan.runs] == [DONE] * 12 and not plan.unused
    changed = Plan(study(STUDY.replace("[algo=rloo]", "[algo=rloo, optim.lr=1e-3]")), rows)
    assert [each.state for each in changed.runs].count(MISSING) == len(changed.unused) == 6
    assert "not used: 6 rows with other settings" in [*changed.lines()]


def test_collection_names_rows_and_moves_stale_ones_to_the_history(study):
    spec = study()
    rows = [row(each) for each in Plan(spec, []).runs]
    write_rows(spec.rows, [replace(rows[0], results=0), *rows[1:]])
    assert [each.state for each in Plan(spec, Collection(spec).rows()).runs] == [STALE] + [DONE] * 11
    renamed = study(STUDY.replace("rloo:", "leave_one_out:"))
    assert Collection(renamed).collect(Configs(renamed))
    assert {each.method for each in read_rows(spec.rows)} == {"dpo", "leave_one_out"}
    (event,) = spec.events("stale")
    assert event["reason"] == "results version 0, now 1" and event["row"]["run"] == rows[0].run
    accepted = study(STUDY + "accept: [0]\n")
    unnamed = replace(rows[0], run="unknown", results=0)  # rows of earlier versions have no digest
    assert Plan(accepted, [unnamed, *rows[1:]]).runs[0].state == DONE


def test_a_folder_that_cannot_be_written_is_an_error_before_a_run(study):
    spec = study()
    spec.folder.parent.mkdir()
    spec.folder.write_text("a file")
    with pytest.raises(UserError, match=r"the folder of a study .* is not a folder.*; copy short.yaml to"):
        Study(spec).run()


def test_all_problems_are_reported_with_their_lines(study):
    text = STUDY.replace("[algo=dpo]", "[algo=dpo, algo.beta=-1]").replace("algo=rloo", "algo=rlooo")
    with pytest.raises(UserError) as error:
        Plan(study(text), []).check()
    first, second = error.value.problems
    assert "line 5: methods.dpo (short dpo lag=0 and 2 more cells): algo.beta must" in first
    assert "line 5: methods.rloo (short rloo lag=0 and 2 more cells): algo must" in second
    with pytest.raises(UserError, match="must have keys that no other key reads"):
        Plan(study(STUDY.replace("debug=tiny", "'eval.prompts=${seed}'")), []).check()


def test_only_restricts_the_runs(study):
    plan = Plan(study(), [], only={"method": ["dpo"], "lag": ["0", "4"], "seed": ["2"]})
    assert [str(each.run) for each in plan.runs] == ["short dpo lag=0 seed 2", "short dpo lag=4 seed 2"]
    assert Plan(study(), [], only={"method": "dpo", "lag": [0, 4], "seed": [2]}).only == plan.only


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("--only methd=dpo", "runs must be selected by task, method, seed, part, lag, got methd; did you"),
        ("--only method=dpoo", "method must be one of dpo, rloo, got 'dpoo'; did you mean method=dpo?"),
        ("--only method", "method must be one of dpo, rloo, got ''; choose one of them"),
        ("--only seed=3", "seed must be one of 1, 2, got '3'; choose one of them"),
        ("--workers 0", "argument --workers: must be a number of at least 1, got 0; write 1"),
    ],
)
def test_what_a_command_does_not_know_is_an_error(study, capsys, words, found):
    with pytest.raises(SystemExit, match="2"):
        main(["run", str(study().file), *words.split()])
    assert found in capsys.readouterr().err


def tuned(spec, values):
    """Return the plan after tuning runs with the value of each learning rate, and their rows."""
    rows = {}
    while missing := [
        each for each in Plan(spec, rows.values()).runs if each.run.part == TUNE and not each.row
    ]:
        for each in missing:
            value = values[float(dict(each.run.tuned)["optim.lr"])]
            rows[each.digest] = row(each, value or 0.0, FINISHED if value is not None else DIVERGED)
    return Plan(spec, rows.values())


def test_a_rate_is_chosen_from_the_tuning_runs_and_one_on_the_edge_extends_them(study):
    spec = study(TUNED)
    before = Plan(spec, [])
    assert len(before.runs) == 2 * 3 and len(before.undecided) == 12
    plan = tuned(spec, {3e-5: 0.2, 1e-4: 0.5, 3e-4: None})
    choice = plan.tuning.choices["short", "dpo", "low"]
    assert choice.chosen == {"optim.lr": "1e-4"} and choice.lead == 0.3 and not choice.edge
    assert len(plan.runs) == 6 + 12 and not plan.undecided
    assert {dict(each.run.tuned)["optim.lr"] for each in plan.runs if each.run.part == TABLE} == {"1e-4"}

    plan = tuned(spec, {3e-5: 0.2, 1e-4: 0.5, 3e-4: 0.6, 1e-3: 0.6})
    choice = plan.tuning.choices["short", "dpo", "low"]
    assert choice.values.keys() == {f"optim.lr={rate}" for rate in ("3e-5", "1e-4", "3e-4", "0.001")}
    assert choice.chosen == {"optim.lr": "3e-4"} and choice.ties == ["optim.lr=0.001"]
    assert "tuning: short dpo low: optim.lr=3e-4 ties with optim.lr=0.001" in [*plan.lines()]


def test_rates_json_stands_for_rows_that_are_not_here(study):
    spec = study(TUNED)
    choices = tuned(spec, {3e-5: 0.2, 1e-4: 0.5, 3e-4: None}).tuning.choices
    plan.write_choices(spec.folder / "rates.json", choices)
    assert Plan(spec, []).tuning.choices == choices and len(Plan(spec, []).runs) == 12
    finer = study(TUNED.replace("[3e-5,", "[1e-5, 3e-5,"))
    assert len(Plan(finer, []).undecided) == 12


def test_rates_of_another_study_are_used_or_compared_with_their_neighbours(study):
    spec = study(TUNED)
    plan.write_choices(
        spec.folder / "rates.json", tuned(spec, {3e-5: 0.2, 1e-4: 0.5, 3e-4: 0}).tuning.choices
    )
    text = STUDY.replace("study: short", "study: longer\ntasks: {from: short}") + "tune: {from: short}\n"
    assert dict(Plan(study(text, "longer"), []).runs[0].run.tuned) == {"optim.lr": "1e-4"}
    checked = Plan(
        study(text.replace("tune: {from: short}", "tune: {from: short, check: true}"), "longer"), []
    )
    compared = {dict(each.run.tuned)["optim.lr"] for each in checked.runs}
    assert compared == {"3e-5", "1e-4", "3e-4"} and len(checked.undecided) == 12


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working folder with data, a reward function, and a package whose modules import each other."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "data.jsonl").write_text(json.dumps({"prompt": "a"}))
    (tmp_path / "reward.py").write_text("def reward(prompt, response): return 1.0")
    lab = tmp_path / "lab_of_identity"
    lab.mkdir()
    (lab / "__init__.py").write_text("")
    (lab / "rewards.py").write_text("from lab_of_identity import length\nfrom .length import scale")
    (lab / "length.py").write_text("scale = 1")
    (lab / "other.py").write_text("")
    return tmp_path


def config(*overrides, reward="reward.py:reward"):
    own = ["task=local", "model.policy=gpt2", "scorer=function"]
    return composed([*own, "task.path=data.jsonl", f"scorer.path={reward}", *overrides])


def reason(before, after, results=plan.RESULTS, accept=()):
    fields = dict.fromkeys(Row.__dataclass_fields__) | {"inputs": before, "results": results}
    return plan.stale(Row(**fields), after, accept)


def test_order_and_spelling_of_overrides_and_the_place_of_a_checkout_are_not_in_the_digest(here):
    one = plan.run_digest(config("seed=2", "optim.lr=1e-4"))
    assert one == plan.run_digest(config("optim.lr=0.0001", "seed=2"))
    assert one == plan.run_digest(config("seed=2", "optim.lr=1e-4", f"task.path={here}/data.jsonl"))
    assert one != plan.run_digest(config("seed=3", "optim.lr=1e-4"))


def test_changed_data_makes_rows_stale(here):
    before = plan.inputs(config())
    assert reason(before, plan.inputs(config("seed=5"))) is None
    (here / "data.jsonl").write_text(json.dumps({"prompt": "ab"}))
    assert reason(before, plan.inputs(config())) == "task.path changed"


def test_changed_source_makes_rows_stale_that_depend_on_it(here):
    by_file = plan.inputs(config())
    by_module = plan.inputs(config(reward="lab_of_identity.rewards:reward"))
    assert by_module.keys() == {
        "task.path",
        *(f"lab_of_identity/{n}.py" for n in ("__init__", "rewards", "length")),
    }
    (here / "lab_of_identity/length.py").write_text("scale = 20")
    (here / "lab_of_identity/other.py").write_text("unused = 1")
    assert reason(by_file, plan.inputs(config())) is None
    after = plan.inputs(config(reward="lab_of_identity.rewards:reward"))
    assert reason(by_module, after) == "lab_of_identity/length.py changed"


def test_another_results_version_makes_rows_stale_unless_the_study_accepts_it():
    assert reason({}, {}) is None
    assert reason({}, {}, results=plan.RESULTS - 1) == "results version 0, now 1"
    assert reason({}, {}, results=plan.RESULTS - 1, accept=(0,)) is None
