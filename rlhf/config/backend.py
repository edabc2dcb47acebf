"""Settings of the distributed backends."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from difflib import get_close_matches
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from omegaconf import MISSING

from rlhf.config.footprint import Footprint, zero
from rlhf.config.schema import Section, option
from rlhf.core.errors import UserError

if TYPE_CHECKING:
    from rlhf.config.model import Dtype
    from rlhf.config.root import Config
    from rlhf.engines.engine import Engine
    from rlhf.processes.ranks import Ranks


M = TypeVar("M", bound="OverRollouts")


class Device(Enum):
    """Where models live. `auto` is CUDA where there is a GPU."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


@dataclass(kw_only=True, slots=True)
class BackendConfig(Section):
    """What every backend has."""

    scales_loss: ClassVar[bool] = False  # as model.dtype=float16 needs it

    name: str = MISSING
    micro_batch: int = 16  # sequences a forward and rank
    device: Device = Device.auto
    threads: int | None = None  # CPU threads of torch; null: one per core
    ranks: int | None = None  # processes that are to be started, as torchrun does; null: any number
    timeout_s: float = 1800.0  # seconds that ranks wait for one another; then the run ends

    def build(self, **parts: Any) -> Engine:
        """Make the engine of `parts`: module, reference, optimizer settings, as the engine takes them."""
        raise NotImplementedError

    def prepare(self, cfg: Config, ranks: Ranks, checkpoint: Path | None) -> None:
        """Make ready what the backend needs, before any model is loaded; `checkpoint` is to be gone on from.

        Raises:
            UserError: something is missing, or the checkpoint is none for these ranks.
        """

    def place(self, frozen: M, ranks: Ranks) -> M:
        """Put a model that is not trained where it is to be."""
        from rlhf.models.placement import place

        return place(frozen, ranks.device).requires_grad_(False)

    def footprint(self, cfg: Config) -> Footprint:
        """Bytes that training takes a parameter, for the memory plan of the run `cfg`.

        Here: weights, gradients and AdamW's moments in float32, all on every rank.
        """
        return Footprint()

    def problems(self, cfg: Config) -> Iterator[str]:
        """Sizes below one."""
        if self.micro_batch < 1:
            yield (
                f"backend.micro_batch must be >= 1 (sequences a forward), got {self.micro_batch}; "
                "set backend.micro_batch=16"
            )
        if self.ranks is not None and self.ranks < 1:
            yield (
                "backend.ranks must be >= 1 (processes that train together; null: any number), "
                f"got {self.ranks}; set backend.ranks=null"
            )
        if self.threads is not None and self.threads < 1:
            yield (
                f"backend.threads must be >= 1 (null: one per core), got {self.threads}; "
                "set backend.threads=null"
            )


@option("backend", "torch")
@dataclass(kw_only=True, slots=True)
class TorchConfig(BackendConfig):
    """Plain torch."""

    scales_loss: ClassVar[bool] = True

    name: str = "torch"

    def build(self, **parts: Any) -> Engine:
        """The whole model on every rank."""
        from rlhf.engines.torch_engine import TorchEngine

        return TorchEngine(**parts, micro_batch=self.micro_batch)


OWNED = {  # native keys that are ours, and what to set instead
    "train_batch_size": "schedule.prompts_per_update",
    "train_micro_batch_size_per_gpu": "backend.micro_batch",
    "gradient_accumulation_steps": "backend.micro_batch",
    "managed_gradient_accumulation": "backend.micro_batch",
    "gradient_clipping": "optim.max_grad_norm",
    "gradient_allreduce_op": "nothing",
    "optimizer": "optim.lr, optim.betas, optim.eps and optim.weight_decay",
    "scheduler": "optim.schedule and optim.warmup",
    "fp16": "model.dtype",
    "bf16": "model.dtype",
    "bfloat16": "model.dtype",
    "torch_autocast.enabled": "model.dtype",
    "torch_autocast.dtype": "model.dtype",
    "zero_optimization.stage": "backend=zero0, zero1, zero2 or zero3",
    "zero_optimization.offload_optimizer.device": "backend=zero2_offload or zero3_offload",
    "zero_optimization.offload_param.device": "backend=zero3_offload",
    "zero_optimization.compute_grad_norm": "nothing",
}


# Top-level keys of DeepSpeed 0.19.8, less those that it refuses.
NATIVE = """activation_checkpointing aio autotuning bf16 bfloat16 checkpoint comet comms_logger
    communication_data_type compile csv_monitor data_efficiency data_types dataloader_drop_last
    datastates_ckpt disable_allgather disable_python_gc dump_state expert_parallel flops_profiler fp16
    gradient_accumulation_steps gradient_allreduce_op gradient_clipping gradient_predivide_factor
    hybrid_engine log_level managed_gradient_accumulation memory_breakdown optimizer pipeline
    prescale_gradients scheduler seq_parallel_communication_data_type steps_per_print tensor_parallel
    tensorboard timers torch_autocast train_batch_size train_micro_batch_size_per_gpu
    use_data_before_expert_parallelism vocabulary_size wall_clock_breakdown wandb weight_quantization
    zero_allow_untested_optimizer zero_force_ds_cpu_optimizer zero_optimization"""


KNOWN = frozenset(NATIVE.split())


RANKS_FILE = "ranks.json"  # beside what DeepSpeed writes: by how many ranks


@dataclass(kw_only=True, slots=True)
class ZeroConfig(BackendConfig):
    """DeepSpeed: optimizer (stage 1), gradients (2) and weights (3) are divided over ranks."""

    stage: ClassVar[int]
    offload_optimizer: ClassVar[bool] = False  # its state and step are the CPU's
    offload_weights: ClassVar[bool] = False  # weights stay in the memory of the CPU until a forward

    deepspeed: dict[str, Any] = field(default_factory=dict)  # native settings, merged over ours

    def footprint(self, cfg: Config) -> Footprint:
        """Bytes that training takes a parameter: all in float32, divided over ranks by the stage."""
        return zero(self.stage, self.offload_optimizer, bfloat16=False)

    def settings(self, dtype: Dtype, max_grad_norm: float | None = None) -> dict[str, Any]:
        """The native configuration."""
        cpu = {"device": "cpu"}
        zero: dict[str, Any] = {"stage": self.stage, "reduce_bucket_size": 50_000_000}
        if self.offload_optimizer:
            zero["offload_optimizer"] = cpu
        if self.offload_weights:
            zero["offload_param"] = cpu
        ours = {
            "train_micro_batch_size_per_gpu": 1,  # asked for, and of no consequence: the engine cuts batches
            "gradient_clipping": max_grad_norm or 0.0 if self.stage else 0.0,  # stage 0 has them whole
            "zero_optimization": zero,
            # What ranks send each other is float32, unless modules are named here.
            "torch_autocast": {
                "enabled": dtype.value == "bfloat16",
                "dtype": "bfloat16",
                "lower_precision_safe_modules": [],
            },
        }
        return merged(ours, self.deepspeed)

    def build(self, **parts: Any) -> Engine:
        """A part of the model on every rank, by the stage."""
        from rlhf.engines.deepspeed_engine import DeepSpeedEngine

        return DeepSpeedEngine(**parts, micro_batch=self.micro_batch, config=self)

    def prepare(self, cfg: Config, ranks: Ranks, checkpoint: Path | None) -> None:
        """Import DeepSpeed, have it read its settings, build its optimizer for CPUs where that is used."""
        from rlhf.engines.deepspeed_engine import prepare

        if checkpoint is not None:
            self.check_ranks(checkpoint, ranks.size)
        prepare(self, cfg.model.dtype, ranks)

    def check_ranks(self, checkpoint: Path, size: int) -> None:
        """Raise UserError where a checkpoint is divided among another number of ranks."""
        wrote = json.loads((checkpoint / RANKS_FILE).read_text())["ranks"]
        if self.stage > 0 and wrote != size:
            raise UserError(
                f"ranks must be {wrote} to go on from {checkpoint} (backend={self.name} has divided it among "
                f"as many), got {size}; start {wrote}, or set resume=never to begin anew"
            )

    def place(self, frozen: M, ranks: Ranks) -> M:
        """Divided over ranks as the model that is trained, or whole on each where that is whole."""
        if self.stage < 3:
            return BackendConfig.place(self, frozen, ranks)
        from rlhf.engines.deepspeed_engine import shard

        return shard(frozen, self, ranks)

    def problems(self, cfg: Config) -> Iterator[str]:
        """DeepSpeed that is not installed, and native keys that it does not know or that are ours."""
        yield from BackendConfig.problems(self, cfg)
        if importlib.util.find_spec("deepspeed") is None:
            yield (
                f"backend={self.name} needs the package deepspeed (an extra), which is not installed; "
                "run: pip install 'rlhf[deepspeed]', or set backend=torch"
            )
        for key in self.deepspeed:
            if key not in KNOWN:
                close = get_close_matches(key, KNOWN, n=1)
                remedy = f"did you mean {close[0]}?" if close else "look it up in DeepSpeed's documentation"
                yield (
                    f"backend.deepspeed.{key} must be a key of DeepSpeed's configuration (what it does not "
                    f"know has no effect), got {key}; {remedy}"
                )
        for key, instead in OWNED.items():
            found = nested(self.deepspeed, key)
            if found is not None:
                remedy = "leave it out" if instead == "nothing" else f"set {instead}"
                yield (
                    f"backend.deepspeed.{key} must not be set (the run says it elsewhere, and would differ "
                    f"from backend=torch), got {found}; {remedy}"
                )


def merged(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """Nested dictionaries as one; `theirs` where both say something."""
    found = dict(ours)
    for key, value in theirs.items():
        both = isinstance(value, dict) and isinstance(found.get(key), dict)
        found[key] = merged(found[key], value) if both else value
    return found


def nested(tree: dict[str, Any], dotted: str) -> Any:
    """What is at a dotted key of nested dictionaries, or None."""
    name, _, rest = dotted.partition(".")
    value = tree.get(name)
    return nested(value, rest) if rest and isinstance(value, dict) else None if rest else value


@option("backend", "zero0")
@dataclass(kw_only=True, slots=True)
class Zero0Config(ZeroConfig):
    """Data parallel by DeepSpeed; nothing is divided."""

    stage: ClassVar[int] = 0

    name: str = "zero0"


@option("backend", "zero1")
@dataclass(kw_only=True, slots=True)
class Zero1Config(ZeroConfig):
    """The optimizer's state is divided."""

    stage: ClassVar[int] = 1

    name: str = "zero1"


@option("backend", "zero2")
@dataclass(kw_only=True, slots=True)
class Zero2Config(ZeroConfig):
    """The optimizer's state and gradients are divided."""

    stage: ClassVar[int] = 2

    name: str = "zero2"


@option("backend", "zero3")
@dataclass(kw_only=True, slots=True)
class Zero3Config(ZeroConfig):
    """The optimizer's state, gradients and weights are divided, those of frozen models too."""

    stage: ClassVar[int] = 3

    name: str = "zero3"


@option("backend", "zero2_offload")
@dataclass(kw_only=True, slots=True)
class Zero2OffloadConfig(Zero2Config):
    """Zero2 with the optimizer on the CPU."""

    offload_optimizer: ClassVar[bool] = True

    name: str = "zero2_offload"


@option("backend", "zero3_offload")
@dataclass(kw_only=True, slots=True)
class Zero3OffloadConfig(Zero3Config):
    """Zero3 with optimizer and weights in the memory of the CPU."""

    offload_optimizer: ClassVar[bool] = True
    offload_weights: ClassVar[bool] = True

    name: str = "zero3_offload"
