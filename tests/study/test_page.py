"""The committed rows of the atlas: tables, findings, verdicts, page; simulated studies; claims."""

import csv
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from rlhf.core import statistics
from rlhf.core.errors import UserError
from rlhf.study import page
from rlhf.study.__main__ import main
from rlhf.study.file import read_spec
from rlhf.study.page import MARKS, write_page
from rlhf.study.rows import (
    DIVERGED,
    FAILED,
    Contrast,
    Results,
    Term,
    decided,
    judged,
    packed,
    read_rows,
    write_rows,
)
from rlhf.study.spec import Formula, Include, Table

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests/golden/atlas_percentile.md"
BY_T = "holds (by t test, not confirmed exactly)"


@pytest.fixture(scope="module")
def spec():
    return read_spec(ROOT / "studies/staleness.yaml")


@pytest.fixture(scope="module")
def rows(spec):
    return read_rows(spec.rows)


@pytest.fixture(scope="module")
def results(spec, rows):
    return Results(spec, rows)


@pytest.mark.nightly
def test_percentile_intervals_reproduce_the_tables_of_the_first_atlas(spec, rows):
    old = Results(replace(spec, interval="percentile"), rows)
    found = ["| " + " | ".join(line) + " |" for each in page.tables(old) for line in each.lines]
    assert found == GOLDEN.read_text().splitlines()


def test_statements_that_survive_the_correction(results):
    found = list(page.families(results))
    losses = [family for family in found if family.what.startswith("loss")]
    assert [sum(each.p < 0.05 for each in family.findings) for family in losses] == [5, 7, 6, 5]
    supported = {
        (family.task, family.column): sorted(
            each.names[0] for each in family.findings if each.verdict == "supported"
        )
        for family in losses
    }
    assert supported == {
        ("tldr_mini", "lag 64"): ["bok", "topr"],
        ("tldr_mini", "N 64"): ["bok", "grpo", "ppo", "rloo", "topr"],
        ("arithmetic", "lag 64"): ["oapl"],
        ("arithmetic", "N 64"): ["grpo", "oapl"],
    }
    gains = [each for family in found if family not in losses for each in family.findings]
    assert [each.names[0] for each in gains if each.verdict == "supported"] == ["m2po - grpo"] * 2
    said = "\n".join(page.findings(results, found))
    assert "`grpo` = `geometric` = `truncate` 0.213 (0.173, 0.253)" in said
    assert said.endswith("about 3 would have it if no method differed.")
    assert said.count("a loss of at most 0.02 is supported for no method") == 4


def test_verdicts_on_the_claims(results):
    made = judged(results)
    found = {(each.said.split(" ")[0], each.formula[-5:], each.task): each.verdict for each in made}
    words = "undecided (0.061 detectable; about 32 (up to 75) seeds for 0.019)"
    assert found["Online", "ag=64", "tldr_mini"] == words
    assert found["Online", "ag=64", "arithmetic"] == "does not hold"  # dpo collapsed, and is worse
    assert found["Online", " N=64", "tldr_mini"] == found["IPO", "ag=64", "tldr_mini"] == BY_T
    rest = [verdict for (said, *_), verdict in found.items() if said in ("The", "Uncorrected")]
    assert len(rest) == 6 and all(verdict.startswith("undecided (") for verdict in rest)
    assert {task for said, _, task in found if said == "A"} == {"tldr_mini"}  # K and size vary there only


def test_an_incomplete_study_states_nothing(spec, rows):
    short = Results(spec, [row for row in rows if (row.method, row.seed) != ("topr", 5)])
    assert short.missing == 14 + 2
    assert {each.verdict for each in judged(short)} == {"runs are missing"}
    assert not list(page.findings(short, list(page.families(short))))


def test_a_failed_run_takes_part_in_no_claim_and_a_diverged_one_counts_as_collapsed(spec, rows):
    def with_status(status):
        broken = [replace(row, status=status, metrics={}) for row in rows if of_rloo(row)]
        return Results(spec, [*broken, *(row for row in rows if not of_rloo(row))])

    def of_rloo(row):
        return (row.method, row.seed) == ("rloo", 1)

    failed, diverged = with_status(FAILED), with_status(DIVERGED)
    assert failed.missing == 0 and len(failed.failed) == 16
    assert next(judged(failed)).verdict == "undecided: a run failed, or does not have the value"
    cell = next(cell for cell in diverged.cells if cell.method == "rloo")
    assert diverged.measured(cell, "value")[1] == 0.0 and diverged.collapsed(cell) == 1


def test_rows_of_two_machine_classes_or_other_models_are_not_paired(spec, rows, results):
    def changed(**fields):
        return Results(spec, [replace(row, **{k: f(row) for k, f in fields.items()}) for row in rows])

    mixed = changed(machine=lambda row: "other" if row.method == "dpo" else row.machine)
    classes = "classes are never paired. Seeds with rows of several classes: 1, 2,"
    assert classes in " ".join(page.state(mixed))
    whole = changed(machine=lambda row: "other" if row.seed == 2 else row.machine)
    said = " ".join(page.state(whole))
    assert "classes are never paired. Code:" in said and "several classes" not in said
    one, other = (next(cell for cell in mixed.cells if cell.method == name) for name in ("dpo", "ppo"))
    terms = [Term(1.0, one, "value"), Term(-1.0, other, "value")]
    difference = mixed.contrast(terms)
    alone = mixed.contrast([Term(1.0, one, "value"), Term(-1.0, one.at({"lag": "64"}), "value")])
    assert (difference.paired, alone.paired) == (False, True)
    first, second = ([*mixed.measured(cell, "value").values()] for cell in (one, other))
    assert difference.p() == pytest.approx(stats.ttest_ind(first, second, equal_var=False).pvalue)
    pooled = [
        Term(0.5, next(c for c in results.cells if (c.task, c.method) == (task, "dpo")), "value")
        for task in spec.tasks
    ]
    assert changed(models=lambda row: {"sft": row.task}).contrast(pooled).paired, "tasks have own models"
    assert results.contrast(pooled).paired
    assert not changed(models=lambda row: {"sft": row.method}).contrast(terms).paired


def test_a_mean_over_fewer_runs_than_all_has_brackets_in_every_kind_of_column(spec, rows):
    declared = [Table("mismatch/ess", "lag"), Table("value", "lag")]

    def columns(rows):
        made = page.tables(Results(spec, rows), declared)
        return [each.rows["dpo"][-1].text for each in made if each.task == "tldr_mini"]

    where = [r for r in rows if (r.task, r.method, r.levels["lag"]) == ("tldr_mini", "dpo", "64")]
    assert not any("[" in text for text in columns(rows))
    others = [row for row in rows if row not in where]
    lacking = [replace(row, means={}) if row.seed < 3 else row for row in where]
    ess, value = columns([*others, *lacking])
    assert ess.endswith(" [3/5]") and "[" not in value
    failed = [replace(row, status=FAILED) if row.seed == 1 else row for row in where]
    assert [text.split(" ")[-1] for text in columns([*others, *failed])] == ["[4/5]", "[4/5]"]
    none = [replace(row, means={}) for row in where]
    assert columns([*others, *none])[0] == "- [0/5]"


def test_findings_and_claims_have_the_level_of_the_looks(spec, rows, results):
    twice, often = (Results(replace(spec, looks=looks), rows) for looks in (2, 500))
    for one, two in zip(page.families(results), page.families(twice), strict=True):
        for each, other in zip(one.findings, two.findings, strict=True):
            assert each.holm == other.holm, "five seeds: by t test in both"
            for finding, level in ((each, 0.05), (other, 0.025)):
                known = (finding.verdict == "supported") == (finding.holm < level)
                assert known or "decided" in finding.verdict
    said = "\n".join(page.findings(twice, list(page.families(twice))))
    assert "5 seeds cannot confirm one of 14 exactly" in said and "have p < 0.025 before" in said
    assert "does not hold" in {each.verdict for each in judged(results)}
    assert all(each.verdict.startswith("undecided") for each in judged(often))


@pytest.mark.parametrize("recorded", ["before", "after", "never"])
@pytest.mark.parametrize(
    ("text", "finding"),
    [
        ("loss(rloo) > 0 at lag=64", "suggested"),
        ("value(rloo) < value(same) at lag=0", "suggested"),
        ("loss(ipo) < 0.02 at lag=64", "suggested"),
        ("loss(bok) > 0.01 at lag=64", None),
        ("loss(ipo) < 0.3 at lag=64", None),
    ],
)
def test_a_claim_is_not_stronger_than_the_finding_unless_it_was_recorded_before_the_runs(
    spec, rows, tmp_path, recorded, text, finding
):
    text = "value(rloo) at lag=64 < value(same) at lag=0" if "same" in text else text
    spec = replace(spec, file=tmp_path / "study.yaml", claims={"a": text})
    if recorded != "never":
        (spec if recorded == "before" else replace(spec, claims={})).record_claims()
    results = Results(spec, rows)
    found = list(page.families(results))
    alone, made = next(judged(results)), next(page.verdicts(results, found))
    assert alone.task == made.task == "tldr_mini" and alone.verdict.startswith(("holds", "does not"))
    if finding is None:
        assert made[:5] == alone[:5]
    elif recorded == "before":
        assert made.verdict == alone.verdict and made.numbers.endswith(f"; as a finding {finding}")
    else:
        assert made.verdict == finding and made.numbers.endswith(f"; alone it {alone.verdict}")


def test_a_page_has_the_numbers_of_claims_verdicts_and_looks(spec, rows, tmp_path):
    spec = replace(spec, file=tmp_path / "study.yaml", looks=3)
    (text, _) = page.claims(Results(spec, rows), [])
    assert text.startswith("15 verdicts on 9 claims, not corrected for their number, look 1 of 3.")
    assert not [line for line in page.claims(Results(spec, [])) if "verdicts on" in line]


def test_a_page_names_the_tuned_values_that_are_on_an_edge(spec):
    lines = {(task, method): values for task, method, *values in page.tuned(spec)}
    assert lines["`tldr_mini`", "`ipo`"] == ["optim.lr=3e-4 (chosen on an edge)"] * 2
    assert lines["`tldr_mini`", "`dpo`"] == ["optim.lr=1e-4"] * 2 and len(lines) == 1 + 28
    assert page.tuned(read_spec(ROOT / "studies/paper.yaml"))[0] == ["task", "method", "low", "high"]


SMALL = """\
tasks: {arithmetic: {set: [task=arithmetic], metric: eval/gold_score, name: accuracy}}
methods: {grpo: [algo=grpo], oapl: [algo=oapl]}
axes: {lag: {key: schedule.max_lag, values: [0, 64], base: 0}}
grids: [{lag: all}]
figures: [value over lag]
claims: {oapl loses: loss(oapl) > 0 at lag=64}
"""


@pytest.fixture
def small(rows, tmp_path):
    """Return a small study, and its rows, which are some of the atlas."""
    study = tmp_path / "studies/small.yaml"
    study.parent.mkdir()
    study.write_text(SMALL)
    own = read_spec(study)
    kept = [r for r in rows if r.task == "arithmetic" and r.method in own.methods and r.levels["N"] == "1"]
    return own, [replace(row, levels={"lag": row.levels["lag"]}) for row in kept]


def test_page_tables_and_figures_are_written_between_the_marks(small, tmp_path, capsys):
    own, few = small
    write_rows(own.rows, few)
    main(["page", str(own.file), "--latex"])
    main(["page", str(own.file)])  # the same rows: one look
    text = own.page.read_text()
    assert text.startswith(f"# small\n\n{MARKS[0]}\n")
    assert "![value_over_lag](figures/value_over_lag.png)" in text
    assert f"| **{BY_T}** | oapl 0.066 (0.037, 0.094) |" in text
    assert "statements hold with these models only" in text and "looks**" not in text
    assert {path.suffix for path in own.folder.rglob("*.*")} >= {".csv", ".tex", ".png", ".pdf", ".svg"}
    own.page.write_text(f"before\n{MARKS[0]}\n{MARKS[1]}\nafter\n")
    other = Results(replace(own, figures=()), [replace(row, cpu_s=0.0) for row in few])
    write_page(other)
    text = own.page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "**2 looks** at these claims" in text
    with pytest.raises(UserError, match="from changed code"):
        write_page(other, final=True)
    capsys.readouterr()
    main(["show", str(own.file)])
    shown = capsys.readouterr().out
    assert "20 of 20 runs" in shown and "oapl  0.840\N{PLUS-MINUS SIGN}" in shown and "holds" not in shown
    docs = replace(own, page=tmp_path / "docs/small.md", figures=())  # the tables stay in the folder
    write_page(Results(docs, few))
    assert "Tables: [tables.md](../studies/small/tables/tables.md)" in docs.page.read_text()
    assert (own.folder / "tables/tables.md").read_text().count("| `oapl` |") == 1
    own.page.write_text("nothing")
    with pytest.raises(UserError, match="page.md must contain '<!-- generated"):
        write_page(other)


def test_claims_that_are_added_after_the_runs_are_marked(small):
    spec, _ = small
    spec.record_claims()
    spec.file.write_text(SMALL.replace("claims: {", "claims: {later: value(oapl) > 0, "))
    spec = read_spec(spec.file)
    spec.record_claims()
    assert spec.added_later() == {"later"}
    assert "later: `value(oapl) > 0` (added after the runs)" in "".join(page.claims(Results(spec, [])))


@pytest.mark.nightly
@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "studies").glob("*.yaml")))
def test_committed_pages_and_tables_are_those_of_their_rows(name, tmp_path):
    for folder in ("studies", "docs/results"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    own = read_spec(tmp_path / "studies" / f"{name}.yaml")
    files = [own.page, *own.folder.glob("tables/*")]
    committed = {file: file.read_text() for file in files}
    main(["page", str(own.file)])
    assert len(files) > 2 and {file: file.read_text() for file in files} == committed


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("raise KeyError('boo')", r"must be a function of rows, got KeyError: 'boo' \(.*own.py, line 2\); "),
        ("raise SystemExit", r"must be a function of rows, got SystemExit \(.*own.py, line 2\); "),
        ("return [1, 2]", r"must return differences by name, .*, got \[1, 2\]; return"),
        ("return {'a': [0.1, float('nan')]}", "must return differences by name, .*, got"),
        ("return {'a': 0.1}", "must return differences by name, .*, got {'a': 0.1}"),
        ("return {'a': [0.2, 0.25, 0.3, 0.25, 0.2, 0.3]}", None),
    ],
)
def test_a_claim_can_be_a_function_whose_mistakes_have_its_line(spec, rows, tmp_path, body, found):
    (tmp_path / "own.py").write_text(f"def own(rows):\n    {body}\n")
    made = judged(Results(replace(spec, claims={"mine": f"{tmp_path}/own.py:own"}), rows))
    if found is None:
        (claim,) = made
        assert (claim.verdict, claim.numbers, claim.task) == ("holds", "a 0.250 (0.203, 0.297)", None)
        return
    with pytest.raises(UserError, match=rf"staleness.yaml.*: claims.mine {found}"):
        list(made)


def test_tables_as_latex_need_booktabs_alone(results):
    """Each row has all columns, each environment and brace is closed, no character is special by mistake."""
    known = {"toprule", "midrule", "bottomrule", "texttt", "scriptsize", "begin", "end"}
    for table in page.tables(results):
        table = replace(table, rows={f"[{name}]_{{~^2 & 5 % <|>": row for name, row in table.rows.items()})
        comment, *lines = page.as_latex(table).splitlines()
        assert comment == f"% {table.task}"
        assert lines[:2] == [f"\\begin{{tabular}}{{l{'r' * len(table.columns)}}}", "\\toprule"]
        assert lines[3] == "\\midrule" and lines[-2:] == ["\\bottomrule", "\\end{tabular}"]
        for line in [lines[2], *lines[4:-2]]:
            assert line.endswith(r" \\") and len(re.findall(r"(?<!\\)&", line)) == len(table.columns)
            bare = re.sub(r"\\[{}]", "", line)
            assert bare.count("{") == bare.count("}") and len(re.findall(r"(?<!\\)\$", line)) % 2 == 0
            assert not re.search(r"(?<!\\)[%#_`~]|(?<![\\$])[\^<>|]|^\[", line), line
        assert set(re.findall(r"\\([a-z]+)", " ".join(lines))) <= known
    loss = next(each for each in page.tables(results) if each.table.quantity == "loss")
    assert r"\texttt{dpo} & 0.007 {\scriptsize [$-0.008$, $0.022$]}" in page.as_latex(loss)


def test_a_table_has_no_columns_without_runs(spec, rows):
    few = Results(spec, [row for row in rows if row.levels["lag"] in ("0", "64")])
    found = [each.columns for each in page.tables(few, [Table("value", "lag"), Table("loss", "lag")])]
    assert found == [["lag 0", "lag 64"], ["lag 64"]] * len(spec.tasks)


def test_tables_in_the_terminal_have_80_columns_and_tests_are_csv(results):
    parts = set()
    for each in page.tables(results):
        _, *lines = page.for_terminal(each)
        assert max(map(len, lines)) <= 80
        heads = [line for line in lines if line.startswith(" ")]
        assert re.findall(r"\S+ \S+", " ".join(heads)) == each.columns  # none is lost where lines divide
        assert len(lines) == len(heads) * (1 + len(each.rows))
        parts.add(len(heads))
    assert 1 in parts and max(parts) > 1
    lines = list(csv.DictReader(page.tests_csv(list(page.families(results))).splitlines()))
    assert len(lines) == 68 and float(lines[0]["mean"]) == pytest.approx(0.25, abs=1e-3)


def test_with_collapsing_runs_at_most_one_study_in_twenty_states_something_that_is_not_so(results):
    """Of 2,000 studies of 14 equal methods, with the residuals of lag 64."""
    column = results.table(next(cell for cell in results.cells if dict(cell.levels)["lag"] == "64"))
    residuals = (column - column.mean(1, keepdims=True)).ravel()
    x = np.random.default_rng(0).choice(residuals, (2000, 15, 5))
    p = stats.ttest_1samp(x[:, 1:] - x[:, :1], 0.0, axis=-1).pvalue
    assert np.mean([min(statistics.holm(each)) < statistics.LEVEL for each in p]) <= 0.05


UP = np.array((0.01, 0.03, 0.02, 0.04, 0.025))  # mean 0.025, sd 0.01118
MIXED = UP - 0.025
NOISE = [0.1, -0.1, 0.1, -0.1, 0.0]
LOW = -np.array((0.01, 0.03, 0.005, 0.03, 0.04))  # one-sided p = 0.0136


@pytest.mark.parametrize(
    ("samples", "options", "verdict"),
    [
        ([UP, UP], {}, "holds"),
        ([UP, MIXED], {}, "undecided"),
        ([MIXED], {}, "undecided"),
        ([UP, -UP], {}, "does not hold"),  # one is surely below the limit
        ([-UP, MIXED], {}, "does not hold"),
        ([UP], {"limit": 0.03}, "undecided"),
        ([UP], {"limit": 0.06}, "does not hold"),
        ([UP], {"level": 0.002}, "undecided"),
        ([[0.1, 0.1001]], {}, "undecided: 2 seeds, at least 3 are needed"),
        ([[0.1] * 5], {}, "undecided"),  # the signs of equal differences
        ([[0.1] * 6], {}, "holds"),
        ([LOW], {}, "does not hold"),
        ([LOW, NOISE], {}, "undecided"),  # corrected for the number of samples
        ([[0.001, -0.001, 0.002, 0.0, -0.002]], {"limit": 0.02, "within": True}, "holds"),
        ([NOISE], {"limit": 0.02, "within": True}, "undecided"),  # not significant is not equal
        ([[1.0] * 7], {"limit": 0.5, "level": 0.025}, "holds"),
    ],
)
def test_a_claim_holds_only_if_all_samples_are_above_the_limit(samples, options, verdict):
    contrasts = {str(place): Contrast(np.array([x]), [1.0], True) for place, x in enumerate(samples)}
    found = decided(contrasts, **{"limit": 0.0, "level": 0.05, **options})
    assert found.split(" (")[0] == verdict


def test_an_undecided_claim_about_equal_values_says_how_many_seeds_decide():
    equal = {"a": Contrast(np.array([[1.0] * 6]), [1.0], True)}
    assert "6 seeds cannot reach p < 0.0125, 7 can" in decided(equal, 0.5, 0.025)


SURE = Contrast(np.array([[0.31, 0.30, 0.32, 0.29, 0.30]]), [1.0], True)
FALLEN = replace(SURE, doubtful=["greater"])
TEN = replace(FALLEN, samples=np.array([[0.3, 0.31] * 5]))
OPEN = "cannot be decided with 5 seeds"


@pytest.mark.parametrize(
    ("contrasts", "limit", "verdict"),
    [
        ([FALLEN], 0.0, OPEN),
        ([FALLEN], 0.4, "does not hold"),  # called worse, it may be so by t test
        ([-SURE], 0.0, "does not hold"),
        ([-FALLEN], 0.0, OPEN),
        ([-FALLEN], -0.4, BY_T),
        ([TEN], 0.0, "holds"),  # ten seeds decide exactly
        ([-TEN], 0.0, "does not hold"),
        ([TEN, -TEN], 0.0, "does not hold"),
    ],
)
def test_a_collapsed_run_never_gives_a_statement_that_its_cell_is_better_from_the_t_test_alone(
    contrasts, limit, verdict
):
    assert decided({str(place): each for place, each in enumerate(contrasts)}, limit, 0.05) == verdict


def test_findings_and_margins_of_cells_with_collapsed_runs():
    assert page.tested({"a": SURE, "b": SURE})[0].verdict == "supported"
    assert page.tested({"a": FALLEN})[0].verdict == OPEN
    assert decided({"a": TEN}, 0.4, 0.05, within=True) == "holds"
    assert decided({"a": TEN}, 0.3, 0.05, within=True).startswith("undecided")


def test_t_tests_of_methods_that_collapse_now_and_then_err_only_by_calling_them_better():
    rng = np.random.default_rng(0)
    x = rng.normal(0, 0.02, (20000, 5)) - 0.3 * (rng.random((20000, 5)) < 1 / 8)
    better, worse = (stats.ttest_1samp(x, -0.3 / 8, axis=1, alternative=side).pvalue < 0.025
                     for side in ("greater", "less"))  # fmt: skip
    assert better.mean() > 0.3 and worse.mean() < 0.005


def test_which_side_is_doubtful_depends_on_the_weights_of_cells_with_collapsed_runs(results):
    cells = (cell for cell in results.cells if (cell.task, cell.method) == ("arithmetic", "dpo"))
    cell = next(filter(results.collapsed, cells))
    loss = results.contrast(results.terms("loss", cell, "lag"))
    assert loss.doubtful == {"less"} and (-loss).doubtful == ["greater"]
    assert results.contrast([Term(1.0, cell, "mismatch/ess")]).doubtful == {"less", "greater"}


def test_values_are_compared_at_a_virtual_time(spec, rows):
    cell = spec.cell("arithmetic", "dpo", {})
    tasks = {**spec.tasks, "arithmetic": replace(spec.tasks["arithmetic"], at_time=15.0)}
    curves = {1: [0, 10, 20], 2: [0, 5, 14]}  # the run of seed 2 ends before
    timed = [
        replace(row, evaluations={"rollouts/time_s": curves[row.seed], "eval/gold_score": [0.0, 0.5, 0.9]})
        for row in rows
        if row.seed in curves
    ]
    found = Results(replace(spec, tasks=tasks), timed)
    assert found.measured(cell, "at_time") == {1: pytest.approx(0.7)}
    (shown,) = page.tables(found, [Table("at_time", "")])
    assert shown.title == "accuracy at 15 virtual s"


def test_metrics_of_which_lower_values_are_better_give_the_same_losses_and_verdicts(spec, rows):
    def mirrored(row):
        values = {name: 1 - value for name, value in row.metrics.items()}
        curves = {n: each if n == "update" else [1 - x for x in each] for n, each in row.evaluations.items()}
        return replace(row, metrics=values, evaluations=curves)

    tasks = {name: replace(task, sign=-1, worst=1.0) for name, task in spec.tasks.items()}
    texts = {said: text for said, text in spec.claims.items() if "loss" in text}
    lower = Results(replace(spec, tasks=tasks, claims=texts), map(mirrored, rows))
    higher = Results(replace(spec, claims=texts), rows)
    assert [each.verdict for each in judged(lower)] == [each.verdict for each in judged(higher)]
    declared = [table for table in spec.tables if table.quantity in ("loss", "collapsed")]
    for one, other in zip(page.tables(lower, declared), page.tables(higher, declared), strict=True):
        assert one.lines == other.lines


def ten_seeds(spec, rows):
    """Return the study with each row twice, with other seeds."""
    more = [replace(row, seed=row.seed + 5) for row in rows if row.seed <= 5]
    return replace(spec, seeds=tuple(range(1, 11))), [*rows, *more]


def test_the_best_method_is_chosen_by_half_of_the_seeds_and_judged_by_the_other_half(spec, rows):
    spec, twice = ten_seeds(replace(spec, claims={"best": "loss(best) < 0.02 at lag=64"}), rows)
    spoilt = [
        replace(row, metrics={**row.metrics, "eval/win_rate": 0.2})
        if (row.method, row.levels["lag"]) == ("ipo", "64") and row.seed > 5
        else row
        for row in twice
    ]
    (first, _), (second, _) = (list(judged(Results(spec, each))) for each in (twice, spoilt))
    assert first.numbers == "ipo -0.002 (-0.016, 0.013), chosen by 5 seeds and judged by 5"
    assert first.verdict == BY_T
    assert second.numbers.startswith("ipo 0.6") and second.verdict == "does not hold"


def test_several_tasks_are_pooled_as_interquartile_means_from_20_values_on(spec, rows, results):
    assert not list(page.over_tasks(results))
    (lag, over_n) = page.over_tasks(Results(*ten_seeds(spec, rows)))
    shares = {line[0]: line[1:] for line in lag[1:]}
    assert lag[0] == ["share of the best gain", "lag 0", "lag 1", "lag 4", "lag 16", "lag 64"]
    assert len(lag) == len(over_n) == 15 and len(over_n[0]) == 5
    assert shares["`dpo`"][0].startswith("0.9") and float(shares["`oapl`"][4].split(" ")[0]) < 0.8


def test_evaluation_noise_is_estimated_from_the_bits_of_single_prompts(spec, rows):
    """Bits that are independent between seeds and prompts: the spread between seeds is all noise."""
    rng = np.random.default_rng(0)
    tossed = [replace(row, bits=packed(rng.random(256) < 0.5)) for row in rows]
    found = page.resolution(Results(spec, tossed))
    assert found[0][-1] == "evaluation noise" and page.resolution(Results(spec, rows))[0][-1] != found[0][-1]
    shares = [float(share) for line in found[1:] for share in line[-1].split(" / ")]
    assert len(shares) == 18 and np.median(shares) > 0.9


def test_all_rows_of_a_cell_are_of_one_study(spec, rows):
    included = [Include(replace(spec, name="base"), spec.grids, {})]
    own = replace(spec, grids=[{"task": ("arithmetic",), "method": ("dpo",)}], include=included)
    mine = [replace(row, cpu_s=-1.0) for row in rows if row.seed < 3]  # two seeds of five
    found = Results(own, mine, [rows]).cells
    first = spec.cell("arithmetic", "dpo", {})
    other = first.at({"lag": "64"})
    assert [row.cpu_s for row in found[first].values()] == [-1.0, -1.0]
    assert len(found[other]) == 5 and all(row.cpu_s > 0 for row in found[other].values())


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("loss(dpo) << 3", None),
        ("value(dpo) within value(ppo)", None),
        ("value(dpo) < 2 of value(ppo)", None),
        ("slope(dpo) < 0", "have 'over <axis>'"),
        ("slope(dpo) < 0 over lag", "positive numbers"),
        ("loss(dpo) < 0.1", "say at which value"),
        ("value(dpo) > 0.5 at lag=3", "name a value of lag (0, 1, 4, 16, 64), not 3"),
        ("values(dpo) > 0.5", "be about value"),
        ("value(best) > value(dpo)", "compare best with a number"),
    ],
)
def test_claims_have_a_grammar(spec, text, rule):
    formula = Formula.read(text)
    assert (formula is None) == (rule is None)
    assert rule is None or rule in " ".join(formula.problems(spec.methods, spec.axes))


def test_claims_over_tasks_over_axes_and_with_factors(spec, rows):
    texts = {
        "pooled": "value(ipo) > 0.5 pooled",
        "every": "value(ipo) > 0.5 at every lag",
        "factor": "loss(dpo, ppo) at N=64 < 20 * loss(same) at lag=64",
        "within": "value(truncate) within 0.1 of value(grpo) at lag=64",
        "metric": "mismatch/ess(bok) < 0.9 at lag=64",
    }
    found = {}
    for each in judged(Results(replace(spec, claims=texts), rows)):
        found.setdefault(each.said, []).append((each.task, each.verdict.split(" (")[0], each.numbers))
    assert [task for task, *_ in found["pooled"]] == [None]
    assert found["every"][0][1] == "holds" and found["every"][0][2].count("ipo lag=") == 5
    assert [name.split(" ")[0] for name in found["factor"][0][2].split("), ")] == ["dpo", "ppo"]
    assert [verdict for _, verdict, _ in found["within"]] == ["holds", "holds"]
    assert [verdict for _, verdict, _ in found["metric"]] == ["holds", "does not hold"]
