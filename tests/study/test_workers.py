"""Workers with attempts that only write a row: no run twice, none lost, failures."""

import json
import os
import signal
import time
from collections import Counter

import pytest

from rlhf.core.errors import RunError
from rlhf.processes.signals import interruptible
from rlhf.report.runs import read_run
from rlhf.runs.lock import LOCK
from rlhf.study import work as workers
from rlhf.study.plan import DONE, Collection, Plan
from rlhf.study.rows import FAILED, FINISHED
from tests.report.test_report import write_run
from tests.study.conftest import STUDY

SHORT = STUDY.replace("grids: [{lag: all}]", "grids: [{lag: [0, 1]}]").replace("[0, 1, 4]", "[0, 1]")


@pytest.fixture
def attempts(monkeypatch, tmp_path):
    """Replace runs by a function; the result returns the runs whose attempts began."""
    log = tmp_path / "attempts"
    log.touch()

    def replace(work):
        def carry_out(spec, planned, cfg):
            with log.open("a") as file:
                file.write(f"{planned.run}\n")
            work(planned)
            return workers.row_of(planned, status=FINISHED, error=None, metric="eval/win_rate")

        monkeypatch.setattr(workers, "_carry_out", carry_out)
        return lambda: Counter(log.read_text().splitlines())

    return replace


def in_process(spec):
    """Let a worker work in a process of its own."""

    def work():
        with interruptible():
            workers.Worker(Plan(spec, [])).work()

    return workers.forked(work)


def states(spec):
    return [each.state for each in Plan(spec, Collection(spec).rows()).runs]


@pytest.mark.process
def test_two_workers_carry_out_every_run_once_and_one_that_is_killed_is_replaced(study, attempts):
    began = attempts(lambda planned: time.sleep(0.3))
    first, second = in_process(spec := study(SHORT)), in_process(spec)
    time.sleep(0.5)
    first.kill()
    assert workers.wait_for(first) == -signal.SIGKILL and workers.wait_for(second) == 0
    assert states(spec) == [DONE] * 8
    again = Counter(began())
    assert len(again) == 8 and again.total() <= 9  # the run of the worker that was killed
    workers.Worker(Plan(spec, [])).work()
    assert began() == again


def test_a_watch_names_each_run_and_each_stage_once_as_it_begins(study, capsys):
    watch = workers.Watch(plan := Plan(study(SHORT), []), 1)
    watch.look()
    assert not capsys.readouterr().out
    first, second, *_ = plan.runs
    for each in (first, second):
        each.folder.mkdir(parents=True)
        (each.folder / LOCK).touch()
    (first.folder / workers.OUTPUT).write_text(
        "[1/3] SFT model: c/sft-1\n[1/3] sft of pythia\n[1/3] SFT model: 0:01 left; all 3 stages: 0:26\n"
        "[1/3] SFT model: done in 0:10\n[2/3] reward model: finished, in c/reward-2\n"
    )
    (second.folder / workers.OUTPUT).write_text("[1/3] SFT model: c/sft-1\nSFT model: c/sft-9\n")
    watch.look()
    watch.look()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" ")[-1] for line in lines if "SFT" in line] == ["c/sft-1", "c/sft-9"]
    assert [line for line in lines if "SFT" not in line] == [f"starts: {r.run}" for r in (first, second)]


@pytest.mark.process
def test_a_signal_stops_a_worker_and_its_attempt(study, attempts):
    began = attempts(lambda planned: time.sleep(30))
    worker = in_process(spec := study(SHORT))
    while not began():
        time.sleep(0.05)
    worker.terminate()
    assert workers.wait_for(worker) == os.EX_TEMPFAIL
    assert not [*spec.folder.glob("runs/*/.lock")] and began().total() == 1
    assert not [*spec.folder.glob("runs/*/failures.jsonl")]


@pytest.mark.process
def test_a_run_that_fails_is_repeated_at_the_end_and_then_has_a_row(study, attempts):
    def work(planned):
        if (planned.run.cell.method, planned.run.seed) == ("rloo", 1):
            raise ValueError(f"lag {planned.run.cell.levels}")

    began = attempts(work)
    spec = study(SHORT)
    workers.Worker(Plan(spec, [])).work()
    assert states(spec) == [DONE] * 8
    assert [*began().values()].count(2) == 2
    failed = [row for row in Collection(spec).rows() if row.status == FAILED]
    assert sorted(row.error for row in failed) == [f"ValueError: lag (('lag', '{lag}'),)" for lag in (0, 1)]
    Collection(spec).forget_failures()
    assert states(spec).count(DONE) == 6


@pytest.mark.process
def test_three_equal_failures_in_a_row_stop_a_worker(study, attempts):
    def work(planned):
        raise OSError(f"no space left for {planned.folder.name}")

    began = attempts(work)
    spec = study(SHORT)
    with pytest.raises(
        RunError, match="3 runs in a row failed with the same error .*no space left for <run>"
    ):
        workers.Worker(Plan(spec, [])).work()
    assert began().total() == 3


@pytest.mark.process
def test_an_attempt_that_is_killed_resumes_unless_it_makes_no_progress(study, attempts):
    def work(planned):
        tries = planned.folder / "tries"
        tries.write_text(tries.read_text() + "x" if tries.exists() else "x")
        if planned.run.seed == 1 and len(tries.read_text()) < 3:
            os.kill(os.getpid(), signal.SIGKILL)

    began = attempts(work)
    spec = study(SHORT.replace("rloo: [algo=rloo]", "").replace("[0, 1]", "[0]"))
    workers.Worker(Plan(spec, [])).work()
    assert states(spec) == [DONE] * 2 and sorted(began().values()) == [1, 3]
    assert not [row for row in Collection(spec).rows() if row.status == FAILED]


def test_a_row_has_all_metrics_of_the_last_quarter_each_over_the_updates_that_have_it(tmp_path):
    folder = write_run(tmp_path / "a", updates=8)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    trained = [row for row in rows if "lr" in row]
    trained[-4]["mismatch/ess"] = 0.1  # before the last quarter
    trained[-2]["mismatch/ess"] = 0.5
    trained[-1]["rollouts/lag"] = 2.0
    evaluated = [row for row in rows if "eval/kl" in row]
    del evaluated[-1]["eval/kl"]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    best = [{"n": 1.0, "gold_score": 2.5}, {"n": 2.0, "gold_score": 2.75}]
    (folder / "best_of.jsonl").write_text("".join(json.dumps(row) + "\n" for row in best))
    found = workers.row_of_files(read_run(folder), "eval/win_rate", [])
    assert found["evaluations"]["best_of/n"] == [1, 2]
    assert found["evaluations"]["best_of/gold_score"] == [2.5, 2.75]
    assert found["means"]["mismatch/ess"] == 0.5 and found["means"]["rollouts/lag"] == 2.0
    assert found["means"]["objective/scores"] == pytest.approx(7.5)
    assert found["evaluations"]["eval/kl"] == [0.0, 1.0, 2.0, 3.0, None]
    assert "eval/kl" not in found["metrics"]
