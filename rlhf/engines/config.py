"""Settings of the distributed backends."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from omegaconf import MISSING

from rlhf.schema import Section, option

if TYPE_CHECKING:
    from rlhf.config import Config
    from rlhf.engines.engine import Engine


class Device(Enum):
    """Where models live. `auto` is CUDA where there is a GPU."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


@dataclass(kw_only=True, slots=True)
class BackendConfig(Section):
    """What every backend has."""

    name: str = MISSING
    micro_batch: int = 16  # sequences a forward and rank
    device: Device = Device.auto
    threads: int | None = None  # CPU threads of torch; null: one per core

    def build(self, **parts: Any) -> Engine:
        """Make the engine of `parts`: module, reference, optimizer settings, as the engine takes them."""
        raise NotImplementedError

    def problems(self, cfg: Config) -> Iterator[str]:
        """Sizes below one."""
        if self.micro_batch < 1:
            yield (
                f"backend.micro_batch must be >= 1 (sequences a forward), got {self.micro_batch}; "
                "set backend.micro_batch=16"
            )
        if self.threads is not None and self.threads < 1:
            yield (
                f"backend.threads must be >= 1 (null: one per core), got {self.threads}; "
                "set backend.threads=null"
            )


@option("backend", "torch")
@dataclass(kw_only=True, slots=True)
class TorchConfig(BackendConfig):
    """Plain torch."""

    name: str = "torch"

    def build(self, **parts: Any) -> Engine:
        """One process, one device."""
        from rlhf.engines.torch_engine import TorchEngine

        return TorchEngine(**parts, micro_batch=self.micro_batch)
