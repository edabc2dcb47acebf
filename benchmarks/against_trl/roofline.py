"""Measure the utilisation of a GPU by an update: matrix products, and memory bandwidth while decoding.

    python -m benchmarks.against_trl.roofline tldr-410m dpo
    .venv-bench/bin/python -m benchmarks.against_trl.roofline tldr-410m dpo --side trl --materials <folder>

The work is that of `make bench`. Two more updates follow the measured updates. In the first, the executed
multiply-adds of matrix products and attention are counted (two FLOP each). In the second, the busy time of
the GPU is profiled. The peak rates are measured before: a product of two bfloat16 matrices of 8192 by 8192,
and a copy of 2 GiB within the GPU (bytes read and written).
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from benchmarks.against_trl.meter import PHASES, Meter
from benchmarks.against_trl.table import Sheet
from benchmarks.against_trl.work import (
    ENVIRONMENTS,
    GPU_PARTS,
    GPU_THREADS,
    SAMPLES,
    SHAPES,
    WORKS,
    Case,
    cases,
)

PREFILL = "prompts"  # the part of `generate` that encodes the prompts
CUDA = torch.device("cuda")
BEYOND = 2  # updates after the measured updates: one counted, one profiled


class Flops(TorchDispatchMode):
    """Adds up the FLOP of all operations, with the formulas of the FLOP counter of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Execute the operation and count its FLOP."""
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        if (count := flop_registry.get(func._overloadpacket)) is not None:
            self.total += count(*args, **kwargs, out_val=found)
        return found


class Counted(Meter):
    """A meter that counts the FLOP of one more update and profiles another one."""

    phases = (*PHASES, PREFILL)

    def __init__(self, case: Case) -> None:
        super().__init__(case.warmup, gpu=True)
        self.last_measured = case.updates - BEYOND
        self.flops = Flops()
        self.profiler: profile | None = None
        self.measured: dict[str, Any] = {}
        self.tflop: Counter[str] = Counter()
        self.busy_s: Counter[str] = Counter()

    def settle(self) -> None:
        """Charge the time since the last call, and the work of the GPU, to the current phase."""
        super().settle()
        self.tflop[self.phase] += self.flops.total / 1e12
        self.flops.total = 0
        if self.profiler is not None:
            self.profiler.stop()
            events = [e for e in self.profiler.events() or [] if e.device_type == DeviceType.CUDA]
            self.busy_s[self.phase] += sum(e.time_range.elapsed_us() for e in events) / 1e6
            self.start_profiler()

    def start_profiler(self) -> None:
        """Profile the GPU until the next phase."""
        self.profiler = profile(activities=[ProfilerActivity.CUDA])
        self.profiler.start()

    def update_ended(self) -> None:
        """End an update; count and profile the updates after the measured ones."""
        super().update_ended()
        if self.updates == self.last_measured:
            self.measured = self.figures()
            self.flops.__enter__()
        elif self.updates == self.last_measured + 1:
            self.flops.__exit__(None, None, None)
            self.start_profiler()
        elif self.updates == self.last_measured + BEYOND and self.profiler is not None:
            self.profiler.stop()
            self.profiler = None


@dataclass(frozen=True, slots=True)
class Rates:
    """Measured peak rates of the GPU."""

    tflop_s: float  # matrix products, bfloat16
    gb_s: float  # copies, read and written

    @staticmethod
    def measure(device: torch.device = CUDA, size: int = 8192, numbers: int = 2**29) -> Rates:
        """Measure the rates, each as the median of 20 repeats.

        Args:
            device: the GPU, or the CPU.
            size: rows and columns of the matrices.
            numbers: float32 numbers that are copied.
        """
        a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
        product = seconds(lambda: torch.mm(a, b), device=device)
        source = torch.randn(numbers, device=device)
        target = torch.empty_like(source)
        copied = seconds(lambda: target.copy_(source), device=device)
        return Rates(2 * size**3 / product / 1e12, 2 * source.nbytes / copied / 1e9)


def seconds(work: Callable[[], Any], repeats: int = 20, device: torch.device = CUDA) -> float:
    """Return the seconds that `work` takes on the GPU, or on the CPU, as a median after 5 more runs."""
    found = []
    for i in range(repeats + 5):
        if device.type == "cpu":
            start = time.perf_counter()
            work()
            found += [time.perf_counter() - start] if i >= 5 else []
            continue
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        if i >= 5:
            found.append(begin.elapsed_time(end) / 1000)
    return median(found)


def decoding_gb(case: Case) -> float:
    """Return the GB that decoding must at least read in an update, with bfloat16 weights and keys.

    Each step reads all weights except the input embeddings, the keys and values of each prompt (once for its
    samples), and those of the tokens that each sample has so far.
    """
    shape, work = SHAPES[case.model], WORKS[case.work]
    weights = shape.layers * 12 * shape.hidden_size**2 + shape.vocabulary * shape.hidden_size
    steps = work.response - 1  # the first token comes from encoding the prompt
    tokens = steps * sum(case.lengths) + case.prompts * case.samples * steps * (steps + 1) // 2
    return 2 * (steps * weights + tokens * 2 * shape.layers * shape.hidden_size) / 1e9


def measure(case: Case, side: str, materials: Path) -> Counted:
    """Run the case by `side`. Call this once per process."""
    longer = replace(case, measured=case.measured + BEYOND)
    meter = Counted(longer)
    if side == "ours":
        from benchmarks.against_trl.ours import carry_out, overrides
        from rlhf.generators.hf import generator as sampling

        meter.wrap(sampling, "encode", PREFILL)
        carry_out(overrides(longer, materials), longer.samples, meter)
    else:
        from benchmarks.against_trl import theirs

        theirs.carry_out(longer, materials, theirs.build, theirs.watch, meter)
    return meter


def rows(case: Case, meter: Counted, rates: Rates) -> list[list[str]]:
    """Return per phase: milliseconds, busy share of the GPU, TFLOP, rates and shares of the peak."""
    found = []
    for phase in meter.phases:
        spent = meter.measured["phases"][phase]["wall_s"]
        if not spent:
            continue
        work = meter.tflop[phase]
        rate = work / spent
        row = [phase, f"{1000 * spent:.0f}", f"{meter.busy_s[phase] / spent:.0%}"]
        row += [f"{work:.2f}", f"{rate:.0f}"]
        row += [f"{rate / rates.tflop_s:.0%}"]
        if phase == "generate":
            read = decoding_gb(case) / spent
            row += [f"{decoding_gb(case):.1f}", f"{read:.0f}", f"{read / rates.gb_s:.0%}"]
        found.append(row + [""] * (9 - len(row)))
    return found


def main() -> None:
    """Parse the command line, measure the case and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=GPU_PARTS, help="work and model")
    parser.add_argument("algo", choices=[algo for algo in SAMPLES if algo not in ENVIRONMENTS])
    parser.add_argument("--side", choices=("ours", "trl"), default="ours", help="default: ours")
    parser.add_argument("--materials", type=Path, help="folder of models and prompts; default: create them")
    parser.add_argument("--markdown", action="store_true", help="print Markdown")
    parser.add_argument("--out", type=Path, help="write the figures to this file as JSON")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("roofline needs a GPU that torch can use (there is none)")
    from benchmarks.against_trl.materials import make

    (case,) = cases([args.part], [args.algo], [GPU_THREADS], gpu=True)
    rates = Rates.measure()
    with tempfile.TemporaryDirectory() as folder:
        materials = args.materials or Path(folder)
        make(case, materials)
        meter = measure(case, args.side, materials)
    columns = ["", "ms", "GPU busy", "TFLOP", "TFLOP/s", "of peak", "GB", "GB/s", "of bandwidth"]
    title = (
        f"{case.name}, {args.side}, on {torch.cuda.get_device_name()}: {rates.tflop_s:.0f} TFLOP/s, "
        f"{rates.gb_s:.0f} GB/s"
    )
    sheet = Sheet(title, columns, rows(case, meter, rates))
    print(f"{title}\n\n{sheet.markdown()}") if args.markdown else sheet.show()
    if args.out:
        figures = {"figures": meter.measured, "tflop": meter.tflop, "busy_s": meter.busy_s}
        args.out.write_text(json.dumps({"case": asdict(case), "rates": asdict(rates), **figures}))


if __name__ == "__main__":
    main()
