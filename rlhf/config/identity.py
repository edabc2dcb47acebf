"""Identity of a run: its name, and the digest of the settings that its result depends on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from rlhf.core import files

if TYPE_CHECKING:
    from rlhf.config.root import Config

# Settings of a generator's worker process. They do not change the samples.
WORKER_KEYS = ("worker", "replicas", "per_rank", "annotate", "threads", "restarts")
WORKER_LIMITS = ("start_limit_s", "request_limit_s")

# Settings of resuming, output paths, display, evaluation samples, logging and checkpoints.
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

# Settings that change neither the weights nor the metrics of a run. They are not part of its name.
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
    """Return eight hex digits of the settings that the result of a run depends on."""
    return files.digest(what_counts(cfg))


def what_counts(cfg: Config | DictConfig) -> dict[str, Any]:
    """Return the settings that the result of a run depends on, resolved, as nested dictionaries."""
    node = cfg if isinstance(cfg, DictConfig) else OmegaConf.structured(cfg)
    kept: dict[str, Any] = OmegaConf.to_container(  # type: ignore[assignment]
        OmegaConf.masked_copy(node, [str(key) for key in node if key not in NOT_IN_NAME]),
        resolve=True,
        enum_to_str=True,
    )
    for dotted in NOT_IN_NAME:
        leave_out(kept, dotted)
    if not kept["stages"]["stand_ins"]:  # a config with false gets the same name as a config without the key
        leave_out(kept, "stages.stand_ins")
    return kept


def leave_out(tree: dict[str, Any], dotted: str) -> None:
    """Remove the key `dotted` from nested dictionaries, if present; `*` in the key matches every name."""
    name, _, rest = dotted.partition(".")
    for key in list(tree) if name == "*" else [name]:
        if not rest:
            tree.pop(key, None)
        elif isinstance(tree.get(key), dict):
            leave_out(tree[key], rest)


def run_name(cfg: Config | DictConfig) -> str:
    """Return the name of a run. Equal configs give equal names, so the same command finds an earlier run."""
    parts = (cfg.task.name, cfg.model.name, cfg.algo.name, cfg.generator.name)
    return f"{'-'.join(parts)}-lag{cfg.schedule.max_lag}-seed{cfg.seed}-{digest(cfg)}"
