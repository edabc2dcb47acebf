"""Tests of the check of the repository of `push_to`."""

import huggingface_hub
import pytest
from huggingface_hub import constants

from rlhf.checks.machine import push_problems


@pytest.fixture(autouse=True)
def logged_in(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "of-the-test")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


def test_without_push_to_neither_a_token_nor_the_hub_is_needed(monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert not list(push_problems(None))
    assert len(list(push_problems("me/model"))) == 2


@pytest.mark.parametrize("name", ["model", "me/a--b", "me/model.git", "me/it/there", "me/", "me/" + 99 * "x"])
def test_a_repository_needs_an_owner_and_a_valid_name(name):
    (found,) = push_problems(name)
    assert found.startswith("push_to= must be <owner>/<name>") and f"got {name}; set push_to=" in found
    assert not list(push_problems("me/my-model_1.5"))


def test_a_login_replaces_the_variable(monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    (found,) = push_problems("me/model")
    assert "run: hf auth login, or: export HF_TOKEN=<token>" in found
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "of-the-login")
    assert not list(push_problems("me/model"))


def test_the_hub_must_not_be_turned_off(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    (found,) = push_problems("me/model")
    assert "got HF_HUB_OFFLINE=1 and push_to=me/model; run: unset HF_HUB_OFFLINE" in found
