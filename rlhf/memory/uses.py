"""Units of the memory plan: parts, phases, uses."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlhf.memory.activations import Tokens

GIB = 2**30
MARGIN = 2.0  # by this factor activations may be less than estimated: few sequences have full length
HEAP = 1.5  # memory of a process for each byte of tensors that come and go: measured with glibc, 1.4 to 1.7
NEARLY = 0.9  # part of a device's memory from which on there is a warning
PROCESS = 0.6 * GIB  # a process with torch and transformers: measured on a CPU
CONTEXT = 0.6 * GIB  # what CUDA takes on a GPU for a process: as is usually seen, not measured here


@dataclass(frozen=True, slots=True)
class Part:
    """Something that takes `bytes`; `made_of` says how many of what."""

    name: str
    bytes: float
    made_of: str = ""
    estimated: bool = False  # else it is counted


@dataclass(frozen=True, slots=True)
class Phase:
    """What is there only for a time."""

    name: str
    parts: tuple[Part, ...]

    @property
    def bytes(self) -> float:
        """All of it."""
        return sum(part.bytes for part in self.parts)


@dataclass(frozen=True, slots=True)
class Use:
    """What a device needs. `device` is RAM, or the GPU's number; `total`: None where it is not known."""

    device: str
    total: int | None
    parts: tuple[Part, ...]  # there all the time
    phases: tuple[Phase, ...] = ()  # one at a time

    @property
    def largest(self) -> Phase:
        """The phase that needs most."""
        return max(self.phases, key=lambda phase: phase.bytes, default=Phase("nothing else", ()))

    @property
    def bytes(self) -> float:
        """The most that is needed at a time."""
        return sum(part.bytes for part in self.parts) + self.largest.bytes

    @property
    def least(self) -> float:
        """The same if activations are as much smaller as they may be."""
        at_once = [self.parts + phase.parts for phase in self.phases or (self.largest,)]
        return max(sum(part.bytes / (MARGIN if part.estimated else 1) for part in parts) for parts in at_once)

    @property
    def fits(self) -> bool:
        """False where the device has clearly too little; True also where that is not known."""
        return self.total is None or self.least <= self.total


@dataclass(frozen=True, slots=True)
class Plan:
    """What the devices need; nothing is known where models are not on this machine: `unknown`, by key."""

    uses: tuple[Use, ...]
    unknown: dict[str, str]


def on_heap(part: Part) -> Part:
    """A part in RAM, where what was freed is not all given back."""
    return replace(part, bytes=part.bytes * HEAP) if part.estimated else part


def times(part: Part, count: int) -> Part:
    """The same part in `count` processes."""
    return (
        part if count == 1 else replace(part, bytes=part.bytes * count, made_of=f"{count} x {part.made_of}")
    )


def kept(parts: list[Part]) -> tuple[Part, ...]:
    """The parts that take anything."""
    return tuple(part for part in parts if part.bytes)


def parameters(count: int, held: float) -> str:
    """A number of parameters in words, and bytes of each."""
    return f"{millions(count)} parameters x {held / max(1, count):.3g} bytes"


def millions(count: int) -> str:
    """A count with its unit."""
    return f"{count / 1e9:.2f} billion" if count >= 1e9 else f"{count / 1e6:.2f} million"


def in_words(tokens: Tokens) -> str:
    """The tokens of a forward."""
    return f"{tokens.sequences} x ({tokens.prompt} + {tokens.response}) tokens"


def gib(amount: float) -> str:
    """An amount of memory in words."""
    if amount < 0.1 * GIB:
        return f"{amount / 2**20:.0f} MiB"
    return f"{amount / GIB:,.0f} GiB" if amount >= 99.5 * GIB else f"{amount / GIB:.1f} GiB"
