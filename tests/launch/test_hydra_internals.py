"""Private parts of Hydra and its submitit launcher behave as rlhf.launch.command_line and sweep expect."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from omegaconf import OmegaConf

from rlhf.config.run import SEARCH_SWEEPER
from rlhf.launch import command_line
from rlhf.launch.command_line import candidates, multirun_config
from rlhf.launch.preflight import sweep_jobs
from rlhf.launch.sweep import Sweep
from rlhf.words.compose import initialized

BASIC_LAUNCHER = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"


def test_the_basic_sweeper_of_hydra_is_recognised_by_its_target():
    Plugins.instance()  # registers the configs of the sweepers
    stored = ConfigStore.instance().load("hydra/sweeper/basic.yaml").node
    assert command_line.uses_basic_sweeper(OmegaConf.create({"hydra": {"sweeper": stored}}))
    other = {"hydra": {"sweeper": {"_target_": SEARCH_SWEEPER}}}
    assert not command_line.uses_basic_sweeper(OmegaConf.create(other))


def test_the_sweeper_of_a_search_is_made_for_its_target():
    pytest.importorskip("optuna")
    launcher = {"_target_": BASIC_LAUNCHER}
    config = OmegaConf.create({"hydra": {"sweeper": {"_target_": SEARCH_SWEEPER}, "launcher": launcher}})
    config = OmegaConf.merge(config, {"hydra": {"sweeper": {"n_trials": 3}}})
    with Sweep().watching():
        made = Plugins.instance().instantiate_sweeper(
            hydra_context=SimpleNamespace(), task_function=print, config=config
        )
    assert type(made).__name__ == "SearchSweeper" and made.config is config


def test_the_jobs_of_a_sweep_are_the_cartesian_product_of_the_swept_values():
    with initialized() as search:
        config = multirun_config([*search, "seed=1,2", "algo=dpo", "optim.lr=choice(0.1,0.2)"])
        assert sweep_jobs(config) == [
            [f"seed={seed}", "algo=dpo", f"optim.lr={lr}"] for seed in (1, 2) for lr in (0.1, 0.2)
        ]


def test_the_flags_of_hydra_are_known_and_which_of_them_have_a_value():
    flags = command_line.flags()
    assert not any(flags[flag] for flag in ("--multirun", "-m", "--resolve", "--help"))
    assert all(flags[flag] for flag in ("--cfg", "-c", "--config-dir", "-cd", "--info"))


class Outer(Launcher):
    launcher = config = None

    def setup(self, *, hydra_context, task_function, config) -> None:
        self.config = config

    def launch(self, job_overrides, initial_job_idx) -> list[JobReturn]:
        return []


def test_a_launcher_is_replaced_and_set_up_only_inside_the_context():
    config = OmegaConf.create({"hydra": {"launcher": {"_target_": BASIC_LAUNCHER}}})

    def instantiate() -> Launcher:
        return Plugins.instance().instantiate_launcher(
            hydra_context=SimpleNamespace(), task_function=print, config=config
        )

    with command_line.launchers_inside(outer := Outer()):
        assert instantiate() is outer and outer.config is config
    assert type(outer.launcher).__name__ == "BasicLauncher" and outer.launcher.config is config
    assert type(instantiate()).__name__ == "BasicLauncher"


def test_submitit_launchers_have_the_executor_and_the_call_that_jobs_need():
    submitit = pytest.importorskip("hydra_plugins.hydra_submitit_launcher.submitit_launcher")
    assert command_line.submitit_executor(submitit.SlurmLauncher()) == "slurm"
    assert command_line.submitit_executor(submitit.LocalLauncher()) == "local"
    assert command_line.submitit_executor(Outer()) is None
    parameters = [*inspect.signature(submitit.BaseSubmititLauncher.__call__).parameters][1:]
    assert parameters == ["sweep_overrides", "job_dir_key", "job_num", "job_id", "singleton_state"]


def test_candidates_are_sections_keys_and_the_value_of_a_key():
    assert candidates(["schedule.max_l"]) == ["schedule.max_lag="]
    assert candidates(["schedule.max_lag="]) == ["schedule.max_lag=0"]
    assert candidates(["schedule.max_lag=1"]) == [] and "schedule." in candidates(["sched"])
