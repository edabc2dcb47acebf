"""Tests of the figures of an update, which all streams with rules share, with values computed by hand."""

from types import SimpleNamespace

import pytest

from rlhf.training.clock import Group, Usage
from rlhf.training.events import RuledStream


def responses(version, *durations):
    group = Group(number=0, version=version, left=0, place=0)
    return [SimpleNamespace(group=group, start=10.0, end=10.0 + seconds) for seconds in durations]


def figures(groups, usage, *, version=6, replaced=0):
    rules = SimpleNamespace(version=version, refilled=3 + replaced, before=3)
    found = RuledStream.figures(SimpleNamespace(rules=rules), groups, now=90.0, slots=4, usage=usage)
    return {name.removeprefix("rollouts/"): stat.value() for name, stat in found.items()}


def test_the_figures_of_an_update_are_those_of_a_worked_example():
    """Two groups of two responses were trained, one group was given up, and one replaced."""
    usage = Usage(span=20.0, busy=60.0, trained=15.0, queue=50.0, wasted=24.0, dropped=1, cut=2)
    found = figures([responses(6, 2.0, 4.0), responses(3, 4.0, 8.0)], usage, replaced=1)
    assert found == {
        "time_s": 90.0,
        "update_s": 20.0,
        "generators_busy": 60 / 20 / 4,
        "trainer_busy": 15 / 20,
        "lag": 1.5,
        "lag_p90": 3.0,
        "oldest": 3.0,
        "queue": 50 / 20,  # complete groups, on average over time
        "length_ratio": 9 / ((18 + 24) / 4),  # seconds of a trained group by those of any of the four groups
        "wasted": 24 / 20 / 4,
        "dropped": 1.0,
        "cut": 2.0,
    }


@pytest.mark.parametrize(("count", "expected"), [(1, 0), (9, 8), (10, 8), (16, 14), (20, 17)])
def test_nine_tenths_of_the_groups_are_at_most_as_old_as_lag_p90(count, expected):
    """The ages are 0 to `count` - 1; at most a tenth of the groups, rounded down, is older."""
    groups = [responses(30 - age, 1.0) for age in range(count)]
    assert figures(groups, Usage(span=1.0), version=30)["lag_p90"] == expected


def test_without_lost_groups_or_time_no_ratio_is_wrong():
    found = figures([responses(6, 0.0)], Usage())
    assert (found["length_ratio"], found["queue"], found["trainer_busy"]) == (1.0, 0.0, 0.0)
