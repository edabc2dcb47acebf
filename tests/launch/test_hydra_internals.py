"""Private parts of Hydra and its submitit launcher behave as rlhf.launch.command_line expects."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from omegaconf import OmegaConf

from rlhf.launch import command_line

BASIC_LAUNCHER = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"


def test_the_basic_sweeper_of_hydra_is_recognised_by_its_target():
    from hydra.core.config_store import ConfigStore

    Plugins.instance()  # registers the configs of the sweepers
    stored = ConfigStore.instance().load("hydra/sweeper/basic.yaml").node
    assert command_line.uses_basic_sweeper(OmegaConf.create({"hydra": {"sweeper": stored}}))
    other = {"hydra": {"sweeper": {"_target_": "a.b.OptunaSweeper"}}}
    assert not command_line.uses_basic_sweeper(OmegaConf.create(other))


class Own(Sweeper):
    def __init__(self, n_trials):
        self.n_trials = n_trials

    def setup(self, *, hydra_context, task_function, config):
        self.config = config

    def sweep(self, arguments):
        return None


def test_a_registered_sweeper_is_made_for_its_target():
    target = "hydra_plugins.tests.Own"
    command_line.register_sweeper(target, Own)
    config = OmegaConf.create({"hydra": {"sweeper": {"_target_": target, "n_trials": 3}}})
    made = Plugins.instance().instantiate_sweeper(
        hydra_context=SimpleNamespace(), task_function=print, config=config
    )
    assert isinstance(made, Own) and made.n_trials == 3 and made.config is config


def test_combinations_are_the_cartesian_product_of_the_sweep_values():
    overrides = OverridesParser.create().parse_overrides(["seed=1,2", "algo=dpo", "optim.lr=choice(0.1,0.2)"])
    assert command_line.combinations(overrides) == [
        [f"seed={seed}", "algo=dpo", f"optim.lr={lr}"] for seed in (1, 2) for lr in (0.1, 0.2)
    ]


def test_the_flags_of_hydra_are_known_and_which_of_them_have_a_value():
    flags = command_line.flags()
    assert not any(flags[flag] for flag in ("--multirun", "-m", "--resolve", "--help"))
    assert all(flags[flag] for flag in ("--cfg", "-c", "--config-dir", "-cd", "--info"))


class Wrapper(Launcher):
    def __init__(self, launcher: Launcher) -> None:
        self.launcher, self.config = launcher, None

    def setup(self, *, hydra_context, task_function, config) -> None:
        self.config = config

    def launch(self, job_overrides, initial_job_idx) -> list[JobReturn]:
        return []


def test_a_launcher_is_wrapped_and_set_up_only_inside_the_context():
    config = OmegaConf.create({"hydra": {"launcher": {"_target_": BASIC_LAUNCHER}}})

    def instantiate() -> Launcher:
        return Plugins.instance().instantiate_launcher(
            hydra_context=SimpleNamespace(), task_function=print, config=config
        )

    with command_line.launchers_wrapped_by(Wrapper):
        wrapped = instantiate()
    assert isinstance(wrapped, Wrapper) and wrapped.config is config
    assert type(wrapped.launcher).__name__ == "BasicLauncher" and wrapped.launcher.config is config
    assert type(instantiate()).__name__ == "BasicLauncher"


def test_submitit_executor_is_slurm_or_local_and_none_for_other_launchers():
    submitit = pytest.importorskip("hydra_plugins.hydra_submitit_launcher.submitit_launcher")
    assert command_line.submitit_executor(submitit.SlurmLauncher()) == "slurm"
    assert command_line.submitit_executor(submitit.LocalLauncher()) == "local"
    assert command_line.submitit_executor(Wrapper(None)) is None


def test_general_settings_exclude_settings_of_a_single_executor():
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    general = command_line.submitit_general_settings()
    assert {"timeout_min", "nodes", "tasks_per_node", "name"} <= general
    assert not {"partition", "signal_delay_s", "max_num_timeout"} & general


def test_submitit_job_arguments_match_the_call_signature_of_the_launcher():
    submitit = pytest.importorskip("hydra_plugins.hydra_submitit_launcher.submitit_launcher")
    first, second = command_line.submitit_calls([["seed=1"], ["seed=2"]], first=3)
    parameters = [*inspect.signature(submitit.BaseSubmititLauncher.__call__).parameters][1:]
    assert parameters == ["sweep_overrides", "job_dir_key", "job_num", "job_id", "singleton_state"]
    assert first[:4] == (["seed=1"], "hydra.sweep.dir", 3, "job_id_for_3") and second[2] == 4
    assert first[4].keys() == Singleton.get_state().keys()


def test_matching_keys_are_sections_keys_and_the_value_of_a_key():
    config = OmegaConf.create({"algo": {"beta": 0.1, "label": None}, "area": 2})
    assert command_line.matching_keys(config, "a") == ["algo.", "area="]
    assert command_line.matching_keys(config, "algo.") == ["algo.beta=", "algo.label="]
    assert command_line.matching_keys(config, "algo.beta=") == ["algo.beta=0.1"]
    assert command_line.matching_keys(config, "algo.label=") == []
    assert command_line.matching_keys(config, "algo.beta=0.2") == []
