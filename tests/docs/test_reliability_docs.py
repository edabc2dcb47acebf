"""docs/reliability.md promises nothing that no test holds."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = (ROOT / "docs" / "reliability.md").read_text()
COLUMNS = ["fault", "lost", "what the user sees", "exit code", "test"]


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


HEAD, _, *ROWS = [
    cells(line) for line in DOCS.partition("## Faults\n")[2].splitlines() if line.startswith("|")
]


def held_by(file: str) -> set[str]:
    """The names of a file's tests; none of a file that is not there."""
    path = ROOT / file
    body = ast.parse(path.read_text()).body if path.exists() else []
    return {node.name for node in body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def test_the_table_has_its_columns():
    assert HEAD == COLUMNS and len(ROWS) > 20
    assert all(len(row) == len(COLUMNS) and all(row) for row in ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_each_fault_names_tests_that_exist(row):
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row[-1])
    assert named and len(named) == row[-1].count("::")
    for file, test in named:
        assert test in held_by(file), f"{file} has no {test}"


def test_each_test_of_survival_is_in_the_table():
    file = "tests/end_to_end/test_survival.py"
    named = {test for row in ROWS for test in re.findall(rf"{re.escape(file)}::(\w+)", row[-1])}
    assert held_by(file) - named == {"test_a_signal_after_the_last_update_lets_the_run_finish"}


def test_exit_codes_are_those_that_the_command_names():
    from rlhf import train

    named = set(re.findall(r"\d+", train.__doc__.partition("Exit codes:")[2]))
    killed = {"137"}  # the shell's for kill -9
    assert {code for row in ROWS for code in re.findall(r"\d+", row[3])} <= named | killed
