"""Rows of metrics: means, merging, rows that span updates, evaluations, and checks at the first update."""

import json
import math
from dataclasses import replace

import pytest
import torch

from rlhf.core.formatting import wilson
from rlhf.core.metrics import Evaluation, How, Metrics, Stat, largest, mean, merge, plain, sample_size
from rlhf.core.state import TrainState
from rlhf.loggers.logger import Logger
from rlhf.training.recorder import JudgeRule, Recorder, against_initial
from tests.tiny_models import tiny_rollouts


class Kept(Logger):
    def __init__(self):
        self.rows, self.evaluations, self.warnings = [], [], []

    def log(self, row, state):
        self.rows.append(row)

    def evaluation(self, row, evaluation, state):
        self.evaluations.append(row)

    def warn(self, text):
        self.warnings.append(text)


class NoEngine:
    def peak_gib(self):
        return 1.0


def recorder_of(log_every=1):
    recorder, kept = Recorder(log_every, "eval/win_rate", 1e-4), Kept()
    recorder.open([kept])
    return recorder, kept


def end_update(recorder, state):
    rollouts = tiny_rollouts()
    state.advance(rollouts)
    recorder.flush(state, rollouts, NoEngine())


def test_mean_maximum_sum_and_last_value_are_merged():
    figures: Metrics = {}
    for value in (3.0, 5.0, 4.0):
        x = torch.tensor([value, 100.0])
        merge(
            figures,
            {
                "max": largest(x, torch.tensor([True, False])),
                "sum": Stat(value, 1.0, How.sum),
                "last": Stat(value, 1.0, How.last),
            },
        )
    merge(figures, {"mean": mean(torch.tensor([1.0, 2.0, 3.0]))})
    merge(figures, {"mean": mean(torch.tensor([10.0, 99.0]), torch.tensor([True, False]))})
    found = {name: stat.value() for name, stat in figures.items()}
    assert found == {"max": 5.0, "sum": 12.0, "last": 4.0, "mean": 4.0}
    for values in ((1.0, math.nan), (math.nan, 1.0)):
        first, later = (largest(torch.tensor([value]), torch.tensor([True])) for value in values)
        assert math.isnan(first.merge(later).value())


def test_the_effective_sample_size_merges_over_micro_batches():
    weights = torch.tensor([3.0, 1.0, 1.0, 0.5])
    ones = torch.ones(2, dtype=torch.bool)
    figures: Metrics = {}
    merge(figures, {"ess": sample_size(weights[:2], ones)})
    merge(figures, {"ess": sample_size(weights[2:], ones)})
    exact = weights.sum().square() / (4 * weights.square().sum())
    assert figures["ess"].value() == pytest.approx(exact.item())
    assert plain(figures)["ess"].value() == figures["ess"].value()
    masked = sample_size(weights, torch.tensor([True, False, False, False]))
    assert masked.value() == 1, "with one sample, the effective fraction is 1"


def test_a_row_spans_log_every_updates_and_the_last_row_is_always_written():
    recorder, kept = recorder_of(log_every=2)
    state = TrainState(num_updates=3)
    for value in (1.0, 3.0, 7.0):
        recorder.add({"x": mean(torch.tensor([value]))})
        end_update(recorder, state)
    assert [(row["update"], row["x"]) for row in kept.rows] == [(2, 2.0), (3, 7.0)]


def test_a_row_that_spans_a_checkpoint_has_the_same_values():
    whole, kept_whole = recorder_of(log_every=2)
    state = TrainState(num_updates=2)
    parts = torch.rand(2, 5)
    for part in parts:
        whole.add({"x": mean(part)})
        end_update(whole, state)
    first, _ = recorder_of(log_every=2)
    state = TrainState(num_updates=2)
    first.add({"x": mean(parts[0])})
    end_update(first, state)
    second, kept_second = recorder_of(log_every=2)
    second.load_state_dict(first.state_dict())
    second.add({"x": mean(parts[1])})
    end_update(second, state)
    assert kept_second.rows[0]["x"] == kept_whole.rows[0]["x"]


def test_the_time_of_an_update_is_the_sum_of_its_phases_without_evaluations():
    recorder, kept = recorder_of()
    state = TrainState(num_updates=2)
    for name in ("wait", "score", "annotate", "train", "sync"):
        with recorder.timer(name):
            pass
    end_update(recorder, state)
    row = kept.rows[0]
    phases = ("wait", "score", "annotate", "train", "sync")
    assert row["time/update_s"] == pytest.approx(sum(row[f"time/{name}_s"] for name in phases))
    with recorder.timer("wait"):
        pass
    recorder.evaluation(state, Evaluation({"eval/win_rate": 0.5}))
    assert recorder.timer.seconds == {}


@pytest.mark.parametrize(("minimised", "best"), [(False, 0.6), (True, 0.3)])
def test_the_best_evaluation_is_kept(minimised, best):
    recorder, state = Recorder(1, "eval/x", 1e-4, minimised=minimised), TrainState(num_updates=2)
    for value in (0.5, 0.3, 0.6, 0.4):
        recorder.evaluation(state, Evaluation({"eval/x": value}))
    assert state.best == best


def test_the_win_rate_against_the_initial_policy_counts_a_tie_as_half_a_win():
    figures = against_initial([2.0, 1.0, 1.0, 0.0], [1.0, 1.0, 2.0, 1.0])
    assert figures["eval/win_rate_vs_initial"] == (1 + 0.5) / 4
    bounds = tuple(figures[f"eval/win_rate_vs_initial_{end}"] for end in ("low", "high"))
    assert bounds == wilson(0.375, 4)
    assert against_initial([3.0], [3.0])["eval/win_rate_vs_initial"] == 0.5


def test_evaluations_after_the_first_are_compared_with_the_initial_scores():
    recorder, kept = recorder_of()
    for update, scores in enumerate(([0.0, 0.0], [1.0, -1.0], None, [1.0, 2.0])):
        recorder.evaluation(TrainState(num_updates=3, update=update), Evaluation({}, scores=scores))
        recorder.load_state_dict(json.loads(json.dumps(recorder.state_dict())))
    rates = [row.get("eval/win_rate_vs_initial") for row in kept.evaluations]
    assert rates == [None, 0.5, None, 1.0]
    assert recorder.evaluated["eval/win_rate_vs_initial"] == 1.0


def test_a_broken_invariant_of_the_first_update_gives_a_warning_with_the_value():
    recorder, kept = recorder_of()
    state = TrainState(num_updates=2)
    recorder.add({"policy/ratio": Stat(1.01), "objective/kl": Stat(1e-6)})
    end_update(recorder, state)
    assert len(kept.warnings) == 1 and "policy/ratio is 1.01" in kept.warnings[0]
    recorder.add({"policy/ratio": Stat(1.5)})
    end_update(recorder, state)
    assert len(kept.warnings) == 1, "later updates may differ"


def test_invariants_are_checked_only_at_the_first_step_for_any_log_every():
    recorder, kept = recorder_of(log_every=2)
    state = TrainState(num_updates=2)
    recorder.add({"policy/ratio": Stat(1.0)})
    recorder.add({"policy/ratio": Stat(1.5)})  # the second minibatch of the first update: weights have moved
    end_update(recorder, state)
    assert kept.warnings == [] and kept.rows == []
    recorder, kept = recorder_of(log_every=2)
    recorder.add({"policy/ratio": Stat(1.5)})
    assert len(kept.warnings) == 1, "the warning does not wait for the row"


BROKEN = {"policy/ratio": 1.0003, "objective/kl": -3e-4, "mismatch/kl": 3e-4, "policy/clipfrac": 0.0}


@pytest.mark.parametrize(
    ("tolerance", "tokens", "expected", "warned"),
    [
        (1e-4, 10.0, None, ["objective/kl", "policy/ratio", "mismatch/kl"]),
        (1e-3, 10.0, None, []),
        (1e-4, 300.0, None, ["mismatch/kl"]),  # rounding errors of sums over tokens grow with their number
        (1e-4, 10.0, ["policy/ratio"], ["policy/ratio"]),  # for example without objective/kl
    ],
)
def test_invariants_are_checked_with_a_tolerance_for_rounding(tolerance, tokens, expected, warned):
    made = Recorder(1, "eval/x", tolerance, *([expected] if expected else []))
    resumed, kept = Recorder(1, "eval/x", tolerance), Kept()
    for recorder in (made, resumed):
        recorder.open([kept])
    resumed.load_state_dict(made.state_dict())
    made.add({name: Stat(value) for name, value in {**BROKEN, "objective/response_tokens": tokens}.items()})
    resumed.add({name: Stat(value) for name, value in BROKEN.items()})  # the first update was before
    assert [text.partition(" ")[0] for text in kept.warnings] == warned


@pytest.mark.parametrize("rule", ["collapse", "repetition"])
def test_a_checkpoint_of_an_earlier_version_has_no_state_of_a_rule(rule):
    recorder, _ = recorder_of()
    saved = recorder.state_dict()
    del saved[rule]
    recorder.load_state_dict(saved)
    assert getattr(recorder, rule).state_dict() == recorder_of()[0].state_dict()[rule]


def test_a_metric_that_is_not_finite_is_omitted_from_the_row_with_a_warning():
    recorder, kept = recorder_of()
    recorder.add({"mismatch/max_ratio": Stat(float("inf"), 1.0, How.max), "x": Stat(1.0)})
    end_update(recorder, TrainState(num_updates=2))
    assert "mismatch/max_ratio" not in kept.rows[0] and kept.rows[0]["x"] == 1.0
    assert any("mismatch/max_ratio" in text for text in kept.warnings)


def test_token_lag_is_a_mean_over_tokens_and_lag_is_the_lag_of_the_oldest_token():
    recorder, kept = recorder_of()
    state, rollouts = TrainState(num_updates=9, version=6), tiny_rollouts()
    versions = torch.where(torch.arange(7) < 1, 4, 5) * rollouts.response_mask
    rollouts = replace(rollouts, version=4, token_versions=versions)
    state.advance(rollouts)
    recorder.flush(state, rollouts, NoEngine())
    responses, tokens = rollouts.episodes, int(rollouts.response_mask.sum())
    assert kept.rows[0]["lag"] == 2
    assert kept.rows[0]["mismatch/token_lag"] == pytest.approx(1 + responses / tokens)


def test_hints_at_a_judge_that_prefers_length_or_whose_criterion_all_meet_come_once():
    rule = JudgeRule()
    figures = {
        "judge/longer": Stat(95.0, 100.0),
        "judge/met/2": Stat(64.0, 64.0),
        "judge/first": Stat(60.0, 100.0),
    }
    (hint,) = rule.observe(figures, {"eval/response_tokens": 18.0}, {"eval/response_tokens": 22.0})
    assert "criterion 2" in hint
    saved, rule = rule.state_dict(), JudgeRule()
    rule.load_state_dict(saved)
    (hint,) = rule.observe(figures, {"eval/response_tokens": 18.0}, {"eval/response_tokens": 26.0})
    assert "longer responses (95% of 200 pairs)" in hint and "18.0" in hint and "26.0" in hint
    assert not [*rule.observe(figures, {"eval/response_tokens": 18.0}, {"eval/response_tokens": 26.0})]


@pytest.mark.parametrize(
    ("won", "of", "due"), [(30, 31, True), (1, 31, True), (20, 31, False), (3, 3, False)]
)
def test_a_judge_prefers_a_position_if_the_interval_excludes_a_half(won, of, due):
    hints = [*JudgeRule().observe({"judge/first": Stat(float(won), float(of))}, {}, {})]
    assert len(hints) == due
