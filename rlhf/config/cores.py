"""CPU threads: how trainer and generator processes share the cores of a machine."""

from __future__ import annotations

import os

from rlhf.config.generator import WorkerConfig
from rlhf.config.root import Config
from rlhf.core.launched import cpu_cores, local_world_size

# Variables that torch and tokenizers read when they are imported, as `hydra.job.env_set` in conf/config.yaml.
ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}


def set_environment() -> None:
    """Set the variables of `ENVIRONMENT` that are not set."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def threads(cfg: Config) -> tuple[int | None, int | None]:
    """Return the CPU threads of the trainer and of each generator process; None: the default of torch.

    The trainer and the generator of a rank share the cores of the rank (OMP_NUM_THREADS cores if this
    variable is set). If both run in parallel and the config does not set their threads, each process gets an
    equal share. With `max_lag=0` trainer and generator take turns, and each may use all cores.
    """
    trainer, generator = cfg.backend.threads, cfg.generator
    if not isinstance(generator, WorkerConfig) or not cfg.has_worker:
        return trainer, None
    own, chosen = generator.threads, os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    cores = int(chosen) if chosen.isdigit() else max(1, cpu_cores() // local_world_size())
    if cfg.schedule.max_lag == 0:
        return trainer, own or cores
    n = max(1, generator.replicas)
    if own is None:
        own = max(1, (cores - trainer) // n if trainer else cores // (n + 1))
    return trainer or max(1, cores - n * own), own
