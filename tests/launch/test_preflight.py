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


def test_a_run_that_cannot_upload_its_model_is_refused_before_its_folder_exists(command, tmp_path):
    answer = command("push_to=model")
    assert answer.code == 2 and not answer.runs and not list(tmp_path.iterdir())
    for text in ("push_to= must be <owner>/<name>", "push_to= needs a token", "got HF_HUB_OFFLINE=1"):
        assert text in answer.err


def test_a_sweep_must_not_upload_the_model_of_each_job(command, tmp_path):
    answer = command("-m", "seed=1,2", "push_to=me/it")
    assert answer.code == 2 and not answer.runs and not list(tmp_path.iterdir())
    assert "push_to must be null in a sweep" in answer.err
