"""A signal to stop is at once where nothing is lost, and else waits until it is asked for."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from rlhf.core.errors import Interrupted
from rlhf.processes import signals
from rlhf.processes.signals import SIGNALS, interruptible

SECONDS = 120  # until a test gives up


@pytest.fixture
def told(monkeypatch):
    """What the user is told."""
    texts = []
    monkeypatch.setattr(signals, "tell", texts.append)
    return texts


def wait_for(condition):
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.01)


@pytest.mark.parametrize("number", SIGNALS)
def test_outside_of_training_a_signal_ends_the_run_at_once(told, number):
    with (
        pytest.raises(Interrupted, match=f"by {number.name} outside of training.* command resumes the run"),
        interruptible(),
    ):
        signal.raise_signal(number)
    assert told == [f"{number.name}: stopping; a second SIGTERM ends the run immediately"]


@pytest.mark.parametrize("number", SIGNALS)
def test_in_training_a_signal_waits_until_it_is_asked_for(told, number):
    with interruptible() as interruption:
        interruption.defer()
        assert not interruption.asked()
        signal.raise_signal(number)
        signal.raise_signal(signal.SIGUSR1)
        assert interruption.asked() and interruption.cause == number.name
    (text,) = told
    assert f"{number.name}: stopping after the current update, with a checkpoint" in text


def test_a_signal_that_came_before_training_does_not_wait_for_an_update(told):
    with interruptible() as interruption:
        interruption.received = signal.SIGTERM  # as where a library swallowed what the signal raised
        with pytest.raises(Interrupted):
            interruption.defer()


def test_a_stage_that_is_asked_to_stop_stops_the_run_around_it(told):
    with interruptible() as run:
        with interruptible() as stage:
            stage.defer()
            signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Interrupted):  # what the run looks at after its stages
            run.check()
        with pytest.raises(Interrupted), interruptible():
            raise AssertionError("nor is the next stage begun, nor the next run of a sweep")


def test_after_a_stage_signals_act_at_once_again(told):
    with pytest.raises(Interrupted), interruptible():
        with interruptible() as stage:
            stage.defer()
        signal.raise_signal(signal.SIGTERM)


def test_handlers_are_as_they_were_before(told):
    def own(*_):
        pass

    before = signal.signal(signal.SIGUSR1, own)
    threads = threading.active_count()
    try:
        with interruptible():
            assert signal.getsignal(signal.SIGUSR1) is not own
        assert signal.getsignal(signal.SIGUSR1) is own
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        assert signal.set_wakeup_fd(-1) == -1 and signals.active is None
        assert threading.active_count() == threads
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.fixture
def ctrl_c():
    """Ctrl-C raises KeyboardInterrupt, also in a background job of a shell, where SIGINT is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_stays_what_it_is(told, ctrl_c):
    with interruptible() as interruption:
        interruption.defer()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert not interruption.asked()
    assert told == []


def test_what_is_waited_for_long_is_said_once(told, monkeypatch):
    monkeypatch.setattr(signals, "PATIENCE_S", 0.05)
    with interruptible() as interruption:
        interruption.defer()
        signal.raise_signal(signal.SIGUSR1)
        wait_for(lambda: len(told) == 2)
        time.sleep(0.2)
    assert len(told) == 2
    assert told[1].startswith("still waiting for the current operation, 0.05 seconds after")


def test_in_another_thread_nothing_is_heard_and_nothing_changed(told):
    found = []

    def run():
        with interruptible() as interruption:
            interruption.defer()
            found.append((interruption.asked(), signal.getsignal(signal.SIGTERM)))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [(False, signal.SIG_DFL)]


@pytest.mark.process
def test_a_forked_process_ends_at_a_signal_and_its_parent_hears_nothing(told):
    with interruptible() as interruption:
        interruption.defer()
        for begin in (lambda start: start(), in_a_thread):
            child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,))
            begin(child.start)
            child.terminate()  # what a pool does with its processes
            child.join(SECONDS)
            assert child.exitcode == -signal.SIGTERM
        assert not interruption.asked()
    assert told == []


def in_a_thread(function):
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


# The main thread is deep in a library: it runs no handler of Python's.
STUCK = """
import ctypes, signal, sys
from rlhf.processes import signals
signals.ECHO_S = float(sys.argv[1])
with signals.interruptible() as interruption:
    interruption.defer()
    print("ready", flush=True)
    lock = ctypes.create_string_buffer(128)
    for _ in range(2):
        ctypes.CDLL(None).pthread_mutex_lock(lock)
"""


@pytest.fixture
def stuck():
    """`stuck(echo_s)` is a process whose main thread is stuck."""
    made = []

    def start(echo_s):
        process = subprocess.Popen(
            [sys.executable, "-c", STUCK, str(echo_s)], stdout=subprocess.PIPE, text=True
        )
        made.append(process)
        assert process.stdout.readline() == "ready\n"
        return process

    yield start
    for process in made:
        process.kill()
        process.wait()


@pytest.mark.process
def test_a_second_sigterm_ends_the_process_at_once_whatever_it_is_doing(stuck):
    process = stuck(0.1)
    process.send_signal(signal.SIGUSR1)
    assert "SIGUSR1: stopping after the current update" in process.stdout.readline()
    process.terminate()
    time.sleep(0.2)
    assert process.poll() is None, "the first SIGTERM"
    process.terminate()
    assert process.wait(SECONDS) == 128 + signal.SIGTERM
    assert "ended immediately by a second SIGTERM; the same command resumes the run" in process.stdout.read()


@pytest.mark.process
def test_a_sigterm_that_a_launcher_passes_on_too_is_the_first_one(stuck):
    process = stuck(1000)
    os.kill(process.pid, signal.SIGTERM)
    assert "SIGTERM: stopping" in process.stdout.readline()
    os.kill(process.pid, signal.SIGTERM)
    time.sleep(0.3)
    assert process.poll() is None
