"""Prerequisites of a run of an embedded task: the SFT model, preference pairs, the reward model.

Prerequisites are made for a run that names no models (`model.policy=null`, `model.reward=null`). The ordinary
training loop trains each model (`algo=sft`, `algo=reward`) once, in a folder of `cache_dir` whose name
contains a hash of all settings that the result depends on. Two runs that start at the same time train a model
only once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock

from rlhf.assembly.device import build_device
from rlhf.config.algo import Trains
from rlhf.core.console import say
from rlhf.processes.ranks import Ranks
from rlhf.runs.folder import RunFolder
from rlhf.stages import tiny_stand_ins
from rlhf.stages.once import made_once
from rlhf.stages.sample_pairs import sample_pairs
from rlhf.stages.stage_config import checked, model_folder, pairs_folder, stage

if TYPE_CHECKING:
    from rlhf.config.root import Config

Run = Callable[["Config", RunFolder, Ranks], object]  # rlhf.stages.run.run, which carries out a run


def complete(cfg: Config, run: Run, reward: bool = True) -> Config:
    """Make every missing model and data set of an embedded task, and return `cfg` with their paths.

    For a task of the hub, `cfg` is returned unchanged, or with stand-ins if `cfg.stand_ins`.

    Args:
        cfg: the config of a run.
        run: function that trains a model (`rlhf.stages.run.run`).
        reward: whether to make also the reward model that the scorer reads.

    Raises:
        UserError: the config of a stage has a problem.
        RunError: a stage had to stop.
        Interrupted: a signal stopped a stage.
    """
    if cfg.stand_ins:
        return tiny_stand_ins.complete(cfg)
    if not cfg.task.embedded or cfg.algo.trains is Trains.base:
        return cfg
    reads_reward = cfg.algo.trains is Trains.policy and cfg.scorer.reads_reward and cfg.model.reward is None
    policy = cfg.model.policy or str(make_policy(cfg, run))
    cfg = replace(cfg, model=replace(cfg.model, policy=policy))
    if cfg.reads_pairs and cfg.task.preferences_path is None:
        cfg = replace(cfg, task=replace(cfg.task, preferences_path=str(make_pairs(cfg))))
    if reward and reads_reward:
        cfg = replace(cfg, model=replace(cfg.model, reward=str(make_reward(cfg, run))))
    return cfg


def make_policy(cfg: Config, run: Run) -> Path:
    """Return the folder of the SFT model; if it does not exist, train it."""
    return make_model(checked(stage(cfg, "sft")), "the SFT model", run)


def make_reward(cfg: Config, run: Run) -> Path:
    """Return the folder of the reward model; if it does not exist, train it on pairs of the SFT model."""
    return make_model(checked(stage(cfg, "reward")), "the reward model", run)


def make_model(cfg: Config, what: str, run: Run) -> Path:
    """Return the folder of the model of the stage `cfg`; run the stage first if it is not finished."""
    folder = model_folder(cfg)
    folder.path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder.path}.lock"):
        if not folder.finished():
            say(f"making {what} (once; kept in {folder.path})", style="bold")
            run(cfg, folder, Ranks(build_device(cfg)))
    return folder.model


def make_pairs(cfg: Config) -> Path:
    """Return the folder of preference pairs; if it does not exist, sample the pairs first.

    A pair consists of two samples for a prompt, ordered by gold score. Ties are skipped.
    """
    return made_once(
        pairs_folder(cfg), "preference pairs", lambda folder: sample_pairs(cfg).save_to_disk(str(folder))
    )
