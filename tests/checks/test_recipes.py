"""Recipes that train nothing are refused by the commands that train."""

import pytest

from rlhf.checks.algorithms import recipes_of_other_commands
from rlhf.core.errors import UserError
from rlhf.stages.pipeline import config_of
from rlhf.words.catalogue import options

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
