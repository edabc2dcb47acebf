"""Tables and sentences of a section of a report: results, settings, differences, samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from statistics import mean
from typing import TYPE_CHECKING, Any

from rich import box
from rich.markup import escape
from rich.table import Table

from rlhf.core.formatting import bounds
from rlhf.report.groups import LINES, column, comparable, differing, headings, joined, pair
from rlhf.report.runs import METRICS, Kind, Metric, duration, number

if TYPE_CHECKING:
    from rlhf.core.statistics import Estimate
    from rlhf.report.groups import Group, Section
    from rlhf.report.runs import FoundRuns, Run


# Tables of a section: results and settings, for the terminal, for Markdown and for the HTML page.


# Metrics of the columns, by decreasing importance. Columns without values are left out.
_COLUMNS = (
    "eval/win_rate",
    "eval/accuracy",
    "eval/loss",
    "eval/gold_score",
    "eval/score",
    "eval/kl",
    "eval/win_rate_vs_initial",
    "eval/response_tokens",
    "eval/ppl",
)
_DETAILS = _COLUMNS[6:]  # metrics whose columns follow the time

# Settings that a reader looks for even if all runs have the same value.
_KEYS = """
algo.name model.name model.base model.policy model.lora.rank scorer.name scorer.path gold.name optim.lr
algo.beta algo.kl_coef schedule.total_episodes schedule.total_epochs schedule.prompts_per_update
algo.samples_per_prompt schedule.minibatches schedule.max_lag schedule.order schedule.update
schedule.max_age schedule.replay schedule.solved_at generator.name generator.temperature
generator.response_length backend.name clock.name clock.slots clock.spread
"""
_SETTINGS = _KEYS.split()

TERMINAL_ROWS = 20  # largest number of rows in the terminal
TERMINAL_LABEL, TERMINAL_COLUMN = 26, 3  # largest width of a label; space between two columns


@dataclass(frozen=True)
class Cell:
    """A value of a group.

    Attributes:
        before: mean before training; None if the value was not measured before training.
        after: mean over the runs, at the last evaluation.
        limits: smallest and largest value of a run.
        interval: 95 % confidence interval; None if not measured, or with several runs.
        show: returns a value as text.
    """

    before: float | None
    after: float
    limits: tuple[float, float]
    interval: tuple[float, float] | None
    show: Callable[[float], str]

    def __str__(self) -> str:
        change = self.final if self.initial is None else f"{self.initial} → {self.final}"
        return f"{change} ({self.spread})" if self.spread else change

    @property
    def initial(self) -> str | None:
        """The value before training as text; None if there is no such value."""
        return None if self.before is None else self.show(self.before)

    @property
    def final(self) -> str:
        """The value at the last evaluation as text."""
        return self.show(self.after)

    @property
    def spread(self) -> str:
        """The range over seeds, or the confidence interval of a single run, as text; empty without either."""
        low, high = map(self.show, self.limits)
        if low != high:
            return f"{low} to {high}"
        return "" if self.interval is None else "95 %: {} to {}".format(*map(self.show, self.interval))


_Column = tuple[str, Callable[[Sequence["Run"]], Cell | None]]  # heading, and the cell of the runs of a group


def _cost(heading: str, read: Callable[[Run], float | None], show: Callable[[float], str]) -> _Column:
    """Return the column of a cost: the mean over the runs that have a value."""

    def cell(runs: Sequence[Run]) -> Cell | None:
        known = [value for run in runs if (value := read(run)) is not None]
        return Cell(None, mean(known), (0.0, 0.0), None, show) if known else None

    return heading, cell


def _pace(run: Run) -> float | None:
    """Return the episodes per second of update time; None if the run has no times."""
    return run.episodes / run.seconds() if run.seconds() else None


_TIME = _cost("time", lambda run: run.seconds() or None, duration)
_PACE = _cost("episodes/s", _pace, lambda value: number(value, 1 if value < 10 else 0))
_MEMORY = _cost("peak GiB", lambda run: run.peak_gib, lambda value: number(value, 1))


@dataclass(frozen=True)
class Results:
    """A table of column headings and one row of cells per group; None: the group lacks the metric."""

    columns: list[str]
    rows: list[tuple[Group, list[Cell | None]]]


def results(section: Section) -> Results:
    """Return the table of the last evaluation and the cost, averaged over the finished runs of each group.

    If a group has no finished run, the mean is over its unfinished runs.
    """
    main = [section.main.name] if section.main else []
    present = [name for name in _COLUMNS if any(run.last(name) is not None for run in section.runs)]
    names = list(dict.fromkeys([*main, *present]))
    late = [name for name in names if name in _DETAILS and name not in main]
    early = [name for name in names if name not in late]
    costs = [_PACE, _MEMORY] if section.kind is Kind.rl else [_MEMORY]
    columns = [*map(_metric, early), _TIME, *map(_metric, late), *costs]
    rows = [(group, [read(group.measured) for _, read in columns]) for group in section.groups]
    return Results([heading for heading, _ in columns], rows)


def _metric(name: str) -> _Column:
    """Return the column of a metric."""
    return METRICS[name].heading, partial(metric_cell, metric=METRICS[name])


def metric_cell(runs: Sequence[Run], metric: Metric) -> Cell | None:
    """Return the cell of a metric; None if no run has a value."""
    known = [value for run in runs if (value := run.last(metric.name)) is not None]
    if not known:
        return None
    start = [run.first(metric.name) for run in runs if run.last(metric.name) is not None]
    before = [value for value in start if value is not None]
    alone = len(runs) == 1 and runs[0].evaluations
    interval = bounds(alone[-1], metric.name) if alone else None
    change = mean(before) if len(before) == len(known) else None  # both means are of the same runs
    return Cell(change, mean(known), (min(known), max(known)), interval, metric.text)


@dataclass(frozen=True)
class Settings:
    """The settings of a section.

    Attributes:
        shared: settings that all groups share, each as `key=value`; only those in `_SETTINGS`.
        keys: keys in which the groups differ.
        rows: one row per group: the value of each key, None if the group does not have the key.
    """

    shared: list[str]
    keys: list[str]
    rows: list[tuple[Group, list[str | None]]]

    @property
    def headings(self) -> list[str]:
        """The headings of the keys."""
        return headings(self.keys)


def settings(section: Section) -> Settings:
    """Return the settings of a section.

    Keys that only some algorithms have, with one value wherever they occur, are shown if they are in
    `_SETTINGS`.
    """
    configs = [group.config for group in section.groups]
    keys = []
    for key in differing(configs):
        present = {str(config[key]) for config in configs if key in config}
        if len(present) > 1 or key in _SETTINGS:
            keys.append(key)
    columns = [column(configs, key) for key in keys]
    shared = [
        pair(key, configs[0][key])
        for key in _SETTINGS
        if key not in keys and configs[0].get(key) not in (None, "none") and configs[0].get(key) != 0
    ]
    if all(group.label == joined(keys, row) for group, *row in zip(section.groups, *columns, strict=True)):
        keys, columns = [], []  # the labels contain all settings
    cells: list[list[Any]] = [list(row) for row in zip(*columns, strict=True)] or [[] for _ in configs]
    return Settings(shared, keys, list(zip(section.groups, cells, strict=True)))


def for_terminal(found: Results, width: int) -> Table:
    """Return the table for the terminal; groups without a finished run are dimmed.

    Args:
        found: the table.
        width: largest width in columns. Columns that do not fit are left out, from the right. Rows after
            the first `TERMINAL_ROWS` are left out, too.
    """
    label = min(TERMINAL_LABEL, max(len(group.label) for group, _ in found.rows))
    left = width - label - max(5, *(len(group.count) for group, _ in found.rows)) - 3 * TERMINAL_COLUMN
    shown: dict[int, int] = {}  # index of the column -> width
    for place, heading in enumerate(found.columns):
        texts = [each.final for _, cells in found.rows if (each := cells[place]) is not None]
        wide = max(map(len, [*texts, *heading.split(), heading[:8]]), default=0)
        if wide + TERMINAL_COLUMN <= left:
            shown[place] = wide
            left -= wide + TERMINAL_COLUMN
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("setting", style="bold", width=label)
    table.add_column("seeds", min_width=5)
    for place, wide in shown.items():
        table.add_column(found.columns[place], justify="right", width=wide)
    for group, cells in found.rows[:TERMINAL_ROWS]:
        table.add_row(
            escape(group.label),
            group.count,
            *("" if (each := cells[place]) is None else each.final for place in shown),
            style=None if group.finished else "dim",
        )
    if len(found.rows) > TERMINAL_ROWS:
        table.caption = f"{len(found.rows) - TERMINAL_ROWS} more settings: see the page, or add --markdown"
    return table


def for_markdown(found: Results) -> str:
    """Return the table in Markdown."""
    rows = [["setting", "seeds", *found.columns]]
    for group, cells in found.rows:
        figures = ["" if each is None else str(each) for each in cells]
        rows.append([f"`{group.label}`", group.seeds, *figures])
    lines = ["| " + " | ".join(text.replace("|", "\\|") for text in row) + " |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


# Sentences of a report: the result of a section, and remarks that a reader needs before comparing runs.


_SCALES = 3  # largest number of scales for which a sentence states the result
_NAMED = 8  # largest number of labels or folders in a remark


def result(section: Section) -> str:
    """Return the result of a section in a few sentences: the best setting, its change, KL and time."""
    main = section.main
    if main is None:
        return "No evaluation and no update yet."
    measured = [group for group in section.groups if group.value(main) is not None]
    scales = comparable(measured, main.scale)
    texts = [_of_scale(members, main, label) for label, members in scales[:_SCALES]]
    if len(scales) > _SCALES:
        texts.append(f"{len(scales) - _SCALES} more are in the table.")
    if not main.evaluated:
        texts.append("There are no evaluations on held-out data.")
    return " ".join(texts)


def _of_scale(groups: Sequence[Group], main: Metric, label: str) -> str:
    """Return the sentence about the best of groups that can be compared.

    Args:
        groups: groups that have the metric, best first.
        main: the main metric.
        label: the label of their scale and length; empty if there is only one.
    """
    best = groups[0]
    cell = metric_cell(best.measured, main)
    assert cell is not None  # the group has the metric
    alone = cell.initial is None or (cell.initial == cell.final and not best.finished)
    change = cell.final if alone else f"from {cell.initial} to {cell.final}"
    count = sum(run.last(main.name) is not None for run in best.measured)
    seeds = f"{count} seeds: " if count > 1 else ""
    spread = f" ({seeds}{cell.spread})" if cell.spread else ""
    text = f"{capital(main.title)} {change}{spread}"
    if len(groups) > 1:
        fair = [group for group in groups if group.finished or not best.finished]
        rivals = [(group.label, group.value(main) or 0.0) for group in fair]
        tied = [label for label, value in rivals if main.text(value) == main.text(rivals[0][1])]
        first = f"Best of {len(groups)} settings: {best.label}"
        first = first if len(tied) == 1 else f"{len(tied)} of {len(groups)} settings tie: {some(tied)}"
        text = f"{first}, {main.title} {change}{spread}"
    kl = metric_cell(best.measured, METRICS["eval/kl"])
    parts = [text] + ([f"KL {kl.final}"] if kl is not None and main.evaluated else [])
    seconds = [run.seconds() for run in best.measured if run.seconds()]
    if seconds:
        parts.append(f"{duration(sum(seconds) / len(seconds))} of training")
    if not best.finished:
        parts.append("unfinished")
    if len(groups) > 1:
        values = [value for _, value in rivals]
        worst = main.text(min(values) if main.better >= 0 else max(values))
        parts += [f"worst setting {worst}"] if len(tied) < len(values) else []
    return (f"{label}: " if label else "") + ", ".join(parts) + "."


def remarks(sections: Sequence[Section], found: FoundRuns) -> list[str]:
    """Return remarks that a reader needs before comparing the runs."""
    groups = [group for section in sections for group in section.groups]
    runs = [run for group in groups for run in group.runs]
    notes = []
    if unfinished := sum(len(group.unfinished) for group in groups):
        notes.append(
            f"{unfinished} unfinished run{'s' * (unfinished > 1)}: dashed in the figures, not part of means."
        )
    repeated = [group.label for group in groups if len({run.seed for run in group.runs}) < len(group.runs)]
    if repeated:
        notes.append(
            f"Several folders have the same settings and seed, and each counts as a run: {some(repeated)}."
        )
    few = []
    for group, name in product(groups, METRICS):
        count = sum(run.last(name) is not None for run in group.measured)
        few += [f"{name} ({count} of {len(group.measured)} of {group.label})"] * (
            0 < count < len(group.measured)
        )
    if few:
        notes.append(f"Means over fewer runs than all, those that have the metric: {some(few)}.")
    if len({run.commit for run in runs}) > 1:
        notes.append("The runs were made with different commits of the code (see Runs).")
    if len({run.hardware for run in runs}) > 1:
        notes.append("The runs were made on different hardware, so their times are not comparable.")
    if empty := [run.folder.name for run in found.runs if not run.rows]:
        notes.append(f"No metrics yet: {some(empty)} (see Runs).")
    if lost := [f"{run.folder.name} ({run.lost})" for run in found.runs if run.lost]:
        notes.append(f"Rows are lost: {some(lost)}.")
    if warned := [f"{run.folder.name} (update {update})" for run in runs if (update := run.collapse_warning)]:
        notes.append(
            f"Runs that warned of a collapse of the policy: {some(warned)}. Compare their evaluations before "
            "and after the warning. If they fall, lower optim.lr or schedule.max_lag, or set an off-policy "
            "correction; the warning in train.log names the settings."
        )
    if found.broken:
        names = [f"{folder.name} ({reason})" for folder, reason in found.broken.items()]
        notes.append(f"Damaged run folders, not shown: {some(names)}.")
    return notes


def not_drawn(section: Section) -> str:
    """Return a sentence about the groups that the figures do not show; empty if there are none."""
    others = [group.label for group in section.groups if group.place is None]
    if not others:
        return ""
    best = f", those with the best {section.main.heading}" if section.main else ""
    return (
        f"The figures show {len(section.drawn)} of {len(section.groups)} settings{best}. "
        f"Not drawn: {some(others)}."
    )


def capital(text: str) -> str:
    """Return a text with a capital first letter."""
    return text[:1].upper() + text[1:]


def some(names: Sequence[str]) -> str:
    """Return the first `_NAMED` names, and the number of the others."""
    shown = ", ".join(names[:_NAMED])
    return shown if len(names) <= _NAMED else f"{shown} and {len(names) - _NAMED} more"


# Differences between the settings of a section: paired, with an interval and a verdict in words.


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


# Completions of the same held-out prompt by several groups, for comparison side by side.


@dataclass(frozen=True)
class Answer:
    """A response of one run to a held-out prompt; `row` is the row of its completions.jsonl."""

    group: Group
    run: Run
    row: dict[str, Any]


@dataclass(frozen=True)
class Sample:
    """A held-out prompt with the reference response and the responses of the groups.

    Attributes:
        prompt: text of the prompt.
        reference: text of the reference response; None if the prompt has none.
        reference_score: score of the reference response by the judge; None without a judge.
        before: completions.jsonl row of the response before training; None if there is no such row, or if the
            responses of the groups before training differ.
        answers: one response for each group that answered the prompt.
    """

    prompt: str
    reference: str | None
    reference_score: float | None
    before: dict[str, Any] | None
    answers: list[Answer]


def samples(section: Section, count: int) -> tuple[list[Sample], list[str]]:
    """Return up to `count` prompts, ordered by the number of groups that answered the prompt.

    The responses of a group are those of its run with the lowest seed, at the last evaluation of that run.
    Only the groups in the figures are included.

    Returns:
        The samples, and a remark about each run whose completions cannot be read.
    """
    answers: dict[str, list[Answer]] = {}
    before: dict[str, list[dict[str, Any]]] = {}
    remarks: list[str] = []
    for group in section.drawn if count else []:
        run, rows = _first_with_completions(group, remarks)
        if run is None:
            continue
        last = rows[-1]["update"]
        for prompt, row in {row["prompt"]: row for row in rows if row["update"] == last}.items():
            answers.setdefault(prompt, []).append(Answer(group, run, row))
        for row in rows:
            if row["update"] == 0 < last:
                before.setdefault(row["prompt"], []).append(row)
    prompts = sorted(answers, key=lambda prompt: -len(answers[prompt]))[:count]
    found = [
        Sample(
            prompt=prompt,
            reference=answers[prompt][0].row.get("reference"),
            reference_score=answers[prompt][0].row.get("reference_gold_score"),
            before=same(before.get(prompt, [])),
            answers=answers[prompt],
        )
        for prompt in prompts
    ]
    return found, remarks


def _first_with_completions(group: Group, remarks: list[str]) -> tuple[Run | None, list[dict[str, Any]]]:
    """Return the first run of a group with completions, and its rows; add unreadable runs to `remarks`."""
    for run in group.measured:
        try:
            if rows := run.completions():
                return run, rows
        except ValueError as error:
            remarks.append(f"The completions of {run.folder.name} are not shown ({error}).")
    return None, []


def same(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the first row if all rows have the same response, else None; None if `rows` is empty."""
    return rows[0] if len({row["response"] for row in rows}) == 1 else None
