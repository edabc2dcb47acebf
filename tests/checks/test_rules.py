"""Tests of rules that a plug-in registers, and of rules that an evaluation skips."""

from __future__ import annotations

import re

from rlhf.checks import check
from rlhf.checks.rules import (
    DOUBTS,
    RULES,
    TRAINING_RULES,
    Row,
    When,
    chosen,
    doubt,
    must,
    other_than,
    rule,
    training_rule,
)
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
    configs = [compose([f"generator={name}", "clock=virtual"]) for name in ("hf", "vllm", "dataset")]
    rows = [row for row in (*RULES, *TRAINING_RULES) if isinstance(row, Row)]
    assert len(rows) > 30
    for row in rows:
        for key in (row.key, *re.findall(r"\{([\w.@]+)\}", row.when.text)):
            assert any(chosen(cfg, key) for cfg in configs), key
