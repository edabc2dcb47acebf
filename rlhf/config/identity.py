"""The identity of a run: its name, and the hash of the settings that its result depends on."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

if TYPE_CHECKING:
    from rlhf.config.root import Config


# How a generator's process works, not what it gives.
WORKER_KEYS = ("worker", "replicas", "per_rank", "annotate", "threads", "restarts")


WORKER_LIMITS = ("start_limit_s", "request_limit_s")


# Where a run writes, what it shows and what it keeps.
BOOKKEEPING = (
    "resume",
    "progress",
    "output_dir",
    "cache_dir",
    "save_total_limit",
    "save_generations",
    "objective_metric",
    "eval.samples",
    "schedule.log_every",
    "schedule.save_every",
)


# What changes neither the weights nor the figures of a run, and so not its name.
NOT_IN_NAME = (
    "hydra",
    "logger",
    *BOOKKEEPING,
    "backend.ranks",
    "backend.threads",
    "backend.timeout_s",
    *(f"generator.{key}" for key in (*WORKER_KEYS, *WORKER_LIMITS)),
    "model.gradient_checkpointing",
    "generator.devices",
    "generator.memory",
    "generator.transfer",
    "eval.batch_size",
    *(
        f"{scorer}.{key}"
        for scorer in ("scorer", "gold", "scorer.parts.*", "gold.parts.*")
        for key in ("concurrency", "timeout_s", "retries", "token_variable")
    ),
)


def digest(cfg: Config | DictConfig) -> str:
    """Eight hex digits of what counts in the resolved config."""
    return hashlib.sha256(json.dumps(what_counts(cfg), sort_keys=True).encode()).hexdigest()[:8]


def what_counts(cfg: Config | DictConfig) -> dict[str, Any]:
    """The resolved config as nested dictionaries, less what changes no result."""
    node = cfg if isinstance(cfg, DictConfig) else OmegaConf.structured(cfg)
    kept: dict[str, Any] = OmegaConf.to_container(  # type: ignore[assignment]
        OmegaConf.masked_copy(node, [str(key) for key in node if key not in NOT_IN_NAME]),
        resolve=True,
        enum_to_str=True,
    )
    for dotted in NOT_IN_NAME:
        leave_out(kept, dotted)
    if not kept["stages"]["stand_ins"]:  # as it is without models and data of that kind
        leave_out(kept, "stages.stand_ins")
    return kept


def leave_out(tree: dict[str, Any], dotted: str) -> None:
    """Take the key `dotted` out of nested dictionaries where it is there; `*` stands for every name."""
    name, _, rest = dotted.partition(".")
    for key in list(tree) if name == "*" else [name]:
        if not rest:
            tree.pop(key, None)
        elif isinstance(tree.get(key), dict):
            leave_out(tree[key], rest)


def run_name(cfg: Config | DictConfig) -> str:
    """Name a run by what it is: the same config has the same name, so an interrupted run finds itself."""
    parts = (cfg.task.name, cfg.model.name, cfg.algo.name, cfg.generator.name)
    return f"{'-'.join(parts)}-lag{cfg.schedule.max_lag}-seed{cfg.seed}-{digest(cfg)}"
