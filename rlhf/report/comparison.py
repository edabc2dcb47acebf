"""Differences between the settings of a section: paired, with an interval and a verdict in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING

from rlhf.report.groups import LINES, comparable

if TYPE_CHECKING:
    from rlhf.core.statistics import Estimate
    from rlhf.report.groups import Group, Section
    from rlhf.report.metrics import Metric
    from rlhf.report.runs import Run

SEEDS, PROMPTS = 3, 20  # fewest seeds, and fewest prompts, over which a difference is estimated
Prompt = tuple[str, int]  # text of a held-out prompt, and its number among equal texts
Scores = Callable[["Run"], Mapping[Prompt, float]]


@dataclass(frozen=True)
class Difference:
    """The difference of the main metric between the best setting and another setting.

    Attributes:
        best: the setting with the best mean.
        other: the setting that it is compared with.
        metric: the metric.
        estimate: mean of the paired differences, best minus other, with its 95 % interval.
        p: p-value, corrected by Holm for all comparisons with the best setting.
        pairs: what is paired, such as "5 seeds".
    """

    best: Group
    other: Group
    metric: Metric
    estimate: Estimate
    p: float
    pairs: str

    def __str__(self) -> str:
        show = self.metric.text
        by, low, high = self.estimate.centre, self.estimate.low, self.estimate.high
        if self.metric.better < 0:
            by, low, high = -by, -high, -low
        interval = f"{show(by)} [{show(low)}, {show(high)}], paired over {self.pairs}"
        from rlhf.core.statistics import LEVEL

        if self.p < LEVEL and by > 0:
            return f"{self.best.label} beats {self.other.label} by {interval}."
        return f"{self.best.label} vs. {self.other.label}: undecided, difference {interval}."


def differences(section: Section) -> list[Difference]:
    """Return the differences of the main metric between the best setting and other comparable settings.

    If the settings have at least `SEEDS` seeds in common, values are paired over seeds. Otherwise they are
    paired over held-out prompts, which are the same in all runs; this says nothing about other seeds.
    Unfinished runs are not compared.
    """
    from rlhf.core.statistics import holm, mean_interval, p_t, p_value

    metric = section.main
    if metric is None or not metric.evaluated or not metric.better:
        return []
    scores = cache(partial(_scores_of, name=metric.name))  # the completions of a run are read once
    found: list[Difference] = []
    finished = [group for group in section.groups if group.finished and group.value(metric) is not None]
    for _, (best, *others) in comparable(finished, metric.scale):
        compared = []
        for other in others[: LINES - 1]:
            seeds = _by_seed(best, other, metric)
            if len(seeds) >= SEEDS:
                family = len(others[: LINES - 1])
                p, pairs = p_value(seeds, family=family), f"{len(seeds)} seeds"
                compared.append((other, mean_interval(seeds), p, pairs))
            elif len(prompts := _by_prompt(best, other, scores)) >= PROMPTS:
                count = min(len(best.finished), len(other.finished))
                pairs = f"{len(prompts)} prompts of {count} seed{'s' * (count > 1)}"
                p = p_t(prompts) if any(prompts) else 1.0
                compared.append((other, mean_interval(prompts), p, pairs))
        for (other, estimate, _, pairs), p in zip(
            compared, holm([each[2] for each in compared]), strict=True
        ):
            found.append(Difference(best, other, metric, estimate, p, pairs))
    return found


def _by_seed(best: Group, other: Group, metric: Metric) -> list[float]:
    """Return the differences of a metric, one per seed that both groups finished."""
    values = [
        {run.seed: value for run in group.finished if (value := run.last(metric.name)) is not None}
        for group in (best, other)
    ]
    return [values[0][seed] - values[1][seed] for seed in sorted(values[0].keys() & values[1].keys())]


def _by_prompt(best: Group, other: Group, scores: Scores) -> list[float]:
    """Return the differences of a metric, one per held-out prompt that all runs of both groups have.

    The value of a group is the mean over its runs.
    """
    values = [[scores(run) for run in group.finished] for group in (best, other)]
    common = set.intersection(*(set(each) for runs in values for each in runs))
    means = [{key: sum(each[key] for each in runs) / len(runs) for key in common} for runs in values]
    return [means[0][key] - means[1][key] for key in sorted(common)]


def _scores_of(run: Run, name: str) -> Mapping[Prompt, float]:
    """Return the value of a metric for each held-out prompt at the last evaluation of a run.

    The result is empty if completions.jsonl has no such values, or cannot be read.
    """
    try:
        rows = run.completions()
    except ValueError:  # the page names the file
        return {}
    last = [row for row in rows if row["update"] == rows[-1]["update"]]
    numbers: Counter[str] = Counter()
    found = {}
    for row in last:
        numbers[row["prompt"]] += 1
        if (value := value_of(row, name)) is not None:
            found[row["prompt"], numbers[row["prompt"]]] = value
    return found


def value_of(row: Mapping[str, object], name: str) -> float | None:
    """Return the value of a metric for one response; None if completions.jsonl does not determine it."""
    keys = {"eval/score": "score", "eval/gold_score": "gold_score", "eval/win_rate": "gold_score"}
    keys["eval/accuracy"] = "gold_score" if "gold_score" in row else "score"
    value, reference = row.get(keys.get(name, "")), row.get("reference_gold_score")
    if not isinstance(value, int | float):
        return None
    if name == "eval/accuracy":  # of answers; that of pairs does not depend on a response
        return float(value == 1) if reference in (1, None) else None
    if name != "eval/win_rate":
        return float(value)
    return float(value > reference) if isinstance(reference, int | float) else None
