"""What a side uses: CPU-seconds, seconds, memory, by phase; psutil, and torch for a GPU."""

from __future__ import annotations

import resource
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

PHASES = ("generate", "score", "reference", "train")  # train: all that is none of the others


class Meter:
    """Counts from the end of the warm-up updates on.

    A side says when training begins (`begin`) and when an update ends (`update_ended`), wraps what belongs to
    a phase, and counts what it does. On a GPU, phases end when what they have launched is over.
    """

    phases: tuple[str, ...] = PHASES

    def __init__(self, warmup: int, gpu: bool = False) -> None:
        self.warmup = warmup
        self.device = Gpu() if gpu else Host()
        self.updates = 0  # ended so far
        self.phase = "train"
        self.spent: dict[str, list[float]] = {}  # phase -> CPU-seconds, seconds
        self.counts: Counter[str] = Counter()
        self.each: list[dict[str, float]] = []  # what each measured update took
        self.start_mib = 0.0
        self.stolen_s = 0.0  # of this machine when counting began

    def begin(self) -> None:
        """Models are loaded, nothing is trained yet."""
        self.start_mib = self.device.used_mib()
        self.device.forget_peak()
        self.restart()

    def restart(self) -> None:
        """Count from here."""
        self.device.wait()
        self.spent = {phase: [0.0, 0.0] for phase in self.phases}
        self.counts.clear()
        self.each = []
        self.last = self.update_began = used()
        self.stolen_s = stolen_s()

    def settle(self) -> None:
        """Charge the running phase with what was used since the last time."""
        self.device.wait()
        now = used()
        for i in range(2):
            self.spent[self.phase][i] += now[i] - self.last[i]
        self.last = now

    @contextmanager
    def charge(self, phase: str) -> Iterator[None]:
        """Charge what happens inside to `phase`, and to nothing else."""
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
        """Charge `owner.name(...)` to `phase` when `when()` says so, and count what `seen(result)` gives."""
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
        """An optimizer step and what belongs to it is over."""
        self.settle()
        self.updates += 1
        if self.updates == self.warmup:
            self.restart()
            return
        began, self.update_began = self.update_began, self.last
        self.each.append({"cpu_s": self.last[0] - began[0], "wall_s": self.last[1] - began[1]})

    def figures(self) -> dict[str, Any]:
        """What was measured; seconds are means over updates.

        `stolen` is the share of the time that cores had work, in which the host gave them to others.
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
    """CPU-seconds, user and system, of this process and the children it has waited for; and the clock."""
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in both), time.perf_counter()


def stolen_s() -> float:
    """Seconds that the host gave to others while cores of this machine had work, since it started."""
    return float(getattr(psutil.cpu_times(), "steal", 0.0))


class Host:
    """The CPU; memory is what is resident of this process (Linux)."""

    def wait(self) -> None:
        """It is never behind."""

    def used_mib(self) -> float:
        """Resident now."""
        return self.status("VmRSS")

    def peak_mib(self) -> float:
        """The most that was resident."""
        return self.status("VmHWM")

    def forget_peak(self) -> None:
        """Let the peak start again from what is resident now (man 5 proc_pid_clear_refs)."""
        Path("/proc/self/clear_refs").write_text("5")

    def status(self, field: str) -> float:
        """A field of the process's status, in MiB."""
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


class Gpu:
    """The first GPU; memory is what torch has handed out of it."""

    def __init__(self) -> None:
        import torch

        self.cuda = torch.cuda

    def wait(self) -> None:
        """Until all that was launched is done."""
        self.cuda.synchronize()

    def used_mib(self) -> float:
        """Handed out now."""
        return self.cuda.memory_allocated() / 2**20

    def peak_mib(self) -> float:
        """The most that was handed out."""
        return self.cuda.max_memory_allocated() / 2**20

    def forget_peak(self) -> None:
        """Let the peak start again from what is handed out now."""
        self.cuda.reset_peak_memory_stats()
