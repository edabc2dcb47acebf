"""Composition of a config with the generator that `generator=auto` selects for it.

The selected generator is the first of `vllm`, `vllm_colocated` and `hf` that this machine can run and with
which the config is valid. For example, `vllm_colocated` allows no lag, and the key `generator.batch_size`
belongs to `hf` alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence

from omegaconf import DictConfig

from rlhf.checks.check import as_objects, problems
from rlhf.checks.machine import expandable_segments
from rlhf.config.backend import Device
from rlhf.config.best_generator import SELECTED, best_generator, candidates, selecting
from rlhf.config.compose import compose_node
from rlhf.config.mistakes import CONFIG_ERRORS, explained
from rlhf.config.root import Config
from rlhf.core.machine import this_machine
from rlhf.memory import plan

Job = tuple[DictConfig, Sequence[str]]  # composed config and overrides of a run


def composed(overrides: list[str]) -> Config:
    """Return the config of `python -m rlhf.train <overrides>`, without checks of the values.

    Raises:
        UserError: an override is invalid, a key is unknown or not set, or has a value of the wrong type.
    """
    return as_objects(composed_node(overrides), overrides)


def composed_node(overrides: list[str]) -> DictConfig:
    """Return the config of `python -m rlhf.train <overrides>` as an OmegaConf node (see `compose_node`).

    Raises:
        UserError: an override is invalid.
    """
    with selecting(generator_of(overrides)), explained(overrides):
        return compose_node(overrides)


def generator_of(overrides: list[str]) -> str:
    """Return the generator that `generator=auto` selects for a run, or that the sweep of a job selected."""
    if SELECTED in os.environ:
        return best_generator()
    return selected(candidates(), lambda: [(compose_node(overrides), overrides)])


def selected(names: Sequence[str], jobs: Callable[[], Iterable[Job]]) -> str:
    """Return the first of the generators `names` with which all jobs are valid; if there is none, the last.

    Args:
        names: options of the group `generator`.
        jobs: a function that composes the runs that must have the same generator.
    """
    *others, last = names
    for name in others:
        with selecting(name):
            try:
                if all(suits(as_objects(node, overrides)) for node, overrides in jobs()):
                    return name
            except CONFIG_ERRORS:  # for example a key that this generator does not have
                continue
    return last


def suits(cfg: Config) -> bool:
    """Return whether vLLM suits a run: a valid config, and a model of some size on a GPU with enough memory.

    The models of embedded tasks and stand-ins have few parameters; on a CPU, `hf` samples the embedded
    model faster. On a machine without GPUs, which submits jobs to others, the memory is not checked.
    """
    tiny = cfg.start is None or cfg.stand_ins
    if tiny or cfg.backend.device is Device.cpu or problems(cfg):
        return False
    return not this_machine().gpus or not [*expandable_segments(cfg), *plan.problems(cfg)]
