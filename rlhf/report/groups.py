"""Runs that differ in their seed alone, and what to call each such group."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlhf.config.identity import BOOKKEEPING, NOT_IN_NAME
from rlhf.report.runs import Status

if TYPE_CHECKING:
    from rlhf.report.runs import Run


# What a label says first, where runs differ in it; then other keys, in the order of the config.
FIRST = (
    "task.name",
    "model.name",
    "algo.name",
    "algo.loss_type",
    "generator.name",
    "schedule.max_lag",
    "schedule.update",
    "backend.name",
)


# Nothing that a figure of a report depends on. Other keys that leave a run's name alone (threads, a worker,
# transfer, ...) change its times, so they do tell groups apart.
SHOWN_NOWHERE = ("seed", *BOOKKEEPING)


@dataclass(frozen=True)
class Group:
    """Runs of one config.

    Attributes:
        label: the settings in which it differs from the other groups, as short as they can be told.
        runs: by seed.
        index: place among all groups.
        place: place among those of its task, which are drawn together; it chooses colour and marker.
    """

    label: str
    runs: tuple[Run, ...]
    index: int
    place: int

    @property
    def task(self) -> str:
        """What its runs are trained on."""
        return str(self.runs[0].config["task.name"])

    @property
    def finished(self) -> list[Run]:
        """The runs that came to their end; means, spreads and bands are over these."""
        return [run for run in self.runs if run.status is Status.finished]

    @property
    def unfinished(self) -> list[Run]:
        """The others."""
        return [run for run in self.runs if run.status is not Status.finished]

    @property
    def measured(self) -> list[Run]:
        """The finished runs; where there are none, the others."""
        return self.finished or self.unfinished

    @property
    def seeds(self) -> str:
        """How many seeds are finished, and what the other runs are."""
        others = [f"seed {run.seed} {run.progress}" for run in self.unfinished]
        return "; ".join([str(len(self.finished)), *others])


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Runs grouped by all settings but the seed, in the order in which they were given."""
    keys = differing(runs)
    told = telling(runs, keys)
    together: dict[str, list[Run]] = {}
    for run in runs:
        together.setdefault(values(run, keys), []).append(run)
    groups: list[Group] = []
    for index, found in enumerate(together.values()):
        ordered = tuple(sorted(found, key=lambda run: (run.seed, str(run.folder))))
        place = sum(group.task == ordered[0].config["task.name"] for group in groups)
        groups.append(Group(label(ordered[0], told), ordered, index, place))
    return groups


def by_task(groups: Sequence[Group]) -> list[list[Group]]:
    """The groups of each task: figures of different tasks do not compare."""
    tasks: dict[str, list[Group]] = {}
    for group in groups:
        tasks.setdefault(group.task, []).append(group)
    return list(tasks.values())


def differing(runs: Sequence[Run]) -> list[str]:
    """The keys in which runs differ, in the order in which labels tell them."""
    every = list(dict.fromkeys(key for run in runs for key in run.config))
    kept = [key for key in every if key not in SHOWN_NOWHERE and not key.startswith("logger.")]
    found = [key for key in kept if len({values(run, [key]) for run in runs}) > 1]
    first = {key: place for place, key in enumerate(FIRST)}
    return sorted(found, key=lambda key: (key in NOT_IN_NAME, first.get(key, len(first))))


def telling(runs: Sequence[Run], keys: Sequence[str]) -> list[str]:
    """As many of `keys` as tell the groups apart: one that the keys before it decide says nothing new."""
    groups = len({values(run, keys) for run in runs})
    chosen: list[str] = []
    for key in keys:
        apart = len({values(run, chosen) for run in runs})
        if apart == groups:
            break
        if len({values(run, [*chosen, key]) for run in runs}) > apart:
            chosen.append(key)
    return chosen


def values(run: Run, keys: Sequence[str]) -> str:
    """What a run has set `keys` to, for comparison."""
    return json.dumps([[key, run.config[key]] for key in keys if key in run.config], default=str)


def label(run: Run, keys: Sequence[str]) -> str:
    """The settings `keys` of a run in words; `<algorithm>` where there is nothing to tell."""
    words = [run.config["algo.name"]] if "algo.name" not in keys else []
    for key in keys:
        if key not in run.config:  # another option of its group has it
            continue
        section, _, name = key.rpartition(".")
        value = shown(run.config[key])
        if name == "name":
            words.append(value)
        else:
            same = [other for other in keys if other.rpartition(".")[2] == name]
            words.append(f"{key if len(same) > 1 else name}={value}")
    return " ".join(words)


def shown(value: Any) -> str:
    """A value as a command line has it."""
    return value if isinstance(value, str) else json.dumps(value, default=str).replace('"', "")


def common(runs: Sequence[Run]) -> dict[str, str]:
    """The options that all runs share, by group."""
    found = {}
    for key in ("task.name", "model.name", "algo.name", "generator.name", "backend.name", "gold.name"):
        if len(set(values(run, [key]) for run in runs)) == 1 and key in runs[0].config:
            found[key.partition(".")[0]] = shown(runs[0].config[key])
    return found
