"""The generator that `generator=auto` selects. This module imports no torch."""

from __future__ import annotations

import importlib.util

from rlhf.core.launched import local_world_size
from rlhf.core.machine import this_machine


def best_generator() -> str:
    """Return the option of the group `generator` that is the fastest on this machine.

    vLLM needs a GPU. It uses a GPU of its own if there are more GPUs than ranks on this host, otherwise the
    trainer's GPU.
    """
    gpus = len(this_machine().gpus)
    if not gpus or importlib.util.find_spec("vllm") is None:
        return "hf"
    return "vllm" if gpus > local_world_size() else "vllm_colocated"
