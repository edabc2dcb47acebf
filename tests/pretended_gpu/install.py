"""Loads the device of device.cpp into this process, and replaces the functions of `torch.cuda`."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.pretended_gpu import NAME

MEMORY = 80 * 2**30  # bytes
STATE = 16  # bytes of the state of the device's random generator, which nothing uses


def install(library: str | Path) -> None:
    """Load the library, import torch and replace the functions of `torch.cuda`."""
    device = ctypes.CDLL(str(library))  # before torch, which looks for devices once
    device.memory_used.restype = device.memory_peak.restype = ctypes.c_int64
    device.set_memory_limit.argtypes = [ctypes.c_int64]
    import torch

    from tests.pretended_gpu import graphs

    index, count = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    properties = SimpleNamespace(
        name=NAME, total_memory=MEMORY, major=9, minor=0, multi_processor_count=132, uuid="0"
    )
    state = torch.zeros(STATE, dtype=torch.uint8)
    for value, names in (
        (None, "_lazy_init set_device synchronize empty_cache ipc_collect"),
        (None, "manual_seed manual_seed_all set_rng_state set_rng_state_all"),
        (True, "is_available is_initialized is_bf16_supported"),
        (index, "current_device _exchange_device _maybe_exchange_device"),
        (count, "device_count"),
        (NAME, "get_device_name"),
        (properties, "get_device_properties"),
        ((9, 0), "get_device_capability"),
        (Stream(), "current_stream default_stream"),
        (contextlib.nullcontext(), "stream"),
        ({}, "memory_stats"),
        (state, "get_rng_state"),
        ([state], "get_rng_state_all"),
    ):
        for name in names.split():
            setattr(torch.cuda, name, gives(value))
    for function, names in (
        (device.memory_used, "memory_allocated memory_reserved"),
        (device.memory_peak, "max_memory_allocated max_memory_reserved"),
        (device.reset_memory_peak, "reset_peak_memory_stats"),
        (lambda: (MEMORY - device.memory_used(), MEMORY), "mem_get_info"),
        (graphs.recording, "is_current_stream_capturing"),
    ):
        for name in names.split():
            setattr(torch.cuda, name, calls(function))
    torch.cuda.set_per_process_memory_fraction = lambda share, *args: device.set_memory_limit(
        int(share * MEMORY)
    )
    torch.cuda.Stream, torch.cuda.Event, torch.cuda.CUDAGraph = Stream, Event, graphs.Graph
    for name in ("range_push", "range_pop", "mark"):
        setattr(torch.cuda.nvtx, name, gives(None))
    torch.backends.cuda.is_built = gives(True)
    torch._C._cuda_getCurrentRawStream = gives(0)
    torch.Tensor.record_stream = gives(None)
    torch.Tensor.pin_memory = lambda self, *args: self.clone()
    torch.Tensor.is_pinned = lambda self, *args: not self.is_cuda
    replace_storages(torch)
    replace_nccl(torch)
    replace_machine(count)


# Each function is a new object: torch.compile refuses a function with two names.


def gives(value: Any) -> Callable[..., Any]:
    """Return a function that returns `value` for all arguments."""
    return lambda *args, **kwargs: value


def calls(function: Callable[[], Any]) -> Callable[..., Any]:
    """Return a function that calls `function` for all arguments."""
    return lambda *args, **kwargs: function()


class Stream:
    """The only stream: operations have ended when their call returns."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def synchronize(self, *others: Any) -> None:
        """Return at once."""

    wait_stream = wait_event = synchronize

    def record_event(self, event: Event | None = None) -> Event:
        """Return an event of the past."""
        return event or Event()


class Event:
    """An event of the past."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def synchronize(self, *streams: Any) -> None:
        """Return at once."""

    record = wait = synchronize

    def query(self) -> bool:
        """Return True."""
        return True

    def elapsed_time(self, later: Event) -> float:
        """Return a time in milliseconds, which means nothing."""
        return 1.0


def replace_storages(torch: Any) -> None:
    """Let storages of the device be copied, saved and loaded; torch does this in C++."""

    def bytes_of(storage: Any) -> Any:
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

    def saved_as(storage: Any) -> str | None:
        return str(storage.device) if storage.device.type == "cuda" else None

    def loaded_on(storage: Any, place: str) -> Any:
        return bytes_of(storage).to(place).untyped_storage() if place.startswith("cuda") else None

    plain = torch.UntypedStorage
    for name in ("cpu", "clone"):
        copy = getattr(plain, name)

        def copied(self: Any, name: str = name, copy: Any = copy) -> Any:
            if self.device.type != "cuda":
                return copy(self)
            return getattr(bytes_of(self), name)().untyped_storage()

        setattr(plain, name, copied)
    torch.serialization.register_package(5, saved_as, loaded_on)


def replace_nccl(torch: Any) -> None:
    """Let process groups use Gloo in place of NCCL."""
    distributed = torch.distributed.distributed_c10d
    torch.cuda.nccl = SimpleNamespace(version=lambda: (2, 28, 0))

    def replaced(backend: str | None) -> str | None:
        return "cpu:gloo,cuda:gloo" if backend == "nccl" else backend and backend.replace("nccl", "gloo")

    start, new = distributed.init_process_group, distributed.new_group

    @functools.wraps(start)
    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> Any:
        return start(replaced(backend), *args, **kwargs)

    @functools.wraps(new)
    def new_group(
        ranks: Any = None, timeout: Any = None, backend: str | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        return new(ranks, timeout, replaced(backend), *args, **kwargs)

    for module in (distributed, torch.distributed):
        module.init_process_group, module.new_group = init_process_group, new_group


def replace_machine(count: int) -> None:
    """Let the checks of a config see the memory of the device."""
    from rlhf.core import machine

    machine.torch_has_cuda = lambda: True
    machine.gpus = lambda visible: (MEMORY,) * count
    machine.this_machine.cache_clear()
