"""Tests of run names, and of folders that an earlier version named after the option of the model."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf.runs.resuming import earlier_name, folder_of
from rlhf.words.compose import compose
from rlhf.words.identity import LONGEST_NAME, digest, model_label, run_name

OWN = ["task=preferences", "task.path=data", "algo=rloo", "scorer=function", "scorer.path=json:loads"]
RUN = "preferences-smol-sft-dataset-lag0-seed1-0123abcd"


@pytest.mark.parametrize(
    ("policy", "label"),
    [
        ("models/smol", "smol"),
        ("models/smol/", "smol"),
        ("meta-llama/Llama-3.2-1B", "Llama-3.2-1B"),
        (f"outputs/{RUN}/model", "smol_sft"),
        (f"outputs/{RUN}/checkpoint-40", "smol_sft"),
        ("my-run/model", "my-run"),
    ],
)
def test_a_run_is_named_after_its_model(policy, label):
    cfg = compose([*OWN, f"model.policy={policy}"])  # a dash of the model is an underscore in the run name
    assert model_label(cfg) == label
    assert run_name(cfg) == f"preferences-{label.replace('-', '_')}-rloo-hf-lag0-seed1-{digest(cfg)}"


def test_an_sft_run_is_named_after_its_base_model():
    words = ["task=local", "task.path=x", "algo=sft", "model.base=models/smol", "model.policy=models/other"]
    assert run_name(compose(words)).startswith("local-smol-sft-dataset-lag0-seed1-")


def test_runs_that_make_their_models_are_named_after_the_option():
    assert run_name(compose([])).startswith("tldr_mini-pythia-dpo-hf-lag0-seed1-")
    made = compose(["model.policy=outputs/artefacts/sft-tldr_mini-0123abcd/model"])
    assert run_name(made).startswith("tldr_mini-pythia-dpo-")


@pytest.mark.parametrize("name", ["x" * 300, "dätä & mehr", "a b", "..", "1.5B-Instruct.v0"])
def test_names_are_short_and_safe_in_file_systems(name):
    found = run_name(compose([*OWN, f"model.policy='models/{name}'"]))
    assert len(found) <= LONGEST_NAME and all(
        sign.isalnum() and sign.isascii() or sign in "._-" for sign in found
    )
    assert found.startswith("preferences-") and not found.startswith("preferences-.")


def test_a_folder_with_the_name_of_an_earlier_version_is_found(tmp_path):
    cfg = compose([*OWN, "model.policy=models/smol", f"output_dir={tmp_path}"])
    new, old = tmp_path / run_name(cfg), tmp_path / f"preferences-pythia-rloo-hf-lag0-seed1-{digest(cfg)}"
    assert folder_of(cfg) == new and earlier_name(new, cfg) is None
    old.mkdir()
    assert folder_of(cfg) == new  # an empty folder is no run
    (old / "config.yaml").touch()
    assert folder_of(cfg) == old and f"the run continues in {old}" in str(earlier_name(old, cfg))
    other = compose([*OWN, "model.policy=models/smol", f"output_dir={tmp_path}", "seed=2"])
    assert folder_of(other) == tmp_path / run_name(other)
    Path(new).mkdir()
    assert folder_of(cfg) == new
