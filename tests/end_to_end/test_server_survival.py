"""Tests of a trainer that is killed while servers sample for it: the run resumes with equal results."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rlhf.generators.servers import pool
from rlhf.generators.servers.server import command as serving
from rlhf.generators.servers.server import variables
from rlhf.processes.servers import SCRATCH, Child
from rlhf.runs.folder import RunFolder
from rlhf.stages.run import run
from rlhf.words.compose import run_name
from tests import needs
from tests.end_to_end.conftest import assert_same_end, nightly, wait_for
from tests.end_to_end.test_survival import start
from tests.end_to_end.test_vllm import answers

pytest.importorskip("vllm", reason=needs.VLLM)

pytestmark = pytest.mark.forks(False)

KEY, VARIABLE = "the-key-of-the-server", "RLHF_SERVER_KEY"
RUN = ["generator=vllm_server", "generator.memory=0.01", "generator.max_num_seqs=16", "schedule.max_lag=1"]
RUN += [
    *("schedule.order=fifo", "schedule.total_episodes=640", "schedule.save_every=1"),
    "schedule.eval_every=20",
]


@pytest.fixture(scope="module")
def served() -> list:
    """Return the settings of the server of the uninterrupted run, as soon as it has started one."""
    return []


@pytest.fixture
def uninterrupted(tiny, served, tmp_path_factory, monkeypatch):
    """Return the folder of a run without a fault."""
    folder = RunFolder(tmp_path_factory.getbasetemp() / "uninterrupted")
    if not served:

        def spy(settings, host):
            served.append(settings)
            return serving(settings, host)

        monkeypatch.setattr(pool, "command", spy)
        folder.path.mkdir()
        run(tiny(*RUN), folder)
    return folder


@pytest.fixture
def url(uninterrupted, served, tmp_path) -> Iterator[str]:
    """Return the address of a server that outlives the trainers."""
    own = variables(served[0], KEY) | {"OMP_NUM_THREADS": "1"}
    child = Child(serving(served[0], "127.0.0.1"), own, tmp_path / "server.log")
    address = child.start()
    wait_for(lambda: answers(f"{address}/health") or child.ended())
    yield address
    assert child.ended() is None, "a run does not end a server that it did not start"
    child.stop()


def killed(words: list[str], folder: RunFolder, main: bool = False) -> dict[psutil.Process, Path]:
    """Kill a trainer at a random moment after its next row, and after the first checkpoint.

    With `main`, the main process of its server is killed just before.

    Returns:
        The processes that it has started, with their folders for temporary files.
    """

    def rows():
        return folder.metrics.read_text().count("\n") if folder.metrics.exists() else 0

    before, process = rows(), start(words, "-m", "rlhf.train")
    wait_for(lambda: rows() > before and folder.last_checkpoint() is not None, process)
    time.sleep(random.uniform(0, 1.0))
    children = {
        each: Path(each.environ().get("TMPDIR", "")) for each in psutil.Process(process.pid).children(True)
    }
    if main:
        (leader,) = {os.getpgid(each.pid) for each, tmp in children.items() if tmp.name.startswith(SCRATCH)}
        os.kill(leader, signal.SIGKILL)
    process.kill()
    process.communicate()
    return children


def finish(words: list[str]) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "rlhf.train", *words], capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("main", [False, nightly(True)])
def test_servers_of_a_killed_trainer_end(main, tiny, command, tmp_path):
    """The main process of the server is killed as well, with `main`."""
    words, folder = [*command, *RUN], RunFolder(tmp_path / run_name(tiny(*RUN)))
    processes = killed(words, folder, main)
    assert len(processes) >= 3, "a server has three processes"
    left = psutil.wait_procs([*processes], timeout=20)[1]
    assert not left, [each.cmdline() for each in left]
    (scratch,) = {each for each in processes.values() if each.name.startswith(SCRATCH)}
    assert not scratch.exists(), "no temporary files are left"


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_a_run_that_is_killed_at_random_moments_resumes_with_equal_results(
    tiny, command, tmp_path, uninterrupted, url, monkeypatch
):
    """A server that runs on samples for all trainers, whose requests and loads are cut off."""
    monkeypatch.setenv(VARIABLE, KEY)
    words = [*command, *RUN, f"generator.urls=[{url}]", f"generator.key_variable={VARIABLE}"]
    folder = RunFolder(tmp_path / run_name(tiny(*RUN)))
    for _ in range(20):
        killed(words, folder)
        assert not folder.finished(), "the run is too short"
    killed([*command, *RUN], folder)  # with a server of its own
    assert "resumed from update" in finish(words)
    assert_same_end(folder, uninterrupted)
    assert not (folder.path / pool.FOLDER).exists()
