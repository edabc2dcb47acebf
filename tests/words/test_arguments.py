"""Tests of arguments that Hydra reads only in quotes, and of suggestions for misspelled words."""

from __future__ import annotations

import pytest

from rlhf.words.mistakes import readable, repeated
from rlhf.words.suggestions import closest


@pytest.mark.parametrize(
    "argument",
    [
        "model.pad_token=<|pad|>",
        "task.path=my dätä/pairs",
        "algo.beta=\u22121",
        "task.path=a&b",
        "task.path=~/data",
    ],
)
def test_a_value_with_signs_that_hydra_cannot_read_gets_quotes(argument):
    key, _, value = argument.partition("=")
    assert readable([argument]) == [f'{key}="{value}"']


@pytest.mark.parametrize(
    "argument",
    [
        "optim.lr=1e-3",
        "task.path=data/a b.jsonl",
        "+scorer@scorer.parts.x=http",
        "~algo",
        "optim.betas=[0.9,0.999]",
        "optim={lr: 1e-3}",
        'model.pad_token="<|pad|>"',
        "algo.beta=${optim.lr}",
        "seed=1,2,<3",
        "--config-dir=dätä",
        "<word>",
        "a='",
    ],
)
def test_other_arguments_stay_as_they_are(argument):
    assert readable([argument]) == [argument]


def test_a_key_with_two_different_values_gives_a_warning():
    assert repeated(["seed=1", "algo=dpo", "seed=2", "algo=dpo"]) == [
        "seed is given twice (1, 2); the last value counts"
    ]


def test_suggestions_ignore_case_and_dashes_and_know_other_names_of_dtypes():
    assert closest("Tldr-Mini", ["tldr", "tldr_mini"]) == "tldr_mini"
    assert closest("dpo.yaml", ["ppo", "dpo"]) == "dpo"
    assert closest("bf16", ["float16", "bfloat16"]) == "bfloat16"
    assert closest("xyz", ["float16"]) is None
