"""Prerequisites of a run of an embedded task: the SFT model, preference pairs, the reward model.

Prerequisites are made for a run that names no models (`model.policy=null`, `model.reward=null`). The ordinary
training loop trains each model (`algo=sft`, `algo=reward`) once, in a folder of `cache_dir` whose name
contains a hash of all settings that the result depends on. If two runs need a model at the same time, one of
them trains the model, and the other one waits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf.assembly.device import build_device
from rlhf.config.algo import Trains
from rlhf.core.stages import Stages
from rlhf.processes.ranks import Ranks
from rlhf.runs.folder import COMPLETE
from rlhf.runs.lock import waiting_claim
from rlhf.stages import tiny_stand_ins
from rlhf.stages.final_model import final_model
from rlhf.stages.once import made_once
from rlhf.stages.sample_pairs import sample_pairs
from rlhf.stages.stage_config import checked, model_folder, pairs_folder, stage

if TYPE_CHECKING:
    from rlhf.config.root import Config

Run = Callable[..., object]  # rlhf.stages.run.run, which carries out a run


def names(cfg: Config, reward: bool = True) -> list[str]:
    """Return the names of the stages before the run `cfg`, finished or not, in their order.

    Args:
        cfg: the config of a run.
        reward: whether to make also the reward model that the scorer reads.
    """
    if cfg.stand_ins or not cfg.task.embedded or cfg.algo.trains is Trains.base:
        return []
    makes_reward = reward and reads_reward(cfg)
    found = {
        "SFT model": cfg.model.policy is None,
        "preference pairs": (cfg.reads_pairs or makes_reward) and cfg.task.preferences_path is None,
        "reward model": makes_reward,
    }
    return [name for name, due in found.items() if due]


def reads_reward(cfg: Config) -> bool:
    """Return whether the scorer of the run reads a reward model that the config does not name."""
    return cfg.algo.trains is Trains.policy and cfg.scorer.reads_reward and cfg.model.reward is None


def complete(cfg: Config, run: Run, reward: bool = True, stages: Stages | None = None) -> Config:
    """Make every missing model and data set of an embedded task, and return `cfg` with their paths.

    For a task of the hub, `cfg` is returned unchanged, or with stand-ins if `cfg.stand_ins`.

    Args:
        cfg: the config of a run.
        run: function that trains a model (`rlhf.stages.run.run`).
        reward: whether to make also the reward model that the scorer reads.
        stages: stages that begin with `names(cfg, reward)`; finished stages are then printed, too.

    Raises:
        UserError: the config of a stage has a problem.
        RunError: a stage had to stop.
        Interrupted: a signal stopped a stage.
    """
    if cfg.stand_ins:
        return tiny_stand_ins.complete(cfg)
    due = names(cfg, reward)
    numbering = stages or Stages(due)

    def made(name: str, folder: Path, finished: bool, make: Callable[[], Path]) -> str:
        number = due.index(name) + 1
        if not finished:
            with numbering.run(number, folder):
                return str(make())
        if stages is not None:
            stages.skip(number, folder)
        return str(make())

    if "SFT model" in due:
        sft = checked(stage(cfg, "sft"))
        folder = model_folder(sft)
        policy = made("SFT model", folder.path, bool(folder.finished()), partial(make_model, sft, run))
        cfg = cfg.with_({"model.policy": policy})
    if cfg.reads_pairs and "preference pairs" in due:
        pairs = _made_pairs(cfg, made)
        cfg = cfg.with_({"task.preferences_path": pairs})
    if "reward model" in due:
        reward_run = checked(stage(cfg, "reward"))
        if reward_run.task.preferences_path is None:
            _made_pairs(reward_run, made)
        folder = model_folder(reward_run)
        make = partial(make_model, reward_run, run)
        model = made("reward model", folder.path, bool(folder.finished()), make)
        cfg = cfg.with_({"model.reward": model})
    return cfg


def _made_pairs(cfg: Config, made: Callable[[str, Path, bool, Callable[[], Path]], str]) -> str:
    """Make the preference pairs that `cfg` reads as a stage, and return their folder."""
    folder = pairs_folder(cfg)
    return made("preference pairs", folder, (folder / COMPLETE).exists(), partial(make_pairs, cfg))


def make_model(cfg: Config, run: Run) -> Path:
    """Return the folder of the model of the stage `cfg`; run the stage first if it is not finished."""
    folder = model_folder(cfg)
    if not folder.finished():
        run(cfg, folder, Ranks(build_device(cfg)), claim=waiting_claim)
    return final_model(folder)


def make_pairs(cfg: Config) -> Path:
    """Return the folder of preference pairs; if it does not exist, sample the pairs first.

    A pair consists of two samples for a prompt, ordered by gold score. Ties are skipped.
    """
    return made_once(pairs_folder(cfg), None, lambda folder: sample_pairs(cfg).save_to_disk(str(folder)))
