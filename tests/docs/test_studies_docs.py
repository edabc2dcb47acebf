"""The package, the study files and the plan of docs/studies.md."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = (Path(__file__).parents[2] / "docs/studies.md").read_text()
FILES = dict(re.findall(r"^`([\w./]+)`[^`]*?\n\n```\w+\n(.*?)^```$", DOCS, re.M | re.S))
PROGRAM = """\
from pathlib import Path
from rlhf import Study
from rlhf.study.study import write_study

base = Study("studies/stale.yaml")
plan = base.plan()
plan.check()
print(*plan.lines(), sep="\\n")
added = Study(write_study(base.spec, Path("asym.yaml"))).plan()
added.check()
print(*(each.run for each in added.runs), sep="\\n")
"""


@pytest.mark.process
def test_the_package_and_the_studies_of_the_docs_are_valid_and_planned_as_shown(tmp_path):
    for name, text in {
        **FILES,
        "asym/asym/__init__.py": "",
        "asym-0.1.dist-info/METADATA": "Metadata-Version: 2.1\nName: asym\nVersion: 0.1\n",
        "asym-0.1.dist-info/entry_points.txt": "[rlhf.options]\nasym = asym.options\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    path = os.pathsep.join([str(tmp_path), str(tmp_path / "asym"), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    shown = re.search(r"rlhf study plan studies/stale.yaml\n(.*?)    \.\.\.", DOCS, re.S)
    assert shown is not None
    plan = [line.removeprefix("    ") for line in shown[1].splitlines()]
    assert done.stdout.splitlines()[: len(plan)] == plan
    assert done.stdout.splitlines()[len(plan) :] == [
        f"sums asym lag={lag} seed {seed}" for seed in (1, 2, 3) for lag in (0, 16)
    ]
