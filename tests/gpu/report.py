"""The report of a stage: its checks and figures, which are sent to the command one by one."""

from __future__ import annotations

import gc
import math
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests import pretended_gpu
from tests.gpu.results import FAILED, FIGURE, OK, SKIPPED

if TYPE_CHECKING:
    import torch
    from torch import Tensor

NO_GPU = "needs a GPU"
LONGEST = 300  # characters of a reason; the log of the stage has the traceback


class Skip(Exception):
    """A reason for skipping the rest of a part."""


class Report:
    """Sends the facts of a stage.

    Args:
        name: the device that the stage tests, "cuda" or "cpu".
        folder: a folder for files of this stage; the command removes the folder.
        materials: a folder for models that several stages and commands share.
        send: sends a message, a dictionary with plain values.
    """

    def __init__(
        self, name: str, folder: Path, materials: Path, send: Callable[[dict[str, Any]], None]
    ) -> None:
        self.name = name
        self.folder = folder
        self.materials = materials
        self.send = send
        self.last = time.monotonic()

    @property
    def gpu(self) -> bool:
        """Whether the stage tests a GPU."""
        return self.name == "cuda"

    @property
    def full(self) -> bool:
        """Whether the stage measures a GPU, with models and batches of full size."""
        import torch

        return self.gpu and torch.cuda.get_device_name() != pretended_gpu.NAME

    @property
    def device(self) -> torch.device:
        """The device that the stage tests."""
        import torch

        return torch.device("cuda", 0) if self.gpu else torch.device(self.name)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Run a part of the stage. An error fails the part; the stage continues after the part."""
        self.send({"part": name})
        self.last = time.monotonic()
        try:
            yield
        except Skip as reason:
            self.fact(name, SKIPPED, reason=str(reason))
        except (Exception, SystemExit) as error:
            traceback.print_exc()
            text = f"{type(error).__name__}: {error}".strip()
            self.fact(name, FAILED, reason=text[:LONGEST])
        gc.collect()
        if self.gpu:
            import torch

            torch.cuda.empty_cache()

    def need_gpu(self) -> None:
        """Skip the rest of the part on a CPU."""
        if not self.gpu:
            raise Skip(NO_GPU)

    def fact(self, name: str, status: str, value: float | str | None = None, **more: str) -> None:
        """Send a fact with the seconds since the fact before."""
        now = time.monotonic()
        if isinstance(value, float) and not math.isfinite(value):
            value = str(value)
        fact = {"name": name, "status": status, "value": value, "seconds": round(now - self.last, 2), **more}
        self.send({"fact": fact})
        self.last = now

    def figure(self, name: str, value: float | str, unit: str = "") -> None:
        """Send a figure, which cannot fail."""
        self.fact(name, FIGURE, value, unit=unit)

    def at_most(self, name: str, value: float, limit: float, unit: str = "") -> None:
        """Check that a value is at most `limit`; NaN fails."""
        status = OK if value <= limit else FAILED
        self.fact(name, status, float(value), unit=unit, limit=f"<= {limit:g}")

    def at_least(self, name: str, value: float, limit: float, unit: str = "") -> None:
        """Check that a value is at least `limit`; NaN fails."""
        status = OK if value >= limit else FAILED
        self.fact(name, status, float(value), unit=unit, limit=f">= {limit:g}")

    def equal(self, name: str, found: object, expected: object) -> None:
        """Check that two values are equal."""
        same = found == expected
        reason = "" if same else f"expected {expected}"[:LONGEST]
        self.fact(name, OK if same else FAILED, str(found)[:80], limit="equal", reason=reason)

    def near(self, name: str, found: Tensor, expected: Tensor, limit: float) -> None:
        """Check that two tensors of one shape differ by at most `limit` in every element."""
        self.at_most(name, difference(found, expected), limit)


def difference(found: Tensor, expected: Tensor) -> float:
    """Return the largest absolute difference of two tensors, computed on the CPU in float64."""
    if found.shape != expected.shape:
        raise ValueError(f"the shapes must be equal, got {tuple(found.shape)} and {tuple(expected.shape)}")
    if found.numel() == 0:
        return 0.0
    return float((found.detach().cpu().double() - expected.detach().cpu().double()).abs().max())


def relative(found: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference over the norm of `expected`, computed on the CPU in float64."""
    expected = expected.detach().cpu().double()
    return float((found.detach().cpu().double() - expected).norm() / expected.norm())
