"""Mistakes in study files: each is an error with line, key, rule and remedy before any run."""

import pytest

from rlhf.core.errors import UserError
from rlhf.study.__main__ import main
from rlhf.study.file import read_spec
from rlhf.study.plan import Plan

STUDY = """\
study: short
set: [task=arithmetic, model=pythia, debug=tiny]
seeds: 2
tasks: {sums: {metric: eval/gold_score}}
methods: {dpo: [algo=dpo], rloo: [algo=rloo]}
axes: {lag: {key: schedule.max_lag, values: [0, 1, 4], base: 0}}
grids: [{lag: [0, 4]}]
"""


def checked(folder, text):
    """Return the plan of a study file, whose runs are valid."""
    (folder / "short.yaml").write_text(text)
    plan = Plan(read_spec(folder / "short.yaml"), [])
    plan.check()
    return plan


def problems(folder, text):
    """Return the problems of a study file without its path."""
    with pytest.raises(UserError) as error:
        checked(folder, text)
    assert all("; " in each for each in error.value.problems)
    return [each.removeprefix(f"{folder}/short.yaml") for each in error.value.problems]


def test_the_study_without_mistakes_is_valid(tmp_path):
    checked(tmp_path, STUDY + "claims: {a: loss(dpo) < loss(rloo) at lag=4}\n")


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ("seeds: 2", "\tseeds: 2", ", line 3: must be YAML, got: found character '\\t'"),
        ("{dpo:", "&a {best: *a, dpo:", " must be YAML, got: an alias inside of what"),
        ("{dpo:", "{[a, b]: [algo=ppo], dpo:", ", line 5: methods.[a, b] must be named by up to 32"),
        ("{dpo:", "{same: [algo=ppo], dpo:", ", line 5: methods.same must be named by"),
        ("study: short", f"study: {'n' * 61}", ", line 1: study must be a name of at most 60"),
        ("seeds: 2", "seeds:", ", line 3: seeds must be a number of seeds (to 9999), or a list"),
        ("seeds: 2", "title: [a]", ", line 3: title must be a text, got ['a']"),
        ("seeds: 2", "resources: {thread: 1}", ", line 3: resources.thread must be one of threads, gpus"),
        ("seeds: 2", "resources: {threads: x}", ", line 3: resources.threads must be a whole number"),
        ("seeds: 2", "page: notes.txt", ", line 3: page must be <file>.md, got notes.txt"),
        ("seeds: 2", "analysis: none.py:f", ", line 3: analysis must name a function"),
        ("seeds: 2", "claims: {a: 'none.py:f'}", ", line 3: claims.a must name a function"),
        ("seeds: 2", "tune: {optim.lr: [1e-4], seeds: [9]}", "tune.optim.lr must have several different"),
        ("seeds: 2", "looks: 0", ", line 3: looks must be a whole number of at least 1, got 0; write 1"),
        ("seeds: 2", "tune: {optim.lr: [1e-4, x], seeds: [9]}", ", line 3: tune.optim.lr (sums dpo lag=0"),
        ("seeds: 2", "tune: {optim.lr: [1, 2], seeds: [9], check: true}", "tune.check must have tune.from"),
        ("eval/gold_score", "lr", ", line 4: tasks.sums.metric must be a metric of the evaluations"),
        ("[0, 1, 4]", "[0, 4, 4]", ", line 6: axes.lag must have key and different values"),
        ("[0, 4]}", "[]}", ", line 7: grids.0.lag must have a lag, got none; write grids.0.lag: all"),
        ("seeds: 2", "tables: [loss]", ", line 3: tables.0 must be over an axis, got loss"),
        ("seeds: 2", "tables: [at_kl]", ", or a metric), got at_kl; add tasks.<name>.at_kl"),
        ("seeds: 2", "tables: [eval/nope]", ", line 3: tables.0 must name a metric that rows keep"),
        ("seeds: 2", "figures: [mismatch/es]", "got mismatch/es; did you mean mismatch/ess?"),
        ("seeds: 2", "tables: [vlaue over lag]", "got vlaue over lag; did you mean value?"),
        ("seeds: 2", "figures: [value over lga]", ", got lga; did you mean lag?"),
        ("seeds: 2", "claims: {a: gold_score(dpo) < 1}", "not gold_score (did you mean eval/gold_score?)"),
        ("seeds: 2", "claims: {a: value(dpoo) < 1}", "not dpoo (did you mean dpo?)"),
        ("seeds: 2", "config_dir: none", "config_dir must be a folder laid out like conf/ (relative to"),
        ("seeds: 2", "claims: {a: at_kl(dpo) < 1}", "a metric, not at_kl (add tasks.<name>.at_kl)"),
        ("seeds: 2", "claims: {a: value(same) > value(dpo)}", "claims.a must have same on the right only"),
        ("seeds: 2", "claims: {a: value(dpo) > value(dpo)}", "claims.a must compare different methods"),
        ("seeds: 2", "claims: {a: loss(dpo) < 1 at lag=0}", "a loss at another value than the base (lag=0)"),
        ("seeds: 2", "claims: {a: value(dpo) < 1 at lag=0 lag=4}", "claims.a must compare quantities"),
        ("seeds: 2", "claims: {a: value(dpo) < 1 at lag=1}", ", line 3: claims.a must be about cells of the"),
        ("[algo=rloo]", "[algo=dpo]", ", line 5: methods.rloo (sums rloo lag=0) must differ from sums dpo"),
        ("debug=tiny", "scorer@gold=none", "tasks.sums.metric must be a metric that the runs have, got"),
        ("debug=tiny", "optim.lr=-1", ", line 2: set (sums dpo lag=0 and 3 more cells): optim.lr must"),
    ],
)  # fmt: skip
def test_a_mistake_is_named_with_line_key_and_rule(tmp_path, old, new, found):
    assert old in STUDY
    assert found in " ".join(problems(tmp_path, STUDY.replace(old, new, 1)))


def test_a_metric_is_refused_if_no_run_has_its_judge_or_scorer(tmp_path):
    text = STUDY.replace("axes:", "tables: [eval/score over lag]\naxes:").replace("lag: [0, 4]", "lag: 0")
    supervised = text.replace("{dpo: [algo=dpo], rloo: [algo=rloo]}", "{sft: [algo=sft]}")
    (found,) = problems(tmp_path, supervised)
    assert found.startswith(", line 6: tables.0 must be a metric that the runs have, got eval/score; choose")
    checked(tmp_path, text.replace("{dpo:", "{sft: [algo=sft], dpo:"))  # sft has no value in the table


def test_a_task_without_runs_has_a_metric_that_is_not_judged_by_runs(tmp_path):
    tasks = "{sums: {metric: eval/gold_score}, later: {metric: eval/win_rate, set: [scorer@gold=none]}}"
    text = STUDY.replace("{sums: {metric: eval/gold_score}}", tasks)
    plan = checked(tmp_path, text.replace("{lag: [0, 4]}", "{task: sums, lag: [0, 4]}"))
    assert {each.run.cell.task for each in plan.runs} == {"sums"}
    (found,) = problems(tmp_path, text)
    assert ": tasks.later.metric must be a metric that the runs have, got eval/win_rate; set scorer" in found


def test_equal_cells_are_named_before_their_rates_are_chosen(tmp_path):
    """Runs that choose rates are at the base of the axis, so only runs of the table are equal."""
    same = "{x: [schedule.minibatches=1], y: [schedule.minibatches=1]}"
    text = STUDY.replace("axes: {", f"axes: {{N: {{values: {same}, base: x}}, ").replace(
        "[{lag", "[{N: all, lag"
    )
    found = problems(tmp_path, text + "tune: {optim.lr: [1e-4, 1e-3], seeds: [9], at: {low: {lag: 4}}}\n")
    assert len(found) == 4  # two methods, two lags
    assert found[0].startswith(
        ", line 5: methods.dpo (sums dpo N=y lag=0) must differ from sums dpo N=x lag=0"
    )


def test_mistakes_in_option_value_and_claim_are_reported_together(tmp_path):
    text = STUDY.replace("debug=tiny", "optim.lr=-1").replace("algo=dpo", "algo=dpoo, algo.beta=-1")
    first, second, third = problems(tmp_path, text + "claims: {a: value(dpo) < 1 at lag=1}\n")
    assert first.startswith(", line 5: methods.dpo (sums dpo lag=0 and 1 more cells): algo must be one of")
    assert "optim.lr must be > 0" in second and "claims.a must be about cells" in third


def test_metrics_of_own_code_are_not_refused_but_misspelled_ones_are(tmp_path):
    (tmp_path / "own.py").write_text("def length(prompt, response):\n    return len(response)\n")
    own = f"debug=tiny, scorer=function, 'scorer.path={tmp_path}/own.py:length'"
    text = STUDY.replace("debug=tiny", own)
    plan = checked(tmp_path, text + "tables: [own/nope]\n")
    assert any("tables.0: your code must return own/nope" in line for line in plan.lines())
    names = ["eval/gold_scor", "eval/nope", "objective/score", "loss/polic"]
    found = problems(tmp_path, text + f"tables: [{', '.join(names)}]\n")
    assert [each.partition(", got ")[2].partition(";")[0] for each in found] == names


@pytest.mark.parametrize("folder", ["", "lab/deep"])
def test_paths_are_relative_to_the_study_file(tmp_path, monkeypatch, folder):
    (tmp_path / "conf").mkdir()
    (tmp_path / "own.py").write_text("def own(rows):\n    return {'a': [0.2, 0.3, 0.2]}\n")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    file = tmp_path / folder / "short.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    up = "../" * len(file.relative_to(tmp_path).parent.parts)
    paths = f"config_dir: {up}conf\npage: {up}pages/p.md\nanalysis: {up}own.py:own\n"
    file.write_text(f"{STUDY}{paths}claims: {{a: '{up}own.py:own'}}\n")
    spec = read_spec(file)
    assert spec.config_dir.resolve() == tmp_path / "conf"
    assert spec.page.resolve() == tmp_path / "pages/p.md"
    for key, address in (("analysis", spec.analysis), ("claims.a", spec.claims["a"])):
        assert spec.call(key, address, []) == {"a": [0.2, 0.3, 0.2]}


def test_a_page_that_cannot_be_written_is_an_error(tmp_path, capsys):
    folder = tmp_path / "studies/short"
    folder.mkdir(parents=True)
    (folder / "tables").touch()  # where a folder should be
    (tmp_path / "short.yaml").write_text(STUDY)
    with pytest.raises(SystemExit, match="2"):
        main(["page", str(tmp_path / "short.yaml")])
    assert f"page must write files in {folder}, got {folder}/tables" in capsys.readouterr().err
