"""Tests that every option composes into its schema, that --help lists it, and that packages contain it."""

from __future__ import annotations

import re
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from rlhf.checks.check import as_objects, checked
from rlhf.config.root import Config, best_generator, to_config
from rlhf.config.run import WandbMode
from rlhf.config.schema import SCHEMAS
from rlhf.core.errors import UserError
from rlhf.words.catalogue import all_keys, also, conf_dir, groups, options, replaced
from rlhf.words.compose import compose_node, run_name
from rlhf.words.help import GROUPS, LONG, help_text

ROOT = Path(__file__).parents[2]
CHOICES = [(group, option) for group in groups() for option in options(group)]


def compose(*overrides: str) -> Config:
    return to_config(compose_node([*overrides]))


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
    checked(as_objects(compose_node(overrides)))


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
    assert len(lines) <= 68 and max(map(len, lines)) <= 80
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
        if field.name not in ("name", "lora", "columns", "correction", "covariance", "moving", "teacher")
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


def test_every_key_has_a_help_text_of_its_own():
    for key in all_keys():
        assert "".join(help_text([key]).split()).startswith(key)


@pytest.mark.parametrize(("topic", "near"), [("schedule.max_lga", "schedule.max_lag"), ("modell", "model")])
def test_help_of_an_unknown_topic_suggests_a_similar_one(command, topic, near):
    answer = command("--help", topic)
    assert answer.code == 2 and f"--help {near}?" in answer.err


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


LENGTH = "schedule: {total_episodes: 320, prompts_per_update: 8}\n"
GLOBAL = "# @package _global_\n"


@pytest.fixture
def own(tmp_path):
    """A function that writes option files, and a folder that the configs of the block include."""

    def write(name, text):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)

    with also(tmp_path):
        yield write


def test_the_lengths_of_an_algorithm_are_inherited_by_another_file(own):
    own("algo/mine.yaml", f"{GLOBAL}defaults: [grpo, _self_]\n{LENGTH}")
    own("algo/other.yaml", f"{GLOBAL}defaults: [mine, _self_]\nalgo: {{kl_coef: 0.5}}\n")
    for algo in ("mine", "other"):
        cfg = compose("task=local", "task.path=x", f"algo={algo}")
        assert (cfg.schedule.total_episodes, cfg.schedule.prompts_per_update) == (320, 8)


def test_a_setting_that_another_option_replaces_is_reported_unless_it_is_meant(own):
    own("task/mine.yaml", f"{GLOBAL}defaults: [tldr_mini, _self_]\n{LENGTH}optim: {{betas: [0.8, 0.9]}}\n")
    words = ["task=mine", "algo=grpo"]
    first, second = replaced(compose(*words), words)
    assert "schedule.total_episodes is 320 in" in first and "but another option sets 262144" in first
    assert second.endswith("add schedule.prompts_per_update=8")
    for more in (["schedule.total_episodes=64", "schedule.prompts_per_update=8"], ["debug=tiny"]):
        assert replaced(compose(*words, *more), [*words, *more]) == []


def test_a_file_with_the_name_of_an_option_of_this_project_is_refused(own):
    own("algo/grpo.yaml", f"{GLOBAL}defaults: [/schema/algo@algo: grpo, _self_]\n{LENGTH}")
    with pytest.raises(UserError, match="rename the file to my_grpo.yaml, and set algo=my_grpo"):
        as_objects(compose_node(["algo=grpo"]), ["algo=grpo"])


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
def test_lengths_of_an_algorithm_of_the_user_come_before_lengths_of_the_task(own, schedule, length, prompts):
    own("algo/mine.yaml", GLOBAL + yaml.safe_dump({"defaults": ["grpo", "_self_"], "schedule": schedule}))
    made = compose_node(["task=local", "algo=mine"]).schedule
    assert (made.total_episodes, made.total_epochs, made.prompts_per_update) == (length, None, prompts)
