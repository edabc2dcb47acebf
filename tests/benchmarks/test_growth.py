"""Tests of the growth benchmark: the expected work and the marks on exponents that are too large."""

import math

import pytest

from benchmarks import growth
from benchmarks.against_trl.meter import PHASES
from benchmarks.growth import AXES, BASE, Exponent, Point, slope, table, work
from rlhf.checks.check import problems
from rlhf.words.compose import compose

SMALL = Point(prompts=2, samples=2, prompt=4, response=3, vocabulary=32, hidden_size=32, layers=1)


def grown(**changes):
    """Return the factor by which `changes` increase the work of each phase."""
    before, after = work(BASE), work(Point(**changes))
    return {phase: after[phase] / before[phase] for phase in PHASES}


def points(exponent, values=(1, 2, 4, 8), of_work=1.0):
    costs = [(3 * value**exponent, 7 * value**of_work) for value in values]
    return [
        {"value": value, "cpu_s": dict.fromkeys(PHASES, cpu_s), "work": dict.fromkeys(PHASES, more)}
        for value, (cpu_s, more) in zip(values, costs, strict=True)
    ]


def test_work_is_linear_in_prompts_and_layers_and_sublinear_in_samples():
    assert grown(prompts=16) == pytest.approx({**dict.fromkeys(PHASES, 2), "train": 2}, rel=0.02)
    assert grown(layers=8)["score"] == pytest.approx(2)
    assert all(1 < times < 2 for times in grown(samples=8).values()), "one encoding for all samples"


def test_score_work_is_at_most_quadratic_in_lengths_and_width_and_needs_no_vocabulary():
    for axis, value in (("prompt", 2**17), ("response", 2**17), ("hidden_size", 2**17)):
        more, twice = (work(Point(**{axis: x}))["score"] for x in (value, 2 * value))
        assert more / work(BASE)["score"] > value / getattr(BASE, axis)
        assert twice / more == pytest.approx(4, rel=0.05)
    found = grown(vocabulary=2**20)
    assert found.pop("score") == 1 and all(times > 30 for times in found.values())


def test_an_exponent_is_the_log_log_slope_over_all_points_and_over_the_last_two():
    assert slope([(2, 8), (4, 64), (8, 512)]) == pytest.approx(3)
    assert slope([(1, 1), (2, 2), (4, 2), (8, 1)]) == pytest.approx(0)
    curve = points(1.5)
    curve[0]["cpu_s"]["train"] *= 4  # an additional cost of small updates
    found = Exponent.of(curve, "train")
    assert found.end == pytest.approx(1.5) and found.all < 1.1 and found.work_all == pytest.approx(1)


def test_a_phase_that_grows_faster_than_its_work_is_marked():
    assert Exponent.of(points(1.5), "train").too_fast
    assert not Exponent.of(points(1.5, of_work=1.4), "train").too_fast
    row = table({"prompts": points(1.5), "layers": points(0.9)}).splitlines()[2:]
    assert row[0].startswith("| prompts (N) | 1 | 8 | **1.50, 1.50** (1.00, 1.00) |") and "**" not in row[1]


@pytest.mark.parametrize("axis", AXES)
def test_every_point_gives_a_valid_config(axis, tmp_path, monkeypatch):
    growth.make(SMALL, tmp_path)
    for value in AXES[axis][1]:
        assert math.log2(value).is_integer()
        words = growth.overrides(Point(**{axis: value}), tmp_path)
        found = problems(compose([*words, "task.max_prompt_tokens=4", "generator.response_length=3"]))
        assert not found
