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
from rlhf.training.comparison import against_initial
from rlhf.training.recorder import EXPECTED, Recorder, broken_invariants, expected
from rlhf.words.compose import compose
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


def test_a_mean_over_micro_batches_is_the_mean_over_all_items():
    figures = {}
    merge(figures, {"x": mean(torch.tensor([1.0, 2.0, 3.0]))})
    merge(figures, {"x": mean(torch.tensor([10.0, 99.0]), torch.tensor([True, False]))})
    assert figures["x"].value() == 4.0


def test_the_maximum_is_nan_if_any_part_is_nan():
    for values in ((1.0, float("nan")), (float("nan"), 1.0)):
        figures: Metrics = {}
        for value in values:
            merge(figures, {"max": largest(torch.tensor([value]), torch.tensor([True]))})
        assert math.isnan(figures["max"].value())


def test_maximum_sum_and_last_value_are_merged():
    figures = {}
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
    assert {name: stat.value() for name, stat in figures.items()} == {"max": 5.0, "sum": 12.0, "last": 4.0}


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


def test_the_best_evaluation_is_kept():
    recorder, kept = recorder_of()
    state = TrainState(num_updates=2)
    for rate in (0.3, 0.6, 0.5):
        recorder.evaluation(state, Evaluation({"eval/win_rate": rate}))
    assert state.best == 0.6
    assert kept.evaluations[1]["episode"] == 0


def test_the_lowest_value_of_a_minimised_metric_is_the_best():
    recorder = Recorder(1, "eval/loss", 1e-4, minimised=True)
    state = TrainState(num_updates=2)
    for loss in (0.6, 0.3, 0.5):
        recorder.evaluation(state, Evaluation({"eval/loss": loss}))
    assert state.best == 0.3


def test_the_win_rate_against_the_initial_policy_counts_a_tie_as_half_a_win():
    figures = against_initial([2.0, 1.0, 1.0, 0.0], [1.0, 1.0, 2.0, 1.0])
    assert figures["eval/win_rate_vs_initial"] == (1 + 0.5) / 4
    bounds = tuple(figures[f"eval/win_rate_vs_initial_{end}"] for end in ("low", "high"))
    assert bounds == wilson(0.375, 4)
    assert against_initial([3.0], [3.0])["eval/win_rate_vs_initial"] == 0.5


def test_evaluations_after_the_first_are_compared_with_the_initial_scores():
    recorder, kept = recorder_of()
    for update, scores in enumerate(([0.0, 0.0], [1.0, -1.0], [1.0, 2.0])):
        recorder.evaluation(TrainState(num_updates=2, update=update), Evaluation({}, scores=scores))
    rates = [row.get("eval/win_rate_vs_initial") for row in kept.evaluations]
    assert rates == [None, 0.5, 1.0]
    assert recorder.evaluated["eval/win_rate_vs_initial"] == 1.0


def test_the_initial_scores_are_in_the_checkpoint():
    first, _ = recorder_of()
    first.evaluation(TrainState(num_updates=2), Evaluation({}, scores=[0.0, 0.1]))
    second, kept = recorder_of()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    second.evaluation(TrainState(num_updates=2, update=2), Evaluation({}, scores=[0.2, 0.1]))
    assert kept.evaluations[0]["eval/win_rate_vs_initial"] == 0.75


def test_without_scores_there_is_no_comparison_with_the_initial_policy():
    recorder, kept = recorder_of()
    for update in (0, 1):
        recorder.evaluation(TrainState(num_updates=1, update=update), Evaluation({"eval/loss": 1.0}))
    assert "eval/win_rate_vs_initial" not in kept.evaluations[1]


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


def test_a_resumed_run_does_not_check_the_invariants_again():
    first, _ = recorder_of()
    second, kept = recorder_of()
    second.load_state_dict(first.state_dict())
    second.add({"policy/ratio": Stat(1.5)})
    assert kept.warnings == []


def test_kl_is_not_checked_if_the_reference_is_another_model():
    assert "objective/kl" in expected(compose([]).model.starts_as_reference)
    another = compose(["model.reference=another"]).model.starts_as_reference
    assert expected(another) == set(EXPECTED) - {"objective/kl"}
    recorder = Recorder(1, "eval/win_rate", 1e-4, {"policy/ratio"})
    kept = Kept()
    recorder.open([kept])
    recorder.add({"policy/ratio": Stat(1.0), "objective/kl": Stat(0.5)})
    assert kept.warnings == []


def test_invariants_are_checked_with_the_given_tolerance():
    row = {"policy/ratio": 1.001, "objective/kl": 0.002, "policy/clipfrac": 0.0}
    assert len(broken_invariants(row, 1e-4)) == 2
    assert broken_invariants(row, 5e-2) == []


def test_bounds_of_sums_over_tokens_grow_with_the_number_of_tokens():
    row = {"objective/kl": -3e-4, "policy/ratio": 1.0003, "mismatch/kl": 3e-4}
    assert len(broken_invariants(row, 1e-4, tokens=10)) == 3
    assert [text.partition(" ")[0] for text in broken_invariants(row, 1e-4, tokens=300)] == ["mismatch/kl"]
    recorder, kept = recorder_of()
    recorder.unchecked, recorder.tolerance = {"objective/kl"}, 1e-4
    recorder.add({"objective/kl": Stat(-3e-4), "objective/response_tokens": Stat(300.0)})
    assert kept.warnings == []


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
