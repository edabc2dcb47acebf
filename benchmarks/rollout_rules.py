"""What each rule for stale rollouts costs: tables of the virtual clock without a model.

    python -m benchmarks.rollout_rules cluster <run folder or groups.jsonl>
                                                   each rule on the cluster of a run

    python -m benchmarks.rollout_rules rules       each rule at one and four batches ahead
    python -m benchmarks.rollout_rules ages        larger bounds on the age
    python -m benchmarks.rollout_rules scale       the same ratios for 64 to 4,096 slots

The durations of responses are those of the run, drawn prompt by prompt, or lognormal (log-sd 1, 0.8 of it
from the prompt); then training takes as long as the ideal generation of its batch. A figure is the mean over
seeds of the steady part of a run, with the standard deviation over seeds in parentheses.

    use             share of the time in which the trainer works
    age, oldest     updates between the weights at the start of a group and its update
    thrown away     share of the slots' time for discarded groups
    cut off         share of the decoding steps of the trained groups that `cut` saved
    longest tenth   share of the trained groups that last longer than 90 % of all groups
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from random import Random
from statistics import mean, stdev

from benchmarks.recorded_cluster import Recording, read
from rlhf.config.run import Order, Stale, VirtualConfig
from rlhf.core.errors import UserError
from rlhf.core.launched import derive
from rlhf.training import clock
from rlhf.training.clock import Clock, Group, Piece, Rules, Start, factors

TOKENS = 50
FIGURES = ("use", "age", "oldest", "thrown away", "cut off", "longest tenth")
RULES = {
    "fifo": (Order.fifo, Stale.wait),
    "pace": (Order.completed, Stale.wait),
    "wait": (Order.completed, Stale.wait),
    "drop": (Order.completed, Stale.drop),
    "cut": (Order.completed, Stale.cut),
}


@dataclass(frozen=True, slots=True)
class Setting:
    """A cluster and a rule; `age` None: the bound is `lag`, and pace and fifo have none."""

    rule: str
    lag: int
    age: int | None = None
    slots: int = 64
    batch: int = 16
    samples: int = 4
    late: bool = False  # drop only complete groups
    whole: bool = True  # the samples of a group start together
    balance: float = 1.0
    score_s: float = 0.0
    durations: tuple[tuple[float, ...], ...] = ()  # seconds of the samples of observed groups; (): lognormal


class LateDrop(Rules):
    """Rules that discard complete groups only, so a running group keeps its slots until it ends."""

    def loaded(self) -> list[Group]:
        """Note an update, and stop no group."""
        self.version += 1
        return []


class Responses:
    """A sampler of responses of equal length; a discarded prompt is the next to start again."""

    def __init__(self) -> None:
        self.rows: dict[int, int] = {}
        self.again: list[int] = []
        self.new = 0

    def begin(self, starts: Sequence[Start], most: Sequence[int]) -> list[Piece]:
        """Return a whole response for each start."""
        return [Piece([0] * TOKENS, [0.0] * TOKENS, True) for _ in starts]

    def go_on(self, sequences: Sequence[clock.Sequence], most: Sequence[int]) -> list[Piece]:
        """No response is sampled in parts."""
        raise NotImplementedError

    def prompt(self, group: int) -> tuple[int, int]:
        """Return the row of the prompt; prompts have no tokens."""
        if group not in self.rows:
            self.new += not self.again
            self.rows[group] = self.again.pop(0) if self.again else self.new
        return self.rows[group], 0

    def discarded(self, sequences: Sequence[clock.Sequence]) -> None:
        """Let the prompt start again."""
        self.again.append(self.rows.pop(sequences[0].group.number))


def run(setting: Setting, seed: int, updates: int, warm: int) -> dict[str, float]:
    """Return the figures of the updates after the first `warm` ones."""
    order, stale = RULES[setting.rule]
    rules = (LateDrop if setting.late else Rules)(
        order=order,
        batch=setting.batch,
        samples=setting.samples,
        max_lag=setting.lag,
        max_age=None if setting.rule in ("fifo", "pace") else setting.age or setting.lag,
        stale=stale,
    )
    costs = VirtualConfig(
        slots=setting.slots, step_s=1 / TOKENS, spread=1.0, balance=setting.balance, score_s=setting.score_s
    )
    made = Clock(rules, costs, Responses(), length=TOKENS, seed=seed, whole=setting.whole)
    of_group = factors(costs, setting.samples, seed + 1000)
    if setting.durations:
        made.factors, of_group = (observed(setting.durations, each) for each in (seed, seed + 1000))
    longest = sorted(max(of_group(group, group)) for group in range(4000))[3600]
    span = busy = trained = wasted = steps = whole = 0.0
    ages, long = [], 0
    for update in range(updates):
        groups = made.next_batch()
        if update >= warm:
            usage = made.usage
            span, busy = span + usage.span, busy + usage.busy
            trained, wasted = trained + usage.trained, wasted + usage.wasted
            ages += [rules.version - own[0].group.version for own in groups]
            long += sum(max(each.steps() for each in own) > longest * TOKENS for own in groups)
            steps += sum(each.steps() for own in groups for each in own)
            whole += sum(TOKENS * each.factor for own in groups for each in own)
        made.loaded()
    return {
        "use": trained / span,
        "age": mean(ages),
        "oldest": max(ages),
        "thrown away": wasted / busy,
        "cut off": 1 - steps / whole,
        "longest tenth": long / len(ages),
    }


def observed(durations: Sequence[Sequence[float]], seed: int) -> Callable[[int, int], Sequence[float]]:
    """Return the function (group, prompt) -> seconds of its samples, as an observed group had them."""

    @cache
    def of_prompt(prompt: int) -> Sequence[float]:
        return Random(derive(seed, "observed group", prompt)).choice(durations)

    return lambda group, prompt: of_prompt(prompt)


def on_cluster(found: Recording) -> Iterator[tuple[Setting, int, int]]:
    """Yield the rows for a recorded cluster: its own rule, and each rule at half, once and twice its lag."""
    size = found.batch * found.samples
    seeds, updates = (3, 100) if size <= 1024 else (1, 40)
    own = Setting(
        found.rule,
        found.lag,
        found.age,
        slots=found.slots,
        batch=found.batch,
        samples=found.samples,
        whole=found.whole,
        balance=found.balance,
        score_s=found.score_s,
        durations=tuple(map(tuple, found.durations)),
    )
    every = [own]
    for lag in sorted({found.lag // 2, found.lag, max(1, 2 * found.lag)}):
        for rule in RULES if lag else ["fifo"]:  # without a lag all rules are the same
            ages = (None,) if rule in ("fifo", "pace") else (lag, 3 * lag)
            every += [replace(own, rule=rule, lag=lag, age=age) for age in ages]
    for setting in dict.fromkeys(every):
        yield setting, seeds, updates + 3 * setting.lag


def settings(table: str) -> Iterator[tuple[Setting, int, int]]:
    """Yield the rows of a table: setting, seeds, updates."""
    if table == "rules":
        for lag in (4, 1):
            for rule in RULES:
                yield Setting(rule, lag, late=rule == "drop"), 12, 125
    if table == "ages":
        for slots, lag, ages in ((64, 4, (4, 6, 8, 12, 16, 24)), (256, 8, (8, 16, 32))):
            for rule in ("wait", "cut", "drop"):
                for age in ages:
                    yield Setting(rule, lag, age, slots), 4, 120
    if table == "scale":
        for rule, lag, ratio in (
            ("pace", 4, 1),
            ("pace", 4, 4),
            ("pace", 8, 4),
            ("drop", 4, 1),
            ("drop", 4, 4),
        ):
            for batch in (16, 64, 256):
                few = 1 if batch == 256 else 3
                yield Setting(rule, lag, slots=4 * ratio * batch, batch=batch, late=True), few, 50


def main(argv: Sequence[str] | None = None) -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("table", choices=["cluster", "rules", "ages", "scale"])
    parser.add_argument("path", nargs="?", type=Path, help="for cluster: a run folder or its groups.jsonl")
    asked = parser.parse_args(argv)
    header = [*("rule", "L", "A", "slots", "B", "seeds"), *FIGURES]
    lines = [f"| {' | '.join(header)} |", "|---" + "|--:" * (len(header) - 1) + "|"]
    if asked.table == "cluster":
        if asked.path is None:
            parser.error("cluster needs a run folder or its groups.jsonl; add its path")
        try:
            found = read(asked.path)
        except UserError as error:
            parser.error(str(error))
        rows = list(on_cluster(found))
        lines = [*_described(found), "", *lines, _row(rows[0][0], "run", [found.figures])]
    else:
        rows = list(settings(asked.table))
    print("\n".join(lines), flush=True)
    for setting, seeds, updates in rows:
        figures = [run(setting, seed, updates, updates // 5) for seed in range(seeds)]
        print(_row(setting, str(seeds), figures), flush=True)


def _described(found: Recording) -> Iterator[str]:
    """Yield the lines that say what was estimated, and from how many groups."""
    spread, shared = found.tail()
    seconds = mean(each for own in found.durations for each in own)
    yield f"{found.groups:,} groups of {found.samples} samples, {found.updates:,} updates"
    yield f"  responses   {seconds:.3g} s on average, {found.tokens_s:.3g} tokens/s"
    yield f"  tail        log-sd {spread:.2f}, {shared:.2f} of it shared by the samples of a prompt"
    yield f"  cluster     {found.slots} slots; an update takes {found.balance:.2f} times its ideal generation"
    if found.early:
        yield f"  {found.early:,} groups ended early: the real tail is longer, a run with stale=wait shows it"
    yield f"  for a run in this time: {found.settings()}"


def _row(setting: Setting, seeds: str, found: Sequence[dict[str, float]]) -> str:
    bound = "" if setting.rule in ("fifo", "pace") else setting.age or setting.lag
    cells = [_cell(name, [each[name] for each in found]) if name in found[0] else "" for name in FIGURES]
    row = (setting.rule, setting.lag, bound, setting.slots, setting.batch, seeds, *cells)
    return f"| {' | '.join(map(str, row))} |"


def _cell(name: str, values: Sequence[float]) -> str:
    digits = {"age": 1, "oldest": 0}.get(name, 3)
    spread = f" ({stdev(values):.{digits}f})" if len(values) > 1 else ""
    return f"{mean(values):.{digits}f}{spread}"


if __name__ == "__main__":
    main()
