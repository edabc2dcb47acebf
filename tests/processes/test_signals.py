"""Signals that stop a run: SIGTERM, SIGUSR1, SIGUSR2 and Ctrl-C, outside of training and during training."""

import multiprocessing
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from rlhf.core import launched
from rlhf.core.errors import Interrupted
from rlhf.processes import signals
from rlhf.processes.signals import SIGNALS, interruptible

SECONDS = 5  # timeout of a wait in a test


@pytest.fixture
def told(monkeypatch):
    """Return the list of messages that are printed to the user."""
    texts = []
    monkeypatch.setattr(signals, "tell", texts.append)
    return texts


def wait_for(condition):
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, "timeout: the condition did not become true"
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
def test_in_training_a_signal_only_sets_a_flag(told, number):
    with interruptible() as interruption:
        interruption.defer()
        assert not interruption.asked()
        signal.raise_signal(number)
        signal.raise_signal(signal.SIGUSR1)
        assert interruption.asked() and interruption.cause == number.name
    (text,) = told
    assert f"{number.name}: stopping after the current update, with a checkpoint" in text


def test_a_signal_received_before_training_stops_the_run_without_an_update(told):
    with interruptible() as interruption:
        interruption.received = signal.SIGTERM  # a library swallowed the exception that the signal raised
        with pytest.raises(Interrupted):
            interruption.defer()


def test_a_signal_during_or_after_a_stage_stops_the_run(told):
    with interruptible() as run:
        with interruptible() as stage:
            stage.defer()
            signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Interrupted):  # the run calls check after its stages
            run.check()
        with pytest.raises(Interrupted), interruptible():
            raise AssertionError("the signal must also stop the following stages and runs")
    with pytest.raises(Interrupted), interruptible():
        with interruptible() as stage:
            stage.defer()
        signal.raise_signal(signal.SIGTERM)


def test_previous_signal_handlers_are_restored_and_an_ignored_ctrl_c_stays_ignored(told):
    def own(*_):
        pass

    before = {signal.SIGUSR1: own, signal.SIGINT: signal.SIG_IGN}
    before = {number: signal.signal(number, handler) for number, handler in before.items()}
    threads = threading.active_count()
    try:
        with interruptible() as interruption:
            assert signal.getsignal(signal.SIGUSR1) is not own
            interruption.defer()
            signal.raise_signal(signal.SIGINT)
            assert not interruption.asked()
        assert signal.getsignal(signal.SIGUSR1) is own
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        assert signal.set_wakeup_fd(-1) == -1 and signals.active is None
        assert threading.active_count() == threads
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.fixture
def ctrl_c():
    """Make Ctrl-C raise KeyboardInterrupt, also in a background job of a shell, where SIGINT is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_the_first_ctrl_c_in_training_only_sets_a_flag(told, ctrl_c):
    with interruptible() as interruption:
        interruption.defer()
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)  # a launcher forwards the Ctrl-C of its terminal at once
        assert interruption.asked() and interruption.cause == "Ctrl-C"
    assert told == [
        "Ctrl-C: stopping after the current update, with a checkpoint; "
        "a second Ctrl-C ends the run immediately"
    ]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_outside_of_training_raises_keyboard_interrupt(told, ctrl_c):
    with interruptible() as interruption:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        wait_for(lambda: told)
        with pytest.raises(Interrupted, match="by Ctrl-C"):  # a library may have dropped the exception
            interruption.defer()
    assert told == ["Ctrl-C: stopping; a second Ctrl-C ends the run immediately"]


def test_a_signal_calls_the_registered_functions_in_another_thread(told):
    called = []
    with interruptible() as interruption:
        interruption.defer()
        signals.call_at_signal(dropped := lambda: called.append("dropped"))
        signals.call_at_signal(lambda: called.append(threading.current_thread()))
        signals.do_not_call_at_signal(dropped)
        signal.raise_signal(signal.SIGTERM)
        wait_for(lambda: called)
    assert len(called) == 1 and called[0] is not threading.main_thread()


def test_a_long_wait_can_be_ended_by_a_deferred_signal(told):
    with interruptible() as interruption:
        interruption.defer()
        signals.end_wait()
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Interrupted):
            signals.end_wait()
    signals.end_wait()


def test_a_long_wait_after_a_signal_is_reported_once(told, monkeypatch):
    monkeypatch.setattr(signals, "PATIENCE_S", 0.05)
    with interruptible() as interruption:
        interruption.defer()
        signal.raise_signal(signal.SIGUSR1)
        wait_for(lambda: len(told) == 2)
        time.sleep(0.2)
    assert len(told) == 2
    assert told[1].startswith("still waiting for the current operation, 0.05 seconds after")


def test_a_listener_that_cannot_print_does_not_hold_up_the_end(monkeypatch):
    printed = threading.Event()
    monkeypatch.setattr(signals, "tell", lambda text: printed.wait(4 * SECONDS))
    started = time.monotonic()
    with pytest.raises(Interrupted), interruptible():
        signal.raise_signal(signal.SIGTERM)
    assert time.monotonic() - started < SECONDS
    printed.set()


def test_interruptible_has_no_effect_outside_the_main_thread(told):
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
@pytest.mark.parametrize("before", [signal.SIG_DFL, launched.end])  # the latter in a command
def test_a_signal_ends_a_forked_process_and_does_not_interrupt_its_parent(told, before):
    original = signal.signal(signal.SIGTERM, before)
    try:
        with interruptible() as interruption:
            interruption.defer()
            for begin in (lambda start: start(), in_a_thread):
                child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,))
                begin(child.start)
                child.terminate()  # as a process pool ends its processes
                child.join(SECONDS)
                assert child.exitcode == -signal.SIGTERM
            assert not interruption.asked()
        assert told == []
    finally:
        signal.signal(signal.SIGTERM, original)


def in_a_thread(function):
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


# The main thread is blocked in C code, so it runs no Python signal handler.
STUCK = """
import ctypes, signal, subprocess, sys
from rlhf.processes import signals
signals.ECHO_S = float(sys.argv[1])
signal.signal(signal.SIGINT, signal.default_int_handler)
if sys.argv[2] == "True":
    subprocess.Popen(["sleep", "1000"])
with signals.interruptible() as interruption:
    interruption.defer()
    print("ready", flush=True)
    lock = ctypes.create_string_buffer(128)
    for _ in range(2):
        ctypes.CDLL(None).pthread_mutex_lock(lock)
"""


@pytest.fixture
def stuck():
    """Return a function that starts a process with a blocked main thread and the given `ECHO_S`."""
    made = []

    def start(echo_s, child=False):
        words = [sys.executable, "-c", STUCK, str(echo_s), str(child)]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, process_group=0)
        made.append(process)
        assert process.stdout.readline() == "ready\n"
        return process

    yield start
    for process in made:
        process.kill()
        process.wait()


@pytest.mark.process
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (signal.SIGUSR1, signal.SIGTERM),
        (signal.SIGINT, signal.SIGINT),
        (signal.SIGTERM, signal.SIGINT),
    ],
)
def test_a_second_signal_ends_a_blocked_process_and_its_children_at_once(stuck, first, second):
    process = stuck(0.1, child=True)
    (child,) = psutil.Process(process.pid).children()
    process.send_signal(first)
    assert "stopping after the current update" in process.stdout.readline()
    if first == signal.SIGUSR1:
        process.terminate()
    time.sleep(0.2)
    assert process.poll() is None, "the first SIGTERM or Ctrl-C must not end the process"
    process.send_signal(second)
    assert process.wait(SECONDS) == 128 + second
    assert "the same command resumes the run" in process.stdout.read()
    child.wait(SECONDS)


@pytest.mark.process
def test_a_sigterm_that_a_launcher_forwards_counts_as_the_first_sigterm(stuck):
    process = stuck(1000)
    process.terminate()
    assert "SIGTERM: stopping" in process.stdout.readline()
    process.terminate()
    time.sleep(0.3)
    assert process.poll() is None


# A command that is being imported; the first import of a command is that of the package.
EARLY = """
import sys
sys.argv = sys.argv[1:]
import rlhf
print("ready", flush=True)
import time
time.sleep(1000)
"""


@pytest.mark.process
@pytest.mark.parametrize(
    ("name", "number", "code"),
    [
        ("-m", signal.SIGINT, 130),
        ("/usr/bin/rlhf", signal.SIGTERM, 75),
        ("-m", signal.SIGUSR1, 75),
        ("a_program.py", signal.SIGTERM, -signal.SIGTERM),  # which keeps its own handlers
    ],
)
def test_a_signal_while_a_command_is_imported_ends_it_without_a_traceback(name, number, code):
    process = subprocess.Popen(
        [sys.executable, "-c", EARLY, name], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == code
    assert code < 0 or (err.startswith("interrupted by ") and err.count("\n") == 1)


def test_the_handlers_of_the_import_are_replaced_and_a_command_that_ended_ignores_signals(monkeypatch, told):
    monkeypatch.setattr(sys, "argv", ["-m"])
    before = {number: signal.signal(number, signal.SIG_DFL) for number in launched.EXIT_CODES}
    try:
        launched.handle()
        assert signal.getsignal(signal.SIGINT) is launched.end
        with interruptible() as interruption:
            interruption.defer()
            signal.raise_signal(signal.SIGINT)
            assert interruption.asked()
        assert {signal.getsignal(number) for number in before} == {signal.SIG_IGN}
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
