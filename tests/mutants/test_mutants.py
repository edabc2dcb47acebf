"""Tests of the program that changes lines."""

import pytest

from tests.mutants.__main__ import changed
from tests.mutants.table import Mutant

TEXT = "def f(x):\n    y = x + 1  # why\n    return y\n\n\ndef g(x):\n    return x\n    return x\n"


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("return y", "return -y", "    return -y\n"),
        ("y = x + 1", "y = x - 1", "    y = x - 1  # why\n"),
        ("y = x + 1  # why", "y = 0", "    y = 0\n"),
        ("return y", "", ""),
    ],
)
def test_one_line_is_changed_and_keeps_its_place(old, new, expected):
    before, after = TEXT.splitlines(keepends=True), changed(TEXT, Mutant("f.py", old, new, ()))
    assert expected in after and len(after.splitlines()) == len(before) - (not new)


@pytest.mark.parametrize("old", ["return x", "return z", "x"])
def test_a_line_that_is_not_there_exactly_once_is_an_error_that_names_it(old):
    with pytest.raises(ValueError, match=old):
        changed(TEXT, Mutant("f.py", old, "pass", ()))
