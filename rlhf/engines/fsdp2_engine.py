"""The engine on FSDP2 of torch (`fully_shard`): ranks share weights, gradients and optimizer state.

Zhao et al., arXiv 2304.11277; in this second form each parameter is a `DTensor`, divided by rows:

    block    gathered before its forward, released after it; gathered again for its backward pass, after which
             the gradients are summed over ranks and each rank keeps the sums of its rows
    root     the embeddings, the head and the other weights of a model, gathered during a whole forward, and
             during a whole backward pass

Gradients are summed with every micro-batch. Weights are float32, as with `backend=torch`; with
`model.dtype=bfloat16`, forward passes use autocast, and ranks still exchange float32 numbers.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from rlhf.config.models import RANKS_FILE, BackendConfig
from rlhf.core.batch import Batch, Outputs
from rlhf.engines.engine import Engine, M, TorchEngine, build_optimizer, full, hollow
from rlhf.models.forward import autocast, is_placeholder
from rlhf.models.modules import RolloutModule
from rlhf.processes.ranks import Ranks, have_group

_PART = "fsdp2-{}.pt"  # file of a rank in a checkpoint: its part of every tensor


class FSDP2Engine(TorchEngine):
    """An engine with data parallelism over ranks, each of which stores a part of every weight."""

    @staticmethod
    def place(config: BackendConfig, frozen: M, ranks: Ranks) -> M:
        """Return a frozen model that is divided over the ranks."""
        _divide(frozen.requires_grad_(False), ranks)
        # The teacher of a distillation calls `states`, and its head until the backward pass.
        register_fsdp_forward_method(frozen, "states")
        cast(FSDPModule, frozen).set_reshard_after_forward(False, recurse=False)
        return frozen

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        Engine.__init__(self, *args, **kwargs)
        self.plan = hollow(self.module.model)
        # Each model is a root: annotations run the policy and the value model of an `ActorCritic` alone.
        self.roots = [part for part in self.module.modules() if isinstance(part, RolloutModule)]
        for root in self.roots:
            _divide(root, self.ranks)
        models = [each for each in (self.module, self.reference) if isinstance(each, nn.Module)]
        self.units = [part for each in models for part in each.modules() if isinstance(part, FSDPModule)]
        self.optimizer = build_optimizer(self.module, self.settings.optim, self.settings.value_lr)
        self.scaler = torch.amp.GradScaler(self.ranks.device.type, enabled=False)
        for parameter in self.parameters().values():  # as in the first step, so that `load` can fill them
            moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            self.optimizer.state[parameter] = {"step": torch.zeros((), device=self.ranks.device), **moments}

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the trained parameters by name: the part of this rank of each."""
        self.release()
        return {name: each for name, each in self.module.named_parameters() if each.requires_grad}

    def release(self) -> None:
        """Release weights that stay gathered: with shared prompts after a backward pass, or after an error.

        Until then, the parameters of a module are other objects than those of the optimizer, without
        gradients.
        """
        for unit in self.units:
            unit.reshard()

    def forward(self, batch: Batch, *extras: str) -> Outputs:
        """Run the trained module on a micro-batch, with gradients; see `Policy.forward` for `extras`.

        A block runs twice if K > 1 samples share their prompt. The gradients of the prompt's keys and values
        reach the block past its outputs, where FSDP2 would gather its weights, so they must still be there.
        """
        for root in self.roots:
            shares = root.shared_prefix and batch.response_ids.shape[1] > 1
            cast(FSDPModule, root).set_reshard_after_backward(not shares)
            cast(FSDPModule, root).set_reduce_scatter_unused_params(not shares)
        # The gradient of a 16-bit copy that a later micro-batch uses again would reach its weight too late.
        with autocast(self.ranks.device, self.settings.dtype, cached=False):
            return cast(Outputs, self.module(batch, *extras))

    def backward(self, loss: Tensor, last: bool) -> None:
        """Add the gradients of `loss`, summed over the ranks."""
        loss.backward()
        self.release()

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield name and whole tensor of every weight, gathered one at a time."""
        self.release()
        for name, tensor in super().weights():
            yield name, full(tensor)

    def state(self) -> dict[str, Tensor]:
        """Return weights, optimizer state and number of steps: only tensors, which `load` fills in place."""
        found = {"step_index": torch.tensor(self.step_index)}
        for name, parameter in self.parameters().items():
            for key, value in {"weight": parameter, **self.optimizer.state[parameter]}.items():
                found[f"{name} {key}"] = value.detach()
        return found

    def save(self, folder: Path) -> None:
        """Write weights and optimizer state for `load`; each rank writes its part."""
        part = {name: x.to_local() if isinstance(x, DTensor) else x for name, x in self.state().items()}
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(part, folder / _PART.format(self.ranks.rank))
        if self.ranks.first:
            (folder / RANKS_FILE).write_text(json.dumps({"ranks": self.ranks.size}))

    def load(self, folder: Path) -> None:
        """Restore the state that `save(folder)` wrote, with any number of ranks, one tensor at a time."""
        wrote = range(json.loads((folder / RANKS_FILE).read_text())["ranks"])
        read = partial(torch.load, map_location="cpu", mmap=True, weights_only=True)
        parts = [read(folder / _PART.format(rank)) for rank in wrote]
        for name, own in (state := self.state()).items():
            saved = parts[0][name]
            if isinstance(own, DTensor):
                whole = torch.cat([part[name] for part in parts])
                saved = distribute_tensor(whole, own.device_mesh, own.placements, src_data_rank=None)
            own.copy_(saved)
        self.step_index = int(state["step_index"])


def _divide(module: RolloutModule, ranks: Ranks) -> None:
    """Divide the weights of a module over the ranks: its blocks, and the rest.

    The values are those of the first rank; parameters of other ranks may be placeholders.
    """
    have_group(ranks.device)
    # Outputs are views of a flat tensor. The warning is about operations in place, which nobody applies.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module", UserWarning)
    module.whole = True  # at the end of a forward, hooks release the gathered weights
    mesh = DeviceMesh.from_group(cast(dist.ProcessGroup, dist.group.WORLD), ranks.device.type)
    units = (RolloutModule, GradientCheckpointingLayer)
    for part in [part for part in module.modules() if isinstance(part, units)][::-1]:  # the module comes last
        for parameter in (each for each in part.parameters() if not isinstance(each, DTensor)):
            if is_placeholder(parameter):
                parameter.data = torch.empty(parameter.shape, dtype=parameter.dtype)
            parameter.data = parameter.data.to(ranks.device).contiguous()
            dist.broadcast(parameter.data, 0)
        unit = fully_shard(part, mesh=mesh, reshard_after_forward=True)
        unit.set_force_sum_reduction_for_comms(True)  # gloo has no sum with a factor
        unit.set_gradient_divide_factor(1.0)  # sums, because losses are divided by counts of all ranks
    for buffer in module.buffers():
        buffer.data = buffer.data.to(ranks.device)
