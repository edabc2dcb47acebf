"""Processes that the user starts end when they are asked to, in the trainer and in a worker process."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor

import pytest

from rlhf.core import launched
from rlhf.processes.signals import SIGNALS, interruptible, kill_group, members
from rlhf.processes.worker import Job, Limits, Service, Worker

pytestmark = pytest.mark.process
LIMIT_S = 60
SLOW = 1000


def terminated(method):
    """Return the exit code of a process that hangs and is terminated, as by the time limit of a checker."""
    child = multiprocessing.get_context(method).Process(target=time.sleep, args=(SLOW,))
    child.start()
    child.join(0.2 if method == "fork" else 2)
    child.terminate()
    child.join(LIMIT_S)
    code = child.exitcode
    child.kill()
    return code


def pooled(method):
    """Return the results of a pool of processes, which ends at the end of its block."""
    with multiprocessing.get_context(method).Pool(2) as pool:
        return pool.map(len, ["a", "bb"])


def executor(method):
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context(method)) as pool:
        return list(pool.map(len, ["a", "bb"]))


def program(method):
    """Return the exit code of a program that is terminated; with "fork", Python code runs before it."""
    before = (lambda: None) if method == "fork" else None
    started = subprocess.Popen(["sleep", str(SLOW)], preexec_fn=before)
    started.terminate()
    try:
        return started.wait(LIMIT_S)
    finally:
        started.kill()


WAYS = {terminated: -signal.SIGTERM, pooled: [1, 2], executor: [1, 2], program: -signal.SIGTERM}


@pytest.fixture
def of_a_command():
    """Set the handlers of a command before it is imported, which it would ignore signals with at its end."""
    before = {number: signal.signal(number, launched.end) for number in launched.EXIT_CODES}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("way", WAYS)
def test_processes_of_the_user_end_in_a_run_of_a_command(of_a_command, way, method):
    with interruptible() as interruption:
        interruption.defer()
        assert way(method) == WAYS[way]


@pytest.mark.parametrize("number", [*SIGNALS, signal.SIGINT])
def test_a_forked_process_has_the_default_handlers(of_a_command, number):
    with interruptible() as interruption:
        interruption.defer()
        if (child := os.fork()) == 0:
            os._exit(signal.getsignal(number) in launched.DEFAULTS)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


def test_a_signal_that_is_ignored_from_outside_stays_ignored_in_a_forked_process():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in a background job of a shell
    try:
        with interruptible():
            if (child := os.fork()) == 0:
                os._exit(signal.getsignal(signal.SIGINT) is signal.SIG_IGN)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    finally:
        signal.signal(signal.SIGINT, before)


def calls(channel):
    """Return a service that calls functions of this module."""
    return Caller()


class Caller(Service):
    def call(self, way, method):
        return globals()[way](method)


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
    log = tmp_path_factory.mktemp("worker") / "caller.log"
    worker = Worker("caller", calls, log, {}, Limits(start_s=120, request_s=LIMIT_S, restarts=0))
    yield worker
    worker.close()


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("way", WAYS)
def test_processes_of_the_user_end_in_a_worker_process(worker, way, method):
    assert worker.put(Job("call", (way.__name__, method))).result(LIMIT_S) == WAYS[way]


HANGS = """
import multiprocessing, sys, time
sys.argv = ["-m"]
from rlhf.processes.signals import interruptible

if __name__ == "__main__":
    with interruptible() as interruption:
        interruption.defer()
        with multiprocessing.get_context(METHOD).Pool(2) as pool:
            print("ready", flush=True)
            pool.map(time.sleep, [1000, 1000])
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_two_ctrl_c_end_a_reward_that_waits_for_its_processes(tmp_path, method):
    file = tmp_path / "hangs.py"
    file.write_text(HANGS.replace("METHOD", repr(method)))
    process = subprocess.Popen(
        [sys.executable, str(file)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, process_group=0,
        text=True,
    )  # fmt: skip
    try:
        assert process.stdout.readline() == "ready\n"
        time.sleep(1)
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(1.5)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(LIMIT_S) == 130
        assert not members(process.pid), "no process of the pool is left"
    finally:
        kill_group(process.pid)
