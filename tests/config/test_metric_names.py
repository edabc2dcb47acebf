"""Names of metrics that studies and sweeps may name."""

import re
from pathlib import Path

import pytest

from rlhf.config.compose import compose
from rlhf.config.metric_names import KNOWN, is_own, lacking

REFERENCE = Path(__file__).parents[2] / "docs/reference/metrics.md"


def test_known_metrics_are_in_the_reference():
    """The reference also has families that rows of studies leave out: times, throughput, memory."""
    said = set(re.findall(r"`([a-z_]+/[\w/<>]+)`", REFERENCE.read_text()))
    assert {*KNOWN} <= said
    rest = {name for name in said - {*KNOWN} if "<" not in name and is_own(name)}
    assert {name.partition("/")[0] for name in rest} <= {"time", "throughput", "memory", "warning"}


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
