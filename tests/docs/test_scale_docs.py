"""Tests that the commands, variables, files and limits of servers in docs/hardware.md are correct."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from rlhf.serve import _parser
from rlhf.words.catalogue import conf_dir
from rlhf.words.compose import compose

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "hardware.md").read_text()
DOCS = PAGE.partition("\n## Servers on other machines\n")[2]  # with containers
SCRIPT = (ROOT / "launchers" / "train_with_servers.sbatch").read_text()
COMMANDS = [
    shlex.split(line) for line in re.sub(r" \\\n *", " ", DOCS).splitlines() if line.startswith("    ")
]


def after(word: str) -> list[list[str]]:
    """Return what follows a word that names a program, in every command that has it."""
    found = [command[command.index(word) + 1 :] for command in COMMANDS if word in command]
    assert found, word
    return [[each.rstrip(";") for each in words if each != "done"] for words in found]


@pytest.mark.parametrize("words", after("rlhf.train") + after("launchers/train_with_servers.sbatch"), ids=str)
def test_a_run_of_the_docs_composes(words):
    assert compose([word.replace("$seed", "1") for word in words]).algo.name in ("dpo", "ppo")


@pytest.mark.parametrize(
    "words",
    [
        *after("launchers/serve.sh"),
        *(shlex.split(each) for each in re.findall(r'SERVE="([^"]+)"', DOCS + SCRIPT)),
        *(re.split(", ", each) for each in re.findall(r"args: \[serve, ([^\]]+)\]", DOCS)),
    ],
    ids=str,
)
def test_a_server_of_the_docs_has_flags_that_exist(words):
    assert _parser().parse_args(words).model


def test_variables_and_defaults_of_the_job_are_those_of_the_script():
    rows = re.findall(r"^\| `([A-Z_]+)` \| (\S+) \|", DOCS, re.M)
    assert {name for name, _ in rows} == {"SERVE", "SERVER_NODES", "SERVERS_PER_NODE"}
    for name, default in rows:
        assert f"${{{name}:-{'' if default == 'required' else default}}}" in SCRIPT


def test_keys_metrics_and_flags_of_the_docs_exist():
    schema = (ROOT / "docs" / "reference" / "config.md").read_text()
    for key in set(re.findall(r"`(generator\.\w+)", DOCS)):
        assert f"`{key}`" in schema or f"`{key}=" in schema, key
    assert (conf_dir() / "generator" / "vllm_server.yaml").is_file()
    metrics = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    for metric in re.findall(r"^\| `(\w+/\w+)` \|", DOCS, re.M):
        assert f"`{metric}`" in metrics, metric
    flags = _parser().format_help()
    for flag in ("--announce", "--answer-limit", "--restarts", "--host", "--port", "--absent-ids", "--nccl"):
        assert f"`{flag}" in DOCS and flag in flags


def test_files_in_the_docs_exist():
    named = set(re.findall(r"`?((?:launchers|rlhf)/[\w./]+\.\w+)", DOCS))
    assert len(named) >= 3 and all((ROOT / file).is_file() for file in named), named
