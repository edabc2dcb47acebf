"""Tests of rules that a plug-in registers, and of rules that an evaluation skips."""

from __future__ import annotations

from rlhf.checks import check
from rlhf.checks.rules import DOUBTS, RULES, TRAINING_RULES, doubt, rule, training_rule
from rlhf.config.compose import compose


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
