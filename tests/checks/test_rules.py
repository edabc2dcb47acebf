"""Rules of plug-ins, rules that an evaluation skips, and secrets."""

from __future__ import annotations

import re

import pytest

from rlhf.checks import check
from rlhf.checks.check import problems
from rlhf.checks.rules import (
    DOUBTS,
    RULES,
    TRAINING_RULES,
    Row,
    When,
    check_arguments,
    chosen,
    doubt,
    must,
    other_than,
    rule,
    training_rule,
)
from rlhf.config.schema import data_file
from rlhf.core.errors import UserError
from rlhf.words.compose import compose


def test_rules_of_a_plug_in_are_checked_with_all_others():
    def odd_seeds(cfg):
        if cfg.seed % 2 == 0:
            yield f"seed must be odd (the plug-in wants it), got {cfg.seed}; set seed=1"

    text = "seed must be odd (the plug-in wants it), got 2; set seed=1"
    cfg = compose(["seed=2"])
    for decorate, rules in ((rule, RULES), (training_rule, TRAINING_RULES), (doubt, DOUBTS)):
        assert decorate(odd_seeds) is odd_seeds
        try:
            assert (text in check.problems(cfg)) == (rules is not DOUBTS)
            assert (text in check.problems(cfg, training=False)) == (rules is RULES)
            assert (text in check.warnings(cfg)) == (rules is DOUBTS)
        finally:
            rules.remove(odd_seeds)


def test_evaluation_skips_the_rules_for_run_length_and_batch_size():
    cfg = compose(["schedule.total_episodes=null", "backend.micro_batch=7"])
    assert len(check.problems(cfg)) == 2
    assert check.problems(cfg, training=False) == []


def test_the_same_message_is_shown_once():
    cfg = compose(["model.dtype=float16", "backend.device=cpu", "generator.top_p=0.5"])
    problems = check.problems(cfg)
    assert len(problems) == len(set(problems)) == 2


def test_a_row_reads_the_values_of_its_message_from_the_config():
    small = When("with scorer={scorer}", lambda cfg: cfg.seed == 2)
    row = must("generator", "dataset", small, "it is a test")
    cfg = compose(["seed=2"])
    assert list(row(cfg)) == [
        "generator must be dataset with scorer=reward_model (it is a test), got hf; set generator=dataset"
    ]
    assert list(row(compose(["seed=1"]))) == [], "the condition does not hold"
    other = must("generator", other_than("hf"), small, "it is a test", fix="generator=vllm")
    assert "generator must not be hf with" in next(other(cfg))


def test_a_row_does_not_apply_to_a_config_without_its_key():
    row = must("generator.replicas", 1, When("", lambda cfg: True), "it is a test")
    assert list(row(compose(["generator=dataset"]))) == []
    assert list(row(compose(["generator.replicas=2"])))


def test_the_keys_of_rows_exist():
    options = ["generator=hf", "generator=vllm", "generator=dataset", "algo=grpo", "algo=ppo", "algo=distill"]
    options += ["environment=python", "environment=gymnasium", "environment=tools", "task=chat"]
    configs = [compose([each, "clock=virtual"]) for each in options]
    rows = [row for row in (*RULES, *TRAINING_RULES) if isinstance(row, Row)]
    assert len(rows) > 30
    for row in rows:
        for key in (row.key, *re.findall(r"\{([\w.@]+)\}", row.when.text)):
            assert any(chosen(cfg, key) for cfg in configs), key
    table = data_file("rlhf.checks", "rules.yaml")
    conditions = " & ".join(
        row.get("when", "") for part in table.values() for rows in part.values() for row in rows
    )
    keys = re.findall(r"(?:^| )([a-z]\w*(?:\.\w+)+|[a-z]\w*(?==))", conditions)
    assert {"algo.supervised", "backend.any_optimizer", "scorer", "schedule.order"} <= {*keys}
    for key in keys:
        assert any(chosen(cfg, key) for cfg in configs), key


@pytest.mark.parametrize(
    ("override", "key", "what"),
    [
        ("model.policy='https://me:hunter2@host/x'", "model.policy", "a user name or password"),
        ("task.path='https://host/x.jsonl?token=hunter2'", "task.path", "a secret in its query"),
        ("model.tokenizer=hf_hunter2hunter2hunter2hunter2", "model.tokenizer", "a token"),
        ("output_dir=s3://me:hunter2@bucket", "output_dir", "a user name or password"),
        (
            "+backend.deepspeed.monitor.url_of='http://h/?key=hunter2'",
            "backend.deepspeed.monitor.url_of",
            "a secret in its query",
        ),
    ],
)
def test_a_value_with_a_secret_is_refused(override, key, what):
    words = ["task=local", "task.path=x.jsonl"] if override.startswith("task") else []
    words += ["backend=zero0"] if "deepspeed" in override else []
    found = [text for text in problems(compose([*words, override])) if text.startswith(f"{key} must not")]
    assert len(found) == 1 and f"must not contain {what}" in found[0] and "hunter2" not in found[0]


def test_an_argument_that_sets_a_secret_is_refused():
    with pytest.raises(UserError) as refused:
        check_arguments(["seed=1", "+logger.wandb.api_key=hunter2", "+hydra.job.env_set.HF_TOKEN=hunter2"])
    assert [text.partition(" must not be set on the command line")[0] for text in refused.value.problems] == [
        "logger.wandb.api_key",
        "hydra.job.env_set.HF_TOKEN",
    ]
    assert "hunter2" not in str(refused.value)


def test_arguments_with_similar_names_are_accepted():
    check_arguments(["model.pad_token=<|pad|>", "task.max_prompt_tokens=512", "logger.wandb.api_key=null"])


def test_a_refused_secret_leaves_no_file_and_is_not_printed(command, tmp_path):
    for word in ("+logger.wandb.api_key=hunter2", "model.policy='https://me:hunter2@host/x'"):
        answer = command(word)
        assert answer.code == 2 and "hunter2" not in answer.out + answer.err and not answer.runs
    assert not list(tmp_path.iterdir())
