"""Tests of the bad-input benchmark: arguments of rows, and the comparison with the expectation."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.bad_inputs.__main__ import PARTS, Result, code_cell, page
from benchmarks.bad_inputs.row import Row

ROWS = [row for _, rows in PARTS.values() for row in rows]


def test_names_are_unique_and_begin_with_the_letter_of_their_part():
    assert not [name for name, count in Counter(row.name for row in ROWS).items() if count > 1]
    for letter, (_, rows) in PARTS.items():
        assert all(row.name.startswith(f"{letter}_") for row in rows)


def test_every_verdict_other_than_good_has_a_remark():
    assert {row.verdict for row in ROWS} <= {"good", "poor", "BAD"}
    assert not [row.name for row in ROWS if row.verdict != "good" and not row.remark]


def test_arguments_of_a_row_replace_those_of_its_base():
    row = Row("a_x", "+scorer.path=b 'task.path=\"my data\"'", base="algo=dpo scorer.path=a")
    assert row.words == ["algo=dpo", "+scorer.path=b", 'task.path="my data"']


TRACE = "Traceback (most recent call last):\nKeyError: 1\n"


@pytest.mark.parametrize(
    ("code", "output", "left", "differences"),
    [
        (2, "warning: x\nerror: seed must be\nwhole; set seed=1", (), []),
        (1, "error: seed must be whole; set seed=1", (), ["exit code 1, not 2"]),
        (2, "error: see --help", (), ["no 'set seed=1'"]),
        (2, f"{TRACE}error: set seed=1", (), ["traceback"]),
        (2, "error: set seed=1", ("outputs/x/config.yaml",), ["leaves 1 files"]),
        (None, "set seed=1", (), ["no end within 180 s"]),
        (2, "error: set seed=1 or quote the value", (), ["contains 'quote'"]),
    ],
)
def test_a_result_is_compared_with_the_expectation(code, output, left, differences):
    row = Row("a_x", "seed=x", ("set seed=1",), never=("quote",))
    assert Result(row, code, 1.0, output, left).differs == differences


def results(letter, message):
    return [Result(row, 2, 0.5, f"warning: y\nerror: {message}", ()) for row in PARTS[letter][1]]


def test_the_page_shows_message_verdict_and_differences():
    row = PARTS["a"][1][0]
    text = page([Result(row, 1, 0.5, f"error: a | b {row.says[0]}", ()), *results("a", "x")[1:]])
    assert f"| {row.input} | 1 | 0.5 |  |  | differs from good (exit code 1, not 2) |" in text
    assert f"`error: a \\| b {row.says[0]}`" in text
    assert len(code_cell("x" * 1000)) < 320 and "`" not in code_cell("a `b` c")


def test_the_page_keeps_the_tables_of_parts_that_did_not_run():
    before = page([*results("a", "old"), *results("f", "old")])
    after = page([*results("f", "new"), *results("g", "new")[1:]], before)
    assert after.count("`error: old`") == len(PARTS["a"][1])
    assert after.count("`error: new`") == len(PARTS["f"][1])
    assert after.count("\n## ") == before.count("\n## ") == 2
