"""Rules between the task and the rest of the config: local data folders and preference pairs."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf.checks.rules import doubt, rule
from rlhf.config.algo import Trains
from rlhf.config.root import Config
from rlhf.config.task import ChatConfig, PreferencesConfig
from rlhf.tasks.folders import folder_problems


@rule
def data_folders(cfg: Config) -> Iterator[str]:
    """Yield an error for each data folder that is missing, or lacks a split or column that the run reads."""
    for need in cfg.task.needs(cfg.reads_pairs, cfg.algo.trains is Trains.policy):
        yield from folder_problems(*need)


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
