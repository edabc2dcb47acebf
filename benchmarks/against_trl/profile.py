"""Profile an update of this project: time by phase and kind of operation, one thread.

    python -m benchmarks.against_trl.profile short-nano dpo
    python -m benchmarks.against_trl.profile tldr-14m rloo --operations 20   # also the most expensive ones

The work is that of `make bench`, in two updates. The profiler of torch measures the time of each operation
itself. The remaining time is Python code of transformers and of this project, and the profiler.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.against_trl.meter import PHASES, Meter
from benchmarks.against_trl.table import Sheet
from benchmarks.against_trl.work import LENGTHS, SAMPLES, Case, cases

KINDS = {  # kind of operation -> prefixes of names, without "aten::"
    "matrix products": ("addmm", "mm", "bmm", "baddbmm"),
    "attention": ("_scaled_dot_product",),
    "activation": ("gelu", "silu"),
    "norms": ("native_layer_norm", "rms_norm", "_fused_rms_norm"),
    "copies": ("cat", "copy_", "fill_", "index", "_index", "gather", "scatter", "clone", "select_backward"),
}
OTHER, PYTHON = "other operations", "Python"


class Profile(Meter):
    """A meter that profiles the measured updates.

    All phases except training are marked in the profile. Operations outside of a mark belong to training.
    """

    def __init__(self, case: Case) -> None:
        from torch.profiler import ProfilerActivity, profile

        super().__init__(case.warmup)
        self.last_update = case.updates
        self.profiler = profile(activities=[ProfilerActivity.CPU], record_shapes=True)

    def update_ended(self) -> None:
        """Start the profile after the warm-up and stop it after the last update."""
        super().update_ended()
        if self.updates == self.warmup:
            self.profiler.start()
            self.restart()
        elif self.updates == self.last_update:
            self.profiler.stop()

    @contextmanager
    def charge(self, phase: str) -> Iterator[None]:
        """Charge the time of the `with` block to `phase`, and mark the phase in the profile."""
        from torch.profiler import record_function

        with super().charge(phase), record_function(marked(phase)):
            yield

    def operations(self) -> Iterator[tuple[str, Any]]:
        """Yield the phase and the event of every operation."""
        events = self.profiler.events() or []
        names = {marked(phase): phase for phase in PHASES}
        phases = [(e.time_range.start, e.time_range.end, names[e.name]) for e in events if e.name in names]
        phases.sort()
        place = 0
        for event in sorted(events, key=lambda e: e.time_range.start):
            if event.name in names:
                continue
            while place < len(phases) and phases[place][1] < event.time_range.start:
                place += 1
            inside = place < len(phases) and phases[place][0] <= event.time_range.start
            yield phases[place][2] if inside else "train", event


def marked(phase: str) -> str:
    """Return the name of a phase in the profile."""
    return f"phase: {phase}"


def kind(name: str) -> str:
    """Return the kind of an operation."""
    own = name.removeprefix("aten::")
    return next((kind for kind, starts in KINDS.items() if own.startswith(starts)), OTHER)


def measure(case: Case, materials: Path) -> tuple[dict[str, Counter[str]], Counter[str]]:
    """Return the milliseconds of an update by kind and phase, and by operation and shapes."""
    from benchmarks.against_trl.ours import carry_out, overrides

    profile = Profile(case)
    carry_out(overrides(case, materials), case.samples, profile)
    kinds: dict[str, Counter[str]] = {name: Counter() for name in (*KINDS, OTHER, PYTHON)}
    operations: Counter[str] = Counter()
    for phase, event in profile.operations():
        ms = event.self_cpu_time_total / 1000 / case.measured
        kinds[kind(event.name)][phase] += ms
        operations[f"{phase}: {event.name} {shapes(event)}"] += ms
    for phase, spent in profile.figures()["phases"].items():
        kinds[PYTHON][phase] = 1000 * spent["wall_s"] - sum(counts[phase] for counts in kinds.values())
    return kinds, operations


def shapes(event: Any) -> str:
    """Return the shapes of the input tensors of an operation."""
    return json.dumps([shape for shape in event.input_shapes if shape])


def sheet(case: Case, kinds: dict[str, Counter[str]]) -> Sheet:
    """Return the table of kinds and phases."""
    whole = sum(counts.total() for counts in kinds.values())
    rows = [
        [name, *(f"{counts[phase]:.0f}" for phase in PHASES), f"{counts.total():.0f}"]
        + [f"{counts.total() / whole:.0%}"]
        for name, counts in kinds.items()
    ]
    sums = [sum(counts[phase] for counts in kinds.values()) for phase in PHASES]
    rows.append(["all", *(f"{ms:.0f}" for ms in sums), f"{whole:.0f}", "100%"])
    columns = [f"{case.part}-{case.algo}", *PHASES, "all", "share"]
    return Sheet("Milliseconds of an update", columns, rows)


def main() -> None:
    """Parse the command line, profile the case and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=LENGTHS, help="work and model")
    parser.add_argument("algo", choices=[algo for algo in SAMPLES if algo != "async_grpo"])
    parser.add_argument(
        "--operations", type=int, default=0, help="number of most expensive operations to list (default 0)"
    )
    parser.add_argument("--markdown", action="store_true", help="print Markdown")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported
    from benchmarks.against_trl.materials import make

    (whole,) = cases([args.part], [args.algo], [1])
    case = replace(whole, warmup=1, measured=2)  # a longer profile takes long to process
    with tempfile.TemporaryDirectory() as folder:
        make(case, Path(folder))
        kinds, operations = measure(case, Path(folder))
    found = sheet(case, kinds)
    print(found.markdown()) if args.markdown else found.show()
    for name, ms in operations.most_common(args.operations):
        print(f"{ms:8.2f} ms  {name}")


if __name__ == "__main__":
    main()
