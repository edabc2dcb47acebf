"""The generator process: order of requests, confirmation of weights, restarts, errors and shutdown."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import wait
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
        if self.fault == "writes":
            Path(tempfile.gettempdir(), "rest").touch()
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


def test_a_request_is_sampled_with_the_weights_loaded_last_before_it(start):
    futures = between_loads(start(Fake()), load)
    assert not futures[-1].done(), "submit does not wait, and load waits only for an earlier load"
    assert answers(futures) == IN_TURN


def test_rollouts_contain_their_prompts_and_the_sampling_time(start):
    generator = start(Fake())
    load(generator, 5)
    rollouts = ask(generator, 0, "slow").result(SECONDS)
    assert torch.equal(rollouts.prompt_ids, prompts().prompt_ids) and rollouts.texts == prompts().texts
    assert 0.3 <= rollouts.generate_s < 5 and rollouts.version == 5


def test_one_version_is_kept_if_all_requests_are_answered_before_each_load(start):
    generator = start(Fake())
    for version in range(4):
        load(generator, version)
        ask(generator, version).result(SECONDS)
        assert len(files_of(generator.store)) == 1 and not generator.store.free


def test_only_versions_in_use_are_kept(start):
    generator = start(Fake())
    load(generator, 0)
    for version in range(1, 8):
        running = ask(generator, version, "slow")
        load(generator, version)
        assert running.result(SECONDS).version == version - 1
    assert len(files_of(generator.store)) == 2


def test_a_process_that_died_while_idle_restarts_with_the_weights_loaded_next(start):
    generator = start(Fake())
    load(generator, 0)
    os.kill(pid(generator), signal.SIGKILL)
    load(generator, 1)  # in the shared memory of version 0
    assert answers([ask(generator, 1)]) == [(1, 1, 1)] and len(files_of(generator.store)) == 1


@pytest.mark.parametrize("fault", ["dies", "hangs"])
def test_a_lost_request_is_sampled_again_with_the_same_version(start, tmp_path, fault):
    limits = replace(LIMITS, request_s=3) if fault == "hangs" else LIMITS
    generator = start(Fake(fault, at=1, once=tmp_path), limits)
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


def test_a_process_lost_while_it_loads_weights_loads_the_weights_again(start, tmp_path):
    generator = start(Fake("dies in load", at=1, once=tmp_path))
    load(generator, 0)
    load(generator, 1)
    assert answers([ask(generator, 0)]) == [(1, 1, 0)]
    assert generator.figures()["generator/restarts"].value() == 1


def test_a_process_killed_while_idle_is_replaced(start):
    generator = start(Fake())
    load(generator, 4)
    os.kill(first := pid(generator), signal.SIGKILL)
    assert answers([ask(generator, 1)]) == [(4, 4, 1)]
    assert generator.process.pid != first


def test_temporary_files_are_removed_with_the_process_that_created_them(start):
    generator = start(Fake("writes"))
    load(generator, 0)
    os.kill(pid(generator), signal.SIGKILL)
    first = Path(generator.process.scratch)
    ask(generator, 1).result(SECONDS)
    second = Path(generator.process.scratch)
    assert first != second and not first.exists() and (second / "rest").exists()
    generator.close()
    assert not second.exists()


def test_a_process_lost_too_often_stops_the_run(start):
    generator = start(Fake("dies", at=1))
    load(generator, 0)
    futures = [ask(generator, 0), ask(generator, 1), ask(generator, 2)]
    assert answers(futures[:1]) == [(0, 0, 0)]
    for future in futures[1:]:
        with pytest.raises(RunError, match=r"more than 2 times .* it died \(killed by SIGKILL\)"):
            future.result(SECONDS)
    with pytest.raises(RunError, match="more than 2 times"):
        ask(generator, 3)
    with pytest.raises(RunError, match="more than 2 times"):
        load(generator, 1)


@pytest.mark.parametrize(
    ("factory", "error", "message"),
    [
        (Fake("build"), RunError, "failed to build: RuntimeError: no such model"),
        (Fake("user"), UserError, "model.policy must be another one"),
        (Fake("dies at start"), RunError, r"process must start, but it died \(exit code 3\)"),
        (Fake("raises"), RunError, "failed to sample: ValueError: out of ideas"),
        (lambda: None, RunError, "thread failed: PicklingError|AttributeError"),
    ],
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_error_of_the_sampler_stops_the_run_without_a_restart(start, factory, error, message):
    generator = start(factory)
    with pytest.raises(error, match=message):
        load(generator, 0)
        ask(generator, 0).result(SECONDS)
    assert generator.restarts == 0


def test_a_process_that_is_not_ready_in_time_is_replaced(start, tmp_path):
    generator = start(Fake("hangs at start", once=tmp_path), replace(LIMITS, start_s=12))
    load(generator, 0)
    assert answers([ask(generator, 0)]) == [(0, 0, 0)]
    assert generator.restarts == 1


def test_a_process_that_is_never_ready_in_time_stops_the_run(start):
    generator = start(Fake("hangs at start"), replace(LIMITS, start_s=0.05, restarts=1))
    message = r"failed again: it did not start within 0.05 seconds; .* or generator.start_limit_s higher"
    with pytest.raises(RunError, match=message):
        load(generator, 0)
        ask(generator, 0).result(SECONDS)


@pytest.mark.forks(False)
def test_the_log_contains_the_output_of_the_process(start, tmp_path):
    generator = start(Fake("raises"))
    load(generator, 0)
    with pytest.raises(RunError):
        ask(generator, 0).result(SECONDS)
    log = (tmp_path / "generator.log").read_text()
    assert "Traceback" in log and "out of ideas" in log


# -- failed weight transfers -----------------------------------------------------------------------


def written(monkeypatch, change):
    """Apply `change(manifest)` to each version after the first, after the version was written."""
    write = SharedWeights.write

    def changed(self, weights, version):
        manifest = write(self, weights, version)
        return change(manifest) if version else manifest

    monkeypatch.setattr(SharedWeights, "write", changed)


def cut(manifest):
    os.truncate(manifest.path, 66)
    return manifest


def scratch(manifest):
    with open(manifest.path, "r+b") as file:
        file.seek(manifest.entries[0].offset)
        file.write(b"?")
    return manifest


FAULTS = {
    "cut short": (cut, "weight of version 1 must reach to byte 68 .* a file of 66 bytes"),
    "changed": (scratch, "weight of version 1 must have the checksum"),
    "another version": (
        lambda manifest: replace(manifest, version=7),
        "must hold version 7, got version 1",
    ),
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


def test_weights_confirmed_with_another_checksum_stop_the_run(start):
    generator = start(Fake("takes another", at=1))
    load(generator, 0)
    load(generator, 1)
    with pytest.raises(TransferError, match="must hold weight of version 1 with the checksum"):
        ask(generator, 1).result(SECONDS)


def test_a_request_sampled_with_another_version_stops_the_run(start):
    generator = start(Fake())
    load(generator, 0)
    ask(generator, 0).result(SECONDS)
    generator.confirmed = replace(generator.confirmed, version=3)  # as if the process had skipped a load
    with pytest.raises(TransferError, match="must be sampled by version 3, .* got version 0"):
        ask(generator, 1).result(SECONDS)


# -- shutdown --------------------------------------------------------------------------------------


def test_close_lets_an_idle_process_close_its_sampler(start, tmp_path):
    generator = start(Fake(once=tmp_path))
    load(generator, 0)
    process = pid(generator)
    generator.close()
    assert gone(process) and (tmp_path / "closed").exists()
    with pytest.raises(RunError, match="the generator was closed"):
        ask(generator, 1)


def test_close_does_not_wait_for_a_running_request(start):
    generator = start(Fake("hangs", at=1))
    load(generator, 0)
    process, future = pid(generator), ask(generator, 1)
    time.sleep(0.2)
    begun = time.monotonic()
    generator.close()
    assert time.monotonic() - begun < SECONDS / 4 and gone(process)
    with pytest.raises(RunError, match="the generator was closed"):
        future.result(SECONDS)


def test_close_does_not_wait_for_a_process_that_starts(start):
    generator = start(Fake("hangs at start"))
    begun = time.monotonic()
    generator.close()
    assert time.monotonic() - begun < SECONDS / 4 and not generator.carrier.is_alive()


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
    end = time.monotonic() + 10
    while not all(map(gone, pids)) or any(map(os.path.exists, files)):
        assert time.monotonic() < end, "a process or a file still exists"
        time.sleep(0.05)
    assert "Traceback" not in log.read_text()


def test_shared_memory_of_a_killed_process_is_removed(start):
    generator = start(Fake("shares", at=1))
    load(generator, 0)
    ask(generator, 1).result(SECONDS)
    name, child = Path(generator.process.scratch, "shared").read_text().split()
    generator.process.kill_all()
    end = time.monotonic() + 10
    while not gone(int(child)) or os.path.exists(f"/dev/shm/{name}"):
        assert time.monotonic() < end, "the child process or the shared memory still exists"
        time.sleep(0.05)


def test_requests_may_come_from_several_threads(start):
    generator = start(Fake())
    load(generator, 0)
    futures = []
    threads = [threading.Thread(target=lambda i=i: futures.append(ask(generator, i))) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wait(futures, SECONDS).not_done
    assert sorted(request for _, _, request in answers(futures)) == list(range(8))
