"""The figure of groups.jsonl: slots and trainer over time, ages of groups, and which lengths are trained."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from functools import partial
from heapq import heappush, heapreplace
from itertools import pairwise
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rlhf.report.drawing import (
    FAINT,
    INK,
    PAPER,
    RULE,
    SERIES,
    Chart,
    Panel,
    legend,
    look,
    mark,
    plain_labels,
    whole_numbers,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from rlhf.report.groups import Group, Section
    from rlhf.report.runs import Run

_UPDATES = 6  # updates of a timeline: with those before the first and after the last, seven versions
_SLOTS = 32  # largest number of slots of a timeline
_TIMELINES = 4  # largest number of timelines
_PITCH = 0.1  # inches from one slot to the next
_GREY = 6  # index in SERIES; grey is the colour of discarded groups
_COLOURS = SERIES[:_GREY] + SERIES[_GREY + 1 :]  # of versions

_CAPTION = (
    "Timeline: six updates in the middle of the run with the lowest seed. A row is a slot, which decodes "
    "one response after another; gaps are idle time. At most 32 slots are shown, evenly chosen. The colour "
    "is the version of the weights that sample; colours repeat after seven versions. The trainer is on top, "
    "in the colour of the version that it makes; thin lines are loads of weights. Grey: responses of groups "
    "that are discarded or replaced. Tick at the end: the response was cut. Age: updates between the first "
    "token of a group and its training."
)
_DURATION = (
    " Duration: mean time of the samples of a group in their slots, until they ended, were cut or discarded; "
    "a decile is a tenth of all groups that were trained or discarded."
)

_Rows = list[dict[str, Any]]  # rows of groups.jsonl


class Response(NamedTuple):
    """A response in its slot: times of start and end, and whether it was not trained, or cut."""

    start: float
    end: float
    dropped: bool
    cut: bool


def asynchrony(section: Section) -> tuple[Chart | None, list[str]]:
    """Return the figure of the runs in virtual time, and a remark about each file that is damaged."""
    found: dict[Group, list[tuple[Run, _Rows]]] = {}
    remarks = []
    for group in section.drawn:
        for run in group.measured:
            try:
                rows = run.groups() if run.loads else []
                if any("loaded" in row for row in rows):
                    found.setdefault(group, []).append((run, rows))
            except ValueError as error:
                remarks.append(f"groups of {run.folder.name} ({error})")
    every = {group: [row for _, rows in runs for row in rows] for group, runs in found.items()}
    timelines = [
        _timeline(*runs[0], group.label if len(section.groups) > 1 else "timeline")
        for group, runs in list(found.items())[:_TIMELINES]
    ]
    panels, caption = [*timelines, Panel(partial(_draw_ages, every))], _CAPTION
    if any(row["fate"] in ("cut", "dropped") for rows in every.values() for row in rows):
        panels, caption = [*panels, Panel(partial(_draw_deciles, every))], caption + _DURATION
    chart = Chart("asynchrony", "Asynchrony", caption, panels, legend(list(every)))
    return chart if found else None, remarks


def in_slots(responses: Iterable[Response], count: int) -> list[list[Response]]:
    """Return the responses of each slot; a response gets the slot that has been free for the longest time.

    Args:
        responses: responses in any order.
        count: number of slots; more are added if more responses overlap.
    """
    slots: list[list[Response]] = [[] for _ in range(count)]
    free = [(-inf, slot) for slot in range(count)]  # heap: since when a slot is free, or from when on
    for response in sorted(responses):
        if not free or free[0][0] > response.start:
            heappush(free, (-inf, len(slots)))
            slots.append([])
        _, slot = heapreplace(free, (response.end, free[0][1]))
        slots[slot].append(response)
    return slots


def _timeline(run: Run, rows: _Rows, label: str) -> Panel:
    """Return the panel of slots and trainer in the middle of a run."""
    updates = sorted({(row["loaded"], row["taken"]) for row in rows if "loaded" in row})
    loads = [loaded for loaded, _ in updates]
    first = max(0, (len(loads) - _UPDATES) // 2)
    begin, end = [0.0, *loads][first], loads[: first + _UPDATES][-1]
    responses = [
        Response(*times, "loaded" not in row, row["fate"] == "cut" and times[1] == max(row["ends"]))
        for row in rows
        for times in zip(row["starts"], row["ends"], strict=True)
        if times[0] < end and times[1] > begin
    ]
    slots = in_slots(responses, run.config.get("clock.slots") or 0)
    shown = slots[:: -(-len(slots) // _SLOTS)]
    placed = [(y, response) for y, slot in enumerate(shown) for response in slot]
    in_flight = run.config.get("schedule.update") == "in_flight"
    bars = [(y, *piece) for y, response in placed for piece in _pieces(response, loads, in_flight)]
    trainer = [
        (-2.5, taken, loaded - run.config.get("clock.sync_s", 0.0), _colour(version))
        for version, (loaded, taken) in enumerate(updates[first : first + _UPDATES], first + 1)
    ]
    work = sum(min(right, end) - max(left, begin) for _, left, right, _ in trainer)

    def draw(axes: Axes) -> None:
        axes.vlines(loads[max(0, first - 1) : first + _UPDATES], -3.5, len(shown), RULE, linewidth=0.8)
        axes.hlines(*zip(*bars, *trainer, strict=True), linewidth=72 * _PITCH * 0.8)
        ends = [
            (each.end, y - 0.45, y + 0.45, INK if each.cut else PAPER, 1.6 if each.cut else 0.8)
            for y, each in placed
        ]
        *at, widths = zip(*ends, strict=True)
        axes.vlines(*at, linewidth=widths)
        axes.set(xlim=(begin, end), ylim=(len(shown), -3.5), xlabel="virtual time (seconds)", title=title)
        axes.set_yticks([-2.5, (len(shown) - 1) / 2], ["trainer", "slots"])
        axes.tick_params(axis="y", length=0)
        axes.grid(visible=False)
        plain_labels(axes.xaxis)

    title = f"{label}\ntrainer works {100 * work / (end - begin):.0f} % of this time"
    return Panel(draw, 1.0 + _PITCH * (len(shown) + 4))


def _pieces(response: Response, loads: list[float], in_flight: bool) -> Iterator[tuple[float, float, str]]:
    """Yield begin, end and colour of the parts of a response that different versions sampled."""
    version = bisect_right(loads, response.start)
    later = loads[version : bisect_left(loads, response.end)] if in_flight else []
    for begin, end in pairwise([response.start, *later, response.end]):
        yield begin, end, FAINT if response.dropped else _colour(version)
        version += 1


def _colour(version: int) -> str:
    return _COLOURS[version % len(_COLOURS)]


def _draw_ages(rows: dict[Group, _Rows], axes: Axes) -> None:
    """Draw the distribution of the ages of the trained groups."""
    for group, own in rows.items():
        ages = [row["update"] - 1 - row["version"] for row in own if "loaded" in row]
        shares, edges = np.histogram(ages, np.arange(max(ages) + 2) - 0.5, density=True)
        colour = look(group.place or 0)["color"]
        axes.stairs(shares, edges, color=colour, fill=len(rows) == 1, linewidth=1.8, gid=mark(group))
    axes.set(title="ages of trained groups", xlabel="age (updates)", ylabel="share")
    whole_numbers(axes.xaxis)


def _draw_deciles(rows: dict[Group, _Rows], axes: Axes) -> None:
    """Draw the share of groups that are trained whole, by decile of the duration of all groups."""
    for group, own in rows.items():
        own = [row for row in own if row["fate"] != "replaced"]  # they were decoded whole
        ordered = sorted(own, key=lambda row: (sum(row["ends"]) - sum(row["starts"])) / len(row["ends"]))
        deciles = np.array_split([row["fate"] == "trained" for row in ordered], 10)
        points = [(decile, whole.mean()) for decile, whole in enumerate(deciles, 1) if len(whole)]
        axes.plot(*zip(*points, strict=True), gid=mark(group), **look(group.place or 0))
    axes.set(
        title="groups that are trained whole", xlabel="decile of duration", ylabel="share", ylim=(-0.04, 1.04)
    )
    axes.set_xticks(range(1, 11))
