"""The memory of a device as parts and phases, and how sizes are formatted."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlhf.memory.activations import Tokens

GIB = 2**30
# Estimated activations may exceed real activations by this factor, because few sequences have full length.
_MARGIN = 2.0
HEAP = 1.5  # bytes of RAM per byte of temporary tensors; 1.4 to 1.7 were measured with glibc
NEARLY = 0.9  # warn above this fraction of the memory of a device
PROCESS = 0.6 * GIB  # RAM of a process with torch and transformers, measured on a CPU
LIBRARIES = "Python, torch, libraries"  # what a process consists of
UNRELEASED = 0.25  # part of the largest phase that remains in segments with permanent tensors; not measured
CONTEXT = 0.6 * GIB  # GPU memory of CUDA for a process: a common value, not measured here


@dataclass(frozen=True, slots=True)
class Part:
    """An item that uses memory, for example the weights of the policy."""

    name: str
    bytes: float
    made_of: str = ""  # the factors of `bytes`, for the table
    estimated: bool = False  # True: upper bound, at maximum length; False: exact


@dataclass(frozen=True, slots=True)
class Phase:
    """A phase of an update, for example training, with the parts that exist only during it."""

    name: str
    parts: tuple[Part, ...]

    @property
    def bytes(self) -> float:
        """The memory of all parts of the phase."""
        return sum(part.bytes for part in self.parts)


@dataclass(frozen=True, slots=True)
class Use:
    """The memory that a run needs on a device."""

    device: str  # "RAM", or "GPU" with the numbers of the GPUs
    total: int | None  # bytes of the device; None: unknown
    parts: tuple[Part, ...]  # permanent parts: in memory during the whole run
    phases: tuple[Phase, ...] = ()  # phases run one after the other

    @property
    def largest(self) -> Phase:
        """The phase that needs the most memory."""
        return max(self.phases, key=lambda phase: phase.bytes, default=Phase("nothing else", ()))

    @property
    def bytes(self) -> float:
        """The peak memory: the permanent parts and the largest phase."""
        return sum(part.bytes for part in self.parts) + self.largest.bytes

    @property
    def least(self) -> float:
        """The lowest peak memory that is plausible: estimated parts divided by `_MARGIN`."""
        peaks = [self.parts + phase.parts for phase in self.phases or (self.largest,)]
        return max(sum(part.bytes / (_MARGIN if part.estimated else 1) for part in parts) for parts in peaks)

    def without(self, name: str) -> Use:
        """Return the use without the phase `name`."""
        return replace(self, phases=tuple(phase for phase in self.phases if phase.name != name))

    @property
    def fits(self) -> bool:
        """Whether the device has at least `least` bytes of memory; True if its memory is unknown."""
        return self.total is None or self.least <= self.total


@dataclass(frozen=True, slots=True)
class Plan:
    """The memory plan of a run."""

    uses: tuple[Use, ...]  # one per device; empty if a model is unknown
    unknown: dict[str, str]  # models that are not on this machine, by config key


def on_heap(part: Part) -> Part:
    """Return the part with its size in RAM: estimated parts times `HEAP`.

    Estimated parts are temporary tensors, and the C library does not return all their memory after they are
    freed.
    """
    return replace(part, bytes=part.bytes * HEAP) if part.estimated else part


def times(part: Part, count: int) -> Part:
    """Return the part with the memory of `count` processes."""
    if count == 1:
        return part
    return replace(part, bytes=part.bytes * count, made_of=f"{count} x {part.made_of}")


def kept(parts: list[Part]) -> tuple[Part, ...]:
    """Return the parts that need more than 0 bytes."""
    return tuple(part for part in parts if part.bytes)


def parameters(count: int, size: float) -> str:
    """Return the number of parameters and the bytes per parameter as text; `size` is in bytes."""
    return f"{_millions(count)} parameters x {size / max(1, count):.3g} bytes"


def _millions(count: int) -> str:
    """Return a count in millions or billions as text."""
    return f"{count / 1e9:.2f} billion" if count >= 1e9 else f"{count / 1e6:.2f} million"


def in_words(tokens: Tokens) -> str:
    """Return the number and length of the sequences of a forward pass as text."""
    return f"{tokens.sequences} x ({tokens.prompt} + {tokens.response}) tokens"


def gib(amount: float) -> str:
    """Return an amount of memory as text, in MiB or GiB."""
    if amount < 0.1 * GIB:
        return f"{amount / 2**20:.0f} MiB"
    return f"{amount / GIB:,.0f} GiB" if amount >= 99.5 * GIB else f"{amount / GIB:.1f} GiB"
