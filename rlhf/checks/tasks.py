"""Rules between the task and the rest of the config: local data folders and preference pairs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path

from rlhf.checks.rules import doubt, rule
from rlhf.config.algo import Data, Trains
from rlhf.config.root import Config
from rlhf.config.task import PREFERENCE_COLUMNS, ChatConfig, LocalConfig, MixtureConfig, PreferencesConfig
from rlhf.core.errors import UserError
from rlhf.core.pasting import setting
from rlhf.tasks.dialogues import different_forms, has_dialogues
from rlhf.tasks.folders import folder_problems
from rlhf.tasks.local_files import HUB_NAME, LocalFiles


@rule
def data_folders(cfg: Config) -> Iterator[str]:
    """Yield an error for each data folder that is missing, or lacks a split, column or row of the run."""
    evaluates = cfg.algo.trains is Trains.policy
    for key, path, columns, splits, reason in cfg.task.needs(cfg.reads_pairs, evaluates):
        hub_key = "preferences_name" if tuple(columns) == PREFERENCE_COLUMNS else "prompts_name"
        if is_hub_name(path) and hub_key in {each.name for each in fields(cfg.task)}:
            yield (
                f"{key} must name a local folder ({reason}), got {path} (no such folder, but the form of a "
                f"name on the hub); for a data set of the hub set {setting(f'task.{hub_key}', path)} "
                f"instead of {key}"
            )
        else:
            yield from folder_problems(key, path, columns, splits, reason)


def is_hub_name(path: str) -> bool:
    """Return whether a path has the form owner/name, and the folder `owner` does not exist."""
    return HUB_NAME.fullmatch(path) is not None and not Path(path).parent.is_dir()


@rule
def local_data(cfg: Config) -> Iterator[str]:
    """Yield an error for each problem of the files of `task=local`: columns, and rows that are no data."""
    if (content := local_content(cfg)) is None:
        return
    assert isinstance(cfg.task, LocalConfig)
    try:
        yield from LocalFiles(cfg.task).problems(content)
    except UserError as error:
        yield from error.problems


def local_content(cfg: Config) -> Data | None:
    """Return what the rows of `task.path` must contain with `task=local`; None: they are not read."""
    task = cfg.task
    if not isinstance(task, LocalConfig) or task.path is None:
        return None
    if cfg.reads_pairs and task.preferences_path is not None:
        return Data.prompts if cfg.algo.trains is Trains.policy else None
    return cfg.data


@rule
def dialogues_have_no_pairs(cfg: Config) -> Iterator[str]:
    """Yield an error if a run of `task=chat` trains on preference pairs and the config names no pairs."""
    task = cfg.task
    if not isinstance(task, ChatConfig) or not cfg.reads_pairs or cfg.stand_ins:
        return
    if task.preferences_path is None and task.preferences_name is None:
        yield (
            "task.preferences_path must name a folder of preference pairs for task=chat (No Robots has "
            "none), got null; set task.preferences_path=<folder> or task.preferences_name=<hub name>"
        )


@rule
def data_of_parts(cfg: Config) -> Iterator[str]:
    """Yield an error for each problem of the data of a part of `task=mixture`, and for different forms."""
    if not isinstance(cfg.task, MixtureConfig):
        return
    dialogues: dict[bool, str] = {}  # whether the prompts are dialogues -> name of the last such part
    for name, part in cfg.task.parts.items():
        alone = replace(cfg, task=part)
        for text in (*local_data(alone), *dialogues_have_no_pairs(alone)):
            yield cfg.task.own_key(name, text)
        if (form := has_dialogues(part)) is not None and not isinstance(part, PreferencesConfig):
            dialogues[form] = name
    if len(dialogues) > 1:
        yield different_forms(dialogues[True], dialogues[False])


@doubt
def unused_pairs(cfg: Config) -> Iterator[str]:
    """Yield a warning if the config names a folder of preference pairs that the run does not read."""
    if isinstance(cfg.task, PreferencesConfig):
        return  # its prompts and references come from the pairs
    if cfg.task.preferences_path is not None and not cfg.reads_pairs:
        yield (
            f"task.preferences_path has no effect with algo={cfg.algo.name} and "
            f"generator={cfg.generator.name} (no preference pairs are read), got "
            f"{cfg.task.preferences_path}; leave it out"
        )
