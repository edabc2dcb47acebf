"""Loading of a ZeRO checkpoint with another number of ranks than the number that wrote it.

DeepSpeed loads the state of its optimizer only with the number of ranks that wrote the checkpoint. Each rank
wrote one file with its part of the float32 weights and of AdamW's moments, as flat tensors. This module joins
the parts of one parameter at a time and sets the whole parameter with functions of DeepSpeed, which divide it
over the current ranks. Files are mapped into memory, so a rank holds one whole parameter at a time.

The layout of the files is that of DeepSpeed 0.19.8:

| stage | part of a rank                                                                                |
|-------|-----------------------------------------------------------------------------------------------|
| 1, 2  | fragments of parameters; `param_slice_mappings` has start and length of each fragment         |
| 3     | an equal share of each parameter, padded at its end; `param_shapes` has the order of parameters |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

MOMENTS = ("exp_avg", "exp_avg_sq")

Read = Callable[[Path], Any]  # returns the content of a file of a checkpoint


@dataclass(frozen=True, slots=True)
class Whole:
    """A trained parameter and its optimizer state, joined from the parts of all ranks."""

    weight: Tensor  # [numel] float32
    moments: dict[str, Tensor]  # name -> [numel] float32; empty if no optimizer step was made
    step: Any  # number of optimizer steps, in the type of the optimizer: int, or tensor with one element


@dataclass(frozen=True, slots=True)
class Part:
    """The flat tensors of one parameter group in the file of one rank."""

    weight: Tensor
    state: dict[str, Any]  # state of the optimizer: moments as flat tensors, step


_Fragment = tuple[int, int, int]  # rank, start and length of a fragment in the flat tensors of a rank


def joined(folder: Path, ranks: int, read: Read) -> Iterator[tuple[str, Whole]]:
    """Yield name and state of each trained parameter of a checkpoint.

    Args:
        folder: DeepSpeed's folder of the checkpoint.
        ranks: the number of ranks that wrote the checkpoint.
        read: reads a file of the checkpoint.
    """
    files = [read(folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt") for rank in range(ranks)]
    states = [file["optimizer_state_dict"] for file in files]
    if "param_slice_mappings" in states[0]:  # stage 1 or 2
        keys = "single_partition_of_fp32_groups", "base_optimizer_state"
        layouts = [
            mapped(group) for group in zip(*(each["param_slice_mappings"] for each in states), strict=True)
        ]
    else:
        keys = "fp32_flat_groups", "optimizer_state_dict"
        shapes = read(folder / "zero_pp_rank_0_mp_rank_00_model_states.pt")["param_shapes"]
        layouts = [shares(group, ranks) for group in shapes]
    groups = zip(*(parts(state, *keys) for state in states), strict=True)
    for group, layout in zip(groups, layouts, strict=True):
        for name, fragments in layout.items():
            yield name, join(group, fragments)


def parts(state: dict[str, Any], weights: str, optimizer: str) -> Iterator[Part]:
    """Yield the parts of one rank, one per parameter group, given the keys of weights and optimizer state."""
    states = state[optimizer]["state"]
    for group, weight in enumerate(state[weights]):
        yield Part(weight, states.get(group, {}))


def mapped(mappings: Iterable[dict[str, Any]]) -> dict[str, list[_Fragment]]:
    """Return the fragments of each parameter of a group, given the mappings of all ranks (stages 1 and 2)."""
    found: dict[str, list[_Fragment]] = {}
    for rank, mapping in enumerate(mappings):
        for name, address in mapping.items():
            found.setdefault(name, []).append((rank, address.start, address.numel))
    return found


def shares(shapes: dict[str, torch.Size], ranks: int) -> dict[str, list[_Fragment]]:
    """Return the fragments of each parameter of a group, given the shapes of the parameters (stage 3)."""
    found: dict[str, list[_Fragment]] = {}
    start = 0
    for name, shape in shapes.items():
        numel = math.prod(shape)
        share = -(-numel // ranks)
        lengths = [max(0, min(share, numel - rank * share)) for rank in range(ranks)]
        found[name] = [(rank, start, length) for rank, length in enumerate(lengths)]
        start += share
    return found


def join(group: tuple[Part, ...], fragments: list[_Fragment]) -> Whole:
    """Return the parameter that consists of `fragments`, given the parts of its group from all ranks."""

    def whole(flats: list[Tensor]) -> Tensor:
        return torch.cat([flats[rank].narrow(0, start, length) for rank, start, length in fragments])

    states = [part.state for part in group]
    moments = {key: whole([state[key] for state in states]) for key in MOMENTS if key in states[0]}
    return Whole(whole([part.weight for part in group]), moments, states[0].get("step"))


def restore(deep: Any, stage: int, folder: Path, ranks: int, read: Read) -> None:
    """Set the trained weights and the optimizer state of a DeepSpeed engine.

    Args:
        deep: the engine of DeepSpeed.
        stage: its ZeRO stage, 1 to 3.
        folder: DeepSpeed's folder of the checkpoint.
        ranks: the number of ranks that wrote the checkpoint.
        read: reads a file of the checkpoint.
    """
    from deepspeed import zero

    parameters = dict(deep.module.named_parameters())
    for name, whole in joined(folder, ranks, read):
        parameter = parameters[name]
        with torch.no_grad(), zero.GatheredParameters([parameter], modifier_rank=0):
            parameter.copy_(whole.weight.view_as(parameter))
        if whole.moments:
            begin_state(deep.optimizer, stage, whole.step)
        for key, moment in whole.moments.items():
            _set_moment(parameter, key, moment, stage)
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
        for key in MOMENTS:
            state.setdefault(key, torch.zeros_like(flat, requires_grad=False))
    if stage < 3:
        optimizer._lazy_init_hp_params_optimizer_state()


def _set_moment(parameter: Any, key: str, moment: Tensor, stage: int) -> None:
    """Set the part of a moment [numel] that this rank stores."""
    from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

    if stage < 3:
        safe_set_full_optimizer_state(parameter, moment, key)
        return
    rank, share = torch.distributed.get_rank(), parameter.ds_tensor.numel()
    part = moment[share * rank : share * (rank + 1)]
    safe_set_local_optimizer_state(parameter, nn.functional.pad(part, (0, share - part.numel())), key)
