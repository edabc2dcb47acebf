"""Runs on the CPU and on the pretended GPU, in a process that has the device.

python -m tests.pretended_gpu.inside <folder of artefacts> <folder> <JSON list of lists of overrides>

Prints a line of JSON per list of overrides: the rows of metrics.jsonl of both runs, and of the run on the
device the log, the planned bytes, and for each optimizer step the number of micro-batches, the waits, and the
bytes at most during the step and after it.
"""

from __future__ import annotations

import gc
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from rlhf.core.batch import Batch, microbatches
from rlhf.core.metrics import Metrics
from rlhf.engines.engine import Engine, Gradients
from rlhf.memory.plan import plan
from rlhf.objectives.objective import Objective
from rlhf.runs.folder import RunFolder
from rlhf.stages.run import run
from rlhf.words.compose import compose
from tests.end_to_end.conftest import TINY, rows
from tests.pretended_gpu.waits import Waits


def main(cache: str, folder: str, overrides: str) -> None:
    """Train on both devices with each list of overrides."""
    for number, words in enumerate(json.loads(overrides)):
        steps: list[dict[str, Any]] = []
        found: dict[str, Any] = {"steps": steps}
        for device in ("cpu", "cuda"):
            where = RunFolder(Path(folder) / f"{number}-{device}")
            cfg = compose([*TINY, f"cache_dir={cache}", f"backend.device={device}", *words])
            with patch.multiple(Engine, **noted(steps)):
                run(cfg, where)
            found[device] = rows(where)
            found["log"] = where.log.read_text()
        use = next(use for use in plan(cfg).uses if use.device.startswith("GPU"))
        kept = sum(part.bytes for part in use.parts if part.name != "CUDA")
        (training,) = (phase.bytes for phase in use.phases if phase.name == "training")
        found |= {"kept": kept, "training": kept + training}
        print(json.dumps(found), flush=True)


def noted(steps: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the halves of an optimizer step of `Engine`, which note their waits in `steps`."""
    first, second = Engine.forward_backward, Engine.optimizer_step
    counts: Counter[str] = Counter()

    def forward_backward(self: Engine, batch: Batch, objective: Objective) -> Gradients:
        gc.collect()  # what earlier runs of this process have left
        torch.cuda.reset_peak_memory_stats()
        with Waits() as waits:
            found = first(self, batch, objective)
        counts.clear()
        counts.update(waits.counts)
        return found

    def optimizer_step(self: Engine, found: Gradients) -> Metrics:
        with Waits() as waits:
            metrics = second(self, found)
        if self.ranks.device.type == "cuda":
            parts = sum(1 for _ in microbatches(found.batch, self.settings.budget))
            memory = {"peak": torch.cuda.max_memory_allocated(), "kept": torch.cuda.memory_allocated()}
            steps.append({"micro-batches": parts, "waits": counts + waits.counts, **memory})
        return metrics

    return {"forward_backward": forward_backward, "optimizer_step": optimizer_step}


if __name__ == "__main__":
    main(*sys.argv[1:])
