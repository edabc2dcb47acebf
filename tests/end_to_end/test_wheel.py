"""Tests of the wheel in an environment that has only the wheel and the libraries, outside of the checkout."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.end_to_end.conftest import TINY
from tests.end_to_end.wheels import ROOT, VERSION, pip

pytestmark = pytest.mark.forks(False)

COMPLETE = """
source <(rlhf --completion bash)
for COMP_LINE in "$@"; do
    COMP_POINT=${#COMP_LINE} COMPREPLY=()
    _rlhf rlhf
    echo "${COMPREPLY[*]}"
done
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory, wheel) -> Path:
    """Return a folder with the environment `env`. A path file adds the libraries of this Python.

    The path file does not add the checkout, because path files of the added folder are not read.
    """
    base = tmp_path_factory.mktemp("wheel")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", base / "env"], check=True)
    pip("--python", base / "env/bin/python", "install", "--no-deps", "--no-index", wheel)
    (site,) = base.glob("env/lib/python*/site-packages")
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib"))
    return base


def call(place: Path, *command: str) -> str:
    """Run a command with the environment activated, and return its output."""
    environ = {"PATH": f"{place / 'env/bin'}:/usr/bin:/bin", "HOME": str(place), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=place, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_environment_does_not_see_the_checkout(place):
    names = "rlhf.__file__, rlhf.words.catalogue.conf_dir(), *sys.path"
    code = f"import sys, rlhf.words.catalogue; print({names})"
    package, conf, *path = call(place, "python", "-c", code).split()
    assert Path(package).is_relative_to(place) and Path(conf).is_relative_to(place)
    assert str(ROOT) not in path


def test_the_version_is_that_of_the_wheel(place):
    assert call(place, "rlhf", "--version") == f"rlhf {VERSION}\n"


def test_a_run_is_trained_and_reported(place, cache_dir):
    overrides = ["algo=dpo", *TINY, f"cache_dir={cache_dir}"]
    out = call(place, "rlhf", "train", *overrides)
    assert "finished: 2 updates" in out
    (folder,) = (place / "outputs").glob("tldr_mini-pythia-dpo-*")
    environment = json.loads((folder / "environment.json").read_text())
    assert environment["packages"]["rlhf-lab"] == VERSION and environment["git"] is None
    assert environment["command"] == ["train.py", *overrides], "the same as python -m rlhf.train"

    call(place, "rlhf", "report", "outputs")
    assert "python -m rlhf.train algo=dpo" in (place / "outputs/report/index.html").read_text()


def test_bash_completes_commands_groups_options_and_keys(place):
    lines = ["rlhf pl", "rlhf train algo=dp", "rlhf train algo=ppo algo.clip_v", "rlhf evaluate ru"]
    found = call(place, "bash", "-c", COMPLETE, "bash", *lines).splitlines()
    assert found == ["plan", "dpo dppo", "algo.clip_value=", "run="]
