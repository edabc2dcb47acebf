"""Settings of the generators."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from omegaconf import MISSING

from rlhf.config.schema import Section, option
from rlhf.core.launched import cpu_cores, local_ranks, rank_count
from rlhf.core.rollout_format import files, shared

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from rlhf.config.root import Config
    from rlhf.engines.engine import Engine
    from rlhf.generators.generator import Generator
    from rlhf.generators.sampler import SamplerFactory
    from rlhf.generators.transfer.weights import WeightStore
    from rlhf.generators.vllm.sampler import VLLMFactory


@dataclass(kw_only=True, slots=True)
class GeneratorConfig(Section):
    """What every generator has."""

    samples: ClassVar[bool] = True  # False: it only returns what is stored

    name: str = MISSING
    temperature: float = 0.7
    response_length: int = 53  # tokens; longer responses are cut there
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    @property
    def rollouts(self) -> bool:
        """Whether what it returns was sampled, with the sampler's log-probs."""
        return self.samples

    def build(
        self, cfg: Config, engine: Engine, tokenizer: PreTrainedTokenizerFast, folder: Path
    ) -> Generator:
        """Make the generator of the run in `folder` whose policy `engine` trains."""
        raise NotImplementedError

    def has_worker(self, cfg: Config) -> bool:
        """Whether it samples in a process of its own."""
        return False

    def on_each_rank(self, cfg: Config) -> bool:
        """Whether every rank has one, for its part of the prompts; else the first rank's serves all."""
        return not self.has_worker(cfg)

    def problems(self, cfg: Config) -> Iterator[str]:
        """Settings of the sampler that training cannot use."""
        if self.response_length < 1:
            yield (
                "generator.response_length must be >= 1 (tokens of a response), "
                f"got {self.response_length}; set generator.response_length=53"
            )
        if self.temperature <= 0:
            yield (
                "generator.temperature must be > 0 (log-probs are those of logits / temperature), "
                f"got {self.temperature}; set generator.temperature=0.7"
            )
        for key, off in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
            value = getattr(self, key)
            if value != off:
                yield (
                    f"generator.{key} must be off for training (a truncated distribution is not the one that "
                    f"is trained, so its log-probs would be wrong), got {value}; set generator.{key}={off}"
                )


@dataclass(kw_only=True, slots=True)
class WorkerConfig(GeneratorConfig):
    """What a generator has that samples in a process of its own."""

    replicas: int = 1  # processes that take requests in turn; useful up to schedule.max_lag + 1
    threads: int | None = None  # CPU threads of a process; null: its share of the cores, all with max_lag 0
    start_limit_s: float = 300.0  # seconds until it must be ready
    request_limit_s: float = 1800.0  # seconds that a request may take; then the process counts as hung
    per_rank: bool = False  # a process for each rank; false: that of the first rank serves all
    restarts: int = 3  # times in a session that a process which died or hung is replaced
    annotate: bool | None = None  # score ahead, in one more process; null: with a lag on a CPU, one rank

    def has_worker(self, cfg: Config) -> bool:
        """Always, but where an option says otherwise."""
        return True

    def on_each_rank(self, cfg: Config) -> bool:
        """Where it has no process of its own, or is to have one for each."""
        return self.per_rank or not self.has_worker(cfg)

    def annotates(self, cfg: Config, ranks: int, on_gpu: bool) -> bool:
        """Whether one more process scores ahead. On GPUs two more models would take memory, and of several
        ranks one process would have all the work.
        """
        if self.annotate is None:
            return cfg.schedule.max_lag > 0 and ranks == 1 and not on_gpu and cfg.generator.has_worker(cfg)
        return self.annotate

    def start(
        self,
        cfg: Config,
        engine: Engine,
        factory: SamplerFactory,
        folder: Path,
        variables: Sequence[dict[str, str]],
        store: WeightStore | None = None,
    ) -> Generator:
        """Start the sampler's process, or those of its replicas, each with one of `variables` in its
        environment, and one that annotates where that is wanted. `store`: how weights go to it; None: through
        shared memory.

        The annotator has the generator's share of the cores. With `max_lag` 1 the two are at work together
        only while the trainer waits, whose share is free then; with more, OMP_WAIT_POLICY=PASSIVE lets
        threads that wait give way.
        """
        from rlhf.assembly.annotator import AnnotatorFactory
        from rlhf.generators.annotating import AnnotatedGenerator
        from rlhf.generators.replicas import Replica, Replicas
        from rlhf.generators.transfer.shared_memory import SharedWeights
        from rlhf.generators.worker import WorkerGenerator
        from rlhf.processes.worker import Limits, Worker

        limits = Limits(self.start_limit_s, self.request_limit_s, self.restarts)
        which = f"-{engine.ranks.rank}" if engine.ranks.rank else ""
        log, in_flight = folder / f"generator{which}.log", cfg.schedule.in_flight
        generator: Generator
        if self.replicas == 1:
            generator = WorkerGenerator(factory, log, variables[0], limits, in_flight, store)
        else:

            def replica(i: int, shared: SharedWeights) -> Replica:
                own = log.with_stem(f"generator-replica{i}") if i else log
                return Replica(factory, own, variables[i], limits, in_flight, shared)

            generator = Replicas(replica, self.replicas, in_flight)
        if not self.annotates(cfg, engine.ranks.size, engine.ranks.device.type == "cuda"):
            return generator
        log = folder / f"annotator{which}.log"
        return AnnotatedGenerator(
            generator, Worker("annotator", AnnotatorFactory(cfg), log, variables[0], limits)
        )

    def problems(self, cfg: Config) -> Iterator[str]:
        """The same, limits out of bounds, and more threads than there are cores."""
        yield from GeneratorConfig.problems(self, cfg)
        for key, least, meaning, remedy in (
            ("replicas", 1, "processes that take requests in turn", 1),
            ("threads", 1, "CPU threads of a generator's process; null: its share of the cores", "null"),
            ("start_limit_s", 1, "seconds until the generator's process must be ready", 300),
            ("request_limit_s", 1, "seconds that a request may take", 1800),
            ("restarts", 0, "times that a lost process is replaced", 3),
        ):
            value = getattr(self, key)
            if value is not None and not value >= least:
                yield (
                    f"generator.{key} must be >= {least} ({meaning}), got {value}; "
                    f"set generator.{key}={remedy}"
                )
        if self.annotate and not self.has_worker(cfg):
            yield (
                "generator.annotate must be null or false without a generator in a process of its own (its "
                "rollouts are scored while the trainer trains), got true; set generator.annotate=null, or "
                "schedule.max_lag=1"
            )
        yield from self.replica_problems(cfg)
        trainer, own = (count or 0 for count in threads(cfg))
        cores, here, n = cpu_cores(), local_ranks(), max(1, self.replicas)
        used = trainer * here + own * n * (here if self.per_rank else 1)
        typed = [key for key in ("generator", "backend") if getattr(cfg, key).threads]
        if self.has_worker(cfg) and cfg.schedule.max_lag > 0 and typed and used > max(cores, (1 + n) * here):
            many = (" x generator.replicas", f" x {n}") if n > 1 else ("", "")
            yield (
                f"backend.threads + generator.threads{many[0]} must be <= the cores of this machine (trainer "
                f"and generator work at the same time), got {trainer} + {own}{many[1]} on {cores} cores"
                + (f" of {here} ranks; " if here > 1 else "; ")
                + f"set {typed[0]}.threads=null"
            )

    def replica_problems(self, cfg: Config) -> Iterator[str]:
        """Replicas that are no processes, that could never all be at work, or of several ranks."""
        if self.replicas <= 1:
            return
        lag = cfg.schedule.max_lag
        if not self.has_worker(cfg) and lag > 0:
            yield (
                "generator.replicas must be 1 without a generator in a process of its own (replicas are "
                f"processes), got {self.replicas}; set generator.worker=null"
            )
        elif self.replicas > lag + 1:
            yield (
                "generator.replicas must be <= schedule.max_lag + 1 (so many requests are under way at most, "
                f"and a replica samples one at a time), got {self.replicas} with schedule.max_lag={lag}; "
                f"set schedule.max_lag={self.replicas} or generator.replicas={lag + 1}"
            )
        if self.per_rank:
            yield (
                "generator.per_rank must be false with generator.replicas above 1 (the first rank's replicas "
                f"serve all ranks), got true with {self.replicas}; set generator.per_rank=false, and "
                "generator.replicas to the number of processes"
            )

    def warnings(self, cfg: Config) -> Iterator[str]:
        """Threads of a process that there is not, and a process with nothing to do meanwhile."""
        yield from GeneratorConfig.warnings(self, cfg)
        if self.annotate and cfg.schedule.max_lag == 0:
            yield (
                "generator.annotate=true saves no time with schedule.max_lag=0 (until rollouts have their "
                "scores the trainer waits)"
            )
        if self.threads is not None and not self.has_worker(cfg):
            yield (
                f"generator.threads={self.threads} has no effect without a process of its own "
                "(generator.worker=true, or schedule.max_lag above 0)"
            )
        if self.replicas > 1 and cfg.schedule.max_lag < self.replicas:
            yield (
                f"generator.replicas={self.replicas} are not all at work while the trainer is, with "
                f"schedule.max_lag={cfg.schedule.max_lag} (so many requests are under way then); "
                f"schedule.max_lag={self.replicas} keeps all busy"
            )
        if self.replicas > 1 and self.replicas + local_ranks() > cpu_cores():
            yield (
                f"generator.replicas={self.replicas} and the trainer share {cpu_cores()} CPU cores: as many "
                "processes are at work at the same time, so more save no time unless they sample on GPUs"
            )


def threads(cfg: Config) -> tuple[int | None, int | None]:
    """CPU threads of the trainer and of the generator's process; None: as torch has it.

    They share the rank's cores (OMP_NUM_THREADS where that is set), equally where the config does not say, if
    they work at the same time; with `max_lag` 0 they take turns, and each has all.
    """
    trainer, generator = cfg.backend.threads, cfg.generator
    if not isinstance(generator, WorkerConfig) or not generator.has_worker(cfg):
        return trainer, None
    own, chosen = generator.threads, os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    cores = int(chosen) if chosen.isdigit() else max(1, cpu_cores() // local_ranks())
    if cfg.schedule.max_lag == 0:
        return trainer, own or cores
    n = max(1, generator.replicas)
    if own is None:
        own = max(1, (cores - trainer) // n if trainer else cores // (n + 1))
    return trainer or max(1, cores - n * own), own


@option("generator", "hf")
@dataclass(kw_only=True, slots=True)
class HFConfig(WorkerConfig):
    """Sampling with the Hugging Face model that is trained, or with a copy of it in a process of its own."""

    name: str = "hf"
    batch_size: int = 256  # sequences decoded at once
    worker: bool | None = None  # a process of its own; null: where schedule.max_lag is above 0

    def has_worker(self, cfg: Config) -> bool:
        """As `generator.worker` says."""
        return cfg.schedule.max_lag > 0 if self.worker is None else self.worker

    def build(
        self, cfg: Config, engine: Engine, tokenizer: PreTrainedTokenizerFast, folder: Path
    ) -> Generator:
        """Sample with the engine's policy, or with a copy of it."""
        from rlhf.generators.hf.generator import HFGenerator, HFSamplerFactory

        if not self.has_worker(cfg):
            return HFGenerator(engine.borrow_policy, tokenizer, self.batch_size, cfg.seed)
        from rlhf.processes.worker import environment

        model = engine.policy.model
        factory = HFSamplerFactory(
            config=model.config.to_json_string(use_diff=False),
            attention=cfg.model.attention,
            remote=model.config.name_or_path if cfg.model.trust_remote_code else None,
            device=model.device.type,
            dtype=cfg.model.dtype,
            stop_ids=[tokenizer.eos_token_id],
            pad_id=tokenizer.pad_token_id,
            batch_size=self.batch_size,
            seed=cfg.seed,
        )
        count = threads(cfg)[1]
        first = int(os.environ.get("LOCAL_RANK", "0")) if self.per_rank else 0
        variables = [environment(count, model.device, first + i) for i in range(self.replicas)]
        return self.start(cfg, engine, factory, folder, variables)

    def problems(self, cfg: Config) -> Iterator[str]:
        """The same, and the size of a decoding batch."""
        yield from WorkerConfig.problems(self, cfg)
        if self.batch_size < 1:
            yield (
                f"generator.batch_size must be >= 1 (sequences decoded at once), got {self.batch_size}; "
                "set generator.batch_size=256"
            )


class Precision(Enum):
    """What a generator computes in."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Transfer(Enum):
    """How weights go from the trainer to vLLM."""

    auto = "auto"  # ipc on the trainer's GPU, nccl to other GPUs, shared_memory without GPUs
    shared_memory = "shared_memory"  # works everywhere
    ipc = "ipc"  # CUDA IPC
    nccl = "nccl"


@option("generator", "vllm")
@dataclass(kw_only=True, slots=True)
class VLLMConfig(WorkerConfig):
    """Sampling with vLLM, in a process of its own; with GPUs, on GPUs of its own."""

    on_gpu: ClassVar[float] = 0.9  # `memory` there, where it is null
    in_ram: ClassVar[float] = 0.1  # the same without GPUs
    shares_gpu: ClassVar[bool] = False  # with the trainer

    name: str = "vllm"
    memory: float | None = None  # share of the GPU's; without GPUs of RAM, for keys and values; null is 0.1
    max_num_seqs: int = 256  # sequences decoded at once
    dtype: Precision | None = None  # null: model.dtype
    enforce_eager: bool | None = None  # do not compile; null: only on GPUs
    tensor_parallel_size: int = 1  # GPUs that share the model
    devices: list[int] | None = None  # GPUs of all replicas, by number; null: those after the trainer's
    transfer: Transfer = Transfer.auto  # of the weights

    @property
    def gpus(self) -> int:
        """How many GPUs all replicas have, where there are GPUs."""
        return self.tensor_parallel_size * max(1, self.replicas)

    def build(
        self, cfg: Config, engine: Engine, tokenizer: PreTrainedTokenizerFast, folder: Path
    ) -> Generator:
        """Sample with vLLM, which starts from the config of the policy and gets its weights with `load`."""
        import torch

        from rlhf.core.console import say
        from rlhf.generators.vllm.generator import build_store, place, route, visible
        from rlhf.processes.worker import environment

        devices = place(self, torch.cuda.device_count())
        variables = [environment(threads(cfg)[1], torch.device("cpu")) for _ in range(self.replicas)]
        if devices:
            each, now = self.tensor_parallel_size, os.environ.get("CUDA_VISIBLE_DEVICES")
            for i, own in enumerate(variables):
                own["CUDA_VISIBLE_DEVICES"] = visible(devices[i * each : (i + 1) * each], now)
                own["NCCL_SOCKET_IFNAME"] = os.environ.get("NCCL_SOCKET_IFNAME", "lo")  # all on this host
        elif self.shares_gpu:
            say(f"generator={self.name} gives no memory back while it waits: on a CPU vLLM cannot sleep")
        trainer = engine.policy.model.device
        transfer = route(self, devices, trainer, torch.distributed.is_nccl_available())
        factory = self.factory(cfg, tokenizer, bool(devices), transfer)
        store = build_store(transfer, trainer, getattr(torch, factory.dtype), len(devices))
        return self.start(cfg, engine, factory, folder, variables, store)

    def factory(
        self,
        cfg: Config,
        tokenizer: PreTrainedTokenizerFast,
        gpu: bool,
        transfer: Transfer = Transfer.shared_memory,
    ) -> VLLMFactory:
        """What the process of vLLM is started with, for the policy of the run `cfg`."""
        from rlhf.generators.vllm.sampler import VLLMFactory

        assert cfg.model.policy is not None, "validated: a policy is named or made"
        return VLLMFactory(
            model=cfg.model.policy,
            trust_remote_code=cfg.model.trust_remote_code,
            dtype=(self.dtype or cfg.model.dtype).value,
            max_model_len=cfg.task.max_prompt_tokens + self.response_length,
            max_num_seqs=self.max_num_seqs,
            memory=self.memory or (self.on_gpu if gpu else self.in_ram),
            enforce_eager=not gpu if self.enforce_eager is None else self.enforce_eager,
            tensor_parallel_size=self.tensor_parallel_size,
            gpu=gpu,
            sleeps=self.shares_gpu and gpu,
            in_flight=cfg.schedule.in_flight,
            transfer=transfer.value,
            stop_ids=(tokenizer.eos_token_id,),
            pad_id=tokenizer.pad_token_id,
            seed=cfg.seed,
        )

    def problems(self, cfg: Config) -> Iterator[str]:
        """The same, vLLM itself, and what it cannot be set to."""
        yield from WorkerConfig.problems(self, cfg)
        if importlib.util.find_spec("vllm") is None:
            yield (
                f"generator={self.name} needs vLLM (it samples), which is not installed here; "
                "pip install 'rlhf[vllm]', or set generator=hf"
            )
        for key, value, remedy in (
            ("generator.temperature", self.temperature, 0.7),
            ("eval.temperature", cfg.eval.temperature, 0.01),
        ):
            if 0 < value < 0.01:
                yield (
                    f"{key} must be >= 0.01 with generator={self.name} (vLLM raises lower ones to that), "
                    f"got {value}; set {key}={remedy}"
                )
        yield from self.transfer_problems(cfg)
        if self.memory is not None and not 0 < self.memory <= 1:
            yield (
                "generator.memory must be > 0 and <= 1 (a share of the device's memory), "
                f"got {self.memory}; set generator.memory=null"
            )
        if self.max_num_seqs < 1:
            yield (
                f"generator.max_num_seqs must be >= 1 (sequences decoded at once), got {self.max_num_seqs}; "
                "set generator.max_num_seqs=256"
            )
        if self.tensor_parallel_size < 1:
            yield (
                "generator.tensor_parallel_size must be >= 1 (GPUs that share the model), "
                f"got {self.tensor_parallel_size}; set generator.tensor_parallel_size=1"
            )
        elif self.devices is not None and (len(set(self.devices)) != self.gpus or min(self.devices) < 0):
            many = " x generator.replicas" if self.replicas > 1 else ""
            yield (
                f"generator.devices must name as many GPUs as generator.tensor_parallel_size{many} says "
                f"({self.gpus}, each by its number), got {self.devices}; set generator.devices=null"
            )

    def transfer_problems(self, cfg: Config) -> Iterator[str]:
        """Ways for the weights that there cannot be; `rlhf.generators.vllm.route` asks what torch knows."""
        if self.transfer not in (Transfer.ipc, Transfer.nccl):
            return
        why = None
        if cfg.backend.device.name == "cpu":
            why = "backend.device=cpu (the weights must lie on a GPU)"
        elif self.transfer is Transfer.ipc and not self.shares_gpu:
            why = f"generator={self.name} (CUDA IPC shares memory of one GPU, and vLLM has another)"
        elif self.transfer is Transfer.ipc and self.tensor_parallel_size > 1:
            why = "generator.tensor_parallel_size above 1 (CUDA IPC shares memory of one GPU)"
        elif self.transfer is Transfer.nccl and self.shares_gpu:
            why = f"generator={self.name} (NCCL has no two processes on one GPU)"
        elif self.replicas > 1:
            why = "generator.replicas above 1 (all take one snapshot of the weights over, in shared memory)"
        if why is not None:
            yield (
                f"generator.transfer must not be {self.transfer.value} with {why}, got "
                f"{self.transfer.value}; set generator.transfer=auto"
            )


@option("generator", "vllm_colocated")
@dataclass(kw_only=True, slots=True)
class VLLMColocatedConfig(VLLMConfig):
    """Sampling with vLLM on the trainer's GPU, in a process that gives the memory back while it trains."""

    on_gpu: ClassVar[float] = 0.45
    shares_gpu: ClassVar[bool] = True

    name: str = "vllm_colocated"

    def problems(self, cfg: Config) -> Iterator[str]:
        """The same, and requests while training."""
        yield from VLLMConfig.problems(self, cfg)
        if cfg.schedule.max_lag > 0:
            yield (
                "schedule.max_lag must be 0 with generator=vllm_colocated (it sleeps while the trainer has "
                f"the device), got {cfg.schedule.max_lag}; set generator=vllm"
            )
        if rank_count() > 1 and not self.per_rank and cfg.backend.device.name != "cpu":
            yield (
                "generator.per_rank must be true with generator=vllm_colocated and several ranks (each "
                "shares its GPU with a generator), got false; set generator.per_rank=true"
            )

    def replica_problems(self, cfg: Config) -> Iterator[str]:
        """Any replicas."""
        if self.replicas > 1:
            yield (
                "generator.replicas must be 1 with generator=vllm_colocated (it sleeps while the trainer has "
                f"the device, so one request at a time is under way), got {self.replicas}; set generator=vllm"
            )


@option("generator", "dataset")
@dataclass(kw_only=True, slots=True)
class DatasetConfig(GeneratorConfig):
    """Completions that a data set holds; nothing is sampled in training."""

    samples: ClassVar[bool] = False

    name: str = "dataset"
    temperature: float = 1.0  # of the log-probs
    path: str | None = None  # saved rollouts (generations/ of a run); null: completions of the task

    def build(
        self, cfg: Config, engine: Engine, tokenizer: PreTrainedTokenizerFast, folder: Path
    ) -> Generator:
        """Return what the task stores, or what a run saved."""
        from rlhf.generators.stored import DatasetGenerator, ReplayGenerator

        if self.path is None:
            return DatasetGenerator(tokenizer)
        return ReplayGenerator(Path(self.path).expanduser(), tokenizer)

    @property
    def rollouts(self) -> bool:
        """Whether what is stored was sampled, with the sampler's log-probs."""
        return self.path is not None

    def problems(self, cfg: Config) -> Iterator[str]:
        """The same, and saved rollouts that are not there, too few, or not as the run would have them."""
        yield from GeneratorConfig.problems(self, cfg)
        if self.path is None:
            return
        if cfg.algo.supervised:
            yield (
                f"generator.path must be null for algo={cfg.algo.name} (it trains on completions of the "
                f"task), got {self.path}; set generator.path=null"
            )
        found = files(Path(self.path).expanduser())
        try:
            common = shared(found[0]) if found else None
            state = "none there"
        except (OSError, ValueError) as error:
            common, state = None, str(error)
        if common is None:
            yield (
                "generator.path must be a folder of saved rollouts (save_generations=true writes one to the "
                f"run folder), got {self.path} ({state}); set generator.path=<run folder>/generations"
            )
            return
        for key, value, theirs in (
            ("generator.temperature", self.temperature, common.temperature),
            ("schedule.prompts_per_update", cfg.schedule.prompts_per_update, common.prompts),
            ("algo.samples_per_prompt", cfg.algo.samples_per_prompt, common.samples),
        ):
            if value != theirs:
                yield (
                    f"{key} must be that of the rollouts in generator.path (they are taken as they are), "
                    f"got {value}; set {key}={theirs}"
                )
        if cfg.schedule.total_episodes is not None and cfg.num_updates() > len(found):
            most = len(found) * cfg.episodes_per_update
            yield (
                f"schedule.total_episodes must be <= {most} (generator.path has rollouts of {len(found)} "
                f"updates), got {cfg.schedule.total_episodes}; set schedule.total_episodes={most}"
            )
