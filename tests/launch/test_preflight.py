"""Tests of the checks before a sweep."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from rlhf.launch.preflight import folders_outside


@pytest.mark.parametrize(
    ("subdir", "outside"),
    [("${run_name:}", False), ("seeds/${seed}", False), ("../x", True), ("a/../../x", True), ("/x", True)],
)
def test_run_folders_of_a_sweep_must_be_below_its_folder(subdir, outside):
    config = OmegaConf.create({"hydra": {"sweep": {"dir": "outputs", "subdir": subdir}}})
    found = list(folders_outside(config))
    assert len(found) == outside
    assert not outside or f"got {subdir}; set hydra.sweep.dir=<folder>" in found[0]
