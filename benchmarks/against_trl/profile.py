"""Where the time of an update of this project goes: phases by kinds of operations, one thread.

    python -m benchmarks.against_trl.profile short-nano dpo
    python -m benchmarks.against_trl.profile tldr-14m rloo --operations 20   # and which ones, with shapes

The work is that of `make bench`, in two updates; torch's profiler counts each operation's own time. What no
operation accounts for is Python, transformers' and ours, and the profiler itself.
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

KINDS = {  # of operations, by how their names begin behind "aten::"
    "matrix products": ("addmm", "mm", "bmm", "baddbmm"),
    "attention": ("_scaled_dot_product",),
    "activation": ("gelu", "silu"),
    "norms": ("native_layer_norm", "rms_norm", "_fused_rms_norm"),
    "copies": ("cat", "copy_", "fill_", "index", "_index", "gather", "scatter", "clone", "select_backward"),
}
OTHER, PYTHON = "other operations", "Python"


class Profile(Meter):
    """Profiles the measured updates.

    Phases other than training are marked in the profile; what is under none of them is training.
    """

    def __init__(self, case: Case) -> None:
        from torch.profiler import ProfilerActivity, profile

        super().__init__(case.warmup)
        self.last_update = case.updates
        self.profiler = profile(activities=[ProfilerActivity.CPU], record_shapes=True)

    def update_ended(self) -> None:
        """As there; the profile begins and ends with what is measured."""
        super().update_ended()
        if self.updates == self.warmup:
            self.profiler.start()
            self.restart()
        elif self.updates == self.last_update:
            self.profiler.stop()

    @contextmanager
    def charge(self, phase: str) -> Iterator[None]:
        """As there, and in the profile."""
        from torch.profiler import record_function

        with super().charge(phase), record_function(marked(phase)):
            yield

    def operations(self) -> Iterator[tuple[str, Any]]:
        """Phase and event of every operation."""
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
    """The name of a phase in a profile."""
    return f"phase: {phase}"


def kind(name: str) -> str:
    """The kind of an operation."""
    own = name.removeprefix("aten::")
    return next((kind for kind, starts in KINDS.items() if own.startswith(starts)), OTHER)


def measure(case: Case, materials: Path) -> tuple[dict[str, Counter[str]], Counter[str]]:
    """Milliseconds of an update: by kind and phase, and by operation and shapes."""
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
    """Of the tensors that an operation is given."""
    return json.dumps([shape for shape in event.input_shapes if shape])


def sheet(case: Case, kinds: dict[str, Counter[str]]) -> Sheet:
    """The table."""
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
    """Read the command line, profile, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=LENGTHS, help="work and model")
    parser.add_argument("algo", choices=SAMPLES)
    parser.add_argument("--operations", type=int, default=0, help="as many of the most costly operations")
    parser.add_argument("--markdown", action="store_true", help="for the docs")
    words = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported
    from benchmarks.against_trl.materials import make

    (whole,) = cases([words.part], [words.algo], [1])
    case = replace(whole, warmup=1, measured=2)  # a profile of more takes long to read
    with tempfile.TemporaryDirectory() as folder:
        make(case, Path(folder))
        kinds, operations = measure(case, Path(folder))
    found = sheet(case, kinds)
    print(found.markdown()) if words.markdown else found.show()
    for name, ms in operations.most_common(words.operations):
        print(f"{ms:8.2f} ms  {name}")


if __name__ == "__main__":
    main()
