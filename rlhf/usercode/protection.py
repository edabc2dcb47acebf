"""Protection of this process from code of the user that changes global settings or random states.

Of torch and numpy, only what is imported already is protected. This module imports neither of them.
"""

from __future__ import annotations

import logging
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple


class _Setting(NamedTuple):
    """A global setting: how it is read and written, and its value after the import of its library."""

    read: Callable[[], Any]
    write: Callable[[Any], object]
    initial: Any = None


_lock = threading.Lock()
_blocks: list[list[tuple[_Setting, Any]]] = []  # what the first of the present blocks read, for each of them


@contextmanager
def protected(seed: int | None = None) -> Iterator[None]:
    """Restore global settings and random states of Python, numpy and torch after the block.

    The working directory, environment, output, signal handlers, the default dtype and device, threads,
    gradient, inference and deterministic mode are restored, for example.

    Args:
        seed: seed of all global random states during the block; None: they are not changed before it.
    """
    loaded = "torch" in sys.modules
    before = _read(_of_process(), _of_thread(), _random_states())
    if seed is not None:
        numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
        random.seed(seed)
        if numpy is not None:
            numpy.random.seed(seed % 2**32)
        if torch is not None:
            torch.default_generator.manual_seed(seed)  # of the CPU
    try:
        with _same_inference_mode():
            yield
    finally:
        if not loaded:
            now = (*_of_process(), *_of_thread())
            before += [(each, each.initial) for each in now if each.initial is not None]
        _restore(before)


@contextmanager
def same_settings() -> Iterator[None]:
    """Restore the global settings of this process after the block, in which other threads run foreign code.

    Blocks of several threads may overlap: the settings are those before the first, restored after the last.
    """
    with _lock:
        _blocks.append(_blocks[0] if _blocks else _read(_of_process()))
    try:
        yield
    finally:
        with _lock:
            before = _blocks.pop()
            if not _blocks:
                _restore(before)


def _read(*settings: Iterable[_Setting]) -> list[tuple[_Setting, Any]]:
    """Return settings with their values."""
    return [(each, each.read()) for some in settings for each in some]


def _restore(before: list[tuple[_Setting, Any]]) -> None:
    """Set each setting to its value, if it has another value."""
    for setting, value in before:
        same = False
        # OSError: the working directory was deleted; otherwise, the comparison of arrays gives no bool
        with suppress(OSError, ValueError, RuntimeError):
            same = bool(setting.read() == value)
        if not same:
            setting.write(value)


@contextmanager
def _same_inference_mode() -> Iterator[None]:
    """Run the block outside of the inference mode of torch; end one that it entered."""
    if (torch := sys.modules.get("torch")) is None:
        yield
        return
    gradients = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(gradients):
        yield


def _of_process() -> Iterator[_Setting]:
    """Yield the settings that all threads share."""
    yield _Setting(lambda: dict(os.environ), _set_environment)
    for name in ("stdin", "stdout", "stderr"):
        yield _Setting(partial(getattr, sys, name), partial(setattr, sys, name))
    yield _Setting(sys.getrecursionlimit, sys.setrecursionlimit)
    yield _Setting(lambda: logging.root.manager.disable, logging.disable)
    yield _Setting(lambda: list(warnings.filters), _set_filters)
    with suppress(FileNotFoundError):  # the working directory was deleted
        os.getcwd()
        yield _Setting(os.getcwd, os.chdir)
    if (torch := sys.modules.get("torch")) is None:
        return

    yield _Setting(torch.get_default_dtype, torch.set_default_dtype, torch.float32)
    yield _Setting(torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly, False)
    yield _Setting(torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode, 0)
    yield _Setting(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "highest")
    for name in ("benchmark", "deterministic", "enabled"):
        cudnn = torch.backends.cudnn
        yield _Setting(partial(getattr, cudnn, name), partial(setattr, cudnn, name), name == "enabled")


def _of_thread() -> Iterator[_Setting]:
    """Yield the settings of this thread; in the main thread, the handlers of signals that stop a run."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            if signal.getsignal(number) is not None:
                yield _Setting(partial(signal.getsignal, number), partial(signal.signal, number))
    if (numpy := sys.modules.get("numpy")) is not None:
        yield _Setting(numpy.geterr, lambda value: numpy.seterr(**value))
    if (torch := sys.modules.get("torch")) is None:
        return
    cpu = torch.device("cpu")

    def set_device(value: Any) -> None:
        torch.set_default_device(None if value == cpu else value)

    yield _Setting(torch.get_default_device, set_device, cpu)
    yield _Setting(torch.get_num_threads, torch.set_num_threads)
    yield _Setting(torch.is_grad_enabled, torch.set_grad_enabled, True)


def _set_environment(value: dict[str, str]) -> None:
    """Set the environment of this process to `value`."""
    for name in os.environ.keys() - value.keys():
        del os.environ[name]
    os.environ.update(value)


def _set_filters(value: list[Any]) -> None:
    """Set the filters of warnings."""
    warnings.resetwarnings()
    warnings.filters.extend(value)  # type: ignore[attr-defined]


def _random_states() -> Iterator[_Setting]:
    """Yield the states of the global random generators."""
    yield _Setting(random.getstate, random.setstate)
    if (numpy := sys.modules.get("numpy")) is not None:
        yield _Setting(numpy.random.get_state, numpy.random.set_state)
    if (torch := sys.modules.get("torch")) is not None:
        yield _Setting(torch.default_generator.get_state, torch.default_generator.set_state)
        if torch.cuda.is_initialized():
            yield _Setting(torch.cuda.get_rng_state_all, torch.cuda.set_rng_state_all)
