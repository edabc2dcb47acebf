"""Handling of an existing run folder: resume, skip a finished run, refuse, or move the folder aside."""

from __future__ import annotations

import glob
import itertools
import os
import re
import sys
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from rlhf.config.root import Config
from rlhf.config.run import DEFAULT_EPOCHS, Resume
from rlhf.core.errors import UserError, as_text, setting
from rlhf.core.files import component
from rlhf.core.launched import is_first_rank
from rlhf.runs.folder import RunFolder
from rlhf.runs.lock import EVALUATION_LOCK, cannot_write, check_unlocked, unwritable
from rlhf.words.compose import differences, digest, load_config, run_name

LENGTH = ("schedule.total_episodes", "schedule.total_epochs")  # settings that `rlhf.extend` may change
_SHOWN = 4  # largest number of differing settings in a message
ASIDE = ".old-"  # suffix, before a number, of a folder that `resume=never` moved aside


def prepare(folder: RunFolder, cfg: Config, *, wait: bool = False) -> dict[str, Any] | None:
    """Prepare the folder of a run before the run starts, as `cfg.resume` requires.

    With `resume=never`, an existing run folder is moved aside.

    Args:
        folder: the run folder.
        cfg: the config of the run.
        wait: wait for another process that runs in the folder.

    Returns:
        The content of trainer_state.json if the run is finished and does not have to run again, else None.

    Raises:
        UserError: `resume=must` without a complete checkpoint, or the folder belongs to a run with other
            settings, is in use by another process, cannot be written, or has a folder in place of a file.
    """
    if is_first_rank():  # the other ranks of a run would find the lock of its first rank
        check_unlocked(folder.path, wait=wait)
        if cfg.resume is Resume.never:
            check_unlocked(folder.path, wait=wait, name=EVALUATION_LOCK)
    exists = folder.path.is_dir() and any(folder.path.iterdir())
    if cfg.resume is Resume.never:
        # A job that SLURM requeued resumes its own work, so that work is not moved aside.
        if exists and is_first_rank() and int(os.environ.get("SLURM_RESTART_COUNT", "0")) == 0:
            names = (folder.path.with_name(f"{folder.path.name}{ASIDE}{n}") for n in itertools.count(1))
            aside = next(path for path in names if not path.exists())
            folder.path.rename(aside)
            print(f"resume=never: moved the existing run {folder.path} to {aside}", file=sys.stderr)
        return None
    folder.check_files()
    finished = folder.finished() if exists else None
    if finished is None and (reason := unwritable(folder.path)):
        raise UserError(cannot_write("hydra.run.dir", folder.path, reason))
    if finished is None and cfg.resume is Resume.must and folder.last_checkpoint() is None:
        reason = "no complete checkpoint in it" if exists else "no such folder"
        raise UserError(
            f"resume=must needs a complete checkpoint to resume from ({reason}), got {folder.path}; "
            "set resume=auto to start from the beginning if there is none"
        )
    if exists:
        refuse_another_run(cfg, folder)
    return finished


def refuse_another_run(cfg: Config, folder: RunFolder) -> None:
    """Raise UserError if the folder has a checkpoint or the result of a run with other settings.

    A finished run that `rlhf.extend` made longer is accepted, with a message.
    """
    if not (folder.finished() or folder.last_checkpoint()):
        return
    # The name of a run ends with a digest of all settings, but `rlhf.extend` changes the length later.
    if folder.path.name.endswith(f"-{digest(cfg)}"):
        now = saved_length(folder)
        if now is None or now == _length(cfg):
            return
        if not folder.finished():
            raise UserError(
                f"the length of the run must be that of its extension, got "
                f"{' '.join(_length(cfg)) or 'the default'} for {folder.path}, which was extended to "
                f"{' '.join(now)}; resume the extension with: {_extend_command(folder)}, or set resume=never "
                "to move that run aside"
            )
        if is_first_rank():
            print(f"{folder.path} was extended to {' '.join(now)}")
        return
    saved = load_config(folder.config)
    differ = differences(saved, cfg)
    if not differ:
        return
    remedy = "set resume=never to move that run aside, or leave hydra.run.dir out"
    if differ.keys() == {length_key(cfg)}:
        remedy = f"set {' '.join(_length(saved))}, or set resume=never to move that run aside"
        if length_value(cfg) > length_value(saved):
            remedy = f"extend that run with: {_extend_command(folder, *_length(cfg))}"
    shown = [f"{key}={as_text(there)} instead of {as_text(here)}" for key, (there, here) in differ.items()]
    more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
    raise UserError(
        "hydra.run.dir must not be the folder of a run with other settings (its checkpoint or result is "
        f"not valid for this run), got {folder.path}, whose config.yaml has {', '.join(shown[:_SHOWN])}"
        f"{more}; {remedy}"
    )


def shorter_run(folder: RunFolder, cfg: Config) -> str | None:
    """Return a message if `folder` does not exist and another run differs only by a smaller length.

    Only folders beside `folder` are compared, by the digest at the end of their names.
    """
    own = digest(cfg)
    before = folder.path.name.removesuffix(own)
    if before == folder.path.name or folder.path.exists():
        return None
    unit = length_key(cfg)
    name = unit.partition(".")[2]
    digests: dict[float, str] = {}
    for path in sorted(folder.path.parent.glob(f"{glob.escape(before)}{'[0-9a-f]' * len(own)}")):
        file = path / "config.yaml"
        try:
            written = file.read_bytes()
        except OSError:  # no config.yaml, or that of another user
            continue
        found = re.search(rf"^  {name}: (\d+(\.\d+)?)$", written.decode(errors="replace"), re.M)
        if found is None or (value := float(found[1])) >= length_value(cfg):
            continue
        if value not in digests:
            shorter = int(value) if unit == LENGTH[0] else value
            digests[value] = digest(cfg.with_({unit: shorter}))
        if path.name == before + digests[value]:
            return (
                f"{path} is the same run with {unit}={found[1]}; to train that run longer instead of "
                f"starting a new run: {_extend_command(RunFolder(path), *_length(cfg))}"
            )
    return None


def length_key(cfg: Config) -> str:
    """Return the key of `LENGTH` that sets the length of a run."""
    return LENGTH[1] if cfg.schedule.total_episodes is None else LENGTH[0]


def length_value(cfg: Config) -> float:
    """Return the length of a run, in the unit of `length_key`."""
    value = cfg.epochs if cfg.schedule.total_episodes is None else cfg.schedule.total_episodes
    assert value is not None, "validated: the run has a length"
    return value


def _length(cfg: Config) -> list[str]:
    """Return the length of a run as overrides; empty for the default length of a task."""
    return _as_overrides(cfg.schedule.total_episodes, cfg.schedule.total_epochs)


def saved_length(folder: RunFolder) -> list[str] | None:
    """Return the length of a run according to config.yaml, as overrides; None if it cannot be read."""
    try:
        schedule = folder.read_config()["schedule"]
        return _as_overrides(schedule.get("total_episodes"), schedule.get("total_epochs"))
    except (OSError, ValueError, KeyError, AttributeError, YAMLError, OmegaConfBaseException):
        return None


def _as_overrides(*lengths: float | None) -> list[str]:
    """Return the values of the keys `LENGTH` as overrides, without those that are null."""
    return [f"{key}={value}" for key, value in zip(LENGTH, lengths, strict=True) if value is not None]


def _extend_command(folder: RunFolder, *lengths: str) -> str:
    """Return the command that trains a run until the length `lengths`, or resumes its extension."""
    return " ".join(["python -m rlhf.extend", setting("run", folder.path), *lengths])


def twice_as_long(folder: RunFolder) -> str | None:
    """Return the command that trains a run twice as long; None if its length cannot be read."""
    lengths = saved_length(folder)
    if lengths is None:
        return None
    key, _, value = (lengths or [f"{LENGTH[1]}={DEFAULT_EPOCHS}"])[0].partition("=")
    twice = f"{2 * int(value)}" if key == LENGTH[0] else f"{2 * float(value):g}"
    return _extend_command(folder, f"{key}={twice}")


# The folder of a run: a new one, or the existing folder of a run with the same settings.


def folder_of(cfg: Config | DictConfig) -> Path:
    """Return `<output_dir>/<run name>`, or the folder of the same run under another name.

    An earlier version of this project may have started the run, with another label for the model. The name
    of such a folder ends with the same digest of all settings.
    """
    output, name = Path(cfg.output_dir), run_name(cfg)
    if os.path.isdir(output) and not (output / name).exists():
        for found in sorted(output.glob(f"{glob.escape(component(cfg.task.name))}-*-{digest(cfg)}")):
            if (found / "config.yaml").is_file():
                return found
    return output / name


def earlier_name(folder: Path, cfg: Config) -> str | None:
    """Return a note if the folder of a run has a name that an earlier version gave; None: it has not."""
    if folder.name != run_name(cfg) and folder.name.endswith(f"-{digest(cfg)}") and folder.is_dir():
        return f"the run continues in {folder}, the name of this run in an earlier version"
    return None
