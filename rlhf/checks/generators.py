"""Rules between the generator and the rest of the config: processes, replicas, cores, transfer, rollouts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rlhf.checks.rules import doubt, rule
from rlhf.config.backend import Device
from rlhf.config.cores import threads
from rlhf.config.generator import (
    DatasetConfig,
    Transfer,
    VLLMColocatedConfig,
    VLLMConfig,
    WorkerConfig,
    least_temperature,
)
from rlhf.config.root import Config
from rlhf.core.launched import cpu_cores, local_world_size, world_size
from rlhf.core.rollout_format import files, shared


@rule
def worker_process(cfg: Config) -> Iterator[str]:
    """Yield an error for an annotator without a generator process, or for more threads than cores."""
    generator = cfg.generator
    if not isinstance(generator, WorkerConfig):
        return
    if generator.annotate and not cfg.has_worker:
        yield (
            "generator.annotate must be null or false without a generator in a process of its own (rollouts "
            "are scored while the trainer trains), got true; set generator.annotate=null, or "
            "schedule.max_lag=1"
        )
    trainer, own = (count or 0 for count in threads(cfg))
    cores, here, n = cpu_cores(), local_world_size(), max(1, generator.replicas)
    used = trainer * here + own * n * (here if generator.per_rank else 1)
    typed = [name for name in ("generator", "backend") if getattr(cfg, name).threads]
    if cfg.has_worker and cfg.schedule.max_lag > 0 and typed and used > max(cores, (1 + n) * here):
        many = (" x generator.replicas", f" x {n}") if n > 1 else ("", "")
        yield (
            f"backend.threads + generator.threads{many[0]} must be <= the cores of this machine (trainer "
            f"and generator run in parallel), got {trainer} + {own}{many[1]} on {cores} cores"
            + (f" of {here} ranks; " if here > 1 else "; ")
            + f"set {typed[0]}.threads=null"
        )


@rule
def replicas(cfg: Config) -> Iterator[str]:
    """Yield an error for replicas without processes, for more replicas than requests, or with `per_rank`."""
    generator, lag = cfg.generator, cfg.schedule.max_lag
    if not isinstance(generator, WorkerConfig) or generator.replicas <= 1:
        return
    if isinstance(generator, VLLMColocatedConfig):
        return  # `VLLMColocatedConfig.problems` rejects replicas
    if not cfg.has_worker and lag > 0:
        yield (
            "generator.replicas must be 1 without a generator in a process of its own (replicas are "
            f"processes), got {generator.replicas}; set generator.worker=null"
        )
    elif generator.replicas > lag + 1:
        yield (
            "generator.replicas must be <= schedule.max_lag + 1 (the largest number of requests in flight, "
            f"and a replica samples one at a time), got {generator.replicas} with schedule.max_lag={lag}; "
            f"set schedule.max_lag={generator.replicas - 1} or generator.replicas={lag + 1}"
        )
    if generator.per_rank:
        yield (
            "generator.per_rank must be false with generator.replicas above 1 (the replicas of rank 0 "
            f"serve all ranks), got true with {generator.replicas}; set generator.per_rank=false, and "
            "generator.replicas to the number of processes"
        )


@doubt
def more_threads_than_cores(cfg: Config) -> Iterator[str]:
    """Yield a warning if the trainer has more threads than the machine has cores."""
    threads, cores = cfg.backend.threads, cpu_cores()
    if threads is not None and threads > cores:
        yield (
            f"backend.threads={threads} is more than the {cores} cores that this process may use, so threads "
            f"wait for each other; set backend.threads={cores}"
        )


@doubt
def idle_processes(cfg: Config) -> Iterator[str]:
    """Yield a warning if the annotator, `threads` or replicas save no time with the other settings."""
    generator, lag = cfg.generator, cfg.schedule.max_lag
    if not isinstance(generator, WorkerConfig):
        return
    if generator.annotate and lag == 0:
        yield (
            "generator.annotate=true saves no time with schedule.max_lag=0 (the trainer waits for the scores)"
        )
    if generator.threads is not None and not cfg.has_worker:
        yield (
            f"generator.threads={generator.threads} has no effect without a process of its own "
            "(generator.worker=true, or schedule.max_lag above 0)"
        )
    if generator.replicas > 1 and lag < generator.replicas:
        yield (
            f"generator.replicas={generator.replicas} are not all busy while the trainer trains, with "
            f"schedule.max_lag={lag} (the number of requests in flight); "
            f"schedule.max_lag={generator.replicas} keeps all busy"
        )
    if generator.replicas > 1 and generator.replicas + local_world_size() > cpu_cores():
        yield (
            f"generator.replicas={generator.replicas} and the trainer share {cpu_cores()} CPU cores: more "
            "processes than cores save no time unless they sample on GPUs"
        )


@rule
def vllm(cfg: Config) -> Iterator[str]:
    """Yield an error if vLLM cannot use the evaluation temperature or the configured transfer of weights."""
    generator = cfg.generator
    if not isinstance(generator, VLLMConfig):
        return
    yield from least_temperature(generator, "eval.temperature", cfg.eval.temperature, 0.01)
    if generator.devices is not None and generator.per_rank and world_size() > 1:
        yield (
            "generator.devices must be null with generator.per_rank=true and several ranks (the vLLM "
            f"processes of the ranks would share these GPUs), got {generator.devices}; set "
            "generator.devices=null"
        )
    if generator.transfer not in (Transfer.ipc, Transfer.nccl):
        return
    why = None
    if cfg.backend.device is Device.cpu:
        why = "backend.device=cpu (the weights must be on a GPU)"
    elif generator.transfer is Transfer.ipc and not generator.shares_gpu:
        why = f"generator={generator.name} (CUDA IPC shares memory of one GPU, and vLLM has another)"
    elif generator.transfer is Transfer.ipc and generator.tensor_parallel_size > 1:
        why = "generator.tensor_parallel_size above 1 (CUDA IPC shares memory of one GPU)"
    elif generator.transfer is Transfer.nccl and generator.shares_gpu:
        why = f"generator={generator.name} (NCCL does not connect two processes on one GPU)"
    elif generator.replicas > 1:
        why = "generator.replicas above 1 (all replicas read one snapshot of the weights in shared memory)"
    if why is not None:
        yield (
            f"generator.transfer must not be {generator.transfer.value} with {why}, got "
            f"{generator.transfer.value}; set generator.transfer=auto"
        )


@rule
def colocated(cfg: Config) -> Iterator[str]:
    """Yield an error if vLLM on the trainer's GPU has a lag, or if several ranks would share its GPUs."""
    generator = cfg.generator
    if not isinstance(generator, VLLMColocatedConfig):
        return
    if cfg.schedule.max_lag > 0:
        yield (
            "schedule.max_lag must be 0 with generator=vllm_colocated (it sleeps while the trainer uses "
            f"the device), got {cfg.schedule.max_lag}; set generator=vllm"
        )
    if world_size() > 1 and not generator.per_rank and cfg.backend.device is not Device.cpu:
        yield (
            "generator.per_rank must be true with generator=vllm_colocated and several ranks (each rank "
            "shares its GPU with a generator), got false; set generator.per_rank=true"
        )
    many = generator.tensor_parallel_size
    if local_world_size() > 1 and many > 1 and cfg.backend.device is not Device.cpu:
        yield (
            "generator.tensor_parallel_size must be 1 with generator=vllm_colocated and several ranks on one "
            "host (vLLM would use the GPU of another rank, whose trainer does not free its memory), got "
            f"{many}; set generator.tensor_parallel_size=1"
        )


@rule
def saved_rollouts_fit(cfg: Config) -> Iterator[str]:
    """Yield an error if saved rollouts are missing, too few, or of another shape than the config."""
    generator = cfg.generator
    if not isinstance(generator, DatasetConfig) or generator.path is None:
        return
    if cfg.algo.supervised:
        yield (
            f"generator.path must be null for algo={cfg.algo.name} (it trains on completions of the "
            f"task), got {generator.path}; set generator.path=null"
        )
    found = files(Path(generator.path).expanduser())
    try:
        common = shared(found[0]) if found else None
        state = "no such files"
    except (OSError, ValueError) as error:
        common, state = None, str(error)
    if common is None:
        yield (
            "generator.path must be a folder of saved rollouts (save_generations=true writes one to the "
            f"run folder), got {generator.path} ({state}); set generator.path=<run folder>/generations"
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
