"""`kill -9` at any point, then the same command: it goes on and ends with the same metrics."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlhf.folder import RunFolder, run_name
from rlhf.run import run
from tests.integration.conftest import rows

RUN = ["schedule.total_episodes=80", "schedule.save_every=1", "schedule.eval_every=2", "algo.ties=keep"]

# The command, with a process that kills itself in the middle of the write of its second checkpoint.
DIES_IN_A_CHECKPOINT = """
import os, signal
import rlhf.checkpoint as checkpoint
from rlhf.train import main
write = checkpoint.sync
def sync(path):
    if "checkpoint-2" in str(path):
        os.kill(os.getpid(), signal.SIGKILL)
    write(path)
checkpoint.sync = sync
main()
"""


def start(words, *command):
    return subprocess.Popen(
        [sys.executable, *command, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish(words) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "rlhf.train", *words], capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def uninterrupted(tiny, tmp_path):
    folder = RunFolder(tmp_path / "uninterrupted")
    run(tiny(*RUN), folder)
    return rows(folder)


def folder_of(tiny, tmp_path) -> RunFolder:
    return RunFolder(tmp_path / run_name(tiny(*RUN)))


def test_killed_in_the_middle_of_a_run(tiny, command, tmp_path, uninterrupted):
    words = [*command, *RUN]
    folder = folder_of(tiny, tmp_path)
    process = start(words, "-m", "rlhf.train")
    wait_for(lambda: folder.last_checkpoint() is not None, process)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not folder.finished()

    told = finish(words)

    assert "going on at update" in told
    assert "model:" in told.splitlines()[-1] and "win-rate" in told.splitlines()[-1]
    assert rows(folder) == uninterrupted


def test_killed_in_the_middle_of_a_checkpoint(tiny, command, tmp_path, uninterrupted):
    words = [*command, *RUN]
    folder = folder_of(tiny, tmp_path)
    process = start(words, "-c", DIES_IN_A_CHECKPOINT)
    out, _ = process.communicate(timeout=500)
    assert process.returncode == -signal.SIGKILL, out
    assert folder.last_checkpoint() == folder.path / "checkpoint-1", "what was half written does not count"
    assert list(folder.path.glob(".tmp-checkpoint-2"))

    assert "going on at update 1 of 5" in finish(words)

    assert rows(folder) == uninterrupted
    assert not list(Path(folder.path).glob(".tmp-*")), "nor is it left behind"


def wait_for(condition, process, seconds=500):
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < end, "the run came to no checkpoint"
        time.sleep(0.02)
