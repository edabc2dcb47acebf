"""Tests of the candidates of tab completion. tests/end_to_end/test_wheel.py runs the script of bash."""

from __future__ import annotations

import pytest

from rlhf.launch.command_line import candidates


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["algo=d"], {"algo=dpo", "algo=dapo", "algo=dr_grpo", "algo=dppo", "algo=distill"}),
        (["alg"], {"algo=", "algo."}),
        (["model.policy="], set()),
        (["model.policy=./mo"], set()),
        (["algo=ppo", "algo.clip_v"], {"algo.clip_value="}),
        (["algo=dpo", "algo.clip_v"], set()),
        (["algo=ppo", "algo.correction.c"], {"algo.correction.cap="}),
        (["scorer@gold=fa"], {"scorer@gold=facts"}),
        (["-m", "algo=dpo,ppo", "seed=1,2", "schedule.max_l"], {"schedule.max_lag="}),
        (["--conf"], {"--config-dir"}),
        (["--config-dir", "co"], set()),
        (["algo=zzz", "schedule.max_l"], set()),
        (["algo=zzz", "alg"], {"algo="}),
        (["algo=[", "schedule.max_l"], set()),
        (["algo.nam"], set()),
    ],
)
def test_candidates(words, expected):
    assert set(candidates(words)) == expected


def test_the_empty_word_has_all_groups_and_sections_except_those_that_help_does_not_list():
    found = set(candidates([""]))
    assert {"algo=", "algo.", "task=", "schedule.", "seed=", "experiment="} <= found
    assert not [each for each in found if each.startswith(("schema", "tuned", "length", "hydra."))]
    assert "hydra/launcher=" in found and "hydra/launcher=slurm" in candidates(["hydra/launcher="])


def test_own_arguments_of_a_command_are_candidates_and_have_no_values():
    assert candidates(["run"], own=["run", "models"]) == ["run="]
    assert candidates(["run=outputs/algo=dpo"], own=["run"]) == []
    assert candidates(["run=x", "schedule.max_l"], own=["run"]) == ["schedule.max_lag="]


def test_options_of_a_config_dir_are_candidates(own_conf, monkeypatch):
    words = ["--config-dir", str(own_conf), "experiment=fi"]
    monkeypatch.setattr("sys.argv", ["rlhf", "--complete", "train", *words])
    assert candidates(words) == ["experiment=fine"]
