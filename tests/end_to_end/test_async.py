"""Tests of generator and annotator processes: equal results without them, and recovery from kills.

"In line" means that the trainer process generates (`generator.worker=false`).
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch

from rlhf.config.models import Dtype
from rlhf.core.errors import RunError
from rlhf.core.files import read_lines
from rlhf.generators.hf.generator import HFSampler, HFSamplerFactory, HFSettings
from rlhf.generators.process import Replica, WorkerGenerator
from rlhf.generators.weights import TransferError, checksum
from rlhf.processes.signals import SIGNALS
from rlhf.processes.worker import Worker
from rlhf.runs.folder import RunFolder
from rlhf.scorers.scorer import RewardModelScorer
from rlhf.stages.run import run
from rlhf.words.compose import run_name
from tests.end_to_end.conftest import rows, wait_for
from tests.tiny_models import KINDS, tiny_lm

SETTINGS = HFSettings(stop_ids=[3], pad_id=0, batch_size=8, seed=7, noise=0.3)
RUN = ["schedule.total_episodes=80", "schedule.save_every=1", "schedule.eval_every=2", "algo.ties=keep"]
RUN += ["schedule.max_lag=1"]  # equals LAG in test_survival.py, so both files share one finished run


REPLICAS = [
    *("schedule.total_episodes=96", "schedule.save_every=3", "schedule.eval_every=3", "schedule.max_lag=2"),
]


def factory(model, **settings):
    settings = {
        "config": model.config.to_json_string(use_diff=False),
        "attention": "sdpa",
        "remote": None,
        "device": "cpu",
        "dtype": Dtype.float32,
        "settings": SETTINGS,
    } | settings
    return HFSamplerFactory(**settings)


@pytest.mark.parametrize("kind", KINDS)
def test_a_sampler_loads_the_weights_that_were_sent(kind):
    from rlhf.generators.weights import SharedWeights, confirm

    model = tiny_lm(kind)
    sampler, shared = factory(model).build(), SharedWeights()
    manifest = shared.write(model.state_dict().items(), 3)
    confirm(manifest, 3, sampler.load(manifest))
    assert {n: checksum(t) for n, t in sampler.model.state_dict().items()} == manifest.checksums()
    assert not sampler.model.training
    shared.close()


def test_weights_with_missing_names_are_rejected():
    from rlhf.generators.weights import SharedWeights

    sampler: HFSampler = factory(tiny_lm("llama")).build()
    shared = SharedWeights()
    manifest = shared.write(list(tiny_lm("llama").state_dict().items())[:-1], 3)
    with pytest.raises(TransferError, match="only one of the two has lm_head.weight"):
        sampler.load(manifest)
    shared.close()


@pytest.fixture
def uninterrupted(finished):
    """Return a finished run whose processes were not killed."""
    return finished(*RUN)


def figures(folder):
    """Return the rows of a run without the counts of restarts."""
    return [{k: v for k, v in row.items() if not k.endswith("/restarts")} for row in rows(folder)]


@pytest.mark.smoke
def test_a_run_logs_the_start_of_its_generator_and_annotator_processes(uninterrupted):
    updates = read_lines(uninterrupted.metrics)
    updates = [row for row in updates if "lr" in row]
    assert [row["lag"] for row in updates] == [0, 1, 1, 1, 1]
    assert all(row["generator/restarts"] == row["annotator/restarts"] == 0 for row in updates)
    assert all(row["time/generate_s"] > 0 and row["time/annotate_ahead_s"] > 0 for row in updates)
    for name in PROCESSES:
        assert (uninterrupted.path / f"{name}.log").exists()
        assert f"starting the {name} process" in uninterrupted.log.read_text()


def test_a_run_in_line_gives_the_same_completions_and_metrics(uninterrupted, tiny, tmp_path):
    folder = RunFolder(tmp_path / "run")
    run(tiny(*RUN, "generator.worker=false"), folder)
    assert not any((folder.path / f"{name}.log").exists() for name in PROCESSES)
    for a, b in zip(figures(folder), figures(uninterrupted), strict=True):
        assert a == pytest.approx(b, rel=1e-4, abs=1e-5)
    told = [
        [line["response"] for line in read_lines(file)]
        for file in (folder.completions, uninterrupted.completions)
    ]
    assert told[0] == told[1]


@pytest.fixture
def one_replica(finished):
    """Return a finished run with max_lag=2 and one generator."""
    return finished(*REPLICAS)


def test_two_replicas_give_the_same_completions_and_metrics_as_one(one_replica, tiny, tmp_path, monkeypatch):
    submit, asked = Replica.submit, []

    def noted(self, prompts, sampling):
        asked.append((sampling.purpose, sampling.request, self.log.name))
        return submit(self, prompts, sampling)

    monkeypatch.setattr(Replica, "submit", noted)
    folder, before = RunFolder(tmp_path / "run"), workers(os.getpid())
    run(tiny(*REPLICAS, "generator.replicas=2"), folder)
    logs = ["generator.log", "generator-replica1.log"]
    assert [each for each in asked if each[0] == "train"] == [("train", t, logs[t % 2]) for t in range(6)]
    assert all((folder.path / name).exists() for name in logs) and workers(os.getpid()) == before
    assert [row["lag"] for row in rows(folder) if "lr" in row] == [0, 1, 2, 2, 2, 2]
    assert figures(folder) == figures(one_replica)
    assert folder.completions.read_text() == one_replica.completions.read_text()


def test_a_killed_replica_and_a_changed_number_of_replicas_change_no_row(
    one_replica, tiny, tmp_path, monkeypatch
):
    folder = RunFolder(tmp_path / "run")
    shutil.copytree(one_replica.path, folder.path)
    folder.state.unlink()  # as if the trainer was killed after its last checkpoint (update 3)
    submit, killed = Replica.submit, []

    def submit_and_kill(self, prompts, sampling):
        future = submit(self, prompts, sampling)
        if sampling.purpose == "train" and not killed:
            wait_for(lambda: self.process is not None)
            os.kill(self.process.pid, signal.SIGKILL)
            killed.append(self.process.pid)
        return future

    monkeypatch.setattr(Replica, "submit", submit_and_kill)
    run(tiny(*REPLICAS, "generator.replicas=3"), folder)
    assert figures(folder) == figures(one_replica)
    assert folder.completions.read_text() == one_replica.completions.read_text()
    assert sum(row.get("generator/restarts", 0) for row in rows(folder)) == len(killed) == 1


def test_a_worker_killed_in_the_middle_of_a_run_changes_no_row(uninterrupted, tiny, tmp_path, monkeypatch):
    submit, load = WorkerGenerator.submit, WorkerGenerator.load

    def submit_and_kill(self, prompts, sampling):
        future = submit(self, prompts, sampling)
        if (sampling.purpose, sampling.request) in (("train", 1), ("eval", 0)) and self.restarts < 2:
            wait_for(lambda: self.process is not None)
            os.kill(self.process.pid, signal.SIGKILL)
        return future

    def load_and_kill(self, weights, version):
        load(self, weights, version)
        if version == 3 and self.process is not None:
            os.kill(self.process.pid, signal.SIGKILL)

    monkeypatch.setattr(WorkerGenerator, "submit", submit_and_kill)
    monkeypatch.setattr(WorkerGenerator, "load", load_and_kill)
    folder = RunFolder(tmp_path / "run")
    run(tiny(*RUN, "generator.restarts=9"), folder)
    assert figures(folder) == figures(uninterrupted)
    assert folder.completions.read_text() == uninterrupted.completions.read_text()
    assert sum(row.get("generator/restarts", 0) for row in rows(folder)) >= 2


def test_an_annotator_killed_in_the_middle_of_a_run_changes_no_row(
    uninterrupted, tiny, tmp_path, monkeypatch
):
    put, killed = Worker.put, []

    def put_and_kill(self, job):
        future = put(self, job)
        if job.method == "annotate" and len(killed) < 2:
            wait_for(lambda: (process := self.process) is not None and process.pid not in killed)
            killed.append(self.process.pid)
            os.kill(killed[-1], signal.SIGKILL)
        return future

    monkeypatch.setattr(Worker, "put", put_and_kill)
    folder = RunFolder(tmp_path / "run")
    run(tiny(*RUN), folder)
    assert figures(folder) == figures(uninterrupted)
    assert folder.completions.read_text() == uninterrupted.completions.read_text()
    assert sum(row.get("annotator/restarts", 0) for row in rows(folder)) == len(killed) == 2
    assert sum(row.get("generator/restarts", 0) for row in rows(folder)) == 0


def test_a_resumed_run_does_not_score_checkpointed_rollouts_again(uninterrupted, tiny, tmp_path, monkeypatch):
    folder = RunFolder(tmp_path / "run")
    shutil.copytree(uninterrupted.path, folder.path)
    folder.state.unlink()  # as if the trainer was killed after its last checkpoint
    packed = torch.load(folder.last_checkpoint() / "in_flight.pt", weights_only=True)
    assert [p["scores"].shape for p in packed] == [(8, 2)] and packed[0]["ref_logprobs"].shape == (8, 2, 16)
    score, scored = RewardModelScorer.score, []

    def noted(self, rollouts):
        scored.append(rollouts.response_ids.shape[:2])
        return score(self, rollouts)

    monkeypatch.setattr(RewardModelScorer, "score", noted)
    run(tiny(*RUN, "generator.worker=false"), folder)
    assert scored == [(16, 1)], "the trainer must score only the completions of the evaluation"
    for a, b in zip(figures(folder), figures(uninterrupted), strict=True):
        assert a == pytest.approx(b, rel=1e-4, abs=1e-5)


def test_a_run_ends_if_the_generator_exceeds_its_restarts(tiny, tmp_path, monkeypatch):
    load = WorkerGenerator.load

    def kill(self, weights, version):
        if version == 1:
            os.kill(self.process.pid, signal.SIGKILL)
        load(self, weights, version)

    monkeypatch.setattr(WorkerGenerator, "load", kill)
    with pytest.raises(RunError, match="must not fail more than 0 times"):
        run(tiny(*RUN, "generator.restarts=0"), RunFolder(tmp_path / "run"))
    assert not workers(os.getpid())


PROCESSES = ("generator", "annotator")


def workers(pid):
    """Return the running worker processes of a trainer."""
    found = []
    for process in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.Error):
            if "rlhf.processes.worker" in process.cmdline():
                found.append(process)
    return found


def shared_files(pid):
    """Return the named shared-memory files of a trainer."""
    return [
        p for place in ("/dev/shm", tempfile.gettempdir()) for p in Path(place).glob(f"rlhf-weights-{pid}-*")
    ]


def start(words):
    return subprocess.Popen(
        [sys.executable, "-m", "rlhf.train", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        process_group=0,
    )


def test_a_killed_trainer_leaves_no_process_and_resumes_to_the_same_rows(
    uninterrupted, tiny, command, tmp_path
):
    words, folder = [*command, *RUN], RunFolder(tmp_path / run_name(tiny(*RUN)))
    process = start(words)
    wait_for(lambda: len(workers(process.pid)) == len(PROCESSES) or process.poll() is not None)
    found = workers(process.pid)
    wait_for(lambda: folder.last_checkpoint() is not None or process.poll() is not None)
    os.kill(process.pid, signal.SIGKILL)  # immediately, because a run of five updates ends soon
    process.wait()
    assert len(found) == len(PROCESSES) and not folder.finished()
    assert not psutil.wait_procs(found, timeout=60)[1], "a worker process is still running"
    assert not shared_files(process.pid)

    again = start(words)
    told, _ = again.communicate(timeout=300)
    assert again.returncode == 0 and "resumed from update" in told, told
    assert figures(folder) == figures(uninterrupted)
    assert folder.completions.read_text() == uninterrupted.completions.read_text()


def test_the_generator_process_ignores_stop_signals(tiny, tmp_path, uninterrupted, monkeypatch):
    submit, asked = WorkerGenerator.submit, []

    def submit_and_ask_to_stop(self, prompts, sampling):
        # the process has loaded weights, so its imports are done
        if self.process is not None and self.confirmed is not None:
            for number in SIGNALS:
                os.killpg(self.process.pid, number)
                asked.append(number)
        return submit(self, prompts, sampling)

    monkeypatch.setattr(WorkerGenerator, "submit", submit_and_ask_to_stop)
    folder = RunFolder(tmp_path / "run")
    run(tiny(*RUN, "generator.restarts=0"), folder)
    assert asked and figures(folder) == figures(uninterrupted)


@pytest.mark.parametrize(
    "forked",
    [True, pytest.param(False, marks=[pytest.mark.forks(False), pytest.mark.nightly])],  # as a user starts it
)
def test_ctrl_c_ends_trainer_and_worker_processes(forked, command):
    process = start([*command, *RUN, "schedule.total_episodes=8000"])
    wait_for(lambda: process.poll() is not None or len(workers(process.pid)) == len(PROCESSES))
    time.sleep(1)
    found = workers(process.pid)
    os.killpg(process.pid, signal.SIGINT)  # a terminal sends SIGINT to the process group
    told, _ = process.communicate(timeout=300)
    assert process.returncode == 130 and "interrupted by Ctrl-C" in told.splitlines()[-1], told
    assert len(found) == len(PROCESSES) and not psutil.wait_procs(found, timeout=60)[1]
    assert not shared_files(process.pid)


def test_a_generator_process_computes_logits_in_float32_if_the_trainer_does():
    head = factory(tiny_lm(), float32_head=True).build().model.get_output_embeddings()
    states = torch.randn(3, head.in_features).to(torch.bfloat16)
    expected = states.float() @ head.weight.T
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(head(states), expected)
