"""The generator that `generator=auto` stands for, which is the default. This module imports no torch.

`candidates` returns the generators that this machine can run, and `rlhf.checks.machine` selects the first
with which the config is valid. While a config is composed, conf/generator/auto.yaml reads the selected
generator from an environment variable, so the processes of a sweep read it too.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager

from rlhf.core.launched import local_world_size
from rlhf.core.machine import this_machine

SELECTED = "RLHF_GENERATOR"  # environment variable with the selected generator
_EVERYWHERE = "hf"  # the generator that needs neither a GPU nor another package


def best_generator() -> str:
    """Return the selected generator; without a selection, the generator that runs everywhere."""
    return os.environ.get(SELECTED, _EVERYWHERE)


@contextmanager
def selecting(name: str) -> Iterator[None]:
    """Let `generator=auto` select the option `name` during the block, in this process and in its children."""
    before = os.environ.get(SELECTED)
    os.environ[SELECTED] = name
    try:
        yield
    finally:
        if before is None:
            del os.environ[SELECTED]
        else:
            os.environ[SELECTED] = before


def candidates(gpus: int | None = None, ranks: int | None = None) -> tuple[str, ...]:
    """Return the generators that `generator=auto` may select on a host, in order of preference.

    vLLM needs a GPU: its own if the host has more GPUs than ranks, otherwise that of a single rank. Several
    ranks would have to share their GPUs with one vLLM process each (`generator.per_rank`).

    Args:
        gpus: GPUs of the host; None: GPUs of this machine.
        ranks: ranks on the host; None: ranks on this machine.
    """
    if gpus is None:
        gpus = len(this_machine().gpus)
    if ranks is None:
        ranks = local_world_size()
    if not gpus or importlib.util.find_spec("vllm") is None:
        return (_EVERYWHERE,)
    if gpus > ranks:
        return "vllm", _EVERYWHERE
    return ("vllm_colocated", _EVERYWHERE) if ranks == 1 else (_EVERYWHERE,)
