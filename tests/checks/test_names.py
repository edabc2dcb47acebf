"""Rules for names: of sections, options, files and recipes."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from rlhf.checks import check
from rlhf.checks.check import problems
from rlhf.checks.settings import recipes_of_other_commands
from rlhf.core.errors import UserError
from rlhf.core.files import component
from rlhf.pipeline import config_of
from rlhf.runs.folder import RunFolder
from rlhf.runs.resuming import folder_of
from rlhf.stages.evaluation import completions_file
from rlhf.stages.prerequisites import model_folder, pairs_folder
from rlhf.words.catalogue import options
from rlhf.words.compose import compose, run_name

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


def test_a_file_with_the_name_of_a_library_is_refused_only_if_python_imports_it(tmp_path, monkeypatch):
    (tmp_path / "deepspeed.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "deepspeed", raising=False)
    cfg = compose([])
    assert check.problems(cfg) == []
    monkeypatch.syspath_prepend(tmp_path)
    (found,) = check.problems(cfg)
    assert found.startswith("deepspeed.py must not have the name of a library")
    assert found.endswith(f"got {tmp_path}/deepspeed.py; rename it")


RELABEL = "run: python -m rlhf.relabel output=outputs/tldr-relabelled experiment=tldr_relabel"


@pytest.mark.parametrize("words", [[], ["-m", "seed=1,2"], ["-m", "algo=dpo,ppo"]])
def test_training_refuses_a_recipe_that_relabels_and_names_the_command(command, tmp_path, words):
    answer = command("experiment=tldr_relabel", *words)
    assert answer.code == 2 and not answer.runs and RELABEL in answer.err
    assert not list(tmp_path.iterdir())


def test_the_pipeline_refuses_a_recipe_that_relabels():
    with pytest.raises(UserError, match="experiment must be a recipe that trains") as refused:
        config_of(["experiment=tldr_relabel"])
    assert RELABEL in str(refused.value)


def test_only_one_recipe_is_not_for_training():
    refused = [name for name in options("experiment") if [*recipes_of_other_commands([f"experiment={name}"])]]
    assert refused == ["tldr_relabel"]
