"""Checkpoints: complete or absent, and enough to go on bit for bit."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from rlhf.batch import Rollouts
from rlhf.engines.engine import Engine
from rlhf.folder import COMPLETE, complete_checkpoints
from rlhf.objectives.objective import Objective
from rlhf.recorder import Recorder
from rlhf.state import TrainState
from rlhf.stream import Stream

SCRATCH = ".tmp-"  # what is being written; a crash leaves it behind


class Checkpoints:
    """Writes `checkpoint-<update>` folders, keeps the newest `limit`, and reads the last back.

    A checkpoint is written under a temporary name, marked complete, then renamed; what a crash leaves
    behind is never taken for one.
    """

    def __init__(self, folder: Path, limit: int, objective: Objective) -> None:
        self.folder = folder
        self.limit = limit
        self.objective = objective
        for leftover in folder.glob(f"{SCRATCH}*"):
            shutil.rmtree(leftover)

    def save(self, state: TrainState, engine: Engine, stream: Stream, recorder: Recorder) -> Path:
        """Write where the run stands: weights, optimizer, counters, the unfinished row, what is in flight."""
        final = self.folder / f"checkpoint-{state.update}"
        scratch = self.folder / f"{SCRATCH}{final.name}"
        shutil.rmtree(final, ignore_errors=True)  # one without its marker
        scratch.mkdir(parents=True)
        engine.save(scratch)
        torch.save([pack(rollouts) for rollouts in stream.in_flight()], scratch / "in_flight.pt")
        torch.save({"torch": torch.get_rng_state()}, scratch / "random.pt")
        counters = {
            "state": state.state_dict(),
            "recorder": recorder.state_dict(),
            "objective": self.objective.state_dict(),
        }
        (scratch / "counters.json").write_text(json.dumps(counters))
        for file in scratch.rglob("*"):
            if file.is_file():
                sync(file)
        (scratch / COMPLETE).touch()
        sync(scratch)
        scratch.rename(final)
        sync(self.folder)
        for old in complete_checkpoints(self.folder)[: -self.limit]:
            shutil.rmtree(old.rename(self.folder / f"{SCRATCH}{old.name}"))  # never half a checkpoint
        return final

    def load(self, path: Path, state: TrainState, engine: Engine, recorder: Recorder) -> list[Rollouts]:
        """Stand where `path` was written; returns the rollouts that were in flight."""
        counters = json.loads((path / "counters.json").read_text())
        state.load_state_dict(counters["state"])
        recorder.load_state_dict(counters["recorder"])
        self.objective.load_state_dict(counters["objective"])
        engine.load(path)
        torch.set_rng_state(torch.load(path / "random.pt", weights_only=True)["torch"])
        return [Rollouts(**packed) for packed in torch.load(path / "in_flight.pt", weights_only=True)]


def pack(rollouts: Rollouts) -> dict[str, Any]:
    """Rollouts as a dict of tensors, lists and numbers, which loads without pickle."""
    return {field.name: getattr(rollouts, field.name) for field in fields(rollouts)}


def sync(path: Path) -> None:
    """Wait until the file or folder is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
