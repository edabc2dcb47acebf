"""Prerequisites of a run of an embedded task: the SFT model, preference pairs, the reward model.

Prerequisites are made for a run that names no models (`model.policy=null`, `model.reward=null`). The ordinary
training loop trains each model (`algo=sft`, `algo=reward`) once, in a folder of `cache_dir` whose name
contains a hash of all settings that the result depends on. If two runs need a model at the same time, one of
them trains the model, and the other one waits.

This module imports torch only to make an artefact.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf.config.algo import Trains
from rlhf.core.stages import Stages
from rlhf.runs.folder import COMPLETE, RunFolder
from rlhf.runs.lock import waiting_claim
from rlhf.stages import tiny_stand_ins
from rlhf.stages.artefacts import Artefact, made_once, trained
from rlhf.stages.stage_config import checked, model_folder, pairs_folder, stage

if TYPE_CHECKING:
    from rlhf.config.root import Config

Run = Callable[..., object]  # rlhf.stages.run.run, which carries out a run

SFT, PAIRS, REWARD = "SFT model", "preference pairs", "reward model"


def names(cfg: Config, reward: bool = True) -> list[str]:
    """Return the names of the prerequisites of the run `cfg`, finished or not, in their order.

    Args:
        cfg: the config of a run.
        reward: whether the run needs the reward model that the scorer reads.
    """
    if cfg.stand_ins or not cfg.task.embedded or cfg.algo.trains is Trains.base:
        return []
    reads_reward = cfg.algo.trains is Trains.policy and cfg.scorer.reads_reward
    makes_reward = reward and reads_reward and cfg.model.reward is None
    due = {
        SFT: cfg.model.policy is None,
        PAIRS: (cfg.reads_pairs or makes_reward) and cfg.task.preferences_path is None,
        REWARD: makes_reward,
    }
    return [name for name, needed in due.items() if needed]


def prerequisites(cfg: Config, run: Run, reward: bool = True) -> tuple[Config, list[Artefact]]:
    """Return `cfg` with the paths of its prerequisites, and the prerequisites of `names(cfg, reward)`.

    Args:
        cfg: the config of a run.
        run: function that trains a model (`rlhf.stages.run.run`).
        reward: whether the run needs the reward model that the scorer reads.

    Raises:
        UserError: the config of a stage has a problem.
    """
    due = names(cfg, reward)
    stages = {
        name: checked(stage(cfg, algo)) for name, algo in ((SFT, "sft"), (REWARD, "reward")) if name in due
    }
    found: list[Artefact] = []
    paths: dict[str, str] = {}
    if SFT in due:
        found.append(_model(SFT, stages[SFT], run))
        paths["model.policy"] = str(RunFolder(found[-1].folder).model)
    if PAIRS in due:
        reader = cfg if cfg.reads_pairs else stages[REWARD]
        found.append(_sampled_pairs(reader.with_(paths)))
        if cfg.reads_pairs:  # otherwise the reward stage itself finds the pairs
            paths["task.preferences_path"] = str(found[-1].folder)
    if REWARD in due:
        found.append(_model(REWARD, stages[REWARD].with_(paths), run))
        paths["model.reward"] = str(RunFolder(found[-1].folder).model)
    return cfg.with_(paths), found


def complete(cfg: Config, run: Run, reward: bool = True, stages: Stages | None = None) -> Config:
    """Make every missing model and data set of an embedded task, and return `cfg` with their paths.

    For a task of the hub, `cfg` is returned unchanged, or with stand-ins if `cfg.stand_ins`.

    Args:
        cfg: the config of a run.
        run: function that trains a model (`rlhf.stages.run.run`).
        reward: whether the run needs the reward model that the scorer reads.
        stages: stages that begin with `names(cfg, reward)`; finished stages are then printed, too.

    Raises:
        UserError: the config of a stage has a problem.
        RunError: a stage had to stop.
        Interrupted: a signal stopped a stage.
    """
    if cfg.stand_ins:
        return tiny_stand_ins.complete(cfg)
    cfg, found = prerequisites(cfg, run, reward)
    numbering = stages or Stages([artefact.name for artefact in found])
    for number, artefact in enumerate(found, 1):
        if not artefact.done():
            with numbering.run(number, artefact.folder):
                artefact.make()
        elif stages is not None:
            stages.skip(number, artefact.folder)
    return cfg


def _model(name: str, cfg: Config, run: Run) -> Artefact:
    """Return the model that the stage `cfg` trains on this rank alone."""

    def make() -> None:
        from rlhf.assembly.models import build_device
        from rlhf.processes.ranks import Ranks

        run(cfg, folder, Ranks(build_device(cfg)), claim=waiting_claim)

    folder = model_folder(cfg)
    return trained(name, folder, make)


def _sampled_pairs(cfg: Config) -> Artefact:
    """Return the preference pairs that are sampled from the policy of `cfg`.

    A pair consists of two samples for a prompt, ordered by gold score. Ties are skipped.
    """

    def write(folder: Path) -> None:
        from rlhf.stages.sample_pairs import sample_pairs

        sample_pairs(cfg).save_to_disk(str(folder))

    folder = pairs_folder(cfg)
    return Artefact(
        name=PAIRS,
        folder=folder,
        done=(folder / COMPLETE).exists,
        make=partial(made_once, folder, write),
        figures=lambda: f"ordered by {cfg.gold.described}",
    )
