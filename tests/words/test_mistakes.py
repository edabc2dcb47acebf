"""Tests of errors on the command line: one message with a remedy, exit code 2, no folder, no torch import."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf.checks.check import composed
from rlhf.core.errors import override
from rlhf.runs.folder import RunFolder
from rlhf.words.catalogue import groups
from rlhf.words.compose import compose, digest, load_config
from rlhf.words.mistakes import readable, repeated

# Wrong arguments -> the key that the message must name -> a command that follows the remedy, whose keys the
# message must have; without it, the remedy has no words to paste.
TABLE = Path(__file__).with_name("mistakes.txt").read_text(encoding="utf-8")
MISTAKES = [[*row.split(" -> "), ""][:3] for row in TABLE.replace("{home}", str(Path.home())).splitlines()]

IN_FILES = {  # experiment file of `own_conf` -> words that the message must contain
    "typo": "experiment/typo.yaml algo.beta",
    "wrong_type": "experiment/wrong_type.yaml 'high' algo.beta=0.1",
    "chain": "experiment/typo.yaml algo.beta",
    "list": "experiment/list.yaml optim.betas=[0.9,0.999]",
    "reference": "experiment/reference.yaml algo.beta ${nope}",
    "two": "experiment/two.yaml algo override /algo:",
    "wrong_group": "experiment/wrong_group.yaml algoo algo?",
    "wrong_option": "experiment/wrong_option.yaml 'dpoo' algo=dpo?",
    "named": "algo.name algo=ppo",
    "no_package": "experiment/no_package.yaml @package _global_",
    "no_yaml": "no_yaml.yaml YAML",
}


@pytest.mark.parametrize(("typed", "key", "remedy"), MISTAKES, ids=[row[0] for row in MISTAKES])
def test_a_mistake_is_refused_with_its_key_and_a_remedy_that_is_accepted(
    command, typed, key, remedy, tmp_path
):
    answer = command(*typed.split())
    assert answer.code == 2 and not answer.runs and not list(tmp_path.iterdir())
    assert answer.err.startswith(f"error: {key}") and len(answer.err.splitlines()) == 1
    rule, got, after = answer.err.partition(", got ")
    assert re.search(" (must|needs) ", rule) and got and "; " in after
    words = remedy.split()
    for word in words:
        name, _, value = word.lstrip("+").partition("=")
        assert word in typed or name in after.partition("; ")[2] or f"{name}=" in rule, answer.err
        options = value and name in groups() and f"{name}={value}" not in typed
        assert not options or value in answer.err
    if words and not words[0].startswith("-"):
        composed(words)


@pytest.mark.parametrize("name", IN_FILES)
def test_error_in_an_experiment_file_names_the_file(command, own_conf, name):
    answer = command("--config-dir", str(own_conf), f"experiment={name}")
    assert answer.code == 2 and answer.err.startswith("error: ") and not answer.runs
    assert all(part in answer.err for part in IN_FILES[name].split())


def test_valid_experiment_file_of_the_user_runs(command, own_conf):
    answer = command("--config-dir", str(own_conf), "experiment=fine")
    assert answer.code == 0 and answer.runs[0][0].algo.beta == 0.3


@pytest.mark.parametrize(
    "typed",
    [
        "--config-dir {run} --config-name config",
        "--config-dir={copy}",
        "-cd {copy} -cn copy seed=3",
        "{run}",
        "{run}/config.yaml",
        "--config {run}/config.yaml",
        "config={run}/config.yaml",
        "experiment={copy}/copy.yaml",
    ],
)
def test_a_saved_config_in_place_of_options_is_refused_with_its_command(command, tmp_path, typed):
    folder = RunFolder(tmp_path / "run, it's")
    folder.path.mkdir()
    folder.write_config(compose(["algo=rloo", override("task.path", "a, b"), "seed=7"]))
    (tmp_path / "copy").mkdir()
    shutil.copy(folder.config, tmp_path / "copy" / "copy.yaml")
    words = [word.format(run=folder.path, copy=tmp_path / "copy") for word in typed.split()]
    answer = command(*words)
    assert answer.code == 2 and not answer.runs
    words = shlex.split(answer.err.partition("to run it")[2].partition(": ")[2])
    assert digest(compose(words[3:])) == digest(load_config(folder.config))


def test_a_folder_without_options_is_no_config_folder(command, tmp_path):
    answer = command("--config-dir", str(tmp_path))
    assert answer.code == 2 and "without a folder of options" in answer.err


@pytest.mark.parametrize(
    "words",
    [
        ["algo.beta=-1", "optim.lr=0", "schedule.total_episodes=1000", "seed=-1"],
        ["+algo.beat=1", "+schedule.foo=1", "task.data_seed=???"],
    ],
)
def test_all_problems_are_reported_together(command, words):
    answer = command(*words)
    assert answer.code == 2 and answer.err.startswith(f"error: {len(words)} problems\n  - ")
    for word in words:
        assert f"  - {word.lstrip('+').partition('=')[0]} must be" in answer.err


def test_warning_does_not_stop_the_run(command):
    answer = command("scorer=facts")
    assert answer.code == 0 and len(answer.runs) == 1
    assert "warning: scorer and scorer@gold are the same (facts)" in answer.err


@pytest.mark.process
def test_help_and_errors_do_not_import_torch_or_other_large_libraries(tmp_path, own_conf):
    commands = [
        ["--help"],
        ["--cfg", "job"],
        ["--cfg", "job", "--resolve", "logger=[wandb,tensorboard,mlflow,trackio]"],
        ["algo.beat=1"],
        ["+algo.beat=1"],
        ["algo.beta=high"],
        ["algo=dpoo"],
        ["algo.beta=-1"],
        ["--config-dir", str(own_conf), "experiment=typo"],
        ["resume=must"],
        ["-m", "seed=1,2", "algo.beta=0.1,-1"],
        ["scorer=function", "scorer.path=nowhere:nothing"],
        ["scorer=http", "scorer.url=nowhere"],
    ]
    script = """
import json, sys
from rlhf.train import main
codes = []
for words in json.loads(sys.argv[1]):
    sys.argv = ["train.py", *words]
    try:
        main()
        codes.append(0)
    except SystemExit as stop:
        codes.append(stop.code)
heavy = {"torch", "transformers", "datasets", "vllm", "deepspeed", "wandb", "tensorboard", "requests"}
heavy |= {"mlflow", "trackio", "matplotlib"}
heavy &= set(sys.modules)
print(json.dumps([codes, sorted(heavy)]))
"""
    done = subprocess.run(
        [sys.executable, "-c", script, json.dumps(commands)], cwd=tmp_path, capture_output=True, text=True
    )
    codes, heavy = json.loads(done.stdout.splitlines()[-1])
    assert codes == [0, 0, 0] + [2] * 10 and heavy == [], done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["own"]


@pytest.mark.process
def test_python_m_rlhf_train_reports_an_error(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-m", "rlhf.train", "algo.beta=high"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 2 and done.stderr.startswith("error: algo.beta must be a number")
    assert done.stdout == "" and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "argument",
    [
        "model.pad_token=<|pad|>",
        "task.path=my dätä/pairs",
        "algo.beta=\u22121",
        "task.path=a&b",
        "task.path=~/data",
    ],
)
def test_a_value_with_signs_that_hydra_cannot_read_gets_quotes(argument):
    key, _, value = argument.partition("=")
    assert readable([argument]) == [f'{key}="{value}"']


def test_other_arguments_stay_as_they_are():
    numbers = ["optim.lr=1e-3", "optim.betas=[0.9,0.999]", "optim={lr: 1e-3}", "algo.beta=${optim.lr}"]
    texts = [
        "task.path=data/a b.jsonl",
        'model.pad_token="<|pad|>"',
        "seed=1,2,<3",
        "--config-dir=dätä",
        "a='",
    ]
    arguments = [*numbers, *texts, "+scorer@scorer.parts.x=http", "~algo", "<word>"]
    assert readable(arguments) == arguments


def test_a_key_with_two_different_values_gives_a_warning():
    (warning,) = repeated(["seed=1", "algo=dpo", "seed=2", "algo=dpo"])
    assert warning.startswith("seed is given twice (1, 2)")
