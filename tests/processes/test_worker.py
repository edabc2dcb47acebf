"""The generator process: order of requests, confirmation of weights, restarts, errors and shutdown."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, replace
from multiprocessing import shared_memory
from pathlib import Path

import psutil
import pytest
import torch

from rlhf.core.batch import Prompts, Rollouts, Sampling
from rlhf.core.errors import RunError, UserError
from rlhf.generators.process import WorkerGenerator
from rlhf.generators.weights import SharedWeights, TransferError, checksum, read
from rlhf.processes.worker import Limits

pytestmark = [pytest.mark.process, pytest.mark.forks]

LIMITS = Limits(start_s=120, request_s=60, restarts=2)
SECONDS = 120  # timeout of a wait in a test


def files_of(store):
    """Return the paths of all files of a store in memory, used and unused."""
    return [*store.holders, *store.free]


@dataclass
class Fake:
    """A factory of a sampler with one weight, whose responses [N, 1, 2] are (weight, request number).

    The fault occurs at the request or version `at`: every time, or only once if `once` is a folder.
    """

    fault: str = ""
    at: int = 0
    once: Path | None = None

    def build(self):
        if self.fault == "build":
            raise RuntimeError("no such model")
        if self.fault == "user":
            raise UserError("model.policy must be another one")
        if self.strikes("hangs at start", self.at):
            time.sleep(1000)
        if self.fault == "dies at start":
            os._exit(3)
        return FakeSampler(self)

    def strikes(self, fault, number):
        if fault != self.fault or number != self.at:
            return False
        if self.once is None:
            return True
        struck = self.once / "struck"
        seen = struck.exists()
        struck.touch()
        return not seen


class FakeSampler:
    def __init__(self, made_by):
        self.made_by, self.weight = made_by, None

    def sample(self, prompts, sampling, update=None):
        request = sampling.request
        if self.made_by.strikes("dies", request):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.made_by.strikes("hangs", request):
            time.sleep(1000)
        if self.made_by.strikes("raises", request):
            raise ValueError("out of ideas")
        if sampling.purpose == "slow":
            time.sleep(0.3)
        if self.made_by.strikes("shares", request):
            self.shared = shared_memory.SharedMemory(create=True, size=100)
            self.child = subprocess.Popen(["sleep", "1000"])
            Path(tempfile.gettempdir(), "shared").write_text(f"{self.shared.name} {self.child.pid}")
        repeats = 1
        if self.made_by.strikes("answers much", request):
            repeats = 2**17  # 4 MiB, more than the buffers of the connection
            Path(tempfile.gettempdir(), "answers").touch()
            time.sleep(0.5)
        tokens = torch.tensor([[[int(self.weight), request] * repeats]]).expand(len(prompts), -1, -1)
        return prompts.extend(
            Rollouts,
            response_ids=tokens.contiguous(),
            response_mask=tokens > -1,
            ended=torch.ones(len(prompts), 1, dtype=torch.bool),
        )

    def load(self, manifest):
        if self.made_by.strikes("dies in load", manifest.version):
            os.kill(os.getpid(), signal.SIGKILL)
        taken = {}
        for name, tensor in read(manifest):
            self.weight = tensor.clone()
            taken[name] = checksum(self.weight)
        if self.made_by.strikes("takes another", manifest.version):
            taken["weight"] += 1
        return taken

    def close(self):
        if self.made_by.once is not None:
            (self.made_by.once / "closed").touch()


@pytest.fixture
def start(tmp_path):
    """Return a function that starts a generator; all generators are closed at the end of the test."""
    made = []

    def make(factory, limits=LIMITS):
        made.append(WorkerGenerator(factory, tmp_path / "generator.log", {"OMP_NUM_THREADS": "1"}, limits))
        return made[-1]

    yield make
    for generator in made:
        generator.close()


def prompts(rows=2):
    ids = torch.arange(rows)[:, None]
    texts = [""] * rows
    return Prompts(
        index=torch.arange(rows), texts=texts, references=texts, prompt_ids=ids, prompt_mask=ids > -1
    )


def ask(generator, request, purpose="train"):
    sampling = Sampling(samples=1, temperature=1.0, response_length=2, purpose=purpose, request=request)
    return generator.submit(prompts(), sampling)


def load(generator, version):
    generator.load([("weight", torch.tensor(float(version)))], version)


def answers(futures):
    """Return (version, weight of the sampler, request number) of each future."""
    found = [future.result(SECONDS) for future in futures]
    return [(rollouts.version, *rollouts.response_ids[0, 0].tolist()) for rollouts in found]


def pid(generator):
    ask(generator, 0).result(SECONDS)
    return generator.process.pid


def gone(pid):
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def until(condition):
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end, "a process or a file still exists"
        time.sleep(0.05)


def between_loads(generator, load):
    """Submit four requests between four loads; `IN_TURN` lists the expected answers."""
    load(generator, 0)
    futures = [ask(generator, 0, "slow"), ask(generator, 1)]
    load(generator, 1)
    load(generator, 2)
    futures += [ask(generator, 2, "slow")]
    load(generator, 3)
    return [*futures, ask(generator, 3)]


IN_TURN = [(0, 0, 0), (0, 0, 1), (2, 2, 2), (3, 3, 3)]


def test_a_request_is_sampled_with_the_weights_loaded_last_before_it(start, tmp_path):
    generator = start(Fake(once=tmp_path))
    futures = between_loads(generator, load)
    assert not futures[-1].done(), "submit does not wait, and load waits only for an earlier load"
    assert answers(futures) == IN_TURN
    rollouts = futures[0].result()
    assert torch.equal(rollouts.prompt_ids, prompts().prompt_ids) and rollouts.texts == prompts().texts
    assert 0.3 <= rollouts.generate_s < 5
    for version in range(4, 8):
        load(generator, version)
        ask(generator, version).result(SECONDS)
        assert generator.store.kept == 1, "all requests were answered before the load"
    for version in range(8, 12):
        running = ask(generator, version, "slow")
        load(generator, version)
        assert running.result(SECONDS).version == version - 1
    assert len(files_of(generator.store)) == 2
    threads = [threading.Thread(target=lambda i=i: futures.append(ask(generator, i))) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(request for _, _, request in answers(futures[4:])) == list(range(8))
    process = pid(generator)
    generator.close()
    assert gone(process) and (tmp_path / "closed").exists(), "an idle process closes its sampler"
    with pytest.raises(RunError, match="the generator was closed"):
        ask(generator, 1)


def test_a_process_killed_while_idle_is_replaced_and_leaves_no_files(start):
    generator = start(Fake("shares", at=2))
    load(generator, 0)
    os.kill(first := pid(generator), signal.SIGKILL)
    scratch = Path(generator.process.scratch)
    assert answers([ask(generator, 1)]) == [(0, 0, 1)]
    assert generator.process.pid != first and not scratch.exists()
    ask(generator, 2).result(SECONDS)
    scratch = Path(generator.process.scratch)
    name, child = (scratch / "shared").read_text().split()
    generator.process.kill_all()
    until(lambda: gone(int(child)) and not os.path.exists(f"/dev/shm/{name}"))
    load(generator, 1)  # in the shared memory of version 0
    assert answers([ask(generator, 1)]) == [(1, 1, 1)] and len(files_of(generator.store)) == 1
    assert not scratch.exists()


@pytest.mark.parametrize("fault", ["dies", "hangs", "dies in load", "hangs at start"])
def test_a_lost_job_is_repeated_with_the_same_version(start, tmp_path, fault):
    limits = {"hangs": replace(LIMITS, request_s=3), "hangs at start": replace(LIMITS, start_s=12)}
    generator = start(Fake(fault, at=1, once=tmp_path), limits.get(fault, LIMITS))
    load(generator, 0)
    futures = [ask(generator, 0), ask(generator, 1), ask(generator, 2)]
    load(generator, 1)  # in shared memory before the request of version 0 is lost
    futures += [ask(generator, 3)]
    load(generator, 2)
    futures += [ask(generator, 4)]
    assert answers(futures) == [(0, 0, 0), (0, 0, 1), (0, 0, 2), (1, 1, 3), (2, 2, 4)]
    assert (tmp_path / "struck").exists()
    assert generator.figures()["generator/restarts"].value() == 1
    assert generator.figures()["generator/restarts"].value() == 0, "each restart is counted once"


@pytest.mark.parametrize(
    ("fault", "limits", "message"),
    [
        ("dies", LIMITS, r"more than 2 times .* it died \(killed by SIGKILL\)"),
        ("hangs at start", replace(LIMITS, start_s=0.05, restarts=1), "or generator.start_limit_s higher"),
    ],
)
def test_a_process_lost_too_often_stops_the_run(start, fault, limits, message):
    generator = start(Fake(fault, at=1), limits)
    with pytest.raises(RunError, match=message):
        load(generator, 0)
        futures = [ask(generator, 0), ask(generator, 1), ask(generator, 2)]
        assert answers(futures[:1]) == [(0, 0, 0)]
        for future in futures[1:]:
            assert future.exception(SECONDS) is generator.failure
        futures[1].result()
    for call in (lambda: ask(generator, 3), lambda: load(generator, 1)):
        with pytest.raises(RunError, match=message):
            call()


@pytest.mark.parametrize(
    ("factory", "error", "message"),
    [
        (Fake("build"), RunError, "failed to build: RuntimeError: no such model"),
        (Fake("user"), UserError, "model.policy must be another one"),
        (Fake("dies at start"), RunError, r"process must start, but it died \(exit code 3\)"),
        pytest.param(Fake("raises"), RunError, "ValueError: out of ideas", marks=pytest.mark.forks(False)),
        (lambda: None, RunError, "thread failed: PicklingError|AttributeError"),
        (Fake("takes another"), TransferError, "must hold weight of version 0 with the checksum"),
    ],
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_error_of_the_sampler_stops_the_run_without_a_restart(start, tmp_path, factory, error, message):
    generator = start(factory)
    with pytest.raises(error, match=message):
        load(generator, 0)
        ask(generator, 0).result(SECONDS)
    assert generator.restarts == 0
    if "ideas" in message:
        log = (tmp_path / "generator.log").read_text()
        assert "Traceback" in log and "out of ideas" in log


def written(monkeypatch, change):
    """Apply `change(manifest)` to each version after the first, after the version was written."""
    write = SharedWeights.write

    def changed(self, weights, version):
        manifest = write(self, weights, version)
        return change(manifest) if version else manifest

    monkeypatch.setattr(SharedWeights, "write", changed)


def cut(manifest):
    os.truncate(manifest.path, 2)
    return manifest


def scratch(manifest):
    with open(manifest.path, "r+b") as file:
        file.seek(manifest.entries[0].offset)
        file.write(b"?")
    return manifest


FAULTS = {
    "cut short": (cut, "weight of version 1 must have the checksum .* in 2 bytes"),
    "changed": (scratch, "weight of version 1 must have the checksum"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_failed_weight_transfer_stops_the_run(start, monkeypatch, fault):
    change, message = FAULTS[fault]
    written(monkeypatch, change)
    generator = start(Fake())
    load(generator, 0)
    before = ask(generator, 0)
    load(generator, 1)
    behind = ask(generator, 1)
    assert answers([before]) == [(0, 0, 0)]
    with pytest.raises(TransferError, match=message):
        behind.result(SECONDS)
    with pytest.raises(TransferError, match=message):
        load(generator, 2)
    assert generator.restarts == 0


def test_a_request_sampled_with_another_version_stops_the_run(start):
    generator = start(Fake())
    load(generator, 0)
    ask(generator, 0).result(SECONDS)
    generator.confirmed = replace(generator.confirmed, version=3)  # as if the process had skipped a load
    with pytest.raises(TransferError, match="must be sampled by version 3, .* got version 0"):
        ask(generator, 1).result(SECONDS)


@pytest.mark.parametrize("fault", ["hangs", "hangs at start"])
def test_close_does_not_wait_for_a_running_request_or_start(start, fault):
    generator, future = start(Fake(fault, at=1)), None
    if fault == "hangs":
        load(generator, 0)
        future = ask(generator, 1)
        time.sleep(0.2)
    begun = time.monotonic()
    generator.close()
    assert time.monotonic() - begun < SECONDS / 4 and not generator.carrier.is_alive()
    if future is not None:
        with pytest.raises(RunError, match="the generator was closed"):
            future.result(SECONDS)


TRAINER = """
import os, signal, sys, time
from pathlib import Path
if sys.argv[1] == "named":
    del os.memfd_create
from tests.processes.test_worker import LIMITS, Fake, ask, load, pid
from rlhf.generators.process import WorkerGenerator
state = sys.argv[3]
fault = {"starting": "hangs at start", "answering": "answers much", "sharing": "shares"}.get(state, "hangs")
generator = WorkerGenerator(Fake(fault, at=1), Path(sys.argv[2]), {"OMP_NUM_THREADS": "1"}, LIMITS)
if state in ("launched", "starting"):
    while generator.process is None:
        time.sleep(0.001)
    worker = generator.process.pid
else:
    load(generator, 0)
    worker = pid(generator)
if state == "starting":
    time.sleep(2)
if state == "sharing":
    ask(generator, 1).result()
if state in ("working", "answering"):
    ask(generator, 1)
while state == "answering" and not Path(generator.process.scratch, "answers").exists():
    time.sleep(0.01)
if state == "working":
    load(generator, 1)
    time.sleep(0.5)
print(worker, generator.process.scratch, *generator.store.holders, *generator.store.free, flush=True)
if state == "answering":
    os.kill(os.getpid(), signal.SIGSTOP)  # the answer does not fit into the buffers of the connection
time.sleep(1000)
"""

STATES = {"launched": 1, "starting": 1, "working": 3, "waiting": 2, "answering": 2, "sharing": 2}  # files


# A server of forks keeps the connection of a killed trainer open, so these states need new processes.
REAL = [("answering", "nameless"), ("working", "named")]
FORKED = [(state, "nameless") for state in STATES if state != "answering"]


@pytest.mark.parametrize(
    ("state", "memory"),
    [
        *FORKED,
        *(pytest.param(*case, marks=pytest.mark.forks(False)) for case in REAL),
        pytest.param("waiting", "named", marks=[pytest.mark.forks(False), pytest.mark.nightly]),
    ],
)
def test_a_process_ends_with_its_trainer_and_leaves_no_files(tmp_path, memory, state):
    log = tmp_path / "log"
    words = [sys.executable, "-c", TRAINER, memory, str(log), state]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as trainer:
        lines = iter(trainer.stdout.readline, "")
        worker, *files = next(line for line in lines if line[0].isdigit()).split()
        pids = [int(worker)]
        assert not gone(pids[0]) and len(files) == STATES[state]
        if state == "sharing":
            name, child = Path(files[0], "shared").read_text().split()
            files.append(f"/dev/shm/{name}")
            pids.append(int(child))
        assert all(map(os.path.exists, files))
        time.sleep(1.5 if state == "answering" else 0)
        trainer.kill()
    until(lambda: all(map(gone, pids)) and not any(map(os.path.exists, files)))
    assert "Traceback" not in log.read_text()
