"""Tests of the schedule simulation against the training loop and the closed form of the steady state."""

import json

import pytest

from benchmarks import schedule
from benchmarks.schedule import Batch, least_lag, least_lag_found, of_run, period, seconds, settled, simulate
from rlhf.report.runs import read_run
from rlhf.runs.folder import RunFolder
from rlhf.words.compose import compose
from tests.generators.test_replicas import noted, train


@pytest.mark.parametrize(("generators", "lag"), [(2, 1), (2, 2), (3, 5), (4, 4)])
@pytest.mark.parametrize("batch", [Batch(generate=3, train=1), Batch(1, 3, annotate=2, load=0.5)])
def test_requests_and_versions_equal_those_of_the_training_loop(generators, lag, batch):
    loop = noted(generators)
    versions = train(loop, lag, updates=12)
    made = simulate([batch] * 12, generators, lag)
    assert made.version == versions
    requests = [[t for what, t in replica.done if what == "train"] for replica in loop.replicas]
    assert [[t for t in range(12) if made.generator[t] == i] for i in range(generators)] == requests


def test_requests_wait_for_weights_and_generator_and_updates_for_annotated_batches():
    batches = schedule.varied(Batch(generate=5, train=2, annotate=1.5, load=0.25), spread=0.8, number=200)
    n, lag = 3, 4
    made = simulate(batches, n, lag)
    free = 0.0
    for t, batch in enumerate(batches):
        asked = 0 if t <= lag else made.trained[t - lag - 1][1]
        before = made.sampled[t - n][1] if t >= n else 0
        new = t < n or made.version[t] != made.version[t - n]
        assert made.sampled[t][0] == pytest.approx(max(asked, before) + (batch.load if new else 0))
        assert made.sampled[t][1] - made.sampled[t][0] == pytest.approx(batch.generate)
        assert made.trained[t][0] == pytest.approx(max(free, made.annotated[t][1]))
        free = made.trained[t][1]
    order = sorted(range(200), key=lambda t: made.annotated[t][0])
    assert order == sorted(range(200), key=lambda t: made.sampled[t][1]) != list(range(200))
    for early, late in zip(order, order[1:], strict=False):
        came = made.sampled[late][1]
        assert made.annotated[late][0] == pytest.approx(max(came, made.annotated[early][1]))


@pytest.mark.parametrize("generators", [1, 2, 3, 5])
@pytest.mark.parametrize("lag", [0, 1, 2, 4, 7])
def test_the_time_per_update_equals_the_closed_form_of_the_steady_state(generators, lag):
    for batch in (Batch(4, 1), Batch(1, 4, 2, 0.5), Batch(9, 2, 3, 1), Batch(1, 1, 6), Batch(7, 1)):
        made = simulate([batch] * 400, generators, lag)
        turn = generators * (lag + 1)
        expected = turn * period(batch, generators, lag)
        assert made.seconds(400 - 1 - turn, 399) == pytest.approx(expected)
        assert seconds([batch], generators, lag) == pytest.approx(expected / turn)


def test_the_period_of_some_schedules():
    batch = Batch(generate=20, train=1)
    assert seconds([batch], 1, 0) == pytest.approx(21) and seconds([batch], 1, 1) == pytest.approx(20)
    assert [seconds([batch], n, 40) for n in (2, 8, 30)] == [pytest.approx(each) for each in (10, 2.5, 1)]
    assert period(batch, 3, 2) < period(batch, 2, 2) and period(batch, 9, 2) == period(batch, 3, 2)


@pytest.mark.parametrize(("g", "generators", "lag"), [(16, 16, 16), (16, 4, 4), (0.5, 1, 1), (16, 32, 16)])
def test_the_least_lag_is_sufficient_and_one_less_is_not(g, generators, lag):
    batch = Batch(generate=g, train=1)
    best = max(1, g / generators)
    assert least_lag(batch, generators) == lag == least_lag_found([batch], generators, best, within=1e-6)
    assert seconds([batch], generators, lag) == pytest.approx(best)
    assert seconds([batch], generators, lag - 1) > 1.01 * best


def test_shares_of_waiting_and_idle_time():
    made, first, last = settled([Batch(generate=4, train=1)], 2, 2)
    assert made.waiting(first, last) == pytest.approx(0.5) and made.idle(2, first, last) == pytest.approx(0)
    made, first, last = settled([Batch(generate=1, train=4)], 1, 1)
    assert made.waiting(first, last) == pytest.approx(0) and made.idle(1, first, last) == pytest.approx(0.75)


def test_uneven_sampling_times_need_more_lag():
    batch = Batch(generate=8, train=1)
    uneven = schedule.varied(batch, spread=0.5)
    assert sum(each.generate for each in uneven) / len(uneven) == pytest.approx(8)
    assert least_lag_found(uneven, 10, best=1, within=0.05) > least_lag(batch, 10)


def begin(folder: RunFolder, *words: str) -> None:
    folder.write_config(compose([*words]))
    folder.write_environment()


def test_a_run_is_compared_with_the_prediction_from_its_phases(tmp_path):
    """The metrics are those of a loop with the simulated phases. Its processes take 5 seconds to start."""
    batches = schedule.varied(Batch(generate=3, train=1, annotate=0.5, load=0.1), spread=0.4, number=30)
    made = simulate(batches, 2, 2)
    free, rows = -5.0, []
    for t, batch in enumerate(batches):
        start, end = made.trained[t]
        phases = {"generate": batch.generate, "annotate_ahead": 0.5, "load": 0.1, "score": 0.25}
        phases |= {"train": 0.75, "wait": start - free, "update": end - free}
        rows.append({"update": t + 1, "lr": 1.0, **{f"time/{name}_s": x for name, x in phases.items()}})
        free = end
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    begin(RunFolder(tmp_path), "generator.replicas=2", "schedule.max_lag=2")
    found = of_run(read_run(tmp_path))
    assert found[3].train == pytest.approx(1) and found[3].load == pytest.approx(0.1)
    cells = schedule.compared([tmp_path]).splitlines()[-1].strip("| ").split(" | ")
    assert cells[:3] == ["2", "2", "29"] and cells[8] == "1.000" and cells[9] == cells[10]


def test_a_run_without_a_row_for_each_update_is_rejected(tmp_path):
    begin(RunFolder(tmp_path))
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"update": 2, "lr": 1.0}) + "\n")
    with pytest.raises(SystemExit, match=r"run it with schedule\.log_every=1"):
        of_run(read_run(tmp_path))
