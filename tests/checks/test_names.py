"""Tests of names that become part of paths."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlhf.checks.check import problems
from rlhf.core.files import component
from rlhf.runs.folder import RunFolder
from rlhf.runs.resuming import folder_of
from rlhf.stages.evaluation import completions_file
from rlhf.stages.prerequisites import model_folder, pairs_folder
from rlhf.words.compose import compose
from rlhf.words.identity import run_name

OUTSIDE = ["/../../x", "../x", "..", "/x", ".", "a/../../b"]


def named(cfg, section, name):
    """Return the config with another name of a section, as a config file could set it."""
    return replace(cfg, **{section: replace(getattr(cfg, section), name=name)})


@pytest.mark.parametrize("section", ["algo", "model", "task", "generator", "backend", "scorer", "gold"])
@pytest.mark.parametrize("name", OUTSIDE)
def test_a_name_that_leaves_the_output_folder_is_refused(section, name):
    found = problems(named(compose([]), section, name))
    assert any(f"{section}.name must not be set" in text and f"got {name}; " in text for text in found)


@pytest.mark.parametrize("name", OUTSIDE)
def test_no_name_moves_a_folder(name, tmp_path):
    cfg = compose([f"output_dir={tmp_path}/o", f"cache_dir={tmp_path}/c"])
    (tmp_path / "o").mkdir()
    for section in ("algo", "model", "task", "generator"):
        other = named(cfg, section, name)
        assert folder_of(other).parent == tmp_path / "o"
        assert folder_of(other).resolve() == folder_of(other)
        for folder in (model_folder(other).path, pairs_folder(other)):
            assert folder.resolve().parent == tmp_path / "c"


def test_the_model_of_a_run_and_of_an_evaluation_stays_a_name(tmp_path):
    for model in ("../../x", "/a/b", "..", "x" * 500, "é" * 300, "hub/name", ""):
        file = completions_file(RunFolder(tmp_path), {"model": model, "settings": {"digest": "../0"}})
        assert file.resolve().parent == tmp_path / "evaluations"
        file.parent.mkdir(exist_ok=True)
        file.touch()
        assert "/" not in run_name(compose([f"model.policy='{model}'"]))


@pytest.mark.parametrize("split", [*OUTSIDE, ""])
def test_a_split_that_leaves_its_folder_is_refused(split):
    found = problems(compose(["task=chat", "debug=tiny", f"task.validation_split='{split}'"]))
    assert [text for text in found if text.startswith("task.validation_split must be the name of a split")]
    assert not any("validation_split" in text for text in problems(compose(["task=chat", "debug=tiny"])))


def test_a_component_keeps_good_names_and_is_different_for_long_names():
    for text in ("tldr_mini-pythia-dpo-hf-lag0-seed1-0123abcd", "checkpoint-12", "a.b"):
        assert component(text) == text
    one, other = component("a" + "/x" * 200), component("b" + "/x" * 200)
    assert one != other and one.endswith("-x-x") and max(map(len, (one, other))) <= 160
    assert component("a/b c", fill="_") == "a_b_c"
