"""Measure CPU-seconds, seconds and memory of one side by phase. Needs psutil, and torch for a GPU."""

from __future__ import annotations

import resource
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

PHASES = ("generate", "score", "reference", "train")  # train: everything outside the other phases


class Meter:
    """Measures the updates after the warm-up.

    The measured side calls `begin` when training begins and `update_ended` after each update. It wraps the
    functions of each phase and counts its work. On a GPU, a phase ends when all its work is done.
    """

    phases: tuple[str, ...] = PHASES

    def __init__(self, warmup: int, gpu: bool = False) -> None:
        self.warmup = warmup
        self.device = Gpu() if gpu else Host()
        self.updates = 0  # ended so far
        self.phase = "train"
        self.spent: dict[str, list[float]] = {}  # phase -> CPU-seconds, seconds
        self.counts: Counter[str] = Counter()
        self.each: list[dict[str, float]] = []  # times of each measured update
        self.start_mib = 0.0
        self.stolen_s = 0.0  # steal time of this machine when measuring began

    def begin(self) -> None:
        """Start measuring: models are loaded, training has not begun."""
        self.start_mib = self.device.used_mib()
        self.device.forget_peak()
        self.restart()

    def restart(self) -> None:
        """Reset all counters."""
        self.device.wait()
        self.spent = {phase: [0.0, 0.0] for phase in self.phases}
        self.counts.clear()
        self.each = []
        self.last = self.update_began = used()
        self.stolen_s = stolen_s()

    def settle(self) -> None:
        """Charge the time since the last call to the current phase."""
        self.device.wait()
        now = used()
        for i in range(2):
            self.spent[self.phase][i] += now[i] - self.last[i]
        self.last = now

    @contextmanager
    def charge(self, phase: str) -> Iterator[None]:
        """Charge the time of the `with` block to `phase` only."""
        outer = self.phase
        self.settle()
        self.phase = phase
        try:
            yield
        finally:
            self.settle()
            self.phase = outer

    def wrap(
        self,
        owner: Any,
        name: str,
        phase: str | None = None,
        seen: Callable[..., dict[str, int]] | None = None,
        when: Callable[[], bool] = lambda: True,
    ) -> None:
        """Replace `owner.name` by a function that charges its time to a phase and counts its work.

        Args:
            owner: the object or module.
            name: the function of `owner`.
            phase: the phase to charge; None: charge the current phase.
            seen: returns the counts to add, from the result of the function.
            when: whether a call is charged to `phase`.
        """
        inner = getattr(owner, name)

        def outer(*args: Any, **kwargs: Any) -> Any:
            if phase is None or not when():
                result = inner(*args, **kwargs)
            else:
                with self.charge(phase):
                    result = inner(*args, **kwargs)
            if seen is not None:
                self.counts.update(seen(result))
            return result

        setattr(owner, name, outer)

    def update_ended(self) -> None:
        """End an update."""
        self.settle()
        self.updates += 1
        if self.updates == self.warmup:
            self.restart()
            return
        began, self.update_began = self.update_began, self.last
        self.each.append({"cpu_s": self.last[0] - began[0], "wall_s": self.last[1] - began[1]})

    def figures(self) -> dict[str, Any]:
        """Return the measurements; seconds are means over updates.

        `stolen` is the share of CPU time that the host of a virtual machine gave to others.
        """
        n = len(self.each)
        peak = self.device.peak_mib()
        cpu_s = sum(update["cpu_s"] for update in self.each)
        stolen = stolen_s() - self.stolen_s
        return {
            "updates": n,
            "counts": dict(self.counts),
            "cpu_s": cpu_s / n,
            "wall_s": sum(update["wall_s"] for update in self.each) / n,
            "phases": {
                phase: {"cpu_s": cpu / n, "wall_s": wall / n} for phase, (cpu, wall) in self.spent.items()
            },
            "each": self.each,
            "stolen": stolen / (stolen + cpu_s),
            "memory": {"start_mib": self.start_mib, "peak_mib": peak, "above_mib": peak - self.start_mib},
        }


def used() -> tuple[float, float]:
    """Return CPU-seconds (user and system) of this process and its finished children, and the clock."""
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in both), time.perf_counter()


def stolen_s() -> float:
    """Return the steal time of this machine since boot, in seconds."""
    return float(getattr(psutil.cpu_times(), "steal", 0.0))


class Host:
    """The CPU. Memory is the resident memory of this process (Linux)."""

    def wait(self) -> None:
        """Return immediately: work on the CPU is synchronous."""

    def used_mib(self) -> float:
        """Return the resident memory."""
        return self.status("VmRSS")

    def peak_mib(self) -> float:
        """Return the peak of the resident memory."""
        return self.status("VmHWM")

    def forget_peak(self) -> None:
        """Reset the peak to the current resident memory (man 5 proc_pid_clear_refs)."""
        Path("/proc/self/clear_refs").write_text("5")

    def status(self, field: str) -> float:
        """Return a field of /proc/self/status in MiB."""
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


class Gpu:
    """The first GPU. Memory is the memory allocated by torch."""

    def __init__(self) -> None:
        import torch

        self.cuda = torch.cuda

    def wait(self) -> None:
        """Wait until all launched work is done."""
        self.cuda.synchronize()

    def used_mib(self) -> float:
        """Return the allocated memory."""
        return self.cuda.memory_allocated() / 2**20

    def peak_mib(self) -> float:
        """Return the peak of the allocated memory."""
        return self.cuda.max_memory_allocated() / 2**20

    def forget_peak(self) -> None:
        """Reset the peak to the currently allocated memory."""
        self.cuda.reset_peak_memory_stats()
