"""The engine on plain torch: every rank has the whole model, and gradients are added up over ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf.config.model import Dtype
from rlhf.core.batch import Outputs
from rlhf.engines.engine import Engine, adam, groups
from rlhf.models.loading import save
from rlhf.models.lora import is_adapted, load_adapter, save_adapter, whole_weights
from rlhf.models.modules import ActorCritic
from rlhf.models.placement import place
from rlhf.models.precision import autocast

if TYPE_CHECKING:
    from rlhf.core.batch import Batch
    from rlhf.models.modules import Policy, RewardModel


OPTIMIZER_FILE = "optimizer.pt"


class TorchEngine(Engine):
    """Data parallel over ranks, AdamW on each."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        place(self.module, self.ranks.device)
        self.optimizer = torch.optim.AdamW(
            groups(self.module, self.optim.lr, self.value_lr), fused=True, **adam(self.optim)
        )
        scaled = self.dtype is Dtype.float16
        self.scaler = torch.amp.GradScaler(self.ranks.device.type, enabled=scaled)

    def forward(self, batch: Batch) -> Outputs:
        """The module that is trained, on a micro-batch."""
        with autocast(self.ranks.device, self.dtype):
            return cast(Outputs, self.module(batch))

    def backward(self, loss: Tensor, last: bool) -> None:
        """Add to the gradients of this rank; with the last, add up those of all."""
        self.scaler.scale(loss).backward()
        if last:
            self.ranks.sum_gradients(self.module.parameters())

    def gradient_norm(self) -> Tensor:
        """The norm of the gradients, which are clipped here."""
        self.scaler.unscale_(self.optimizer)
        return self.clip_gradients()

    def update(self, lr: float) -> None:
        """One step of AdamW."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["scale"]
        lay_out(self.optimizer)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.discard()

    def lower_scale(self) -> bool:
        """Halve the scale of the loss; False where it is 1 or less, or there is none."""
        if self.scaler.get_scale() <= 1:
            return False
        self.scaler.update()
        return True

    def discard(self) -> None:
        """Forget the gradients."""
        self.optimizer.zero_grad(set_to_none=True)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The weights of the Hugging Face model that is trained, one tensor at a time."""
        yield from whole_weights(self.module.model)

    @contextmanager
    def borrow_policy(self) -> Iterator[PreTrainedModel]:
        """The Hugging Face model that is trained, to generate in this process."""
        with autocast(self.ranks.device, self.dtype):
            yield self.module.model

    def save_model(self, folder: Path) -> None:
        """Write the model that is trained in Hugging Face format."""
        if self.ranks.first:
            save(self.module.model, self.tokenizer, folder)

    def save(self, folder: Path) -> None:
        """Write what is trained and optimizer state for `load`; every rank has the same."""
        if not self.ranks.first:
            return
        for name, model in models(self.module).items():
            if is_adapted(model):
                save_adapter(model, folder / name)
            else:
                save(model, self.tokenizer, folder / name)
        state = {
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "step_index": self.step_index,
        }
        torch.save(state, folder / OPTIMIZER_FILE)

    def load(self, folder: Path) -> None:
        """Stand where `save(folder)` stood, by however many ranks."""
        for name, model in models(self.module).items():
            restore(model, folder / name)
        state = torch.load(folder / OPTIMIZER_FILE, map_location=self.ranks.device, weights_only=True)
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        self.step_index = state["step_index"]


def lay_out(optimizer: torch.optim.Optimizer) -> None:
    """Have gradients and moments lie in memory as their parameters do: the fused AdamW goes through all of
    them in one order, and does not look. Sums over ranks and checkpoints can bring another."""
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        if parameter.grad is not None and parameter.grad.stride() != parameter.stride():
            parameter.grad = torch.empty_like(parameter).copy_(parameter.grad)
        state = optimizer.state.get(parameter, {})
        for name, value in state.items():
            if value.shape == parameter.shape and value.stride() != parameter.stride():
                state[name] = torch.empty_like(parameter).copy_(value)


def models(module: Policy | RewardModel | ActorCritic) -> dict[str, PreTrainedModel]:
    """The Hugging Face models of what is trained, by their names in a checkpoint."""
    critic = {"critic": module.critic.model} if isinstance(module, ActorCritic) else {}
    return {"model": module.model, **critic}


def restore(model: PreTrainedModel, folder: Path) -> None:
    """Give `model` the weights of a checkpoint; of one with adapters, these alone."""
    if is_adapted(model):
        return load_adapter(model, folder)
    model.load_state_dict(type(model).from_pretrained(folder, dtype=torch.float32).state_dict())
