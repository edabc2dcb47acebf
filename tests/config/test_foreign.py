"""Tests of the table of names in TRL, OpenRLHF and verl."""

from __future__ import annotations

from dataclasses import is_dataclass
from pathlib import Path
from typing import get_type_hints

import pytest

from rlhf.config.catalogue import all_keys, groups
from rlhf.config.foreign import ELSEWHERE, PROJECTS, TABLE, WITHOUT, meaning
from rlhf.config.root import Config

PAGE = (Path(__file__).parents[2] / "docs" / "coming_from.md").read_text()


def exists(key: str) -> bool:
    """Return whether the config has a key, also inside of sections of sections."""
    section: object = Config
    for part in key.split("."):
        hints = get_type_hints(section) if is_dataclass(section) else {}
        if part not in hints:
            return key in all_keys() or key.rpartition(".")[0] in all_keys()
        section = hints[part]
    return True


def test_every_key_of_the_table_exists():
    keys = {row.key for row in (*TABLE, *ELSEWHERE)} - {WITHOUT, *groups()}
    assert [key for key in keys if not exists(key)] == []


def test_no_row_follows_another_one_that_has_all_of_its_names():
    for row in ELSEWHERE:
        found = [meaning(name) for name, _ in row.named()]
        assert all(each is not None and each[0].key == row.key for each in found)


def test_the_page_has_every_name():
    for row in TABLE:
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
