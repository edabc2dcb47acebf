"""Tests of what a run records about its code."""

import subprocess

import pytest

from rlhf.runs import folder


@pytest.mark.parametrize(
    ("changed", "counts"),
    [
        ("rlhf/runs/folder.py", True),
        ("studies/a.yaml", True),
        ("studies/a/rows.jsonl", False),
        ("studies/a/tables/value.csv", False),
    ],
)
def test_what_a_study_writes_is_no_change_of_the_code(changed, counts, tmp_path, monkeypatch):
    file = tmp_path / "rlhf" / "runs" / "environment.py"
    for path in {file, tmp_path / "studies" / "a.yaml", tmp_path / changed}:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("1")
    for words in (["init"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-m", "a"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True, capture_output=True)
    monkeypatch.setattr(folder, "__file__", str(file))
    assert folder.git_commit()["changed"] is False
    (tmp_path / changed).write_text("2")
    assert folder.git_commit()["changed"] is counts
