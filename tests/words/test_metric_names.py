"""Names of metrics that studies and sweeps may name."""

import pytest

from rlhf.words.compose import compose
from rlhf.words.suggestions import lacking


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("eval/gold_score_low", ""),
        ("objective/scores/length", ""),
        ("environment/turns", "task=calculator"),
        ("environment/my_figure", "task=calculator"),
        ("eval/kl", "algo=sft"),
    ],
)
def test_a_run_may_have_a_metric(name, words):
    assert lacking(name, compose(words.split())) is None


@pytest.mark.parametrize("name", ["environment/turn", "environment/tool_error"])
def test_a_misspelled_figure_of_an_environment_is_not_a_figure_of_the_user(name):
    assert lacking(name, compose(["task=calculator"]), code=True) is not None
