"""A cluster as `groups.jsonl` of one of its runs shows it: durations of responses, rates, and the rule.

A line is a group: a prompt with its K samples. These keys are used:

    group, row, version   number in the order of starts; row of the prompt; finished updates at its start
    lengths               tokens of each sample
    starts, ends          seconds at which each sample got its slot and left it
    update, taken         number of the update that trained on it, from 1, and when the update began
    ready, loaded         when its scores were known, and when the generators had the update's weights
    waited                without `loaded`: seconds that the trainer waited before `taken`
    fate                  trained; cut: samples ended early; dropped, replaced: not trained
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import ceil, exp, log, sqrt
from pathlib import Path
from statistics import fmean, variance
from typing import Any

import yaml

from rlhf.core.errors import UserError
from rlhf.core.files import read_lines

LEAST_GROUPS, LEAST_UPDATES = 30, 5
KEYS = ("update", "group", "row", "version", "lengths", "starts", "ends", "fate")

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Update:
    """The trained groups of an update, and the seconds from its batch to the load of its weights."""

    number: int
    groups: list[Row]
    taken: float
    loaded: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """What the groups of a run say about its cluster.

    Attributes:
        groups, updates: number of groups, and of updates that were trained.
        early: groups that ended early (cut or dropped), so that their durations are lower bounds.
        durations: seconds of the samples of groups, in the order of starts.
        tokens_s: tokens per second of a slot.
        slots: largest number of samples that were decoded at the same time.
        batch, samples: B and K.
        whole: whether the samples of a group start together.
        balance: seconds of an update, as a multiple of the ideal generation of its batch.
        score_s: seconds from the end of a group until its scores are known.
        rule, lag, age: fifo, pace, wait, cut or drop; L; A, None if ages are not bounded.
        figures: what the run had, under the names of the simulation.
    """

    groups: int
    updates: int
    early: int
    durations: list[list[float]]
    tokens_s: float
    slots: int
    batch: int
    samples: int
    whole: bool
    balance: float
    score_s: float
    rule: str
    lag: int
    age: int | None
    figures: dict[str, float]

    def tail(self) -> tuple[float, float]:
        """Return the standard deviation of the log of a duration, and the part of it that a group shares."""
        logs = [[log(each) for each in own] for own in self.durations]
        within = fmean(variance(own) for own in logs) if self.samples > 1 else 0.0
        between = max(0.0, variance([fmean(own) for own in logs]) - within / self.samples)
        spread = sqrt(within + between)
        return spread, sqrt(between) / spread if spread else 0.0

    def settings(self) -> str:
        """Return the settings of a run with a model in the virtual time of this cluster."""
        spread, shared = self.tail()
        every = [each for own in self.durations for each in own]
        step_s = exp(fmean(map(log, every))) / fmean(every) / self.tokens_s
        return (
            f"clock=virtual clock.slots={self.slots} clock.step_s={step_s:.3g} clock.spread={spread:.2f} "
            f"clock.shared={shared:.2f} clock.balance={self.balance:.2f} clock.score_s={self.score_s:.3g}"
        )


def read(path: Path) -> Recording:
    """Return the cluster of a run folder or of its `groups.jsonl`.

    `config.yaml` beside the file names the rule; without it, the groups show which rule it was.

    Raises:
        UserError: there is no file, a line is damaged, or there are too few groups.
    """
    file = path / "groups.jsonl" if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"{path} must be a run folder with groups.jsonl, or such a file, got neither")
    rows = sorted(read_lines(file, KEYS), key=lambda row: row["group"])
    updates = _updates([row for row in rows if row["fate"] in ("trained", "cut")])
    trained = [row for update in updates for row in update.groups]
    if len(trained) < LEAST_GROUPS or len(updates) < LEAST_UPDATES:
        raise UserError(
            f"{file} must have at least {LEAST_GROUPS} groups of {LEAST_UPDATES} complete updates (the tail "
            f"is estimated from them), got {len(trained)} of {len(updates)}; use a longer run"
        )
    rows = [row for row in rows if row["update"] <= updates[-1].number]
    size, samples = len(updates[0].groups), len(trained[0]["starts"])
    requests: dict[float, list[Row]] = defaultdict(list)  # only the time of their longest response is known
    for row in rows if "waited" in trained[0] else []:
        requests[row["ends"][0]].append(row)
    for own in requests.values():
        longest = max(max(row["lengths"]) for row in own)
        for row in own:
            row["ends"] = [
                start + (end - start) * max(1, tokens) / longest
                for start, end, tokens in zip(row["starts"], row["ends"], row["lengths"], strict=True)
            ]
    slots = _most_at_once(rows)
    train_s = sum(update.loaded - update.taken for update in updates)
    loads = {update.loaded for update in updates}
    dropped = [row for row in rows if row["fate"] == "dropped"]
    early = sum(row["fate"] == "cut" for row in rows)
    early += sum(max(row["ends"], default=0.0) in loads for row in dropped)  # running groups stop at a load
    first = {row["row"]: row for row in reversed(rows)}  # of each prompt: the long ones start again
    durations = [
        _seconds(row) for row in (first.values() if dropped else rows) if len(row["starts"]) == samples
    ]
    rule, lag, age = _rule(file.parent / "config.yaml", rows, size)
    return Recording(
        groups=len(rows),
        updates=len(updates),
        early=early,
        durations=durations,
        tokens_s=sum(sum(row["lengths"]) for row in trained) / sum(sum(_seconds(row)) for row in trained),
        slots=slots,
        batch=size,
        samples=samples,
        whole=all(len(set(row["starts"])) == 1 for row in trained),
        balance=train_s / (sum(sum(_seconds(row)) for row in trained) / slots),
        score_s=fmean(row.get("ready", max(row["ends"])) - max(row["ends"]) for row in trained),
        rule=rule,
        lag=lag,
        age=age,
        figures=_figures(updates, dropped, lag, sorted(map(max, durations))[int(0.9 * len(durations))]),
    )


def _updates(trained: list[Row]) -> list[Update]:
    """Return the updates in order, without a last one whose end is not known."""
    groups: dict[int, list[Row]] = defaultdict(list)
    for row in trained:
        groups[row["update"]].append(row)
    found = []
    for (number, own), (_, later) in pairwise([*sorted(groups.items()), (0, [])]):
        if "loaded" in own[0]:
            found.append(Update(number, own, own[0]["taken"], own[0]["loaded"]))
        elif later:
            found.append(Update(number, own, own[0]["taken"], later[0]["taken"] - later[0]["waited"]))
    return found


def _seconds(row: Row) -> list[float]:
    return [end - start for start, end in zip(row["starts"], row["ends"], strict=True)]


def _most_at_once(rows: list[Row]) -> int:
    changes = [(time, 1) for row in rows for time in row["starts"]]
    changes += [(time, -1) for row in rows for time in row["ends"]]
    return max(accumulate(change for _, change in sorted(changes)))  # at the same time ends come first


def _rule(config: Path, rows: list[Row], size: int) -> tuple[str, int, int | None]:
    """Return rule, L and A, from the config of the run or as the groups show them."""
    if config.is_file():
        schedule = yaml.safe_load(config.read_text(encoding="utf-8"))["schedule"]
        if schedule.get("order", "fifo") == "fifo":
            return "fifo", schedule["max_lag"], None
        return schedule["stale"] if schedule["max_age"] else "pace", schedule["max_lag"], schedule["max_age"]
    trained = [row for row in rows if row["fate"] in ("trained", "cut")]
    oldest = max(row["update"] - 1 - row["version"] for row in trained)
    fates = {row["fate"] for row in rows}
    if "dropped" in fates:
        kept = [{"starts": row["starts"][:1], "ends": [row.get("taken", max(row["ends"]))]} for row in rows]
        return "drop", ceil(_most_at_once(kept) / size) - 1, oldest
    lag = max(ceil((row["group"] + 1) / size) - 1 - row["version"] for row in trained)
    if "cut" in fates:
        return "cut", lag, oldest
    in_order = all(row["update"] - 1 == row["group"] // size for row in trained)
    return "fifo" if in_order else "pace", lag, None


def _figures(updates: list[Update], dropped: list[Row], lag: int, longest: float) -> dict[str, float]:
    """Return the figures of the steady part: without the first fifth and the last L + 1 updates."""
    first, last = len(updates) // 5, len(updates) - min(lag + 1, len(updates) // 5)
    steady = updates[first:last]
    ages = [update.number - 1 - row["version"] for update in steady for row in update.groups]
    kept = [_seconds(row) for update in steady for row in update.groups]
    numbers = {update.number for update in steady}
    wasted = sum(sum(_seconds(row)) for row in dropped if row["update"] in numbers)
    return {
        "use": sum(each.loaded - each.taken for each in steady)
        / (steady[-1].loaded - updates[first - 1].loaded),
        "age": fmean(ages),
        "oldest": max(ages),
        "thrown away": wasted / (wasted + sum(map(sum, kept))),
        "longest tenth": sum(max(own) > longest for own in kept) / len(kept),
    }
