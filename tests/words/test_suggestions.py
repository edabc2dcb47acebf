"""The table of names in TRL, OpenRLHF and verl; similar words; names of metrics."""

from __future__ import annotations

import re
import shlex
from collections import defaultdict
from dataclasses import is_dataclass
from pathlib import Path
from typing import get_type_hints

import pytest

from rlhf.checks.check import composed, problems
from rlhf.checks.rules import RULES, TRAINING_RULES, Row
from rlhf.config.root import Config
from rlhf.words.catalogue import all_keys, groups, options
from rlhf.words.compose import compose
from rlhf.words.mistakes import PROJECTS, TABLE, WITHOUT, assigned, closest, keys_of_run, lacking, meaning

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "coming_from.md").read_text()


def exists(key: str) -> bool:
    """Return whether the config has a key, also inside of sections of sections."""
    section: object = Config
    for part in key.split("."):
        hints = get_type_hints(section) if is_dataclass(section) else {}
        if part not in hints:
            return key in all_keys() or key.rpartition(".")[0] in all_keys()
        section = hints[part]
    return True


VALUES = {  # elsewhere, for keys that take no number
    "model.lora.targets": "[q_proj, v_proj]", "model.dtype": "float16", "task.path": "data/train",
    "scorer.path": "own.py:reward", "generator": "server", "generator.urls": "http://127.0.0.1:8000",
    "environment.functions": "[own.py:look]", "algo": "ppo", "algo.kl_estimator": "k1", "algo.scale": "batch",
    "algo.correction.kind": "mask", "algo.loss_type": "ipo", "optim.schedule": "cosine",
    "optim.betas": "[0.9,0.95]", "optim.optimizer": "adamw",
}  # fmt: skip


def remedies() -> list[list[str]]:
    """Return the remedies of all names of the tables, as a shell divides them into arguments."""
    known, found = keys_of_run([]), []
    names = [name for row in TABLE for name, _ in row.named()]
    for row in dict.fromkeys(meant[0] for name in names if (meant := meaning(name, known))):
        value = VALUES.get(row.key, "3")
        words = [shlex.split(assigned(row, value).replace("<value>", value))]
        if row.key == WITHOUT:
            words = [[word] for word in re.findall(r"\b[\w.]+=[^\s,;]+", row.note)]
        found += words
    return found


def test_the_remedy_of_every_name_is_accepted():
    runs: dict[str, list[dict[str, str]]] = defaultdict(lambda: [{}])  # by the options that they choose
    for *chosen, last in remedies():
        key, _, value = last.partition("=")
        settings = runs[" ".join([*chosen, last] if key in groups() else chosen)]
        for each in settings if key not in groups() else ():
            if each.setdefault(key, value) == value:
                break
        else:
            settings += [{key: value}] if key not in groups() else []
    for chosen, settings in runs.items():
        for each in settings:
            composed([*chosen.split(), *(f"{key}={value}" for key, value in each.items())])


def test_addresses_without_http_are_reported_with_all_of_them():
    given = ["generator=vllm_server", "generator.urls=[127.0.0.1:8000,http://127.0.0.1:8001]"]
    (found,) = [text for text in problems(composed(given)) if "urls" in text or "key_variable" in text]
    again = composed([given[0], *shlex.split(found.partition("; set ")[2])])
    assert again.generator.urls == ["http://127.0.0.1:8000", "http://127.0.0.1:8001"]
    assert not [text for text in problems(again) if "urls" in text or "key_variable" in text]


def test_the_remedies_of_the_rules_name_options_and_keys_that_exist():
    rows = [each for each in (*RULES, *TRAINING_RULES) if isinstance(each, Row)]
    whole = r"(?<![\w.@>])([\w.@]+)=([^\s,;<]+)"  # a key with a placeholder such as <name> is not whole
    for key, value in (word for row in rows for word in re.findall(whole, row.fix)):
        group = key.partition("@")[0]
        assert (value in options(group) or "{" in value) if group in groups() else exists(key), (key, value)


def test_no_row_follows_another_one_that_has_all_of_its_names():
    for row in (row for row in TABLE if row.names[-1]):
        found = [meaning(name) for name, _ in row.named()]
        assert all(each is not None and each[0].key == row.key for each in found)


def test_every_key_of_the_table_exists_and_the_page_has_every_name():
    assert all(exists(row.key) for row in TABLE if row.key not in {WITHOUT, *groups()})
    for row in (row for row in TABLE if any(row.names[:-1])):
        assert all(f"`{name}`" in PAGE for name, _ in row.named())
        assert row.key == WITHOUT or f"- `{row.key}" in PAGE


@pytest.mark.parametrize(
    ("word", "known", "key"),
    [
        ("beta", ["algo.kl_coef"], "algo.kl_coef"),
        ("beta", ["algo.beta"], "algo.beta"),
        ("trainer.save_freq", (), "schedule.save_every"),
        ("actor_rollout_ref.actor.optim.lr", (), "optim.lr"),
        ("Max-Completion-Length", (), "generator.response_length"),
        ("optim.learning_rate", (), "optim.lr"),
    ],
)
def test_a_name_leads_to_its_key(word, known, key):
    found = meaning(word, known)
    assert found is not None and found[0].key == key and found[2] in PROJECTS


def test_a_name_of_no_project_has_no_meaning():
    assert meaning("quantum") is None


def test_suggestions_ignore_case_and_dashes_and_know_other_names_of_dtypes():
    assert closest("Tldr-Mini", ["tldr", "tldr_mini"]) == "tldr_mini"
    assert closest("dpo.yaml", ["ppo", "dpo"]) == "dpo"
    assert closest("bf16", ["float16", "bfloat16"]) == "bfloat16"
    assert closest("xyz", ["float16"]) is None


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("eval/gold_score_low", ""),
        ("objective/scores/length", ""),
        ("environment/turns", "task=calculator"),
        ("environment/my_figure", "task=calculator"),
        ("eval/kl", "algo=sft"),
    ],
)
def test_a_run_may_have_a_metric(name, words):
    assert lacking(name, compose(words.split())) is None


@pytest.mark.parametrize("name", ["environment/turn", "environment/tool_error"])
def test_a_misspelled_figure_of_an_environment_is_not_a_figure_of_the_user(name):
    assert lacking(name, compose(["task=calculator"]), code=True) is not None
