"""What embedded tasks make on the way: the SFT model, preference pairs, the reward model.

A run that names no model (`model.policy=null`, `model.reward=null`) gets them from here. Each is made by
the same loop that trains everything (`algo=sft`, `algo=reward`), once, into a folder of `cache_dir` whose
name holds a hash of all settings that it depends on; two runs that start together make it once.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock

from rlhf.checks.check import problems
from rlhf.config.algo import Trains
from rlhf.config.backend import ZeroConfig
from rlhf.config.compose import compose
from rlhf.config.identity import digest
from rlhf.config.mistakes import CONFIG_ERRORS, explain
from rlhf.config.model import LoRAConfig
from rlhf.config.run import StagesConfig
from rlhf.core.console import say
from rlhf.core.errors import UserError
from rlhf.runs.folder import RunFolder
from rlhf.stages.once import made_once

if TYPE_CHECKING:
    from rlhf.config.root import Config


def prepare(cfg: Config, reward: bool = True) -> Config:
    """`cfg` with every missing model and data set of an embedded task made, by this process, and named.

    A task of the hub has stand-ins made where it wants them, else nothing. `reward`: the reward model that
    the scorer reads too.
    """
    if cfg.stand_ins:
        from rlhf.stages.tiny_stand_ins import prepare as prepare_stand_ins

        return prepare_stand_ins(cfg)
    if not cfg.task.embedded or cfg.algo.trains is Trains.base:
        return cfg
    reads_reward = cfg.algo.trains is Trains.policy and cfg.scorer.reads_reward and cfg.model.reward is None
    policy = cfg.model.policy or str(make_policy(cfg))
    cfg = replace(cfg, model=replace(cfg.model, policy=policy))
    if cfg.data.name == "preferences" and cfg.task.preferences_path is None:
        cfg = replace(cfg, task=replace(cfg.task, preferences_path=str(make_pairs(cfg))))
    if reward and reads_reward:
        cfg = replace(cfg, model=replace(cfg.model, reward=str(make_reward(cfg))))
    return cfg


def make_policy(cfg: Config) -> Path:
    """The folder of the SFT model, trained if it is not there."""
    return make_model(checked(stage(cfg, "sft")), "the SFT model")


def make_reward(cfg: Config) -> Path:
    """The folder of the reward model, trained on pairs sampled from the SFT model if it is not there."""
    return make_model(checked(stage(cfg, "reward")), "the reward model")


def make_model(cfg: Config, what: str) -> Path:
    """Run the stage `cfg` unless its folder is finished; returns the folder of its model."""
    from rlhf.assembly.device import build_device
    from rlhf.processes.ranks import Ranks
    from rlhf.stages.run import run

    folder = model_folder(cfg)
    folder.path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder.path}.lock"):
        if not folder.finished():
            say(f"making {what} (once; kept in {folder.path})", style="bold")
            run(cfg, folder, Ranks(build_device(cfg)))
    return folder.model


def model_folder(cfg: Config) -> RunFolder:
    """Where the stage `cfg` of an embedded task is kept."""
    return RunFolder(Path(cfg.cache_dir) / f"{cfg.algo.name}-{cfg.task.name}-{key(cfg)}")


def stage(cfg: Config, algo: str) -> Config:
    """The config of a stage before `cfg`: the defaults of `algo`, with the task and model of `cfg`, then its
    own overrides (`stages.sft`, `stages.reward`).

    An embedded task's is on plain torch, trains all weights and has the task's judge, so that many runs share
    it; another's is on the backend of `cfg`, with its adapters and its judge.

    Raises:
        UserError: the overrides do not compose.
    """
    own, embedded = cfg.backend, cfg.task.embedded
    words = [
        f"algo={algo}",
        f"task={cfg.task.name}",
        f"model={cfg.model.name}",
        f"backend={'torch' if embedded else own.name}",
        f"generator.response_length={cfg.generator.response_length}",
    ]
    if not embedded:
        words.append(f"backend.micro_batch={own.micro_batch}")
    words += getattr(cfg.stages, algo)
    try:
        made = compose(words)
    except CONFIG_ERRORS as error:
        raise in_stage(algo, [explain(error, words)]) from error
    model = replace(cfg.model, reference=None, reward=None)  # a stage needs none of these
    backend = replace(made.backend, device=own.device, threads=own.threads, timeout_s=own.timeout_s)
    if embedded:
        model = replace(model, lora=LoRAConfig())
    elif isinstance(backend, ZeroConfig) and isinstance(own, ZeroConfig):
        backend = replace(backend, deepspeed=own.deepspeed)
    return replace(
        made,
        gold=made.gold if embedded else cfg.gold,
        task=cfg.task,
        model=model,
        backend=backend,
        stages=cfg.stages,
        seed=cfg.stages.seed,
        output_dir=cfg.output_dir,
        cache_dir=cfg.cache_dir,
        progress=cfg.progress,
    )


def checked(cfg: Config) -> Config:
    """The stage `cfg`, which has no problems.

    Raises:
        UserError: it has.
    """
    if found := problems(cfg):
        raise in_stage(cfg.algo.name, found)
    return cfg


def in_stage(algo: str, found: list[str]) -> UserError:
    """What to tell of problems of the stage `algo`."""
    return UserError(*(f"in the stage algo={algo} that this run needs: {text}" for text in found))


def key(cfg: Config) -> str:
    """A hash of the settings that a stage's result depends on; earlier results by name, which has a hash."""
    policy, pairs = cfg.model.policy, cfg.task.preferences_path
    task = replace(cfg.task, preferences_path=pairs and made_name(pairs, cfg))
    stages = StagesConfig()  # what concerns other stages only is left out
    if cfg.algo.trains is Trains.reward:
        stages = replace(cfg.stages, sft=[], reward=[])
    model = replace(cfg.model, policy=policy and made_name(policy, cfg))
    return digest(replace(cfg, model=model, task=task, stages=stages))


def made_name(path: str, cfg: Config) -> str:
    """The name of an artefact in `cache_dir` from its path, or that of its model; any other path as it is."""
    made = Path(path).parent if Path(path).name == "model" else Path(path)
    return made.name if made.parent == Path(cfg.cache_dir) else path


def pairs_folder(cfg: Config) -> Path:
    """Where the preference pairs are kept that are sampled from the policy of `cfg`."""
    depends = (
        made_name(cfg.model.policy or "", cfg),
        asdict(cfg.task),
        asdict(cfg.gold),
        (cfg.stages.pairs, cfg.stages.pairs_temperature, cfg.stages.seed),
        (cfg.generator.response_length, cfg.eval.prompts),
    )
    digits = hashlib.sha256(repr(depends).encode()).hexdigest()[:8]
    return Path(cfg.cache_dir) / f"pairs-{cfg.task.name}-{digits}"


def make_pairs(cfg: Config) -> Path:
    """The folder of preference pairs: two samples of the policy a prompt, ordered by gold, without ties."""
    from rlhf.stages.sample_pairs import sample_pairs

    return made_once(
        pairs_folder(cfg), "preference pairs", lambda folder: sample_pairs(cfg).save_to_disk(str(folder))
    )
