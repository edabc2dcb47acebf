"""Tests of sweeps in docs/runs.md and of SLURM in docs/hardware.md: commands, files, exit codes, defaults."""

from __future__ import annotations

import re
import shlex
import subprocess
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from rlhf import train
from rlhf.config.run import SearchConfig
from rlhf.launch import sweep
from rlhf.launch.preflight import completed
from rlhf.words.compose import compose

ROOT = Path(__file__).parents[2]
SWEEPS = (ROOT / "docs" / "runs.md").read_text().partition("\n## Sweeps\n")[2].partition("\n## ")[0]
SLURM = (ROOT / "docs" / "hardware.md").read_text().partition("\n## SLURM\n")[2].partition("\n## ")[0]
DOCS = SWEEPS + SLURM
COMMANDS = [line.strip() for line in DOCS.splitlines() if line.startswith("    ")]


def words(start: str) -> list[list[str]]:
    return [shlex.split(line.removeprefix(start)) for line in COMMANDS if line.startswith(start)]


def test_each_command_of_the_docs_is_of_a_known_kind():
    kinds = ("python -m rlhf.train ", "sbatch ", "launchers/", "cp launchers/", "source launchers/site.sh")
    assert len(COMMANDS) >= 9 and all(line.startswith(kinds) for line in COMMANDS)


@pytest.mark.parametrize("given", words("python -m rlhf.train "), ids=str)
def test_a_sweep_of_the_docs_launches(command, monkeypatch, tmp_path, given):
    (tmp_path / "outputs").mkdir()  # a run would create this folder
    launched = []

    def launch(watched, jobs, first):
        launched.extend((watched.launcher, job) for job in jobs)
        return [completed(0.5) for _ in jobs]

    monkeypatch.setattr(sweep.Sweep, "run", launch)
    answer = command(*given)
    assert answer.code == 0, answer.err
    trials = 20 if "hydra/sweeper=search" in given else 10 if "sweep=lr" in given else None
    assert len(launched) == (trials or (2 if "algo=ppo" in given else 4))
    for word in given:
        if word.startswith("hydra.launcher."):
            key, _, value = word.removeprefix("hydra.launcher.").partition("=")
            launcher = launched[0][0]
            assert str({**getattr(launcher, "params", {}), **getattr(launcher, "joblib", {})}[key]) == value


@pytest.mark.parametrize("given", words("sbatch "), ids=str)
def test_a_job_of_the_docs_composes(given):
    script = next(word for word in given if not word.startswith("--"))
    assert (ROOT / script).is_file()
    compose(given[given.index(script) + 1 :])


def test_files_and_make_targets_in_the_docs_exist():
    named = set(re.findall(r"`?((?:launchers|tests|rlhf)/[\w./]+\.\w+)", DOCS)) - {"launchers/site.sh"}
    assert len(named) >= 4 and all((ROOT / file).is_file() for file in named), named
    assert "launchers/site.sh" in (ROOT / ".gitignore").read_text().split()
    makefile = (ROOT / "Makefile").read_text()
    assert all(f"\n{target}:" in makefile for target in re.findall(r"`make ([\w-]+)`", DOCS))


def test_exit_codes_of_the_docs_are_those_of_the_command():
    table = SLURM.partition("| exit code |")[2].partition("\n\n")[0]
    killed = {"137"}  # the exit code that a shell reports after kill -9
    named = set(re.findall(r"\b\d+\b", train.__doc__.partition("Exit codes:")[2])) | killed
    assert set(re.findall(r"^\| (\d+) \|", table, re.M)) == named


def test_keys_and_defaults_of_the_docs_are_those_of_the_launcher():
    conf = (ROOT / "conf" / "hydra" / "launcher" / "slurm.yaml").read_text()
    for key, value in (("timeout_min", 240), ("signal_delay_s", 300), ("max_num_timeout", 100)):
        assert f"\n{key}: {value} " in conf and re.search(rf"{key}` \| {value} \|", DOCS)


def test_keys_and_defaults_of_the_docs_are_those_of_a_search():
    rows = re.findall(r"^\| `hydra\.sweeper\.(\w+)`(?:, `\.(\w+)`)? \| ([^|]+) \|", DOCS, re.M)
    told = {}
    for first, second, defaults in rows:
        values = [yaml.safe_load(value.strip("` ")) for value in defaults.split(",")]
        told |= dict(zip(filter(None, (first, second)), values * 2, strict=False))
    config = yaml.safe_load((ROOT / "conf" / "hydra" / "sweeper" / "search.yaml").read_text())
    del config["defaults"]
    made = SearchConfig()
    defaults = {key: getattr(made, key) for key in config}
    assert told == config == {key: getattr(value, "value", value) for key, value in defaults.items()}
    assert config.keys() == {each.name for each in fields(made)} - {"_target_", "params"}


@pytest.mark.parametrize("script", ["train.sbatch", "local_slurm.sh", "site.example.sh"])
def test_scripts_have_valid_shell_syntax(script):
    subprocess.run(["bash", "-n", ROOT / "launchers" / script], check=True)
