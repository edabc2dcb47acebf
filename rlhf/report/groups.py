"""Groups of runs that differ only in their seed, and the labels of the groups."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlhf.config.identity import BOOKKEEPING, NOT_IN_NAME
from rlhf.report.runs import Status

if TYPE_CHECKING:
    from rlhf.report.runs import Run

# Keys that come first in a label, if the runs differ in these keys. Other keys follow in the order of the
# config.
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

# Keys without effect on a report: runs that differ only in these keys form one group. Other keys that are not
# in the name of a run (threads, worker, transfer, ...) change the times, so runs that differ in them are in
# different groups.
SHOWN_NOWHERE = ("seed", *BOOKKEEPING)


@dataclass(frozen=True)
class Group:
    """Runs with one config and different seeds.

    Attributes:
        label: the settings in which the group differs from the other groups, as short as possible.
        runs: the runs, ordered by seed.
        index: position among all groups.
        place: position among the groups of the same task, which share figures; determines colour and marker.
    """

    label: str
    runs: tuple[Run, ...]
    index: int
    place: int

    @property
    def task(self) -> str:
        """The name of the task of the runs."""
        return str(self.runs[0].config["task.name"])

    @property
    def finished(self) -> list[Run]:
        """The finished runs; means, standard deviations and bands are computed over these runs."""
        return [run for run in self.runs if run.status is Status.finished]

    @property
    def unfinished(self) -> list[Run]:
        """The runs that are unfinished or failed."""
        return [run for run in self.runs if run.status is not Status.finished]

    @property
    def measured(self) -> list[Run]:
        """The finished runs; if no run is finished, the unfinished runs."""
        return self.finished or self.unfinished

    @property
    def seeds(self) -> str:
        """The number of finished seeds, and the progress of each unfinished run."""
        others = [f"seed {run.seed} {run.progress}" for run in self.unfinished]
        return "; ".join([str(len(self.finished)), *others])


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Group runs by all settings except the seed; groups are in the order of their first run."""
    keys = differing(runs)
    label_keys = distinguishing(runs, keys)
    together: dict[str, list[Run]] = {}
    for run in runs:
        together.setdefault(values(run, keys), []).append(run)
    groups: list[Group] = []
    for index, members in enumerate(together.values()):
        ordered = tuple(sorted(members, key=lambda run: (run.seed, str(run.folder))))
        place = sum(group.task == ordered[0].config["task.name"] for group in groups)
        groups.append(Group(label(ordered[0], label_keys), ordered, index, place))
    return groups


def by_task(groups: Sequence[Group]) -> list[list[Group]]:
    """Return a list of groups per task; metrics are comparable only within a task."""
    tasks: dict[str, list[Group]] = {}
    for group in groups:
        tasks.setdefault(group.task, []).append(group)
    return list(tasks.values())


def differing(runs: Sequence[Run]) -> list[str]:
    """Return the keys in which runs differ, in the order in which labels use the keys."""
    every = list(dict.fromkeys(key for run in runs for key in run.config))
    kept = [key for key in every if key not in SHOWN_NOWHERE and not key.startswith("logger.")]
    found = [key for key in kept if len({values(run, [key]) for run in runs}) > 1]
    first = {key: place for place, key in enumerate(FIRST)}
    return sorted(found, key=lambda key: (key in NOT_IN_NAME, first.get(key, len(first))))


def distinguishing(runs: Sequence[Run], keys: Sequence[str]) -> list[str]:
    """Return keys that together distinguish all groups, chosen in the order of `keys`.

    A key is skipped if it distinguishes no groups that the keys chosen before do not distinguish.
    """
    groups = len({values(run, keys) for run in runs})
    chosen: list[str] = []
    for key in keys:
        count = len({values(run, chosen) for run in runs})
        if count == groups:
            break
        if len({values(run, [*chosen, key]) for run in runs}) > count:
            chosen.append(key)
    return chosen


def values(run: Run, keys: Sequence[str]) -> str:
    """Return the values that a run has for `keys` as one string, for comparison."""
    return json.dumps([[key, run.config[key]] for key in keys if key in run.config], default=str)


def label(run: Run, keys: Sequence[str]) -> str:
    """Return the values of `keys` in the config of `run` as a label; without keys, the algorithm's name."""
    parts = [run.config["algo.name"]] if "algo.name" not in keys else []
    for key in keys:
        if key not in run.config:  # the run has another option of this config group
            continue
        name = key.rpartition(".")[2]
        value = shown(run.config[key])
        if name == "name":
            parts.append(value)
        else:
            same = [other for other in keys if other.rpartition(".")[2] == name]
            parts.append(f"{key if len(same) > 1 else name}={value}")
    return " ".join(parts)


def shown(value: Any) -> str:
    """Return a value as it is written on a command line."""
    return value if isinstance(value, str) else json.dumps(value, default=str).replace('"', "")


def common(runs: Sequence[Run]) -> dict[str, str]:
    """Return the options that all runs share: config group -> option."""
    found = {}
    for key in ("task.name", "model.name", "algo.name", "generator.name", "backend.name", "gold.name"):
        if len({values(run, [key]) for run in runs}) == 1 and key in runs[0].config:
            found[key.partition(".")[0]] = shown(runs[0].config[key])
    return found
