"""Test of the growth benchmark, from measurement to plot."""

import json

import pytest

from benchmarks import growth
from benchmarks.against_trl.meter import PHASES
from benchmarks.growth import Point, work

SMALL = Point(prompts=2, samples=2, prompt=4, response=3, vocabulary=32, hidden_size=32, layers=1)


@pytest.mark.nightly
def test_a_small_sweep_is_measured_and_plotted(monkeypatch, tmp_path):
    monkeypatch.setattr(growth, "BASE", SMALL)
    monkeypatch.setattr(growth, "UPDATES", 2)
    monkeypatch.setattr(growth, "AXES", {"layers": ("layers", (1, 2)), "samples": ("samples", (2, 4))})
    out = tmp_path / "growth.json"
    for axis in ("layers", "samples"):  # the second command keeps the measurements of the first
        monkeypatch.setattr("sys.argv", ["growth", "--axis", axis, "--out", str(out)])
        growth.main()
    kept = json.loads(out.read_text())
    assert [point["value"] for point in kept["axes"]["layers"]] == [1, 2] and len(kept["axes"]) == 2
    first = kept["axes"]["layers"][0]
    assert all(0 < first["cpu_s"][phase] < 60 for phase in PHASES) and first["work"] == work(SMALL)
    assert out.with_suffix(".png").stat().st_size > 10_000
