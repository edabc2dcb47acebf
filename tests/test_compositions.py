"""Tests of the compositions that tests share: they equal the compositions of Hydra."""

from dataclasses import dataclass

import pytest
from hydra._internal import config_loader_impl as loader
from hydra._internal import defaults_list as lists
from hydra._internal.config_repository import ConfigRepository
from hydra.core.config_store import ConfigStore

from rlhf.config.algorithms import DPOConfig
from rlhf.config.root import selecting
from rlhf.words.catalogue import also
from rlhf.words.compose import compose
from tests import compositions


@pytest.fixture
def by_hydra(monkeypatch):
    """Return a function that composes without sharing."""

    def call(overrides):
        with monkeypatch.context() as patch:
            patch.setattr(loader, "create_defaults_list", compositions.create_defaults_list)
            patch.setattr(lists, "_create_interpolation_map", compositions.create_interpolation_map)
            original = compositions.compose_from_defaults
            patch.setattr(loader.ConfigLoaderImpl, "_compose_config_from_defaults_list", original)
            patch.setattr(ConfigRepository, "load_config", compositions.load_config)
            patch.delattr(ConfigStore, "__deepcopy__")
            return compose(overrides)

    return call


@pytest.mark.parametrize(
    "overrides",
    [
        ["algo.beta=0.3"],
        ["algo=ppo", "optim.lr=0.1", "task=chat"],
        ["experiment=tldr_410m_rloo_async", "debug=tiny"],
        ["~experiment", "scorer@gold=function", "scorer=none"],
    ],
)
def test_a_shared_composition_equals_that_of_hydra(by_hydra, overrides):
    shared = compose([*overrides, "seed=17"])
    assert shared.seed == 17
    assert compose(overrides) == by_hydra(overrides) != shared


def test_an_option_outside_conf_is_read_anew(own_conf):
    with also(own_conf):
        assert compose(["experiment=fine"]).algo.beta == 0.3
        file = own_conf / "experiment" / "fine.yaml"
        file.write_text(file.read_text().replace("0.3", "0.4"))
        assert compose(["experiment=fine"]).algo.beta == 0.4


def test_the_selected_generator_is_not_that_of_an_earlier_composition():
    assert compose([]).generator.name == "hf"
    with selecting("vllm"):
        assert compose([]).generator.name == "vllm"


@dataclass(kw_only=True, slots=True)
class OtherDPOConfig(DPOConfig):
    beta: float = 0.7


def test_a_registered_option_replaces_that_of_an_earlier_composition():
    before = compose(["algo=dpo"]).algo.beta
    try:
        ConfigStore.instance().store(group="schema/algo", name="dpo", node=OtherDPOConfig)
        assert compose(["algo=dpo"]).algo.beta == 0.7 != before
    finally:
        ConfigStore.instance().store(group="schema/algo", name="dpo", node=DPOConfig)
    assert compose(["algo=dpo"]).algo.beta == before
