"""Tests of the warning of collapse: signals, averages, one warning, resuming, and the remedies it names."""

import json

import pytest

from rlhf.assembly.training import build_collapse_rule, remedies
from rlhf.checks.check import problems, warnings
from rlhf.core.metrics import Stat
from rlhf.core.state import TrainState
from rlhf.training.recorder import LIMITS, CollapseRule, Limits, Recorder
from rlhf.words.compose import compose
from tests.training.test_recorder import Kept, end_update


def row(update=1, kl=0.0, entropy=4.0, tokens=10.0, ess=1.0, gradient=2.0):
    """Return a training row; KL and entropy in nats per response."""
    return {
        "update": update,
        "objective/kl": kl,
        "objective/entropy": entropy,
        "objective/response_tokens": tokens,
        "mismatch/ess": ess,
        "policy/grad_norm": gradient,
    }


def warned_at(rule, rows):
    """Return the updates of the rows for which the rule returns a warning."""
    return [each["update"] for each in rows if rule.observe(each) is not None]


def test_signals_are_per_token_and_a_row_without_samples_of_the_policy_has_none():
    rule = CollapseRule(limits=Limits(entropy=1.0, ess=1.0))
    assert rule.observe({"update": 1, "objective/response_tokens": 12.0, "loss/policy": 0.3}) is None
    assert rule.averages == {}
    rule.observe({**row(kl=3.0, entropy=5.0, tokens=10.0, ess=0.5), "mismatch/kl": 0.2})
    assert rule.first == {"kl": 0.5, "entropy": 0.5, "gradient": 2.0}, "the KL of sampler and trainer add up"
    assert (rule.averages["kl"], rule.averages["ess"]) == (0, 0.5)


@pytest.mark.parametrize(
    ("limits", "bad", "said"),
    [
        (Limits(kl=0.2, memory=1e-9), {"kl": 3.0}, "KL to the reference of 0.3 nats per token, limit 0.2"),
        (Limits(entropy=0.5, memory=1e-9), {"entropy": 1.0}, "entropy per token at 0.25 of its first value"),
        (Limits(ess=0.1, memory=1e-9), {"ess": 0.05}, "effective sample size of 0.05 of the responses"),
        (Limits(gradient=3.0, memory=1e-9), {"gradient": 8.0}, "gradient norm at 4 times its first value"),
    ],
)
def test_each_limit_gives_one_warning_with_value_limit_and_remedy(limits, bad, said):
    rule = CollapseRule("set optim.lr=3e-05", limits)
    assert rule.observe(row(1)) is None and not rule.warned
    text = rule.observe(row(2, **bad))
    assert text is not None and said in text and "at update 2" in text and "set optim.lr=3e-05" in text
    assert rule.warned and rule.observe(row(3, **bad)) is None


def test_a_fast_rise_of_the_kl_warns_before_its_level_does():
    rows = [row(update, kl=update - 1.0) for update in range(1, 12)]  # 0.1 nats per token and update
    level, speed = (
        CollapseRule(limits=Limits(**limit, memory=2.0)) for limit in ({"kl": 0.5}, {"rise": 0.08})
    )
    (late,), (soon,) = warned_at(level, rows), warned_at(speed, rows)
    assert soon < late and speed.averages["rise"] == pytest.approx(0.1, rel=0.01)
    slow = [row(update, kl=0.5 * (update - 1.0)) for update in range(1, 40)]
    assert warned_at(CollapseRule(limits=Limits(rise=0.08, memory=2.0)), slow) == []


def test_kl_counts_from_its_first_value_so_that_another_reference_does_not_warn():
    rows = [row(update, kl=9.0) for update in range(1, 5)]
    assert warned_at(CollapseRule(limits=Limits(kl=0.2)), rows) == []


def test_averages_do_not_depend_on_how_many_updates_a_row_spans():
    every, fourth = (CollapseRule(limits=Limits(memory=3.0)) for _ in range(2))
    every.observe(row(0))
    fourth.observe(row(0))
    for update in range(1, 9):
        every.observe(row(update, kl=4.0))
        if update % 4 == 0:
            fourth.observe(row(update, kl=4.0))
    assert every.averages["kl"] == pytest.approx(fourth.averages["kl"])


def test_a_single_outlier_within_the_memory_does_not_warn():
    rows = [row(update, kl=4.0 if update == 5 else 0.0) for update in range(1, 10)]
    assert warned_at(CollapseRule(limits=Limits(kl=0.2, memory=4.0)), rows) == []
    assert warned_at(CollapseRule(limits=Limits(kl=0.2, memory=1e-9)), rows) == [5]


def test_a_resumed_rule_warns_at_the_same_update_and_not_twice():
    rows = [row(update, kl=0.4 * update, entropy=4.0 - 0.1 * update) for update in range(1, 20)]
    limits = Limits(kl=0.3, memory=3.0)
    whole = warned_at(CollapseRule(limits=limits), rows)
    assert len(whole) == 1
    for stop in range(len(rows)):
        first, second = CollapseRule(limits=limits), CollapseRule(limits=limits)
        before = warned_at(first, rows[:stop])
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert before + warned_at(second, rows[stop:]) == whole


def test_the_recorder_warns_once_and_marks_the_rows_from_the_warning_on():
    recorder, kept = Recorder(1, "eval/win_rate", 1e-4, ()), Kept()
    recorder.open([kept])
    state = TrainState(num_updates=9)

    def flushed(to, kl):
        to.add({name: Stat(value) for name, value in row(kl=kl).items() if name != "update"})
        end_update(to, state)

    for kl in (0.0, 0.1, 90.0, 90.0):
        flushed(recorder, kl)
    again, more = Recorder(1, "eval/win_rate", 1e-4, ()), Kept()
    again.open([more])
    again.load_state_dict(recorder.state_dict())
    flushed(again, 90.0)
    assert [each.get("warning/collapse") for each in kept.rows + more.rows] == [None, None, 1.0, 1.0, 1.0]
    assert len(kept.warnings) == 1 and not more.warnings


REMEDIES = {
    "algo=dpo": ["optim.lr=3e-05"],
    "algo=dpo schedule.max_lag=8": ["optim.lr=3e-05", "schedule.max_lag=2", "algo.weighting=is"],
    "algo=ppo schedule.max_lag=1": ["optim.lr=3e-05", "algo.correction.kind=truncate"],
    "algo=rloo schedule.minibatches=2": [
        "optim.lr=3e-05",
        "algo.correction.kind=truncate algo.correction.level=sequence",
    ],
    "algo=grpo schedule.max_lag=4 algo.correction.kind=truncate": ["optim.lr=3e-05", "schedule.max_lag=1"],
    "algo=grpo schedule.max_lag=1 algo.anchor=behaviour": ["optim.lr=3e-05"],
    "algo=bok schedule.max_lag=1": ["optim.lr=3e-05"],
}


@pytest.mark.parametrize("words", REMEDIES)
def test_each_remedy_is_a_valid_setting_of_the_run_without_effectless_keys(words):
    plain = [*words.split(), "optim.lr=1e-4"]
    before = compose(plain)
    assert remedies(before) == REMEDIES[words]
    for remedy in remedies(before):
        after = compose([*plain, *remedy.split()])
        assert problems(after) == [] and set(warnings(after)) <= set(warnings(before))


def test_only_a_run_that_samples_has_limits():
    assert build_collapse_rule(compose(["algo=dpo"])).limits is LIMITS
    stored = build_collapse_rule(compose(["algo=sft"]))
    assert stored.limits == Limits()
