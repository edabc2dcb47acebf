"""Tests of option files of the user: their settings count, or a message says that they do not."""

from __future__ import annotations

import pytest

from rlhf.checks.check import as_objects
from rlhf.core.errors import UserError
from rlhf.words.catalogue import also, replaced
from rlhf.words.compose import compose, compose_node

LENGTH = "schedule: {total_episodes: 320, prompts_per_update: 8}\n"
GLOBAL = "# @package _global_\n"


@pytest.fixture
def own(tmp_path):
    """A function that writes option files, and a folder that the configs of the block include."""

    def write(name, text):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)

    with also(tmp_path):
        yield write


def test_the_lengths_of_an_algorithm_are_inherited_by_another_file(own):
    own("algo/mine.yaml", f"{GLOBAL}defaults: [grpo, _self_]\n{LENGTH}")
    own("algo/other.yaml", f"{GLOBAL}defaults: [mine, _self_]\nalgo: {{kl_coef: 0.5}}\n")
    for algo in ("mine", "other"):
        cfg = compose(["task=local", "task.path=x", f"algo={algo}"])
        assert (cfg.schedule.total_episodes, cfg.schedule.prompts_per_update) == (320, 8)


def test_a_setting_that_another_option_replaces_is_reported_unless_it_is_meant(own):
    own("task/mine.yaml", f"{GLOBAL}defaults: [tldr_mini, _self_]\n{LENGTH}optim: {{betas: [0.8, 0.9]}}\n")
    words = ["task=mine", "algo=grpo"]
    first, second = replaced(compose(words), words)
    assert "schedule.total_episodes is 320 in" in first and "but another option sets 262144" in first
    assert second.endswith("add schedule.prompts_per_update=8")
    for more in (["schedule.total_episodes=64", "schedule.prompts_per_update=8"], ["debug=tiny"]):
        assert replaced(compose([*words, *more]), [*words, *more]) == []


def test_a_file_with_the_name_of_an_option_of_this_project_is_refused(own):
    own("algo/grpo.yaml", f"{GLOBAL}defaults: [/schema/algo@algo: grpo, _self_]\n{LENGTH}")
    with pytest.raises(UserError, match="rename the file to my_grpo.yaml, and set algo=my_grpo"):
        as_objects(compose_node(["algo=grpo"]), ["algo=grpo"])
