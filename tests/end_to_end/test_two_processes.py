"""Tests of two processes that write to the same folder: nothing is duplicated, and the second one says why.

The first process is stopped (SIGSTOP) while it has the lock, so that the second one surely finds the lock.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from rlhf.assembly.parts import make
from rlhf.core.files import read_lines
from rlhf.runs.folder import RunFolder
from rlhf.runs.lock import EVALUATION_LOCK, LOCK
from rlhf.words.compose import compose
from tests.end_to_end.conftest import TINY, wait_for

LENGTH = ("schedule.total_episodes=32", "schedule.save_every=1")


@pytest.fixture
def start(tmp_path):
    """`start(command, *words)` starts a command, whose output goes to the file `process.out`."""
    processes = []

    def begin(command: str, *words: str) -> subprocess.Popen:
        out = tmp_path / f"out-{len(processes)}"
        with out.open("w") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", f"rlhf.{command}", *words],
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )
        process.text = lambda: " ".join(out.read_text().split())
        processes.append(process)
        return process

    yield begin
    for process in processes:
        process.kill()
        process.wait()


@pytest.fixture
def stopped(start, tmp_path):
    """`stopped(lock, command, *words)` starts a command, and stops it when a file of the pattern exists."""

    def begin(lock: str, command: str, *words: str) -> subprocess.Popen:
        process = start(command, *words)
        end = time.monotonic() + 100
        while not any(path.read_bytes() for path in tmp_path.glob(lock)):
            assert time.monotonic() < end and process.poll() is None, process.text()
            time.sleep(0.001)
        process.send_signal(signal.SIGSTOP)
        return process

    return begin


def assert_refused(process: subprocess.Popen, owner: subprocess.Popen, folder: Path | str) -> None:
    """Check that a process ends with exit code 2 because another process, which is stopped, has the lock."""
    assert process.wait(100) == 2, process.text()
    assert f"another process does: process {owner.pid} on " in process.text()
    assert f"got {folder}; wait until that process has ended, or stop it: kill {owner.pid}" in process.text()
    assert "Traceback" not in process.text()


def assert_ends(process: subprocess.Popen) -> None:
    """Let a stopped process continue, and check that it ends with exit code 0."""
    process.send_signal(signal.SIGCONT)
    assert process.wait(300) == 0, process.text()


def updates(folder: RunFolder) -> Counter:
    """Return how often each training row is in metrics.jsonl."""
    return Counter(row["update"] for row in read_lines(folder.metrics) if "lr" in row)


def assert_each_update_once(folder: RunFolder) -> None:
    assert folder.finished() and set(updates(folder).values()) == {1}
    assert not [path.name for path in folder.path.iterdir() if path.name.startswith((".lock", ".tmp"))]


def test_the_same_run_twice(command, stopped, start, tmp_path, finished):
    finished(*LENGTH)  # makes the SFT model and the reward model
    words = [*command, *LENGTH]
    first = stopped(f"tldr_mini-*/{LOCK}", "train", *words)
    (path,) = tmp_path.glob("tldr_mini-*")
    assert_refused(start("train", *words), first, path)
    assert_refused(start("train", *words, "resume=never"), first, path)
    assert_ends(first)
    assert_each_update_once(RunFolder(path))
    assert len(list(tmp_path.glob("tldr_mini-*"))) == 1


@pytest.mark.nightly
def test_the_same_extension_twice(stopped, start, tmp_path, finished):
    folder = RunFolder(shutil.copytree(finished(*LENGTH).path, tmp_path / "run"))
    words = [f"run={folder.path}", "schedule.total_episodes=64"]
    first = stopped(f"run/{LOCK}", "extend", *words)
    assert_refused(start("extend", *words), first, folder.path)
    assert_ends(first)
    assert_each_update_once(folder)
    assert folder.read_config()["schedule"]["total_episodes"] == 64


def test_the_same_evaluation_twice(stopped, start, tmp_path, finished):
    folder = RunFolder(shutil.copytree(finished(*LENGTH).path, tmp_path / "run"))
    words = [f"run={folder.path}", "only=model", "eval.prompts=8"]
    first = stopped(f"run/{EVALUATION_LOCK}", "evaluate", *words)
    assert_refused(start("evaluate", *words), first, folder.path)
    assert_ends(first)
    assert [row["model"] for row in read_lines(folder.evaluations)] == ["model"]
    assert not (folder.path / EVALUATION_LOCK).exists()


def test_the_same_relabelling_twice(stopped, start, tmp_path):
    rows = make(compose([*TINY]).task).prompts("train").select(range(4))
    pairs = zip(rows["query"], rows["reference_response"], rows["reference_response"][::-1], strict=True)
    (tmp_path / "pairs").mkdir()
    for split in ("train", "validation"):
        lines = (json.dumps(dict(zip(("prompt", "chosen", "rejected"), pair, strict=True))) for pair in pairs)
        (tmp_path / "pairs" / f"{split}.jsonl").write_text("".join(f"{line}\n" for line in lines))
        pairs = zip(rows["query"], rows["reference_response"], rows["reference_response"][::-1], strict=True)
    words = [*TINY, f"task.preferences_path={tmp_path}/pairs", f"output={tmp_path}/out"]
    first = stopped("out.lock", "relabel", *words)
    assert_refused(start("relabel", *words), first, tmp_path / "out")
    assert_ends(first)
    assert (tmp_path / "out" / "relabel.json").is_file() and not (tmp_path / "out.lock").exists()


@pytest.mark.nightly
def test_the_same_pipeline_twice(command, stopped, start, tmp_path, finished):
    finished(*LENGTH)
    words = [*command, *LENGTH]
    first = stopped(f"tldr_mini-*/{LOCK}", "pipeline", *words)
    (path,) = tmp_path.glob("tldr_mini-*")
    assert_refused(start("pipeline", *words), first, path)
    assert_ends(first)
    assert_each_update_once(RunFolder(path))
    models = [row["model"] for row in read_lines(RunFolder(path).evaluations)]
    assert models and len(models) == len(set(models))


@pytest.mark.nightly
def test_the_same_sweep_twice(command, stopped, start, tmp_path, finished):
    finished(*LENGTH)
    words = ["-m", *command, *LENGTH, "seed=1,2"]
    first = stopped(f"tldr_mini-*/{LOCK}", "train", *words)
    second = start("train", *words)
    wait_for(lambda: f"waiting for process {first.pid} on " in second.text())
    assert_ends(first)
    assert second.wait(300) == 0, second.text()
    runs = [RunFolder(path) for path in tmp_path.glob("tldr_mini-*")]
    assert len(runs) == 2
    for run in runs:
        assert_each_update_once(run)


def test_two_runs_that_need_the_same_missing_models(stopped, start, tmp_path):
    words = [*TINY, f"cache_dir={tmp_path}/cache", *LENGTH]
    first = stopped(f"cache/sft-*/{LOCK}", "train", *words, f"output_dir={tmp_path}/a")
    second = start("train", *words, f"output_dir={tmp_path}/b")
    wait_for(lambda: f"waiting for process {first.pid} on " in second.text())
    assert f", which writes {tmp_path}/cache/sft-" in second.text()
    assert_ends(first)
    assert second.wait(300) == 0, second.text()
    for path in [*tmp_path.glob("[ab]/*"), *tmp_path.glob("cache/sft-*"), *tmp_path.glob("cache/reward-*")]:
        assert_each_update_once(RunFolder(path))
    assert not list((tmp_path / "cache").glob("*.lock"))
    assert second.text().count("waiting for process") <= 3


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 75), pytest.param(signal.SIGINT, 130, marks=pytest.mark.nightly)]
)
def test_a_signal_ends_a_run_that_waits_for_a_model(stopped, start, tmp_path, number, code):
    words = [*TINY, f"cache_dir={tmp_path}/cache", *LENGTH]
    first = stopped(f"cache/sft-*/{LOCK}", "train", *words, f"output_dir={tmp_path}/a")
    second = start("train", *words, f"output_dir={tmp_path}/b")
    wait_for(lambda: "waiting for process" in second.text())
    second.send_signal(number)
    started = time.monotonic()
    assert second.wait(100) == code, second.text()
    assert time.monotonic() - started < 3
    assert "Traceback" not in second.text()
    (lock,) = tmp_path.glob(f"cache/sft-*/{LOCK}")
    assert f"process {first.pid} on " in lock.read_text()
