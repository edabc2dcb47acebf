"""The engine on DeepSpeed ZeRO, which divides optimizer state, gradients and weights over ranks.

Rajbhandari et al., arXiv 1910.02054; with the optimizer on the CPU: Ren et al., arXiv 2101.06840.

| stage | divided over ranks                      | gradients are summed over ranks   |
|-------|-----------------------------------------|-----------------------------------|
| 0     | nothing                                 | once per step                     |
| 1     | optimizer state                         | once per step                     |
| 2     | optimizer state, gradients              | with every micro-batch            |
| 3     | optimizer state, gradients, weights     | with every micro-batch            |

At stage 3, the weights of frozen models are divided too. Weights are float32, as with `backend=torch`; with
`model.dtype=bfloat16`, forward passes use autocast, and stage 3 gathers most weights in bfloat16 (see
`rlhf.engines.deepspeed_engine`). DeepSpeed is imported at its first use, because the import takes seconds.

DeepSpeed has no public functions for the gradient norm before a step and for discarding gradients. For both,
this module repeats what the optimizers of DeepSpeed 0.19.8 do in `step()`.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import shutil
import sysconfig
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any, Self, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlhf.config.models import RANKS_FILE, Dtype, ZeroConfig
from rlhf.core.batch import Batch, Outputs
from rlhf.core.errors import UserError
from rlhf.engines.engine import Engine, adam, groups, hollow, rounded_weights, trained
from rlhf.models.folder import first_line
from rlhf.models.forward import is_placeholder, place
from rlhf.models.modules import RolloutModule, Teacher, whole_weights
from rlhf.processes.ranks import Ranks, have_group
from rlhf.terminal.console import say

M = TypeVar("M", bound=RolloutModule)
_FOLDER, _TAG = "deepspeed", "state"  # folder in a checkpoint, and DeepSpeed's folder inside it
_LINEAR = nn.functional.linear


class DeepSpeedEngine(Engine):
    """An engine with AdamW and data parallelism; `config.stage` selects what is divided over the ranks."""

    @classmethod
    def build(cls, config: ZeroConfig, **parts: Any) -> Self:
        """Return the engine of a run; `parts` are the arguments of `Engine`."""
        return cls(**parts, config=config)

    @staticmethod
    def prepare(config: ZeroConfig, dtype: Dtype, ranks: Ranks) -> None:
        """Initialise DeepSpeed, check its settings, and build its CPU optimizer if the config uses it.

        Raises:
            UserError: DeepSpeed rejects its settings, or its CPU optimizer cannot be built.
        """
        deepspeed(ranks)
        from deepspeed.runtime.config import DeepSpeedConfig

        try:
            DeepSpeedConfig(config.settings(dtype))
        except (ValueError, AssertionError, TypeError) as error:
            said = " ".join(str(error).split())
            raise UserError(
                f"backend.deepspeed must be settings that DeepSpeed accepts ({said}), got "
                f"{config.deepspeed}; correct or leave out the setting that it names"
            ) from None
        if config.offload_optimizer:
            ranks.from_first(lambda: _build_cpu_adam(config.name))

    @staticmethod
    def place(config: ZeroConfig, frozen: M, ranks: Ranks) -> M:
        """Return a frozen model on the device: divided over the ranks at stage 3, else whole on each rank."""
        if config.stage < 3:
            return place(frozen, ranks.device).requires_grad_(False)
        native = config.settings(Dtype.float32)
        _settle(frozen.requires_grad_(False), native, ranks)
        # a layer is gathered only while it computes; hooks in the model keep DeepSpeed's engine alive
        deepspeed(ranks).initialize(model=frozen, config=native)
        return frozen

    def __init__(self, *args: Any, config: ZeroConfig, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.stage = config.stage
        self.offload = config.offload_optimizer
        self.plan = hollow(self.module.model) if self.stage == 3 else None
        native = config.settings(self.settings.dtype, self.settings.optim.max_grad_norm)
        _settle(self.module, native, self.ranks)
        if self.stage == 3 and self.settings.dtype is Dtype.bfloat16:
            from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

            # smaller parameters stay gathered between steps, and stay exact
            smaller = DeepSpeedZeroConfig(**native["zero_optimization"]).param_persistence_threshold
            for weight in rounded_weights(self.module).values():
                if weight.dtype == torch.float32 and weight.ds_numel > smaller:
                    setattr(weight, _ATTRIBUTE, torch.bfloat16)
        optimizer = self.adamw(groups(self.module, self.settings.optim.lr, self.settings.value_lr))
        self.deep, self.optimizer, *_ = deepspeed(self.ranks).initialize(
            model=self.module, optimizer=optimizer, config=native
        )
        self.deep.checkpoint_engine.load = _load_tensors

    def adamw(self, parts: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """Return AdamW for groups of parameters: of DeepSpeed on the CPU, or of torch; fused on a GPU."""
        if not self.offload:
            fused = self.ranks.device.type == "cuda"
            return torch.optim.AdamW(parts, fused=fused, **adam(self.settings.optim))
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam(parts, **adam(self.settings.optim), adamw_mode=True)

    def forward(self, batch: Batch, *extras: str) -> Outputs:
        """Run the trained module on a micro-batch, with gradients; see `Policy.forward` for `extras`."""
        if self.stage == 3 and "divergence" in extras and isinstance(teacher := self.policy.teacher, Teacher):
            own = self.policy.model.get_output_embeddings()
            # Ranks gather weights together, but have different numbers of tiles: each needs a whole head.
            if teacher.head is not own and hasattr(teacher.head.weight, "ds_id"):
                with self.gathered(teacher.head.parameters()):
                    teacher.head = teacher.head.copied()
        return cast(Outputs, self.deep(batch, *extras))

    def backward(self, loss: Tensor, last: bool) -> None:
        """Add the gradients of `loss`, times the number of ranks: DeepSpeed takes the mean over ranks."""
        self.deep.set_gradient_accumulation_boundary(last)
        self.deep.backward(loss * self.ranks.size)

    def gradient_norm(self) -> Tensor:
        """Return the norm of the gradients before clipping.

        From stage 1 on, DeepSpeed clips the gradients in its step, and a norm of NaN is returned as infinity.
        """
        if self.stage == 0:
            return self.clip_gradients()
        if self.stage == 3:
            from deepspeed.runtime.utils import combine_grad_norm_groups

            return cast(Tensor, combine_grad_norm_groups(self.optimizer._get_norm_groups()))
        return cast(Tensor, self.optimizer.scaled_global_norm())

    def update(self, lr: float) -> None:
        """Make one step of AdamW; from stage 1 on, each rank updates its part of the weights."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["scale"]
        self.deep.step()

    def discard(self) -> None:
        """Delete the gradients, as DeepSpeed does when it skips a step."""
        self.deep.zero_grad()
        if self.stage == 3:
            self.optimizer._overflow_clean_up(self.optimizer.loss_scale)
        elif self.stage > 0:
            self.optimizer.zero_grad()
            self.optimizer.micro_step_id = -1  # the CPU optimizer then starts a new sum of gradients

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield name and float32 tensor of every weight; stage 3 gathers one tensor at a time."""
        yield from whole_weights(self.module.model, self.gathered)

    @contextmanager
    def gathered(self, parameters: Iterable[Tensor]) -> Iterator[None]:
        """Gather `parameters` on every rank within the block, in the dtype in which the ranks store them."""
        wanted = list(parameters)
        with exact(wanted), deepspeed(self.ranks).zero.GatheredParameters(wanted):
            yield

    def save_adapter(self, folder: Path) -> None:
        """Write the adapter of the trained model in PEFT format, if the model has an adapter."""
        with self.gathered(trained(self.module.model)):
            super().save_adapter(folder)

    def save(self, folder: Path) -> None:
        """Write weights and optimizer state for `load`; each rank writes its part."""
        kept = {"step_index": self.step_index}
        with write_errors_last(self.deep.checkpoint_engine):
            self.deep.save_checkpoint(str(folder / _FOLDER), _TAG, client_state=kept, save_latest=False)
        if self.ranks.first:
            (folder / RANKS_FILE).write_text(json.dumps({"ranks": self.ranks.size}))

    def load(self, folder: Path) -> None:
        """Restore the state that `save(folder)` wrote, with any number of ranks."""
        wrote = json.loads((folder / RANKS_FILE).read_text())["ranks"]
        if self.stage == 0 or wrote == self.ranks.size:
            _, kept = self.deep.load_checkpoint(str(folder / _FOLDER), _TAG)
        else:
            say(f"dividing {folder} over {self.ranks.size} instead of {wrote} ranks")
            _restore(self.deep, self.stage, folder / _FOLDER / _TAG, wrote)
            first = "zero_pp_rank_0_mp_rank_00" if self.stage == 3 else "mp_rank_00"
            kept = _mapped(folder / _FOLDER / _TAG / f"{first}_model_states.pt")
        self.step_index = kept["step_index"]


def _settle(module: nn.Module, native: dict[str, Any], ranks: Ranks) -> None:
    """Move a module to the device; at stage 3, divide every parameter over the ranks.

    Stage 3 divides the values of the first rank. The parameters of other ranks may be placeholders.

    Args:
        module: the module, changed in place.
        native: native settings of DeepSpeed.
        ranks: the ranks, and the device of this rank.
    """
    if native["zero_optimization"]["stage"] < 3:
        module.to(ranks.device)
        return
    for part in module.modules():
        if isinstance(part, RolloutModule):
            part.whole = True  # at the end of a forward, stage 3 frees the gathered weights
    for part in module.modules():  # one layer at a time, so that a rank has memory for one layer only
        own = [each for each in part.parameters(recurse=False) if not hasattr(each, "ds_id")]
        for parameter in filter(is_placeholder, own):
            parameter.data = torch.empty(parameter.shape, dtype=parameter.dtype, device=ranks.device)
        if own:
            layer = nn.ParameterList(own)
            deepspeed(ranks).zero.Init(module=layer, config_dict_or_path=native, dtype=torch.float32)
    nn.functional.linear = _linear  # type: ignore[assignment]
    for buffer in module.buffers():
        buffer.data = buffer.data.to(ranks.device)


def _linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute `torch.nn.functional.linear`, with DeepSpeed's function if the weight is divided.

    DeepSpeed's function does not store the whole weight until the backward pass. `zero.Init` replaces
    `torch.nn.functional.linear` by DeepSpeed's function, permanently and for all weights. The results of
    models that are not divided, and of later runs in this process, would then change in their last digits.
    This function uses DeepSpeed's function for divided weights only.
    """
    if not hasattr(weight, "ds_id"):
        return _LINEAR(rows, weight, bias)
    from deepspeed.runtime.zero.linear import zero3_linear_wrap

    return cast(Tensor, zero3_linear_wrap(rows, weight, bias))


@contextmanager
def write_errors_last(files: Any) -> Iterator[None]:
    """Raise the first error of a write at the end of the block, instead of at once.

    DeepSpeed waits for all ranks between its writes. A rank with a full disk must take part, or the others
    wait until their time limit.

    Args:
        files: DeepSpeed's checkpoint engine, which writes its files in `save` and its folders in `makedirs`.
    """
    errors: list[Exception] = []

    def kept(write: Callable[..., object]) -> Callable[..., None]:
        def try_to_write(*arguments: Any, **named: Any) -> None:
            try:
                write(*arguments, **named)
            except Exception as error:
                errors.append(error)

        return try_to_write

    files.save, files.makedirs = kept(files.save), kept(files.makedirs)
    try:
        yield
    finally:
        del files.save, files.makedirs  # the methods of the class again
    if errors:
        raise errors[0]


@cache
def deepspeed(ranks: Ranks) -> ModuleType:
    """Import and initialise DeepSpeed for these ranks, and return the package.

    DeepSpeed requires a process group even for one rank; the group of one rank uses no network.

    Raises:
        UserError: this process has used DeepSpeed on another device.
    """
    os.environ.setdefault("DS_ACCELERATOR", ranks.device.type)
    os.environ.setdefault("LOCAL_RANK", "0")
    import deepspeed as package

    if (first := package.accelerator.get_accelerator().device_name()) != ranks.device.type:
        raise UserError(
            f"backend.device must be {first} for a backend of DeepSpeed in this process (DeepSpeed keeps the "
            f"device of the first run), got {ranks.device.type}; start a new process, or set backend=torch"
        )
    have_group(ranks.device)
    package.logger.setLevel("ERROR")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    # All-reduce through shared memory would need a compiler, which may be missing.
    package.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    package.init_distributed(dist_init_required=False, verbose=False)
    return package


def _build_cpu_adam(name: str) -> None:
    """Load DeepSpeed's CPU optimizer; compile the optimizer if it was not compiled before.

    Raises:
        UserError: the optimizer cannot be compiled or loaded.
    """
    from deepspeed.ops.op_builder import CPUAdamBuilder

    say("loading DeepSpeed's CPU optimizer (the first time it is compiled, which takes minutes)")
    scripts = sysconfig.get_path("scripts")  # of this environment, which has ninja and may not be activated
    os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", os.defpath), scripts])
    try:
        CPUAdamBuilder().load()
    except (RuntimeError, OSError, ImportError) as error:
        wanted = (os.environ.get("CXX", "c++"), "ninja")
        missing = [program for program in wanted if shutil.which(program) is None]
        reason = f"{' and '.join(missing)} not found" if missing else first_line(error)
        raise UserError(
            f"backend={name} needs DeepSpeed's CPU optimizer, which a C++ compiler and ninja compile "
            f"({reason}), got {name}; install them, or set backend={name.removesuffix('_offload')}"
        ) from None


def _load_tensors(path: str | Path, map_location: Any = None, mmap: bool = False) -> Any:
    """Load a file of tensors, plain values and three classes of DeepSpeed; reject any other class."""
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    def member(kind: type, name: str) -> Any:
        if kind is ZeroStageEnum:
            return kind(getattr(kind, name))
        raise pickle.UnpicklingError(f"only members of {ZeroStageEnum.__name__} are read, got {kind}")

    # Before Python 3.11.4, a member of an enum is stored as a call of `getattr`.
    known = [LossScaler, ZeroStageEnum, fragment_address, (member, "builtins.getattr")]
    with torch.serialization.safe_globals(known):
        return torch.load(path, map_location=map_location, mmap=mmap, weights_only=True)


# Loading of a ZeRO checkpoint with another number of ranks than the number that wrote it.
#
# DeepSpeed loads the state of its optimizer only with the number of ranks that wrote the checkpoint. Each
# rank wrote one file with its part of the float32 weights and of AdamW's moments, as flat tensors. This
# module joins the parts of one parameter at a time and sets the whole parameter with functions of DeepSpeed,
# which divide it over the current ranks. Files are mapped into memory, so a rank holds one whole parameter at
# a time.
#
# The layout of the files is that of DeepSpeed 0.19.8:
#
# | stage | part of a rank                                                                                |
# |-------|-----------------------------------------------------------------------------------------------|
# | 1, 2  | fragments of parameters; `param_slice_mappings` has start and length of each fragment         |
# | 3     | an equal share of each parameter, padded at its end; `param_shapes` has the order of parameters |


_MOMENTS = ("exp_avg", "exp_avg_sq")
_mapped = partial(_load_tensors, map_location="cpu", mmap=True)  # returns the content of a file


def _restore(deep: Any, stage: int, folder: Path, ranks: int) -> None:
    """Set the trained weights and the optimizer state of a DeepSpeed engine.

    Args:
        deep: the engine of DeepSpeed.
        stage: its ZeRO stage, 1 to 3.
        folder: DeepSpeed's folder of the checkpoint.
        ranks: the number of ranks that wrote the checkpoint.
    """
    from deepspeed import zero
    from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

    files = [_mapped(folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt") for rank in range(ranks)]
    states = [file["optimizer_state_dict"] for file in files]
    # Each group of parameters as (rank, start, length) of its fragments in the flat tensors, by name
    layouts: list[dict[str, list[tuple[int, int, int]]]] = []
    if stage < 3:
        weights, optimizer = "single_partition_of_fp32_groups", "base_optimizer_state"
        for mappings in zip(*(state["param_slice_mappings"] for state in states), strict=True):
            layouts.append({})
            for rank, mapping in enumerate(mappings):
                for name, address in mapping.items():
                    fragment = rank, address.start, address.numel
                    layouts[-1].setdefault(name, []).append(fragment)
    else:
        weights, optimizer = "fp32_flat_groups", "optimizer_state_dict"
        for shapes in _mapped(folder / "zero_pp_rank_0_mp_rank_00_model_states.pt")["param_shapes"]:
            layouts.append({})
            start = 0
            for name, shape in shapes.items():
                share = -(-(numel := math.prod(shape)) // ranks)
                lengths = [max(0, min(share, numel - rank * share)) for rank in range(ranks)]
                layouts[-1][name] = [(rank, start, length) for rank, length in enumerate(lengths)]
                start += share
    parameters = dict(deep.module.named_parameters())
    for group, layout in enumerate(layouts):
        flats = {"": [state[weights][group] for state in states]}
        own = [state[optimizer]["state"].get(group, {}) for state in states]  # empty: no optimizer step yet
        flats |= {key: [state[key] for state in own] for key in _MOMENTS if key in own[0]}
        for name, fragments in layout.items():
            weight, *moments = (
                torch.cat([flat[rank].narrow(0, start, length) for rank, start, length in fragments])
                for flat in flats.values()
            )
            parameter = parameters[name]
            with torch.no_grad(), zero.GatheredParameters([parameter], modifier_rank=0):
                parameter.copy_(weight.view_as(parameter))
            if moments:
                begin_state(deep.optimizer, stage, own[0].get("step"))
            for key, moment in zip(_MOMENTS, moments, strict=False):  # this rank stores its part
                if stage < 3:
                    safe_set_full_optimizer_state(parameter, moment, key)
                    continue
                rank, share = dist.get_rank(), parameter.ds_tensor.numel()
                part = moment[share * rank : share * (rank + 1)]
                part = nn.functional.pad(part, (0, share - part.numel()))
                safe_set_local_optimizer_state(parameter, part, key)
    deep.optimizer.refresh_fp32_params()


def begin_state(optimizer: Any, stage: int, step: Any) -> None:
    """Create the optimizer state that DeepSpeed creates in its first step, and set the number of steps."""
    weights = "fp32_partitioned_groups_flat" if stage == 3 else "single_partition_of_fp32_groups"
    fused = optimizer.optimizer.defaults.get("fused")
    for flat in getattr(optimizer, weights):
        state = optimizer.optimizer.state[flat]
        if isinstance(step, Tensor):  # the fused AdamW reads it on the device of the weights
            step = step.to(flat.device if fused else step.device, copy=True)
        state["step"] = step
        for key in _MOMENTS:
            state.setdefault(key, torch.zeros_like(flat, requires_grad=False))
    if stage < 3:
        optimizer._lazy_init_hp_params_optimizer_state()


# The number format in which ZeRO-3 gathers weights.
#
# Ranks store the weights in float32. With `model.dtype=bfloat16`, autocast rounds the weights of linear
# layers to bfloat16 before every use, so ranks may exchange these weights in bfloat16: half of the bytes, and
# the forward computes the same numbers. DeepSpeed 0.19.8 then reduces the gradients of these weights in
# bfloat16, too, and adds them up in float32. Embeddings, norms, biases and heads that compute in float32 stay
# float32.
#
# DeepSpeed's own choice, `torch_autocast.lower_precision_safe_modules`, selects all layers of a class. It
# would also round embeddings that are tied to the head, heads that compute in float32, and exported weights.


_ATTRIBUTE = "comm_dtype"  # attribute of a parameter: the dtype in which DeepSpeed sends it


@contextmanager
def exact(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Gather parameters in the dtype in which the ranks store them, within the block."""
    sent: dict[Any, torch.dtype] = {p: getattr(p, _ATTRIBUTE) for p in parameters if hasattr(p, _ATTRIBUTE)}
    for parameter in sent:
        if parameter.ds_status.name == "AVAILABLE":  # gathered before, in 16 bits
            parameter.partition()
        delattr(parameter, _ATTRIBUTE)
    try:
        yield
    finally:
        for parameter, dtype in sent.items():
            setattr(parameter, _ATTRIBUTE, dtype)
