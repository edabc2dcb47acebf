"""Tests that every option composes into its schema, that --help lists it, and that packages contain it."""

from __future__ import annotations

import re
import tomllib
from dataclasses import fields
from pathlib import Path

import hydra
import pytest
import yaml
from omegaconf import OmegaConf

from rlhf.checks.check import as_objects, checked
from rlhf.config.root import Config, best_generator
from rlhf.config.run import WandbMode
from rlhf.config.schema import SCHEMAS
from rlhf.words import catalogue
from rlhf.words.catalogue import all_keys, conf_dir, groups, options
from rlhf.words.compose import compose_node
from rlhf.words.help import GROUPS, LONG, all_meanings, help_text
from rlhf.words.identity import run_name

ROOT = Path(__file__).parents[2]
CHOICES = [(group, option) for group in groups() for option in options(group)]


def compose(*overrides: str) -> Config:
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        cfg = OmegaConf.to_object(hydra.compose("config", list(overrides)))
    assert isinstance(cfg, Config)
    return cfg


COMPOSED = [each for each in CHOICES if each[0] != "experiment"]  # tests/docs/test_recipes.py composes these


@pytest.mark.parametrize(
    ("group", "option"), COMPOSED, ids=[f"{group}={option}" for group, option in COMPOSED]
)
def test_option_composes(group, option):
    algorithm = ["algo=grpo"] if group == "correction" else []
    cfg = compose(*algorithm, f"{group}={option}")
    section = getattr(cfg, group, None)
    selected = best_generator() if (group, option) == ("generator", "auto") else option
    if section is not None and hasattr(section, "name") and group != "scorer":
        assert section.name == selected
    assert run_name(cfg)


@pytest.mark.parametrize("option", options("scorer"))
def test_every_scorer_can_be_the_judge(option):
    schema = re.search(
        r"/schema/scorer@_here_: (\w+)", (conf_dir() / "scorer" / f"{option}.yaml").read_text()
    )
    assert schema and compose(f"scorer@gold={option}").gold.name == schema[1]


@pytest.mark.parametrize(
    "overrides", [[], ["algo=sft"], ["algo=reward"], ["generator=dataset"], ["debug=tiny"]]
)
def test_runs_of_the_readme_are_valid(overrides):
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        checked(as_objects(hydra.compose("config", overrides)))


def test_stored_completions_use_the_labels_scorer_by_default():
    assert compose("algo=sft").generator.name == "dataset"
    assert [compose(word).scorer.name for word in ("algo=sft", "algo=reward", "generator=dataset")] == [
        "labels"
    ] * 3
    assert compose("generator=dataset", "scorer=reward_model").scorer.name == "reward_model"


def test_several_loggers_can_be_selected():
    logger = compose("logger=[wandb,tensorboard]", "logger.wandb.mode=offline").logger
    assert (
        logger.wandb is not None and logger.wandb.mode is WandbMode.offline and logger.tensorboard is not None
    )
    assert compose("logger=wandb").logger.tensorboard is None
    assert compose().logger.wandb is None


def test_tuned_values_apply_to_embedded_models_and_paper_values_to_others():
    assert compose().optim.lr != 3e-6
    assert compose("~tuned").optim.lr == 3e-6
    assert compose("model=pythia_410m").optim.lr == 3e-6
    assert compose("model=pythia_410m", "algo=sft").optim.lr == 1e-5


def test_every_schema_has_an_option_and_every_option_has_a_description():
    used = {
        f"schema/{group}/{name}"
        for file in conf_dir().rglob("*.yaml")
        for group, name in re.findall(r"/schema/(\w+)@\w+: (\w+)", file.read_text())
    }
    assert set(SCHEMAS) == used
    assert all(options(group)[option] for group, option in CHOICES)


def test_help_fits_on_two_screens_and_lists_groups_options_and_common_keys(command):
    answer = command("--help")
    assert answer.code == 0 and "$" not in answer.out
    lines = answer.out.splitlines()
    assert len(lines) <= 64 and max(map(len, lines)) <= 80
    listed = {option for group, option in CHOICES if len(options(group)) <= LONG}
    assert listed <= set(answer.out.split())
    keys = re.findall(
        r"^  (\S+) {3,}", answer.out.partition("Most used keys")[2].partition("Examples")[0], re.M
    )
    assert answer.out.index("  algo ") < answer.out.index("optim.lr")
    assert len(keys) > 10 and set(keys) <= set(all_keys()) and set(GROUPS) == set(groups())


def test_help_of_a_group_describes_its_options_and_keys(command):
    answer = command("--help", "algo")
    for name, means in options("algo").items():
        assert re.search(rf"^  {name} +{re.escape(means.split()[0])}", answer.out, re.M)
    assert "algo.beta" in answer.out and max(map(len, answer.out.splitlines())) <= 80
    assert "tldr_410m_dpo_async" in command("--help=experiment").out


def test_help_of_all_keys_has_every_key_with_its_meaning(command):
    text = command("--help", "keys").out
    listed = {line.split()[0] for line in text.splitlines()[1:] if line[2:3].strip()}
    declared = {
        f"{group}.{field.name}"
        for stored, cls in SCHEMAS.items()
        for group in [stored.split("/")[1]]
        if group != "logger"
        for field in fields(cls)
        if field.name not in ("name", "lora", "columns", "correction", "covariance")
    }
    assert declared <= listed and {"seed", "optim.lr", "model.lora.rank", "logger.wandb.project"} <= listed
    assert "optimizer steps of warm-up" in " ".join(text.split())


@pytest.mark.parametrize(
    ("topic", "keys"),
    [
        ("schedule.max_lag", ["schedule.max_lag"]),
        ("seed", ["seed"]),
        ("algo.correction.kind", ["algo.correction.kind"]),
        ("model.lora", ["model.lora.rank", "model.lora.alpha"]),
        ("pad_token", ["model.pad_token", "scorer.pad_token", "gold.pad_token"]),
    ],
)
def test_help_of_a_key_has_its_meaning(command, topic, keys):
    answer = command("--help", topic)
    assert answer.code == 0 and all(f"  {key} " in answer.out or f"  {key}\n" in answer.out for key in keys)
    assert len(answer.out.splitlines()) < 40 and "Keys of" not in answer.out


def test_every_key_has_a_help_text_of_its_own(command, monkeypatch):
    found = all_meanings()
    monkeypatch.setattr("rlhf.words.help.all_meanings", lambda: found)  # once for all keys
    for key in found:
        assert "".join(help_text([key]).split()).startswith(key)


def test_help_of_an_unknown_key_suggests_a_key(command):
    answer = command("--help", "schedule.max_lga")
    assert answer.code == 2 and "did you mean --help schedule.max_lag?" in answer.err


def test_help_with_an_unknown_topic_suggests_a_group(command):
    answer = command("--help", "modell")
    assert answer.code == 2 and "did you mean --help model?" in answer.err


def test_help_lists_options_of_a_user_config_folder(command, own_conf):
    assert " fine" in command("--config-dir", str(own_conf), "--help").out
    assert "fine of the tests" in command("--config-dir", str(own_conf), "--help", "experiment").out


def test_wheel_contains_every_package_and_conf():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    packages = {
        ".".join(file.parent.relative_to(ROOT).parts) for file in (ROOT / "rlhf").rglob("__init__.py")
    }
    assert set(project["packages"]) == packages | {"rlhf.conf"}
    assert project["package-dir"] == {"rlhf.conf": "conf"} and project["package-data"]["rlhf.conf"] == [
        "**/*.yaml"
    ]


@pytest.mark.parametrize(
    ("schedule", "length", "prompts"),
    [
        ({}, None, 64),
        ({"total_episodes": 640}, 640, 64),
        ({"prompts_per_update": 8}, None, 8),
        ({"total_episodes": 640, "prompts_per_update": 8}, 640, 8),
        ({"eval_every": 0}, None, 64),
    ],
)
def test_lengths_of_an_algorithm_of_the_user_come_before_lengths_of_the_task(
    tmp_path, schedule, length, prompts
):
    (tmp_path / "algo").mkdir()
    head = "# @package _global_\n"
    body = {"defaults": ["grpo", "_self_"], "schedule": schedule}
    (tmp_path / "algo" / "mine.yaml").write_text(head + yaml.safe_dump(body))
    with catalogue.also(tmp_path):
        made = compose_node(["task=local", "algo=mine"]).schedule
    assert (made.total_episodes, made.total_epochs, made.prompts_per_update) == (length, None, prompts)
