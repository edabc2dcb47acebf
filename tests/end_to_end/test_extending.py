"""Tests of files and commands in docs/python.md. rlhf and the example package are installed as wheels."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf.core.files import read_lines
from tests.end_to_end.wheels import build, pip

pytestmark = pytest.mark.forks(False)

ROOT = Path(__file__).parents[2]
DOCS = (ROOT / "docs" / "python.md").read_text()
EXAMPLE = DOCS.partition("\n## Extending\n")[2]
FILES = dict(re.findall(r"^`([\w./]+)`\n\n```\w+\n(.*?)^```$", EXAMPLE, re.M | re.S))
COMMANDS = re.findall(r"^    (?:rlhf train|python -m rlhf\.\w+) --config-dir my_lab/conf (.*)$", DOCS, re.M)
TINY = ["debug=tiny", "task.train_size=64", "task.validation_size=32", "progress=off"]


@pytest.fixture(scope="module")
def lab(tmp_path_factory, wheel) -> Path:
    """Return a folder outside of the checkout with `site` (rlhf and my_lab installed) and `my_lab/conf`."""
    base = tmp_path_factory.mktemp("lab")
    for name, text in {**FILES, "my_lab/__init__.py": ""}.items():
        file = base / "my_lab" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    mine = build(base / "my_lab", base / "wheels")
    pip("install", "--no-deps", "--no-index", "--target", base / "site", "--upgrade", wheel, mine)
    shutil.rmtree(base / "my_lab" / "my_lab")
    return base


def call(lab: Path, *words: str, code: int = 0) -> str:
    """Run a Python command in the folder `lab`, check its exit code and return its output."""
    done = subprocess.run(
        [sys.executable, *words],
        cwd=lab,
        env={**os.environ, "PYTHONPATH": str(lab / "site")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_rlhf_is_imported_from_the_installed_wheel(lab):
    assert call(lab, "-c", "import rlhf; print(rlhf.__file__)").startswith(str(lab / "site"))


def test_help_lists_the_options_of_rlhf_and_of_the_other_package(lab):
    told = call(lab, "site/bin/rlhf", "train", "--config-dir", "my_lab/conf", "--help")
    for option in ("dpo", "reinforce_mean", "backwards", "in_place"):
        assert re.search(rf"^      +([a-z_0-9]+ +)*{option}( |$)", told, re.M), option


def test_algorithm_task_and_scorer_of_another_package_can_be_trained_and_evaluated(lab):
    words = ["--config-dir", "my_lab/conf", *COMMANDS[0].split(), *TINY]
    told = call(lab, "site/bin/rlhf", "train", *words)
    assert "reinforce_mean of pythia on backwards" in told
    (folder,) = (lab / "outputs").glob("backwards-pythia-reinforce_mean-hf-lag1-seed1-*")
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert "eval/win_rate" in last

    call(lab, "-m", "rlhf.evaluate", f"run={folder}", "--config-dir", "my_lab/conf", "progress=off")

    rows = read_lines(folder / "evaluations.jsonl")
    assert rows[-1]["model"] == "model" and rows[-1]["settings"]["gold"] == "in_place"
    assert rows[-1]["eval/gold_score"] == last["eval/gold_score"]


@pytest.mark.nightly
def test_the_pipeline_runs_the_stages_of_another_package(lab):
    told = call(lab, "-m", "rlhf.pipeline", "--config-dir", "my_lab/conf", *COMMANDS[1].split(), *TINY)
    assert "[1/3] SFT model" in told and "[3/3] evaluation (validation): done" in told


def test_an_unknown_key_is_reported_with_similar_keys_of_the_other_package(lab):
    words = ["--config-dir", "my_lab/conf", "task=backwards", "task.leters=3"]
    told = call(lab, "site/bin/rlhf", "train", *words, code=2)
    assert "task.leters must be a setting of task=backwards" in told and "task.letters?" in told


def test_an_entry_point_that_cannot_be_imported_is_reported_with_its_package(lab, tmp_path):
    site = tmp_path / "site"
    shutil.copytree(lab / "site", site)
    (site / "my_lab" / "options.py").write_text("import nothing_of_the_kind\n")
    done = subprocess.run(
        [sys.executable, "-m", "rlhf.plan"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: my_lab.options must import (the package my-lab names it")
