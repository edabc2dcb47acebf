"""Tests of the statistics against values of scipy, statsmodels and rliable, and of the rows of the atlas."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from rlhf.core import statistics
from rlhf.core.formatting import wilson
from rlhf.study.rows import Contrast, decided
from tests import needs

GOLDEN = Path(__file__).parents[3] / "shared/golden/statistics.json"
ROWS = Path(__file__).parents[2] / "studies/staleness/rows.jsonl"
LIST = json.loads(GOLDEN.read_text())["cases"] if GOLDEN.exists() else []
CASES = {case["name"]: case for case in LIST}
pytestmark = pytest.mark.skipif(not GOLDEN.exists(), reason=needs.GOLDEN)


def cases(function):
    return pytest.mark.parametrize("case", [c for c in LIST if c["function"].startswith(function)], ids=name)


def name(case):
    return case["name"]


def agree(case, found):
    """Compare values with the expected values of the same names; null is nan."""
    expected = {key: case["expected"][key] for key in found}
    expected = {key: math.nan if value is None else value for key, value in expected.items()}
    tolerance = case["tolerance"]
    assert found == pytest.approx(expected, rel=tolerance, abs=tolerance, nan_ok=True)


def table_of(case):
    return np.array(case["inputs"]["values"])


def differences(case):
    return np.subtract(case["inputs"]["first"], case["inputs"]["second"])


def of(estimate, *others):
    """Return an estimate by the names of the golden values, with p-values."""
    names = "p", "p_less", "p_greater", "p_signflip"
    found = {"mean": estimate.centre, "low": estimate.low, "high": estimate.high}
    return found | dict(zip(names, others, strict=False))


def bca(case):
    found = statistics.bootstrap_interval(table_of(case), statistic=np.mean, method="BCa")
    return {"low": found.low, "high": found.high}


def paired(case):
    x = differences(case)
    p = [statistics.p_t(x, side=side) for side in ("two-sided", "less", "greater")]
    return of(statistics.mean_interval(x), *p, statistics.p_sign_flip(x))


def equivalent(case):
    x, margin = differences(case), case["inputs"]["margin"]
    return {"p": max(statistics.p_t(x, -margin, "greater"), statistics.p_t(x, margin, "less"))}


def inputs(case, *names):
    return [case["inputs"][name] for name in names]


def share(count, total):
    return wilson(count / total, total)


FOUND = {
    "iqm": lambda case: {"iqm": float(statistics.iqm(table_of(case)))},
    "t interval": lambda case: of(statistics.mean_interval(table_of(case))),
    "BCa interval": bca,
    "Wilson interval": lambda case: dict(zip(("low", "high"), share(**case["inputs"]), strict=True)),
    "paired comparison": paired,
    "unpaired comparison": lambda case: of(*statistics.unpaired(inputs(case, "first", "second"), [1, -1])),
    "equivalence": equivalent,
    "loses at most": lambda case: {"p": statistics.p_t(*inputs(case, "losses", "margin"), "less")},
    "power": lambda case: {"power": statistics.power(*inputs(case, "delta", "sd", "seeds", "alpha"))},
    "minimal detectable difference": lambda case: {
        "difference": statistics.detectable(*inputs(case, "sd", "seeds"))
    },
}


@pytest.mark.parametrize("function", FOUND)
def test_statistics_equal_those_of_other_implementations(function):
    found = [case for case in LIST if case["function"].startswith(function)]
    assert found
    for case in found:
        agree(case, FOUND[function](case))


@cases("percentile interval")
def test_percentile_intervals(case):
    found = statistics.bootstrap_interval(table_of(case))
    assert [found.low, found.high] == pytest.approx(case["expected"]["interval"], abs=0.002)


@cases("multiple comparisons")
def test_holm(case):
    assert statistics.holm(case["inputs"]["p"]) == pytest.approx(
        case["expected"]["holm"], rel=case["tolerance"]
    )


@cases("exact sign-flip test")
def test_the_smallest_p_of_the_sign_flip_test(case):
    seeds = case["inputs"]["seeds"]
    assert [statistics.smallest_p(n) for n in seeds] == pytest.approx(case["expected"]["p"])
    fewest = next(n for n in seeds if 14 * statistics.smallest_p(n) <= statistics.LEVEL)
    assert fewest == case["expected"]["seeds_for_family_of_14"]
    assert statistics.p_sign_flip(np.arange(1.0, 11)) == statistics.smallest_p(10)


@cases("noise ceiling")
def test_noise_ceilings(case):
    table, expected = table_of(case), case["expected"]
    signal = statistics.signal(table)
    agree(case, {"signal": signal})
    ceilings = {"ceiling": statistics.ceiling([signal], 5), "ceiling_ten": statistics.ceiling([signal], 10)}
    agree(case, ceilings)
    taus = statistics.split_half(table)
    halves = {"mean": taus.mean(), "least": taus.min(), "most": taus.max(), "splits": len(taus)}
    assert halves == pytest.approx(expected["split_half"], rel=1e-6)
    assert statistics.seeds_for_ceiling(signal) == expected["seeds_for_0_8"]
    variance = statistics.components(table)
    found = dict(zip(("method", "seed", "residual"), variance, strict=True))
    assert found == pytest.approx(expected["variance"], rel=1e-6)


@cases("tau between tasks")
def test_ceilings_between_tasks(case):
    first, second = (table_of(CASES[case["inputs"][key]]) for key in ("first", "second"))
    found = stats.kendalltau(first.mean(1), second.mean(1))
    ceiling = statistics.ceiling([statistics.signal(first), statistics.signal(second)], 5)
    agree(case, {"tau": found.statistic, "p": found.pvalue, "ceiling": ceiling})


@pytest.mark.parametrize("case", [c for c in LIST if c["name"].startswith("seeds_")], ids=name)
def test_numbers_of_seeds(case):
    delta, sd = case["inputs"]["delta"], case["inputs"]["sd"]
    found = {
        "seeds": statistics.seeds_needed(delta, sd),
        "seeds_family_of_14": statistics.seeds_needed(delta, sd, 0.05 / 14),
    }
    assert found == case["expected"]


@cases("verdict")
def test_verdicts(case):
    inputs, expected = case["inputs"], case["expected"]
    samples, limit = inputs.get("differences") or expected["falls"], inputs.get("limit", 0.0)
    found = {name: Contrast(np.array([values]), [1.0], True) for name, values in samples.items()}
    assert decided(found, limit, statistics.LEVEL).split(" (")[0] == expected["verdict"]
    fails = statistics.holm([each.p(limit, "less", len(found)) for each in found.values()])
    holds = max(each.p(limit, "greater") for each in found.values())
    agree(case, {"p_holds": holds, "p_fails": min(fails)})


@cases("evaluation noise")
def test_evaluation_noise(case):
    outcomes = np.array([[int(digit) for digit in each] for each in case["inputs"]["outcomes"]])
    found, expected = statistics.components(outcomes), case["expected"]
    assert dict(zip(("seed", "prompt", "residual"), found, strict=True)) == pytest.approx(
        expected["variance"]
    )
    for prompts in (64, 256, 1024):
        share = statistics.evaluation_share(outcomes, prompts)
        assert share == pytest.approx(expected[f"share_{prompts}"], rel=1e-8)


# -- the committed rows of the atlas ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def atlas():
    """Return the final values of the atlas: (task, lag, N) -> method -> values of the seeds."""
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()]
    samples = {"tldr_mini": "2", "arithmetic": "4"}
    metrics = {"tldr_mini": "eval/win_rate", "arithmetic": "eval/gold_score"}
    found: dict = {}
    for row in sorted(rows, key=lambda row: row["seed"]):
        task, levels = row["task"], row["levels"]
        if row["part"] == "table" and (levels["size"], levels["K"]) == ("128", samples[task]):
            column = found.setdefault((task, int(levels["lag"]), int(levels["N"])), {})
            column.setdefault(row["method"], []).append(row["metrics"][metrics[task]])
    methods = json.loads(GOLDEN.read_text())["methods"]
    return {at: {name: np.array(column[name]) for name in methods} for at, column in found.items()}


@cases("losses of a column")
def test_losses_of_the_columns_of_the_atlas(case, atlas):
    for (task, at), expected in ((key.split(", "), value) for key, value in case["expected"].items()):
        lag, n = (int(at[4:]), 1) if at.startswith("lag") else (0, int(at[4:]))
        losses = {m: atlas[task, 0, 1][m] - x for m, x in atlas[task, lag, n].items()}
        names = list(statistics.distinct({m: x.round(9) for m, x in losses.items()}))
        assert names == list(expected)
        corrected = statistics.holm([statistics.p_t(losses[m]) for m in names])
        for method, p_holm in zip(names, corrected, strict=True):
            x = losses[method]
            mean = statistics.mean_interval(x)
            values = {"mean": mean.centre, "low": mean.low, "high": mean.high, "sd": x.std(ddof=1)}
            values |= {"p": statistics.p_t(x), "p_holm": p_holm, "p_signflip": statistics.p_sign_flip(x)}
            assert values == pytest.approx(expected[method], rel=1e-8, abs=1e-8)


@cases("seeds needed of every pair")
def test_seeds_that_every_pair_of_the_atlas_needs(case, atlas):
    for key, expected in case["expected"].items():
        task, lag, n = key.split(", ")
        column = atlas[task, int(lag[4:]), int(n[2:])]
        for pair, (mean, sd, *seeds, least) in list(expected.items())[::9]:
            first, second = (column[m] for m in pair.split(" - "))
            x = first - second
            found = statistics.detectable(x.std(ddof=1), 5)
            assert (x.mean(), x.std(ddof=1), found) == pytest.approx((mean, sd, least), rel=1e-3, abs=1e-5)
            assert [statistics.seeds_needed(delta, x.std(ddof=1)) for delta in (0.01, 0.02, 0.05)] == seeds
