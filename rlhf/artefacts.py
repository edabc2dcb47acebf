"""What embedded tasks make on the way: the SFT model, preference pairs, the reward model.

A run that names no model (`model.policy=null`, `model.reward=null`) gets them from here. Each is made by
the same loop that trains everything (`algo=sft`, `algo=reward`), once, into a folder of `cache_dir` whose
name holds a hash of all settings that it depends on; two runs that start together make it once.
"""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import asdict, replace
from pathlib import Path

from filelock import FileLock

from rlhf.compose import compose
from rlhf.config import Config, StagesConfig
from rlhf.console import say
from rlhf.errors import UserError
from rlhf.folder import COMPLETE, RunFolder, digest
from rlhf.objectives.config import Trains
from rlhf.validate import problems


def prepare(cfg: Config) -> Config:
    """`cfg` with every missing model and data set of an embedded task made and named."""
    if not cfg.task.embedded or cfg.algo.trains is Trains.base:
        return cfg
    wants_reward = cfg.algo.trains is Trains.policy and cfg.scorer.reads_reward and cfg.model.reward is None
    policy = cfg.model.policy or str(make_policy(cfg))
    cfg = replace(cfg, model=replace(cfg.model, policy=policy))
    if cfg.data.name == "preferences" and cfg.task.preferences_path is None:
        cfg = replace(cfg, task=replace(cfg.task, preferences_path=str(make_pairs(cfg))))
    if wants_reward:
        cfg = replace(cfg, model=replace(cfg.model, reward=str(make_reward(cfg))))
    return cfg


def make_policy(cfg: Config) -> Path:
    """The folder of the SFT model, trained if it is not there."""
    return make_model(stage(cfg, "sft", cfg.stages.sft), "the SFT model")


def make_reward(cfg: Config) -> Path:
    """The folder of the reward model, trained on pairs sampled from the SFT model if it is not there."""
    return make_model(stage(cfg, "reward", cfg.stages.reward), "the reward model")


def make_model(cfg: Config, what: str) -> Path:
    """Run the stage `cfg` unless its folder is finished; returns the folder of its model."""
    from rlhf.run import run

    folder = RunFolder(Path(cfg.cache_dir) / f"{cfg.algo.name}-{cfg.task.name}-{key(cfg)}")
    folder.path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder.path}.lock"):
        if not folder.finished():
            say(f"making {what} (once; kept in {folder.path})", style="bold")
            run(cfg, folder)
    return folder.model


def stage(cfg: Config, algo: str, overrides: list[str]) -> Config:
    """The config of a stage before `cfg`: its own defaults, and the task, model and backend of `cfg`."""
    choices = [
        f"algo={algo}",
        f"task={cfg.task.name}",
        f"model={cfg.model.name}",
        f"backend={cfg.backend.name}",
    ]
    made = compose([*choices, f"generator.response_length={cfg.generator.response_length}", *overrides])
    made = replace(
        made,
        task=cfg.task,
        model=replace(cfg.model, reference=None, reward=None),  # a stage needs neither, nor depends on them
        backend=replace(cfg.backend, micro_batch=made.backend.micro_batch),
        stages=cfg.stages,
        seed=cfg.stages.seed,
        cache_dir=cfg.cache_dir,
        progress=cfg.progress,
    )
    found = problems(made)
    if found:
        raise UserError(*(f"in the stage algo={algo} that this run needs: {text}" for text in found))
    return made


def key(cfg: Config) -> str:
    """A hash of the settings that a stage's result depends on; earlier results by name, which has a hash."""
    policy = cfg.model.policy and parent(cfg.model.policy)
    pairs = cfg.task.preferences_path
    task = replace(cfg.task, preferences_path=pairs and Path(pairs).name)
    stages = StagesConfig()  # what concerns other stages only is left out
    if cfg.algo.trains is Trains.reward:
        stages = replace(cfg.stages, sft=[], reward=[])
    return digest(replace(cfg, model=replace(cfg.model, policy=policy), task=task, stages=stages))


def parent(model: str) -> str:
    """The name of a cached artefact from the path of its model; any other name as it is."""
    path = Path(model)
    return path.parent.name if path.name == "model" else model


def make_pairs(cfg: Config) -> Path:
    """The folder of preference pairs: two samples of the policy a prompt, ordered by gold, without ties."""
    from rlhf.pairs import sample_pairs

    depends = (
        parent(cfg.model.policy or ""),
        asdict(cfg.task),
        asdict(cfg.gold),
        (cfg.stages.pairs, cfg.stages.pairs_temperature, cfg.stages.seed),
        (cfg.generator.response_length, cfg.eval.prompts),
    )
    digits = hashlib.sha256(repr(depends).encode()).hexdigest()[:8]
    folder = Path(cfg.cache_dir) / f"pairs-{cfg.task.name}-{digits}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not (folder / COMPLETE).exists():
            say(f"making preference pairs (once; kept in {folder})", style="bold")
            scratch = folder.with_name(f".tmp-{folder.name}")
            shutil.rmtree(scratch, ignore_errors=True)
            sample_pairs(cfg).save_to_disk(str(scratch))
            (scratch / COMPLETE).touch()
            shutil.rmtree(folder, ignore_errors=True)
            scratch.rename(folder)
    return folder
