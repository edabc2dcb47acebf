"""Tests that docs/algorithms.md describes every algorithm and setting, with the defaults of the code."""

import re
from dataclasses import fields
from enum import Enum
from pathlib import Path

import pytest

from rlhf.checks.check import problems
from rlhf.config.algorithms import Covariance, CovarianceConfig
from rlhf.config.schema import SCHEMAS
from rlhf.words.catalogue import options
from rlhf.words.compose import compose

DOCS = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
COMMANDS = re.findall(r"^    python -m rlhf\.train (.*)$", DOCS, re.M)
ALGORITHMS = sorted(options("algo"))


def table(heading: str) -> dict[str, list[str]]:
    """Return the rows of the first table after a heading, by their first cell."""
    lines = DOCS.partition(f"## {heading}\n")[2].partition("\n## ")[0].splitlines()
    rows = [line.strip("|").split("|") for line in lines if line.startswith("| `")]
    return {name.strip(" `"): [cell.strip() for cell in cells] for name, *cells in rows[1:]}


@pytest.mark.parametrize("heading", ["Formulas", "Settings and requirements"])
def test_every_algorithm_has_its_row(heading):
    assert sorted(table(heading)) == ALGORITHMS


def test_every_algorithm_has_a_command():
    chosen = {words.split()[0] for words in COMMANDS}
    assert chosen == {f"algo={name}" for name in ALGORITHMS}


@pytest.mark.parametrize("words", COMMANDS)
def test_the_commands_pass_validation(words):
    assert problems(compose(words.split())) == []


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_keys_and_defaults_are_those_of_the_section(algo):
    section = SCHEMAS[f"schema/algo/{algo}"]()
    own = table("Settings and requirements")[algo][0]
    for key, default in re.findall(r"`(\w+)`(?: \(([^),:]+))?", own):
        value = getattr(section, key)
        value = value.value if isinstance(value, Enum) else value
        if not default:
            assert value is None
        elif isinstance(value, bool | str):
            assert str(value).lower() == default
        else:
            assert float(value) == float(default)


def test_every_key_of_an_algorithm_is_described():
    keys = {f.name for algo in ALGORITHMS for f in fields(SCHEMAS[f"schema/algo/{algo}"])}
    named = set(re.findall(r"`(?:algo\.)?([a-z_]+)(?:=[\w.]+)?`", DOCS))
    assert keys - named == {"name"}


def test_keys_and_defaults_of_covariance_are_those_of_the_section():
    text = DOCS.partition("### KL-Cov and Clip-Cov\n")[2].partition("\n### ")[0]
    rows = re.findall(r"^\| `(\w+)` \| ([\d.e-]+) \|", text, re.M)
    section = CovarianceConfig()
    assert {key: float(default) for key, default in rows} == {
        field.name: getattr(section, field.name) for field in fields(section) if field.name != "kind"
    }
    kinds = re.findall(r"^\| `(\w+)` \((?:default|KL-Cov|Clip-Cov)\) \|", text, re.M)
    assert kinds == [kind.value for kind in Covariance]
