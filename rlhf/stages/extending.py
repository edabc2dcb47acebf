"""Extension of a run: the run continues in its folder, from its last checkpoint, until a new length.

The settings are those of the run's config.yaml. Only the length may change, and settings that do not change
results. Before the run continues, config.yaml gets the new length, and trainer_state.json marks the run as
unfinished. So an interrupted extension is resumed by the same command.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from rlhf.checks.check import check_job, check_machine, checked, warn, warnings
from rlhf.config.algorithms import Trains
from rlhf.config.root import Config
from rlhf.config.run import LRSchedule
from rlhf.core.errors import UserError, setting
from rlhf.core.files import write_atomically
from rlhf.core.launched import is_first_rank
from rlhf.runs.folder import complete_checkpoints
from rlhf.runs.lock import claimed
from rlhf.runs.resuming import LENGTH, length_key, length_value
from rlhf.terminal.console import say, say_loading
from rlhf.words.compose import key_of, load_config, not_in_name, overridden

if TYPE_CHECKING:
    from pathlib import Path

    from rlhf.loggers.logger import Hook
    from rlhf.runs.folder import RunFolder

# Settings that an extension cannot change, although they do not affect the result: files, loggers
_KEPT = ("hydra", "logger", "resume", "output_dir")


def extend(folder: RunFolder, overrides: Sequence[str], hooks: Sequence[Hook] = ()) -> Config:
    """Train the run in `folder` until its new length, and return its config with the overrides.

    Args:
        folder: the run folder.
        overrides: `schedule.total_episodes=<n>` or `schedule.total_epochs=<n>`, and settings that do not
            affect the result. Without a length, an unfinished run is resumed.
        hooks: the user's code that the run calls, in addition to the classes that the key `hooks` names.

    Raises:
        UserError: an override is not allowed, the new length is too small, there is no valid checkpoint, or
            another process runs in the folder.
        RunError, Interrupted: see `rlhf.stages.run.run`.
    """
    # The other ranks of a run would find the lock of its first rank.
    with claimed(folder.path) if is_first_rank() else nullcontext():
        return _carry_out(folder, overrides, hooks)


def _carry_out(folder: RunFolder, overrides: Sequence[str], hooks: Sequence[Hook]) -> Config:
    """Extend the run in the locked `folder`; see `extend`."""
    before = load_config(folder.config)
    key = length_key(before)
    cfg = _changed(folder, overrides, key)
    old, new = length_value(before), length_value(cfg)
    state = folder.read_state() or {}
    finished = state.get("finished") is True
    if finished and new == old and any(override.startswith(f"{key}=") for override in overrides):
        say(f"finished already: {folder.path} ({key}={new})")
        return cfg
    if new < old or (finished and new == old):
        raise UserError(
            f"{key} must be above {old} (the length of the run so far), got "
            f"{new if new < old else 'no new length'}; set {key}={2 * old}"
        )
    checked(cfg)
    check_machine(cfg)
    hooks = [*check_job(cfg), *hooks]
    say_loading()
    from rlhf.stages.run import run
    from rlhf.training.checkpoint import damage

    undamaged = (path for path in reversed(complete_checkpoints(folder.path)) if not damage(path))
    last = next(undamaged, None)
    if last is None and new > old:
        start = f"model.{'base' if cfg.algo.trains is Trains.base else 'policy'}"
        raise UserError(
            f"run= must have a valid checkpoint to continue from (a final model has no optimizer state), got "
            f"{folder.path} with none; start a new run from its model: python -m rlhf.train "
            f"{setting(start, folder.model)} <settings of the run>"
        )
    warn(warnings(cfg))
    if not is_first_rank():
        run(cfg, folder, check=False, claim=nullcontext)
        return cfg
    for line in _description(cfg, folder, state, last, f"{key}={old} -> {new}" if new > old else ""):
        say(line)
    with _unchanged_if_refused(folder):
        if finished:
            folder.write_state({**state, "finished": False})
        folder.write_config(cfg)
        run(cfg, folder, check=False, claim=nullcontext, hooks=hooks)
    return cfg


@contextmanager
def _unchanged_if_refused(folder: RunFolder) -> Iterator[None]:
    """Restore config.yaml and trainer_state.json if the block raises UserError before it removes any row."""
    saved = {file: file.read_text() for file in (folder.config, folder.state) if file.exists()}
    rows = folder.metrics.stat() if folder.metrics.exists() else None
    try:
        yield
    except UserError:
        if rows is None or folder.metrics.stat().st_mtime_ns == rows.st_mtime_ns:
            for file, content in saved.items():
                write_atomically(file, content)
        raise


def _changed(folder: RunFolder, overrides: Sequence[str], length_key: str) -> Config:
    """Return the config of the run in `folder` with `overrides`.

    Args:
        folder: the run folder.
        overrides: overrides of the command line.
        length_key: the key that sets the length of the run.

    Raises:
        UserError: an override is invalid, or changes a setting that an extension cannot change.
    """

    def change(node: DictConfig, parsed: Sequence[Override]) -> None:
        for override in parsed:
            key = key_of(override)
            parent, _, leaf = key.rpartition(".")
            section = OmegaConf.select(node, parent) if parent else node
            known = isinstance(section, DictConfig) and leaf in section
            if "@" in key or known:  # `update` refuses other keys, with a suggestion
                _refuse_change(str(override.input_line), length_key)
            OmegaConf.update(node, key, override.value())

    return overridden(folder.config, overrides, f", got {{}}; set {length_key}=<number>", change)


def _refuse_change(override: str, length_key: str) -> None:
    """Raise UserError if an override changes a setting that an extension cannot change."""
    key, _, value = override.partition("=")
    if key == length_key or any(fnmatch(key, each) for each in not_in_name() if each not in _KEPT):
        return
    if key in LENGTH:
        raise UserError(
            f"the length of this run must be set by {length_key} (its config.yaml has it in this unit), got "
            f"{key}={value}; set {length_key}=<number>"
        )
    raise UserError(
        f"{key} must stay as it is (an extension changes only the length, {length_key}), got {override}; "
        "leave it out, or start a new run from the model of the run (python -m rlhf.train)"
    )


def _description(
    cfg: Config, folder: RunFolder, state: dict[str, Any], last: Path | None, change: str
) -> list[str]:
    """Return lines about an extension: new length, first update, and what depends on the length.

    Args:
        cfg: the config with the new length.
        folder: the run folder.
        state: the content of trainer_state.json.
        last: the checkpoint that the run continues from.
        change: the old and the new length; empty if the length stays the same.
    """
    if not change:
        return []
    assert last is not None
    counters = json.loads((last / "counters.json").read_text())["state"]
    at, end = counters["update"], state.get("update", 0)
    lines = [f"extending {folder.path}: {change}"]
    again = ""
    if end > at:
        first = f"updates {at + 1:,} to {end:,} are" if end > at + 1 else f"update {end:,} is"
        again = f"; {first} trained again"
    lines.append(f"  continues from {last.name} (update {at:,}){again}")
    schedule = cfg.optim.schedule
    if schedule is not LRSchedule.constant:
        lines.append(f"  learning rate: {schedule.value} schedule of the new length, so it rises at first")
    fractions = [f"schedule.{name}" for name in ("eval_every", "save_every", "log_every")]
    fractions = [key for key in fractions if 0 < getattr(cfg.schedule, key.partition(".")[2]) < 1]
    if fractions:
        lines.append(f"  fractions of the new length: {', '.join(fractions)}")
    return lines
