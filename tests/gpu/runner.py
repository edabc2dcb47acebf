"""Runs stages one after the other, each in a process of its own with a time limit."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import psutil

from tests.gpu.results import FAILED, INTERRUPTED, SKIPPED, Fact, Results, StageResult

ROOT = Path(__file__).parents[2]
GRACE_S = 10.0  # seconds for processes that a stage started to end after the stage
POLL_S = 1.0  # seconds between checks of a running stage
LEAST_S = 5.0  # a stage is not started with less time
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "WANDB_MODE": "offline",
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
    "PYTHONFAULTHANDLER": "1",
}


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage: a function of a module, which is called with a `Report`."""

    number: int
    title: str
    address: str  # module:function
    limit_s: float


def run_stages(
    stages: Sequence[Stage],
    results: Results,
    device: str,
    folder: Path,
    limit_s: float,
    told: Callable[[str], None] = print,
) -> list[StageResult]:
    """Run stages in order and return their results.

    Args:
        stages: the stages.
        results: receives every fact at once.
        device: "cuda" or "cpu".
        folder: folder for logs and temporary files.
        limit_s: time limit of all stages together, in seconds. A stage gets at most what is left. Stages
            without time are skipped.
        told: prints a line.

    Returns:
        The results of the stages that were started or skipped. After Ctrl-C, which kills the running stage,
        the last stage has the status INTERRUPTED.
    """
    end = time.monotonic() + limit_s
    found = []
    for stage in stages:
        left = min(stage.limit_s, end - time.monotonic())
        result = StageResult(
            number=stage.number,
            title=stage.title,
            device=device,
            started=datetime.now().isoformat(timespec="seconds"),
            limit_s=round(max(left, 0.0), 1),
        )
        results.begin(result)
        found.append(result)
        started = time.monotonic()
        try:
            if left < min(LEAST_S, stage.limit_s):
                reason = f"no time is left of the {limit_s:g} s of all stages; set --limit-s, or --stages"
                result.facts.append(Fact(name="all parts", status=SKIPPED, reason=reason))
            else:
                told(f"stage {stage.number}: {stage.title}")
                run_stage(stage, results, result, device, folder, left)
        except KeyboardInterrupt:
            result.status = INTERRUPTED
        result.finish(round(time.monotonic() - started, 1))
        results.write()
        told(f"stage {stage.number}: {result.status} after {result.seconds:.0f} s")
        if result.status == INTERRUPTED:
            break
    return found


def run_stage(
    stage: Stage, results: Results, result: StageResult, device: str, folder: Path, limit_s: float
) -> None:
    """Run one stage, and add its facts to `result` as they arrive.

    If the process ends before the end of the stage or exceeds the limit, the fact of the running part is
    failed. All processes that the stage started are killed at its end.
    """
    folder.mkdir(parents=True, exist_ok=True)
    log, scratch = folder / f"stage-{stage.number}.log", folder / f"stage-{stage.number}"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    reading, writing = os.pipe()
    command = [sys.executable, "-m", "tests.gpu.stage", stage.address, device, str(scratch)]
    command += [str(folder / "materials"), str(writing)]
    progress = Progress(result, results)
    begun = time.monotonic()
    try:
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                env=environment(device),
                cwd=ROOT,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=[writing],
            )
        os.close(writing)
        descendants = Descendants(process)
        try:
            code = follow(process, reading, progress, descendants, begun + limit_s)
        finally:
            descendants.kill()
    finally:
        os.close(reading)
        shutil.rmtree(scratch, ignore_errors=True)
    if code == 0 and progress.complete:
        return
    reason = f"the stage took longer than {limit_s:g} s and was killed"
    if code is not None:
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        reason = f"the process ended {how}"
    part = "end of the process" if progress.complete else progress.part
    seconds = max(0.0, time.monotonic() - begun - sum(fact.seconds for fact in result.facts))
    reason += f"; see {os.path.relpath(log)}"
    result.facts.append(Fact(name=part, status=FAILED, reason=reason, seconds=round(seconds, 1)))


class Progress:
    """The progress of a stage, from the messages of its process (see `tests.gpu.stage`).

    Args:
        result: receives the facts.
        results: is written after every fact.
    """

    def __init__(self, result: StageResult, results: Results) -> None:
        self.result = result
        self.results = results
        self.part = "start of the process"  # the part that runs
        self.complete = False  # whether the last part has ended
        self.rest = b""  # a line that has not arrived completely

    def take(self, data: bytes) -> None:
        """Process the next bytes of the messages."""
        *lines, self.rest = (self.rest + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            self.part = message.get("part", self.part)
            self.complete = self.complete or "end" in message
            if "fact" in message:
                self.result.facts.append(Fact(**message["fact"]))
                self.results.write()


def follow(
    process: subprocess.Popen[bytes], reading: int, progress: Progress, descendants: Descendants, end: float
) -> int | None:
    """Read the messages of a process until the process ends, and return its exit code.

    Args:
        process: the process of a stage.
        reading: file descriptor of the messages. Other processes may keep the other end open.
        progress: processes the messages.
        descendants: collects the processes that the stage starts.
        end: time of `time.monotonic` at which reading stops; the exit code is then None.
    """
    while time.monotonic() < end:
        descendants.look()
        # Ask for the exit code before reading, so that the last messages of the process are read.
        over = process.poll() is not None
        data = b""
        if select.select([reading], [], [], 0.0 if over else POLL_S)[0]:
            data = os.read(reading, 2**16)
            progress.take(data)
            if not data and not over:  # the other end is closed
                with suppress(subprocess.TimeoutExpired):
                    process.wait(POLL_S)
        if over and not data:
            break
    return process.poll()


class Descendants:
    """The processes that a stage has started, of which `look` has seen the parents alive."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.found: set[psutil.Process] = set()

    def look(self) -> None:
        """Add the processes that exist now."""
        with suppress(psutil.Error):
            self.found |= set(psutil.Process(self.process.pid).children(recursive=True))

    def kill(self) -> None:
        """Kill the process group of the stage, and the other processes after `GRACE_S` seconds.

        Worker processes lead process groups of their own. They end when their trainer ends, so that the GPU
        is free for the next stage.
        """
        self.look()
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for each in self.left():
            with suppress(psutil.Error):
                each.kill()
        self.left()

    def left(self) -> list[psutil.Process]:
        """Wait up to `GRACE_S` seconds for the end of all processes; return those that still run."""
        end = time.monotonic() + GRACE_S
        while (left := list(filter(runs, self.found))) and time.monotonic() < end:
            time.sleep(0.02)
        return left


def runs(process: psutil.Process) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def environment(device: str) -> dict[str, str]:
    """Return the environment of a stage: offline; if the device is the CPU, one thread and no GPUs."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {**os.environ, **OFFLINE, "PYTHONPATH": os.pathsep.join(paths)}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        own.pop(name, None)
    if device == "cpu":
        own["CUDA_VISIBLE_DEVICES"] = ""
        # Threads of such small tensors mostly wait for one another, which is slow if other programs run.
        own.setdefault("OMP_NUM_THREADS", "1")
    return own
