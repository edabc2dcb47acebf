"""Identity of a run: its name, and the digest of the settings that its result depends on."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from rlhf.config.algo import Trains
from rlhf.config.model import AUTO
from rlhf.config.schema import Section, values
from rlhf.core import files

if TYPE_CHECKING:
    from rlhf.config.root import Config

LONGEST_NAME = 80  # characters of a run name
RUN_NAME = re.compile(r"[^-]+-(?P<model>.+)-(?P<algo>[^-]+)-[^-]+-lag\d+-seed\d+-[0-9a-f]{8}")
MODEL_FOLDERS = ("model", "adapter")  # folders of a run that contain a model

# Settings of a generator's worker process. They do not change the samples.
WORKER_KEYS = ("worker", "replicas", "per_rank", "annotate", "threads", "restarts")
WORKER_LIMITS = ("start_limit_s", "request_limit_s")

# Settings of resuming, output paths, display, evaluation samples, logging and checkpoints.
BOOKKEEPING = (
    "resume",
    "progress",
    "output_dir",
    "cache_dir",
    "push_to",
    "save_total_limit",
    "save_generations",
    "hooks",
    "objective_metric",
    "eval.samples",
    "schedule.log_every",
    "schedule.save_every",
)

SCORERS = ("scorer", "gold", "scorer.parts.*", "gold.parts.*")

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
        for scorer in SCORERS
        for key in ("concurrency", "timeout_s", "retries", "token_variable")
    ),
)

CORRECTION = {
    "floor": 0.0,
    "normalise": False,
    "reject": None,
    "reject_by": "k1",
    "reject_low": 0.5,
    "reject_high": 2.0,
    "reject_limit": 0.04,
    "reject_counted": False,
}
COVARIANCE = {"kind": "none", "share": 2e-3, "low": 1.0, "high": 5.0, "coef": 1.0}

# Settings that are in the name only if they differ from these values, so that runs of versions without these
# keys keep their names.
NEW_IN_NAME: dict[str, object] = {
    "stages.stand_ins": False,
    "task.chat": False,
    "model.chat_template": None,
    "model.clock": None,
    "model.float32_head": False,
    "model.fused_head": None,
    "backend.tokens": None,
    "backend.compile": None,
    "algo.tie_tolerance": None,
    **{f"{scorer}.{key}": None for scorer in SCORERS for key in ("pad_token", "weights")},
    "schedule.replay": 1,
    "schedule.solved_at": None,
    "optim.optimizer": "adamw",
    "optim.momentum": 0.95,
    "optim.ess_scaling": "none",
    "optim.ess_on_policy": 1.0,
    "algo.weighting": "none",
    "algo.weighting_eps": 1.0,
    "algo.weighting_clamp": 1.0,
    "algo.advantage": "mean",
    "algo.anchor": "old",
    "algo.off_policy_mask": None,
    "algo.dual_clip": None,
    "algo.entropy_coef": 0.0,
    **{f"algo.correction.{key}": value for key, value in CORRECTION.items()},
    **{f"algo.covariance.{key}": value for key, value in COVARIANCE.items()},
}


def digest(cfg: Config | DictConfig) -> str:
    """Return eight hex digits of the settings that the result of a run depends on."""
    return files.digest(what_counts(cfg))


def what_counts(cfg: Config | DictConfig) -> dict[str, Any]:
    """Return the settings that the result of a run depends on, resolved, as nested dictionaries."""
    kept = values(cfg) if isinstance(cfg, Section) else resolved(cfg)
    for dotted in NOT_IN_NAME:
        leave_out(kept, dotted)
    if kept.get("model", {}).get("attention") == AUTO:  # sdpa, or another kernel for the same function
        kept["model"]["attention"] = "sdpa"
    for dotted, value in NEW_IN_NAME.items():
        leave_out(kept, dotted, only=(value,))
    return kept


def resolved(node: DictConfig) -> dict[str, Any]:
    """Return the settings of a node that may count, resolved. Others, such as Hydra's, may not resolve."""
    counted = OmegaConf.masked_copy(node, [str(key) for key in node if key not in NOT_IN_NAME])
    kept: dict[str, Any] = OmegaConf.to_container(counted, resolve=True, enum_to_str=True)  # type: ignore[assignment]
    return kept


def differences(one: Config, other: Config) -> dict[str, tuple[Any, Any]]:
    """Return the settings of `what_counts` that differ between two configs: dotted key -> both values."""
    both = [dict(flat(what_counts(cfg))) for cfg in (one, other)]
    keys = dict.fromkeys([*both[0], *both[1]])
    values = {key: (both[0].get(key), both[1].get(key)) for key in keys}
    return {key: pair for key, pair in values.items() if pair[0] != pair[1]}


def flat(tree: dict[str, Any], at: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted key and value of every leaf of nested dictionaries."""
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from flat(value, f"{at}{name}.")
        else:
            yield f"{at}{name}", value


def leave_out(tree: dict[str, Any], dotted: str, only: tuple[object, ...] | None = None) -> None:
    """Remove the key `dotted` from nested dictionaries, if present; `*` in the key matches every name.

    With `only`, other values than these are kept, and a dictionary without other values is removed.
    """
    name, _, rest = dotted.partition(".")
    for key in list(tree) if name == "*" else [name]:
        if not rest:
            if only is None or tree.get(key) in only:
                tree.pop(key, None)
        elif isinstance(tree.get(key), dict):
            leave_out(tree[key], rest, only)
            if only is not None and not tree[key]:
                del tree[key]


def run_name(cfg: Config | DictConfig) -> str:
    """Return the name of a run, of at most 80 characters that are safe in file names.

    Equal configs give equal names, so the same command finds an earlier run.
    """
    before, after = cfg.task.name, f"{cfg.algo.name}-{cfg.generator.name}-lag{cfg.schedule.max_lag}"
    after = f"{after}-seed{cfg.seed}-{digest(cfg)}"
    room = max(8, LONGEST_NAME - len(f"{before}--{after}"))
    model = re.sub(r"[^A-Za-z0-9._]+", "_", model_label(cfg))[:room].strip("._") or cfg.model.name
    return files.component(f"{before}-{model}-{after}")


def model_label(cfg: Config | DictConfig) -> str:
    """Return a short name of the model that training starts from.

    The label is the last part of `model.policy` (for SFT, `model.base`); for the model of another run, the
    model and the algorithm of that run. Without such a model, or with one that an embedded task made, the
    label is the option of `model`.
    """
    algo: Any = OmegaConf.get_type(cfg.algo) if isinstance(cfg, DictConfig) else type(cfg.algo)
    start = cfg.model.base if algo.trains is Trains.base else cfg.model.policy
    return start_label(start, cfg.model.name, cfg.cache_dir)


def start_label(start: str | None, option: str, cache_dir: str) -> str:
    """Return the label of a run (see `model_label`).

    Args:
        start: `model.policy`, or for SFT `model.base`.
        option: the option of `model`.
        cache_dir: folder of the models that embedded tasks make.
    """
    if start is None or Path(cache_dir) in Path(start).parents:
        return option
    path = Path(start)
    if path.name in MODEL_FOLDERS or path.name.startswith("checkpoint-"):
        path = path.parent
    if run := RUN_NAME.fullmatch(path.name):
        return f"{run['model']}_{run['algo']}"
    return path.name or option
