"""Runs on the CPU and on the pretended GPU, in a process that has the device.

python -m tests.pretended_gpu.inside <folder of artefacts> <folder> <JSON list of lists of overrides>

Prints a line of JSON per list of overrides: the rows of metrics.jsonl of both runs, the log of the run on the
device, and for each of its optimizer steps the number of micro-batches and the waits.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

from rlhf.config.compose import compose
from rlhf.core.batch import microbatches
from rlhf.engines.engine import Engine
from rlhf.runs.folder import RunFolder
from rlhf.stages.run import run
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
            with patch.object(Engine, "step", noted(Engine.step, steps)):
                run(cfg, where)
            found[device] = rows(where)
            found["log"] = where.log.read_text()
        print(json.dumps(found), flush=True)


def noted(step: Any, steps: list[dict[str, Any]]) -> Any:
    """Return `Engine.step` that notes its waits in `steps`."""

    def call(self: Engine, batch: Any, objective: Any) -> Any:
        with Waits() as waits:
            metrics = step(self, batch, objective)
        if self.ranks.device.type == "cuda":
            parts = sum(1 for _ in microbatches(batch, self.budget))
            steps.append({"micro-batches": parts, "waits": waits.counts})
        return metrics

    return call


if __name__ == "__main__":
    main(*sys.argv[1:])
