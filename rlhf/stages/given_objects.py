"""Data sets and reward functions that are given to `Experiment` as objects. This module imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlhf.checks.machine import composed
from rlhf.config.given_functions import Function, GivenFunctions
from rlhf.core.errors import UserError
from rlhf.core.pasting import override
from rlhf.runs.writable import creating
from rlhf.tasks.given_data import written


def with_objects(
    overrides: Sequence[str], dataset: object, reward: Function | Sequence[Function] | None
) -> tuple[list[str], GivenFunctions | None]:
    """Store a data set in `cache_dir`, and return the overrides with its address and those of functions.

    Args:
        overrides: the other overrides.
        dataset: see `Experiment`; None: the overrides name the data.
        reward: see `Experiment`; None: the overrides name the scorer.

    Returns:
        The overrides, and the functions.

    Raises:
        UserError: the overrides name other data or another scorer, an object cannot be used, or `cache_dir`
            cannot be written.
    """
    words, functions = list(overrides), None
    for argument, given, option, path in (
        ("dataset", dataset, "task=local", "task.path"),
        ("reward", reward, "scorer=function", "scorer.path"),
    ):
        if given is None:
            continue
        for word in overrides:
            if word.startswith(f"{path}=") or (
                word.startswith(option.partition("=")[0] + "=") and word != option
            ):
                raise UserError(
                    f"{argument} must not be given together with {word} (both name the {argument}), got an "
                    f"object of type {type(given).__name__}; leave {word} out"
                )
        words = [*words, *([] if option in words else [option])]
    cache = Path(composed(words).cache_dir)
    with creating(cache, "cache_dir"):
        if dataset is not None:
            words.append(override("task.path", written(dataset, cache / "given_data")))
        if reward is not None:
            functions = GivenFunctions(reward)
            paths = functions.paths
            words.append(override("scorer.path", paths[0] if len(paths) == 1 else paths))
    return words, functions
