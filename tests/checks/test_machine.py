"""Checks of this machine: the allocator of torch, and the repository of `push_to`."""

import huggingface_hub
import pytest
from huggingface_hub import constants

from rlhf.checks import check as machine
from rlhf.checks.check import push_problems
from rlhf.core.machine import Machine
from rlhf.memory.uses import GIB
from rlhf.words.compose import compose

IPC = ("generator=vllm_colocated",)
NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@pytest.fixture
def found(monkeypatch):
    """Return a function that returns the errors of a config with variables of the environment."""

    def check(*words, gpus=1, **variables):
        for name in NAMES:
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(machine, "this_machine", lambda: Machine(64 * GIB, (80 * GIB,) * gpus))
        return list(machine.expandable_segments(compose(list(words))))

    return check


@pytest.mark.parametrize("name", NAMES)
def test_expandable_segments_are_refused_with_cuda_ipc(found, name):
    (problem,) = found(*IPC, **{name: "expandable_segments:True"})
    assert problem.startswith(f"{name} must not contain expandable_segments:True")
    assert problem.endswith(f"run: unset {name}, or set generator.transfer=shared_memory")
    assert found(*IPC, "generator.transfer=ipc", **{name: "expandable_segments:True"})


def test_the_remedy_keeps_the_other_settings_of_the_allocator(found):
    others = "max_split_size_mb:64,roundup_power2_divisions:[256:1,512:2]"
    for value in (f"expandable_segments:True,{others}", f"{others}, expandable_segments: True"):
        (problem,) = found(*IPC, PYTORCH_CUDA_ALLOC_CONF=value)
        assert f"got {value}; run: export PYTORCH_CUDA_ALLOC_CONF='{others}', or set" in problem
        assert not found(*IPC, PYTORCH_CUDA_ALLOC_CONF=others)


@pytest.mark.parametrize(
    ("words", "gpus"),
    [
        (("generator=hf",), 1),
        (("generator=vllm",), 2),
        ((*IPC, "generator.transfer=shared_memory"), 1),
        ((*IPC, "generator.tensor_parallel_size=2"), 2),
        ((*IPC, "backend.device=cpu"), 1),
        (IPC, 0),
    ],
)
def test_expandable_segments_are_allowed_without_cuda_ipc(found, words, gpus):
    assert not found(*words, gpus=gpus, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")


def test_disabled_expandable_segments_are_allowed(found):
    assert not found(*IPC, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:False")
    assert not found(*IPC)


def test_check_machine_raises_the_error(found, monkeypatch):
    found(*IPC, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")
    with pytest.raises(machine.UserError, match="expandable_segments"):
        machine.check_machine(compose([*IPC, "scorer=facts"]))


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
