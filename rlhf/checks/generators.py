"""Rules between the generator and the rest of the config: processes, replicas, cores, transfer, rollouts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rlhf.checks.algorithms import SUPERVISED
from rlhf.checks.rules import (
    DOUBTS,
    RULES,
    Allowed,
    When,
    chosen,
    doubt,
    doubtful,
    is_set,
    must,
    one_of,
    rule,
)
from rlhf.config.backend import Device
from rlhf.config.cores import threads
from rlhf.config.root import Config
from rlhf.core.launched import cpu_cores, local_world_size, world_size
from rlhf.core.rollout_format import files, shared

_NO_PROCESS = When("without a generator in a process of its own", lambda cfg: not cfg.has_worker)
_LAG_WITHOUT_PROCESS = When(_NO_PROCESS.text, lambda cfg: not cfg.has_worker and cfg.schedule.max_lag > 0)
_NO_SECOND_SAMPLER = When(
    _NO_PROCESS.text, lambda cfg: _LAG_WITHOUT_PROCESS.holds(cfg) and not cfg.clock.virtual
)
_COLOCATED = When("with generator=vllm_colocated", lambda cfg: cfg.generator.shares_gpu)
_ONE_OF_SEVERAL_RANKS = When(
    "with generator=vllm_colocated and several ranks",
    lambda cfg: world_size() > 1 and _COLOCATED.holds(cfg) and cfg.backend.device is not Device.cpu,
)
_ONE_OF_SEVERAL_RANKS_HERE = When(
    "with generator=vllm_colocated and several ranks on one host",
    lambda cfg: local_world_size() > 1 and _ONE_OF_SEVERAL_RANKS.holds(cfg),
)

RULES += [
    must(
        "generator.annotate",
        one_of(None, False),
        _NO_PROCESS,
        "rollouts are scored while the trainer trains",
        fix="generator.annotate=null, or schedule.max_lag=1",
    ),
    must(
        "generator.replicas", 1, _LAG_WITHOUT_PROCESS, "replicas are processes", fix="generator.worker=null"
    ),
    must(
        "schedule.update",
        "between",
        _NO_SECOND_SAMPLER,
        "no other generator can load weights while it samples",
    ),
    must(
        "eval.temperature",
        Allowed("be >= 0.01", lambda value: not 0 < value < 0.01),
        When("with generator={generator}", lambda cfg: cfg.generator.lowest_temperature > 0),
        "vLLM raises lower values to 0.01",
        fix="eval.temperature=0.01",
    ),
    must(
        "generator.devices",
        None,
        When(
            "with generator.per_rank=true and several ranks",
            lambda cfg: world_size() > 1 and cfg.generator.on_each_rank(cfg.schedule.max_lag),
        ),
        "the vLLM processes of the ranks would share these GPUs",
    ),
    must(
        "generator.transfer",
        one_of("auto", "shared_memory"),
        When("with backend.device=cpu", lambda cfg: cfg.backend.device is Device.cpu),
        "ipc and nccl need weights on a GPU",
        fix="generator.transfer=auto",
    ),
    must(
        "schedule.max_lag", 0, _COLOCATED, "it sleeps while the trainer uses the device", fix="generator=vllm"
    ),
    must("generator.per_rank", True, _ONE_OF_SEVERAL_RANKS, "each rank shares its GPU with a generator"),
    must(
        "generator.tensor_parallel_size",
        1,
        _ONE_OF_SEVERAL_RANKS_HERE,
        "vLLM would use the GPU of another rank, whose trainer does not free its memory",
    ),
    must("generator.path", None, SUPERVISED, "it trains on completions of the task"),
]

DOUBTS += [
    doubtful(
        "generator.annotate=true saves no time with schedule.max_lag=0 (the trainer waits for the scores)",
        lambda cfg: chosen(cfg, "generator.annotate") == "true" and cfg.schedule.max_lag == 0,
    ),
    doubtful(
        "generator.threads={generator.threads} has no effect without a process of its own "
        "(generator.worker=true, or schedule.max_lag above 0)",
        lambda cfg: is_set(cfg, "generator.threads") and not cfg.has_worker,
    ),
]


@rule
def _more_threads_than_cores(cfg: Config) -> Iterator[str]:
    trainer, own = (count or 0 for count in threads(cfg))
    cores, here, n = cpu_cores(), local_world_size(), max(1, cfg.generator.replicas)
    each_rank = cfg.generator.on_each_rank(cfg.schedule.max_lag)
    used = trainer * here + own * n * (here if each_rank else 1)
    typed = [name for name in ("generator", "backend") if is_set(cfg, f"{name}.threads")]
    if cfg.has_worker and cfg.schedule.max_lag > 0 and typed and used > max(cores, (1 + n) * here):
        many = (" x generator.replicas", f" x {n}") if n > 1 else ("", "")
        yield (
            f"backend.threads + generator.threads{many[0]} must be <= the cores of this machine (trainer "
            f"and generator run in parallel), got {trainer} + {own}{many[1]} on {cores} cores"
            + (f" of {here} ranks; " if here > 1 else "; ")
            + f"set {typed[0]}.threads=null"
        )


@rule
def _more_replicas_than_requests(cfg: Config) -> Iterator[str]:
    n, lag = cfg.generator.replicas, cfg.schedule.max_lag
    if n > lag + 1 and not cfg.generator.shares_gpu:
        yield (
            "generator.replicas must be <= schedule.max_lag + 1 (the largest number of requests in flight, "
            f"and a replica samples one at a time), got {n} with schedule.max_lag={lag}; "
            f"set schedule.max_lag={n - 1} or generator.replicas={lag + 1}"
        )


@doubt
def _processes_that_wait(cfg: Config) -> Iterator[str]:
    threads, cores, n, lag = cfg.backend.threads, cpu_cores(), cfg.generator.replicas, cfg.schedule.max_lag
    if threads is not None and threads > cores:
        yield (
            f"backend.threads={threads} is more than the {cores} cores that this process may use, so threads "
            f"wait for each other; set backend.threads={cores}"
        )
    if n > 1 and lag < n:
        yield (
            f"generator.replicas={n} are not all busy while the trainer trains, with schedule.max_lag={lag} "
            f"(the number of requests in flight); schedule.max_lag={n} keeps all busy"
        )
    if n > 1 and n + local_world_size() > cores:
        yield (
            f"generator.replicas={n} and the trainer share {cores} CPU cores: more processes than cores save "
            "no time unless they sample on GPUs"
        )


@rule
def _saved_rollouts_fit(cfg: Config) -> Iterator[str]:
    generator, path = cfg.generator, cfg.generator.saved_rollouts
    if path is None:
        return
    found = files(Path(path).expanduser())
    try:
        common = shared(found[0]) if found else None
        state = "no such files"
    except (OSError, ValueError) as error:
        common, state = None, str(error)
    if common is None:
        yield (
            "generator.path must be a folder of saved rollouts (save_generations=true writes one to the "
            f"run folder), got {path} ({state}); set generator.path=<run folder>/generations"
        )
        return
    for key, value, theirs in (
        ("generator.temperature", generator.temperature, common.temperature),
        ("schedule.prompts_per_update", cfg.schedule.prompts_per_update, common.prompts),
        ("algo.samples_per_prompt", cfg.algo.samples_per_prompt, common.samples),
    ):
        if value != theirs:
            yield (
                f"{key} must be that of the rollouts in generator.path (they are used unchanged), "
                f"got {value}; set {key}={theirs}"
            )
    if cfg.schedule.total_episodes is not None and cfg.num_updates() > len(found):
        most = len(found) * cfg.episodes_per_update
        yield (
            f"schedule.total_episodes must be <= {most} (generator.path has rollouts of {len(found)} "
            f"updates), got {cfg.schedule.total_episodes}; set schedule.total_episodes={most}"
        )
