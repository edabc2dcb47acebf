"""Gold and proxy over KL on the page of a study: fits, peaks, falls, stopping rules; claims of one method."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rlhf.core.errors import UserError
from rlhf.core.overoptimization import fit, peak
from rlhf.study.curves import curves, fitted, stopped
from rlhf.study.file import read_spec
from rlhf.study.page import write_page
from rlhf.study.rows import Results, Row, judged, read_rows
from rlhf.study.spec import Formula

ROOT = Path(__file__).parents[2]
KEY = "curves: [gold and proxy over kl]\n"
STUDY = (
    """\
study: pushed
set: [task=tldr_mini, model=pythia]
repeat: [seed, stages.seed]
seeds: 10
tasks: {tldr_mini: {metric: eval/gold_score, at_kl: 2}}
methods: {noisy: [algo=rloo], worst: {set: [algo=rloo, algo.kl_coef=0], base: noisy}}
axes: {lag: {key: schedule.max_lag, values: [0, 64], base: 0}}
grids: [{lag: all, method: noisy}, {method: worst}]
claims: {gold falls after KL 2: value(noisy) < at_kl(noisy) at lag=0}
"""
    + KEY
)
D = np.linspace(0, 2.4, 9)


def pushed(a, b, method="noisy", lag="0", seeds=10, noise=0.1, **more):
    """Return rows whose gold score follows the form of training, and whose proxy rises to the end."""
    found, rng = [], np.random.default_rng(seeds + int(lag))
    for seed in range(1, seeds + 1):
        d = D * rng.uniform(0.9, 1.1)
        gain = np.r_[0, d[1:] * (a * rng.uniform(0.8, 1.2) - b * rng.uniform(0.9, 1.1) * np.log(d[1:]))]
        gold = (2.4 + gain + rng.normal(0, noise, 9)).tolist()
        evaluations = {"update": list(range(0, 45, 5)), "eval/kl": (d**2).tolist(), "eval/gold_score": gold}
        evaluations |= {"eval/score": d.tolist()} | more
        last = {name: values[-1] for name, values in evaluations.items() if name.startswith("eval/")}
        names = {"task": "tldr_mini", "method": method, "levels": {"lag": lag}, "seed": seed, "part": "table"}
        found.append(
            Row(
                run=f"{method}{lag}{seed}", inputs={}, results=1, tuned={}, status="finished", error=None,
                metric="eval/gold_score", metrics=last, evaluations=evaluations, **names,
            )
        )  # fmt: skip
    return found


@pytest.fixture
def results(study):
    def made(*rows):
        return Results(study(STUDY, "pushed"), [row for each in rows for row in each])

    return made


def table(results):
    """Return the cells of the table of fits by curve and heading."""
    (found,) = curves(results).values()
    heads, *lines = fitted(results, found)
    return {line[0]: dict(zip(heads, line, strict=True)) for line in lines}


def numbers(text):
    return [float(each) for each in re.findall(r"-?\d+\.\d+", text)]


def test_lag_moves_the_peak_and_an_ensemble_without_curvature_has_none(results):
    found = results(pushed(1.2, 0.9), pushed(0.7, 0.9, lag="64"), pushed(0.8, 0.0, "worst"))
    lines = table(found)
    early, late, none = (lines[f"`{name}`"] for name in ("noisy lag=64", "noisy lag=0", "worst lag=0"))
    for line, ratio in ((early, 0.7 / 0.9), (late, 1.2 / 0.9)):
        centre, low, high = numbers(line["d at the peak"])
        assert low < peak(ratio, "rl") < high and low < centre < high
        assert numbers(line["fall of gold"])[1] > 0
    shift = numbers(early["minus that of the base"])
    assert shift[1] < peak(0.7 / 0.9, "rl") - peak(1.2 / 0.9, "rl") < shift[2] < 0
    assert none["d at the peak"] == "no peak" and late["minus that of the base"] == "-"
    assert none["fall of gold"] == "0.00 (0.00, 0.00)"
    assert (
        early["evaluations (0 < d < 0.3)"].startswith("9 (")
        and "worse than a line" not in early["R^2 (of a line)"]
    )


def test_coefficients_are_means_of_one_fit_for_each_seed(results):
    rows = pushed(1.2, 0.9)
    x = [[np.array(row.evaluations[name]) for name in ("eval/kl", "eval/gold_score")] for row in rows]
    fits = np.array([fit(np.sqrt(kl), gold - gold[0], "rl") for kl, gold in x])
    (line,) = table(results(rows)).values()
    assert numbers(line["a"])[0] == pytest.approx(fits[:, 0].mean(), abs=0.006)
    assert numbers(line["R^2 (of a line)"])[0] == pytest.approx(np.median(fits[:, 2]), abs=0.006)


def test_a_form_that_fits_worse_than_a_line_and_a_peak_beyond_the_data_are_said(results):
    gold = (D - 3.0 * (D > 0)).tolist()  # a line that does not begin at the start
    (line,) = table(results(pushed(0, 0, **{"eval/gold_score": gold}))).values()
    assert "worse than a line" in line["R^2 (of a line)"] and line["d at the peak"] == "no peak"
    (line,) = table(results(pushed(2.0, 0.7, noise=0.01))).values()
    assert re.fullmatch(r"> (2\.\d\d) \(> \1, > \1\)", line["d at the peak"])
    far, near = pushed(2.0, 0.7, noise=0.01), pushed(0.7, 0.9, lag="64")
    assert table(results(far, near))["`noisy lag=64`"]["minus that of the base"] == "-"


def test_the_base_of_a_method_is_that_of_its_peak_too(results):
    lines = table(results(pushed(1.2, 0.9), pushed(0.7, 0.9, "worst")))
    _, low, high = numbers(lines["`worst lag=0`"]["minus that of the base"])
    assert low < peak(0.7 / 0.9, "rl") - peak(1.2 / 0.9, "rl") < high < 0


def test_runs_without_all_evaluations_are_counted_and_few_seeds_or_evaluations_are_not_fitted(results):
    rows = pushed(1.2, 0.9)
    short = {name: values[:4] for name, values in rows[0].evaluations.items()}
    (line,) = table(results([replace(rows[0], evaluations=short), *rows[1:]])).values()
    assert line["curve"] == "`noisy lag=0 [9/10]`" and line["a"] != "-"
    few = [replace(row, evaluations={n: v[:3] for n, v in row.evaluations.items()}) for row in rows]
    for each in (few, rows[:2]):
        found = results(each)
        (line,) = table(found).values()
        assert {line["a"], line["d at the peak"], line["fall of gold"]} == {"-"} and line["gold"] != "-"
        assert not stopped(*curves(found).values())
    later = [replace(row, evaluations=row.evaluations | {"update": list(range(5, 50, 5))}) for row in rows]
    assert not curves(results(later)), "no evaluation before training"


def test_rows_with_the_best_of_n_have_a_curve_with_the_other_form(results):
    n = [2**power for power in range(9)]
    kl = [float(np.log(each) - (each - 1) / each) for each in n]
    d = np.sqrt(kl)
    best = {"best_of/n": n, "best_of/kl": kl, "best_of/score": d.tolist()}
    best["best_of/gold_score"] = (1 + 1.3 * d - 0.5 * d**2).tolist()
    lines = table(results(pushed(1.2, 0.9, **best)))
    assert list(lines) == ["`noisy lag=0`", "`noisy lag=0 best of n`"]
    line = lines["`noisy lag=0 best of n`"]
    assert (line["a"], line["b"]) == ("1.30 (1.30, 1.30)", "0.50 (0.50, 0.50)")
    assert line["d at the peak"] == "1.30 (1.30, 1.30)" and line["R^2 (of a line)"].startswith("1.00 (0.")


def test_stopping_rules_are_compared_by_what_they_lose_in_other_seeds(results):
    spread = {"eval/score_std": (1 + 0.2 * D).tolist()}
    found = results(pushed(0.7, 0.9, **spread), pushed(0.7, 0.9, lag="64"))
    heads, first, second, mean = stopped(*curves(found).values())
    assert heads[1:] == ["no rule", "d", "gain of the proxy", "spread"]
    (never, *_), (limited, *_, limit) = numbers(first[1]), numbers(first[2])
    assert limited < 0.3 * never and 0.3 < limit < 1.5 and "%" in first[2] and "%" not in first[1]
    assert first[4] != "-" and second[4] == mean[4] == "-", "only some runs have members"
    assert numbers(mean[1])[0] == pytest.approx((numbers(first[1])[0] + numbers(second[1])[0]) / 2, abs=0.006)


def test_the_page_shows_curves_of_committed_rows_only_if_the_study_has_the_key(tmp_path):
    text = (ROOT / "studies/off_policy.yaml").read_text()
    for more in ("", KEY):
        (tmp_path / "off_policy.yaml").write_text(text + more)
        spec = read_spec(tmp_path / "off_policy.yaml")
        keep = {
            "methods": {name: spec.methods[name] for name in ("dpo", "rloo")},
            "figures": (),
            "claims": {},
        }
        rows = [
            row for row in read_rows(ROOT / "studies/off_policy/rows.jsonl") if row.method in keep["methods"]
        ]
        files = {file.name for file in write_page(Results(replace(spec, **keep), rows))}
        page = spec.page.read_text()
        assert ("| `rloo lag=64 N=1` | 2 (0) | 1.95 | -1.06 to 2.19 | 1.61 to 5.46 |" in page) == bool(more)
        assert (
            ("gold_and_proxy_over_kl_tldr_mini.png" in files) == ("](figures/gold_and" in page) == bool(more)
        )
        assert ("## Gold and proxy" in page) == bool(more) and "\n\n\n" not in page


def test_a_claim_compares_two_quantities_of_one_method(results):
    """Pushed to the end, gold is below its value at KL 2; a run that never has this KL decides nothing."""
    rows = pushed(0.7, 0.9)
    (claim,) = judged(results(rows, pushed(0.7, 0.9, lag="64"), pushed(0.8, 0.0, "worst")))
    assert claim.verdict == "holds" and claim.numbers.startswith("noisy -")
    near = replace(rows[0], evaluations=rows[0].evaluations | {"eval/kl": (D / 9).tolist()})
    (claim,) = judged(results([near, *rows[1:]], pushed(0.7, 0.9, lag="64"), pushed(0.8, 0.0, "worst")))
    assert claim.verdict.startswith("undecided: a run failed, or does not have the value")


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("value(noisy) < value(noisy)", False),
        ("value(noisy) < at_kl(noisy)", True),
        ("at_kl(noisy) > at_kl(worst)", True),
    ],
)
def test_only_different_quantities_or_methods_are_compared(results, text, right):
    spec = results().spec
    assert (not [*Formula.read(text).problems(spec.methods, spec.axes, spec.tasks)]) == right


def test_a_curve_of_other_scores_is_refused(study):
    with pytest.raises(
        UserError, match=r"pushed.yaml, line 10: curves.0 must be curves \(gold and proxy over kl\)"
    ):
        study(STUDY.replace("gold and proxy over kl", "gold over lag"), "pushed")
