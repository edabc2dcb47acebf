"""Rules for generators, and for the order of rollouts."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from rlhf.checks.algorithms import SUPERVISED
from rlhf.checks.rules import RULES, TRAINING_RULES, Allowed, When, chosen, doubt, is_set, must, rule
from rlhf.config.backends import Device
from rlhf.config.root import Config, threads
from rlhf.config.schedule import Order, Stale, Unit
from rlhf.core.files import files, shared
from rlhf.core.launched import cpu_cores, local_world_size, world_size

# Rules between the generator and the rest of the config: processes, replicas, cores, transfer, rollouts.


_NO_PROCESS = When("without a generator in a process of its own", lambda cfg: not cfg.has_worker)
_LAG_WITHOUT_PROCESS = When(_NO_PROCESS.text, lambda cfg: not cfg.has_worker and cfg.schedule.max_lag > 0)
_NO_SECOND_SAMPLER = When(
    _NO_PROCESS.text, lambda cfg: _LAG_WITHOUT_PROCESS.holds(cfg) and not cfg.clock.virtual
)
_VLLM = When("with generator={generator}", lambda cfg: cfg.generator.lowest_temperature > 0)
_SEVERAL_RANKS_SAMPLE = When(
    "with generator.per_rank=true and several ranks",
    lambda cfg: world_size() > 1 and cfg.generator.on_each_rank(cfg.schedule.max_lag),
)
_ON_CPU = When("with backend.device=cpu", lambda cfg: cfg.backend.device is Device.cpu)
_COLOCATED = When("with generator=vllm_colocated", lambda cfg: cfg.generator.shares_gpu)
_ONE_OF_SEVERAL_RANKS = When(
    "with generator=vllm_colocated and several ranks",
    lambda cfg: world_size() > 1 and _COLOCATED.holds(cfg) and not _ON_CPU.holds(cfg),
)
_ONE_OF_SEVERAL_RANKS_HERE = When(
    "with generator=vllm_colocated and several ranks on one host",
    lambda cfg: local_world_size() > 1 and _ONE_OF_SEVERAL_RANKS.holds(cfg),
)
_WARM = Allowed("be >= 0.01", lambda value: not 0 < value < 0.01)
_SHARED = "vLLM would use the GPU of another rank, whose trainer does not free its memory"
_LOADS = "no other generator can load weights while it samples"
_SHARE = "the vLLM processes of the ranks would share these GPUs"
_IN_TURN = "it sleeps while the trainer uses the device"

RULES += [
    must("generator.annotate", (None, False), _NO_PROCESS, "rollouts are scored while the trainer trains"),
    must("generator.replicas", 1, _LAG_WITHOUT_PROCESS, "replicas are processes", "generator.worker=null"),
    must("schedule.update", "between", _NO_SECOND_SAMPLER, _LOADS),
    must("eval.temperature", _WARM, _VLLM, "vLLM raises lower values to 0.01", "eval.temperature=0.01"),
    must("generator.devices", None, _SEVERAL_RANKS_SAMPLE, _SHARE),
    must("generator.transfer", ("auto", "shared_memory"), _ON_CPU, "ipc and nccl need weights on a GPU"),
    must("schedule.max_lag", 0, _COLOCATED, _IN_TURN, fix="generator=vllm"),
    must("generator.per_rank", True, _ONE_OF_SEVERAL_RANKS, "each rank shares its GPU with a generator"),
    must("generator.tensor_parallel_size", 1, _ONE_OF_SEVERAL_RANKS_HERE, _SHARED),
    must("generator.path", None, SUPERVISED, "it trains on completions of the task"),
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


# Rules for the order of rollouts and for the clock.


_VIRTUAL = When("with clock=virtual", lambda cfg: cfg.clock.virtual)
_BATCHES = When(
    "with clock=wall and generator={generator}",
    lambda cfg: not cfg.clock.virtual and not cfg.generator.samples_singly,
)
_COMPLETED = When(
    "with schedule.order=completed and clock=wall",
    lambda cfg: cfg.schedule.order is Order.completed and not cfg.clock.virtual,
)
_COMPLETED_ON_RANKS = When(
    "with schedule.order=completed and several ranks",
    lambda cfg: world_size() > 1 and cfg.schedule.order is Order.completed,
)
_FIFO = When("with schedule.order=fifo", lambda cfg: cfg.schedule.order is Order.fifo)
_SEVERAL_RANKS = When("with several ranks", lambda cfg: world_size() > 1)
_ON_EACH_RANK = When(
    "with several ranks that all sample",
    lambda cfg: world_size() > 1 and cfg.generator.on_each_rank(cfg.schedule.max_lag),
)
_NO_SAMPLES = When("with generator={generator}", lambda cfg: not cfg.generator.samples)
_ONE_SAMPLE = When("with algo.samples_per_prompt=1", lambda cfg: cfg.algo.samples_per_prompt == 1)
_TOO_FEW_SLOTS = When(
    "with schedule.unit=group",
    lambda cfg: (
        cfg.schedule.unit is Unit.group and int(chosen(cfg, "clock.slots") or 0) < cfg.algo.samples_per_prompt
    ),
)
_USES_TIES = When("with algo={algo}", lambda cfg: cfg.algo.learns_from_ties)
_IN_PARTS = Allowed("be hf", lambda generator: generator.samples_parts or not generator.samples)
_ENOUGH = Allowed("be >= algo.samples_per_prompt", lambda slots: slots is None)
_MORE_SLOTS = "clock.slots={algo.samples_per_prompt} or schedule.unit=sequence"
_PARTS = "responses are sampled in parts, with the trained model itself"
_WHOLE = "its processes take whole batches, in the order of the requests"
_SIMULATED = "the generators are simulated in the trainer's process"
_ONE_BY_ONE = "schedule.order=fifo, clock=virtual or generator=vllm_server"

TRAINING_RULES += [
    must("clock", "wall", _NO_SAMPLES, "nothing is sampled"),
    must("clock", "wall", _SEVERAL_RANKS, "one process simulates all generators"),
    must("generator", _IN_PARTS, _VIRTUAL, _PARTS, "generator=hf"),
    must("generator.worker", (None, False), _VIRTUAL, _SIMULATED),
    must("schedule.order", "fifo", _BATCHES, _WHOLE, fix=_ONE_BY_ONE),
    must("schedule.order", "fifo", _COMPLETED_ON_RANKS, "one process chooses the groups"),
    must("schedule.update", "in_flight", _COMPLETED, "all responses of a server have the same weights"),
    must("schedule.refill", 0, _COMPLETED, "groups are scored after they were chosen"),
    must("schedule.max_age", None, _FIFO, "ages are at most schedule.max_lag"),
    must("clock.slots", _ENOUGH, _TOO_FEW_SLOTS, "the samples of a prompt start together", _MORE_SLOTS),
    must("schedule.refill", 0, _NO_SAMPLES, "nothing is sampled"),
    must("schedule.refill", 0, _ONE_SAMPLE, "the score of one response has nothing to tie with"),
    must("schedule.refill", 0, _USES_TIES, "prompts whose scores tie have signal, too"),
    must("schedule.refill", 0, _ON_EACH_RANK, "a few prompts cannot be divided among the ranks"),
]


@doubt
def _settings_of_rollouts(cfg: Config) -> Iterator[str]:
    schedule, virtual, typed = cfg.schedule, cfg.clock.virtual, partial(chosen, cfg)
    if typed("generator.annotate") == "true" and schedule.max_lag == 0:
        yield "generator.annotate=true saves no time with schedule.max_lag=0 (the trainer waits for scores)"
    if is_set(cfg, "generator.threads") and not cfg.has_worker:
        yield (
            f"generator.threads={typed('generator.threads')} has no effect without a process of its own "
            "(generator.worker=true, or schedule.max_lag above 0)"
        )
    if schedule.unit is not Unit.group and schedule.order is Order.fifo and not virtual:
        yield f"schedule.unit={typed('schedule.unit')} has no effect with schedule.order=fifo and clock=wall"
    punished = is_set(cfg, "scorer.missing_eos_score") or is_set(cfg, "scorer.missing_eos_penalty")
    if schedule.stale is Stale.cut and schedule.max_age is not None and punished:
        yield (
            "schedule.stale=cut ends responses before their end token, and scorer.missing_eos_score or "
            "scorer.missing_eos_penalty punishes them; set both to null, or schedule.stale=wait"
        )
    if schedule.refill > 0 and typed("scorer") == "reward_model":
        yield (
            f"schedule.refill={schedule.refill} hardly replaces a group: scores of a reward model rarely tie"
        )
    if schedule.in_flight and not virtual:
        yield (
            "schedule.update=in_flight makes a run depend on timing (which weights sample a token): two runs "
            "with the same config will differ, and so will a resumed run"
        )
