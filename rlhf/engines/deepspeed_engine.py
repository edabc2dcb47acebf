"""The engine on DeepSpeed: optimizer state, gradients and weights divided over ranks, by the stage of ZeRO.

Rajbhandari et al., arXiv 1910.02054; with the optimizer on the CPU: Ren et al., arXiv 2101.06840.

| stage | divided over ranks                      | gradients are added up over ranks |
|-------|-----------------------------------------|-----------------------------------|
| 0     | nothing                                 | once a step                       |
| 1     | optimizer state                         | once a step                       |
| 2     | and gradients                           | with every micro-batch            |
| 3     | and weights, those of frozen models too | with every micro-batch            |

Weights are float32, as on plain torch; with `model.dtype=bfloat16` forwards are autocast over them. DeepSpeed
is imported where it is first used: that takes seconds. Where its public interface does not reach (the norm
before a step, forgetting gradients), this follows the `step()` of its optimizers, version 0.19.8.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import warnings
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf.config.backend import RANKS_FILE
from rlhf.config.model import Dtype
from rlhf.core.batch import Outputs
from rlhf.core.console import say
from rlhf.core.errors import UserError
from rlhf.engines.engine import Engine, adam, groups, trained
from rlhf.models.loading import first_line, save
from rlhf.models.lora import whole_weights
from rlhf.models.modules import OverRollouts
from rlhf.models.placement import place
from rlhf.models.precision import autocast

if TYPE_CHECKING:
    from rlhf.config.backend import ZeroConfig
    from rlhf.core.batch import Batch
    from rlhf.processes.ranks import Ranks

M = TypeVar("M", bound=OverRollouts)
FOLDER, TAG = "deepspeed", "state"  # in a checkpoint, and in that: DeepSpeed's own files
LINEAR = nn.functional.linear


class DeepSpeedEngine(Engine):
    """Data parallelism over ranks with AdamW; the stage of `config` says what is divided over ranks."""

    @classmethod
    def build(cls, config: ZeroConfig, **parts: Any) -> Self:
        """Return the engine of a run; `parts` are the arguments of `Engine`, without `micro_batch`."""
        return cls(**parts, micro_batch=config.micro_batch, config=config)

    @staticmethod
    def prepare(config: ZeroConfig, dtype: Dtype, ranks: Ranks, checkpoint: Path | None) -> None:
        """Import DeepSpeed, check its settings, and build its CPU optimizer if the config uses it.

        Raises:
            UserError: DeepSpeed refuses its settings, its CPU optimizer cannot be built, or `checkpoint` is
                divided over another number of ranks.
        """
        if checkpoint is not None:
            check_ranks(config, checkpoint, ranks.size)
        prepare(config, dtype, ranks)

    @staticmethod
    def place(config: ZeroConfig, frozen: M, ranks: Ranks) -> M:
        """Put a model that is not trained on the device: divided over ranks at stage 3, else whole."""
        if config.stage < 3:
            return place(frozen, ranks.device).requires_grad_(False)
        return shard(frozen, config, ranks)

    def __init__(self, *args: Any, config: ZeroConfig, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.stage = config.stage
        self.offload = config.offload_optimizer
        # Under stage 3 the model is nowhere whole: what is generated from is put together by this plan.
        self.plan = hollow(self.module.model) if self.stage == 3 else None
        native = config.settings(self.dtype, self.optim.max_grad_norm)
        settle(self.module, native, self.ranks)
        parts = groups(self.module, self.optim.lr, self.value_lr)
        optimizer: torch.optim.Optimizer
        if self.offload:
            from deepspeed.ops.adam import DeepSpeedCPUAdam

            optimizer = DeepSpeedCPUAdam(parts, **adam(self.optim), adamw_mode=True)
        else:
            optimizer = torch.optim.AdamW(parts, **adam(self.optim))
        self.deep, self.optimizer, *_ = deepspeed(self.ranks).initialize(
            model=self.module, optimizer=optimizer, config=native
        )
        self.deep.checkpoint_engine.load = load_tensors

    def forward(self, batch: Batch) -> Outputs:
        """The module that is trained, on a micro-batch."""
        return cast(Outputs, self.deep(batch))

    def backward(self, loss: Tensor, last: bool) -> None:
        """Add to the gradients; DeepSpeed divides their sum over ranks by the number of these."""
        self.deep.set_gradient_accumulation_boundary(last)
        self.deep.backward(loss * self.ranks.size)

    def gradient_norm(self) -> Tensor:
        """The norm of the gradients. From stage 1 on, DeepSpeed clips them in its step, and says infinite
        where the norm is NaN.
        """
        if self.stage == 0:
            return self.clip_gradients()
        if self.stage == 3:
            from deepspeed.runtime.utils import combine_grad_norm_groups

            return cast(Tensor, combine_grad_norm_groups(self.optimizer._get_norm_groups()))
        return cast(Tensor, self.optimizer.scaled_global_norm())

    def update(self, lr: float) -> None:
        """One step of AdamW, in which each rank moves its part of the weights."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["scale"]
        self.deep.step()

    def discard(self) -> None:
        """Forget the gradients, as a step of DeepSpeed does that it skips."""
        self.deep.zero_grad()
        if self.stage == 3:
            self.optimizer._overflow_clean_up(self.optimizer.loss_scale)
        elif self.stage > 0:
            self.optimizer.zero_grad()
            self.optimizer.micro_step_id = -1  # what an optimizer on the CPU begins to add up anew by

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The weights of the Hugging Face model that is trained, float32; under stage 3 one is gathered after
        the other.
        """
        yield from whole_weights(self.module.model, self.gathered)

    def gathered(self, parameters: Iterable[Tensor]) -> AbstractContextManager[Any]:
        """While `parameters` are whole on every rank."""
        found = deepspeed(self.ranks).zero.GatheredParameters(list(parameters))
        return cast(AbstractContextManager[Any], found)

    @contextmanager
    def borrow_policy(self) -> Iterator[PreTrainedModel]:
        """The Hugging Face model that is trained; under stage 3 a whole copy of it, which no rank has to wait
        for another to run.
        """
        model = self.module.model if self.plan is None else self.whole(self.plan)
        with autocast(self.ranks.device, self.dtype):
            yield model

    def whole(self, plan: PreTrainedModel) -> PreTrainedModel:
        """A model by `plan` with the present weights."""
        model = copy.deepcopy(plan)
        model.load_state_dict({name: tensor.clone() for name, tensor in self.weights()}, assign=True)
        model.tie_weights()
        torch.nn.Module.to(model, self.ranks.device)  # buffers
        return model

    def save_model(self, folder: Path) -> None:
        """Write the model that is trained in Hugging Face format."""
        first = self.ranks.first
        state = {name: tensor.to("cpu", copy=True) for name, tensor in self.weights() if first}
        if first:
            save(self.module.model, self.tokenizer, folder, state)

    def save_adapter(self, folder: Path) -> None:
        """Write the adapter of the model that is trained in the format of PEFT, where it has one."""
        with self.gathered(trained(self.module.model)):
            super().save_adapter(folder)

    def save(self, folder: Path) -> None:
        """Write weights and optimizer state for `load`, each rank its part."""
        kept = {"step_index": self.step_index}
        self.deep.save_checkpoint(str(folder / FOLDER), TAG, client_state=kept, save_latest=False)
        if self.ranks.first:
            (folder / RANKS_FILE).write_text(json.dumps({"ranks": self.ranks.size}))

    def load(self, folder: Path) -> None:
        """Stand where `save(folder)` stood, by as many ranks (but stage 0 by any number)."""
        _, kept = self.deep.load_checkpoint(str(folder / FOLDER), TAG)
        self.step_index = kept["step_index"]


def hollow(model: PreTrainedModel) -> PreTrainedModel:
    """A model like `model`, without adapters and without weights: it takes no memory but that of buffers."""
    with torch.device("meta"):
        made = type(model)(model.config).eval().requires_grad_(False)
    for name, buffer in model.named_buffers():
        owner, _, own = name.rpartition(".")
        made.get_submodule(owner).register_buffer(own, buffer.clone(), persistent=name in made.state_dict())
    return made


def settle(module: nn.Module, native: dict[str, Any], ranks: Ranks) -> None:
    """Put a module on the device; under stage 3 parameter by parameter, of which each rank keeps its part."""
    if native["zero_optimization"]["stage"] < 3:
        module.to(ranks.device)
        return
    for part in module.modules():
        if isinstance(part, OverRollouts):
            part.whole = True  # a module's weights are given back when its forward has ended
    deepspeed(ranks).zero.Init(module=module, config_dict_or_path=native, dtype=torch.float32)
    nn.functional.linear = linear  # type: ignore[assignment]
    for buffer in module.buffers():
        buffer.data = buffer.data.to(ranks.device)


def linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear`, by DeepSpeed's function where the weight is divided.

    That function holds no whole weight until the backward pass. DeepSpeed puts it in the place of torch's for
    all weights and for good: models that are not divided, and later runs of the process, would compute other
    last digits.
    """
    if not hasattr(weight, "ds_id"):
        return LINEAR(rows, weight, bias)
    from deepspeed.runtime.zero.linear import zero3_linear_wrap

    return cast(Tensor, zero3_linear_wrap(rows, weight, bias))


def shard(frozen: M, config: ZeroConfig, ranks: Ranks) -> M:
    """Divide a model that is not trained over ranks; it is whole where and while it computes."""
    native = config.settings(Dtype.float32)
    settle(frozen.requires_grad_(False), native, ranks)
    deepspeed(ranks).initialize(model=frozen, config=native)  # kept alive by its hooks in the model
    return frozen


def check_ranks(config: ZeroConfig, checkpoint: Path, size: int) -> None:
    """Raise UserError if a checkpoint is divided over another number of ranks than `size`."""
    wrote = json.loads((checkpoint / RANKS_FILE).read_text())["ranks"]
    if config.stage > 0 and wrote != size:
        raise UserError(
            f"ranks must be {wrote} to resume from {checkpoint} (backend={config.name} divided it over "
            f"{wrote}), got {size}; start {wrote} ranks, or set resume=never to start again"
        )


def prepare(config: ZeroConfig, dtype: Dtype, ranks: Ranks) -> None:
    """Initialise DeepSpeed, check its settings, and build its CPU optimizer if the config uses it.

    Raises:
        UserError: DeepSpeed refuses its settings, or its CPU optimizer cannot be built.
    """
    deepspeed(ranks)
    from deepspeed.runtime.config import DeepSpeedConfig

    try:
        DeepSpeedConfig(config.settings(dtype))
    except (ValueError, AssertionError, TypeError) as error:
        said = " ".join(str(error).split())
        raise UserError(
            f"backend.deepspeed must be settings that DeepSpeed accepts ({said}), got {config.deepspeed}; "
            "correct or leave out the setting that it names"
        ) from error
    if config.offload_optimizer:
        ranks.from_first(lambda: build_cpu_adam(config.name))


@cache
def deepspeed(ranks: Ranks) -> ModuleType:
    """The package, ready for these ranks.

    It wants a process group where there is but one rank, too; that is one without a network.
    """
    os.environ.setdefault("DS_ACCELERATOR", ranks.device.type)
    os.environ.setdefault("LOCAL_RANK", "0")
    if not dist.is_initialized():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback())
        backend = "cpu:gloo,cuda:nccl" if ranks.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    import deepspeed as package

    package.logger.setLevel("ERROR")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    # All-reduce through shared memory would be compiled first, with a compiler that may not be there.
    package.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    package.init_distributed(dist_init_required=False, verbose=False)
    return package


def loopback() -> str:
    """The name of the network interface that reaches this machine alone."""
    return next(
        name
        for name, addresses in psutil.net_if_addrs().items()
        if any(address.address == "127.0.0.1" for address in addresses)
    )


def build_cpu_adam(name: str) -> None:
    """Build DeepSpeed's optimizer for CPUs, where that was not done before.

    Raises:
        UserError: it cannot be built.
    """
    from deepspeed.ops.op_builder import CPUAdamBuilder

    say("loading DeepSpeed's optimizer for CPUs (the first time it is built, which takes minutes)")
    try:
        CPUAdamBuilder().load()
    except (RuntimeError, OSError, ImportError) as error:
        wanted = (os.environ.get("CXX", "c++"), "ninja")
        missing = [program for program in wanted if shutil.which(program) is None]
        reason = f"there is no {' and no '.join(missing)} here" if missing else first_line(error)
        raise UserError(
            f"backend={name} needs DeepSpeed's optimizer for CPUs, which is built with a C++ compiler and "
            f"ninja ({reason}), got {name}; install what is missing, or set "
            f"backend={name.removesuffix('_offload')}"
        ) from error


def load_tensors(path: str, map_location: Any = None) -> Any:
    """Read one of DeepSpeed's files: tensors, plain values, and its records of them; no other code is run."""
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    with torch.serialization.safe_globals([LossScaler, ZeroStageEnum, fragment_address]):
        return torch.load(path, map_location=map_location, weights_only=True)
