"""Test of the rule that no file in the current folder hides a library."""

from __future__ import annotations

import sys

from rlhf.checks import check
from rlhf.words.compose import compose


def test_a_file_with_the_name_of_a_library_is_refused_only_if_python_imports_it(tmp_path, monkeypatch):
    (tmp_path / "deepspeed.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "deepspeed", raising=False)
    cfg = compose([])
    assert check.problems(cfg) == []
    monkeypatch.syspath_prepend(tmp_path)
    (found,) = check.problems(cfg)
    assert found.startswith("deepspeed.py must not have the name of a library")
    assert found.endswith(f"got {tmp_path}/deepspeed.py; rename it")
