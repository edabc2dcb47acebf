"""Configs and folders of the stages before a run: SFT, preference pairs, reward model.

This module imports no torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf.checks.check import problems
from rlhf.config import identity
from rlhf.config.algo import Trains
from rlhf.config.compose import compose
from rlhf.config.mistakes import CONFIG_ERRORS, explain
from rlhf.config.model import LoRAConfig
from rlhf.config.run import StagesConfig
from rlhf.config.schema import values
from rlhf.core.errors import UserError
from rlhf.core.files import component, digest
from rlhf.runs.folder import RunFolder

if TYPE_CHECKING:
    from rlhf.config.root import Config


_PLACES = ("output_dir", "cache_dir", "progress")  # keys that a stage has from its run


def model_folder(cfg: Config) -> RunFolder:
    """Return the run folder of the stage with the config `cfg`, for an embedded task."""
    name = component(f"{cfg.algo.name}-{cfg.task.name}-{stage_digest(cfg)}")
    return RunFolder(Path(cfg.cache_dir) / name)


def stage(cfg: Config, algo: str) -> Config:
    """Return the config of the stage `algo` before the run `cfg`.

    The config consists of the defaults of `algo`, the task and model of `cfg`, and the overrides of the stage
    (`stages.sft`, `stages.reward`). The stage of an embedded task uses plain torch, trains all weights and
    has the judge of the task, so that many runs share its result. The stage of another task uses the backend,
    the adapters and the judge of `cfg`.

    Raises:
        UserError: the overrides do not compose.
    """
    own, embedded = cfg.backend, cfg.task.embedded
    overrides = [
        f"algo={algo}",
        f"task={cfg.task.name}",
        f"model={cfg.model.name}",
        f"backend={'torch' if embedded else own.name}",
        f"generator.response_length={cfg.generator.response_length}",
    ]
    if not embedded:
        overrides.append(f"backend.micro_batch={own.micro_batch}")
    overrides += getattr(cfg.stages, algo)
    try:
        made = compose(overrides)
    except CONFIG_ERRORS as error:
        raise _in_stage(algo, [explain(error, overrides)]) from None
    changes = {name: getattr(cfg, name) for name in ("task", "model", "stages", *_PLACES)}
    shared = [name for name in made.backend.for_stages if name in own.for_stages]
    changes |= {f"backend.{name}": getattr(own, name) for name in shared}
    changes |= {"model.reference": None, "model.reward": None}  # a stage needs neither of these models
    if embedded:
        changes["model.lora"] = LoRAConfig()
    else:
        changes["gold"] = cfg.gold
    return made.with_({**changes, "seed": cfg.stages.seed, "eval.samples": min(made.eval.samples, 1)})


def checked(cfg: Config) -> Config:
    """Return the config of a stage unchanged, after all checks.

    Raises:
        UserError: a check found a problem; the error lists every problem.
    """
    if found := problems(cfg):
        raise _in_stage(cfg.algo.name, found)
    return cfg


def _in_stage(algo: str, found: list[str]) -> UserError:
    """Return the problems `found` of the stage `algo` as an error."""
    return UserError(*(f"in the stage algo={algo} that this run needs: {text}" for text in found))


def stage_digest(cfg: Config) -> str:
    """Return a hash of the settings that the result of a stage depends on.

    For models and pairs of earlier stages, the hash depends only on the names of their folders, which contain
    hashes.
    """
    policy, pairs = cfg.model.policy, cfg.task.preferences_path
    changes: dict[str, Any] = {
        "task.preferences_path": pairs and _name_in_cache(pairs, cfg),
        "model.policy": policy and _name_in_cache(policy, cfg),
    }
    if cfg.algo.trains is Trains.reward:
        changes |= {"stages.sft": [], "stages.reward": []}
    else:
        changes["stages"] = StagesConfig()  # without the settings of other stages
    return identity.digest(cfg.with_(changes))


def _name_in_cache(path: str, cfg: Config) -> str:
    """Return X if `path` is `<cache_dir>/X` or `<cache_dir>/X/model`; return any other path unchanged."""
    made = Path(path).parent if Path(path).name == "model" else Path(path)
    return made.name if made.parent == Path(cfg.cache_dir) else path


def pairs_folder(cfg: Config) -> Path:
    """Return the folder of the preference pairs that are sampled from the policy of `cfg`."""
    depends = {
        "policy": _name_in_cache(cfg.model.policy or "", cfg),
        "task": values(cfg.task),
        "gold": values(cfg.gold),
        "pairs": [cfg.stages.pairs, cfg.stages.pairs_temperature, cfg.stages.seed],
        "lengths": [cfg.generator.response_length, cfg.eval.prompts],
    }
    return Path(cfg.cache_dir) / component(f"pairs-{cfg.task.name}-{digest(depends)}")
