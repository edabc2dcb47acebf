"""The engine on plain torch: every rank has the whole model, and gradients are summed over ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from rlhf.config.models import Dtype
from rlhf.config.schedule import OptimConfig
from rlhf.core.batch import Outputs
from rlhf.engines.engine import Engine, EngineSettings, build_optimizer
from rlhf.models.forward import autocast, place
from rlhf.models.loading import check_saved, save
from rlhf.models.modules import (
    ActorCritic,
    RolloutModule,
    is_adapted,
    load_adapter,
    save_adapter,
    whole_weights,
)
from rlhf.processes.ranks import buckets, together

if TYPE_CHECKING:
    from rlhf.config.backends import BackendConfig
    from rlhf.core.batch import Batch, Budget
    from rlhf.models.modules import Policy, RewardModel
    from rlhf.processes.ranks import Ranks


M = TypeVar("M", bound=RolloutModule)
OPTIMIZER_FILE = "optimizer.pt"


class TorchEngine(Engine):
    """An engine with data parallelism over ranks, and a whole optimizer on each rank."""

    @classmethod
    def build(cls, config: BackendConfig, **parts: Any) -> Self:
        """Return the engine of a run; `parts` are the arguments of `Engine`."""
        return cls(**parts)

    @staticmethod
    def prepare(config: BackendConfig, dtype: Dtype, ranks: Ranks) -> None:
        """Do nothing: plain torch needs no preparation before a model is loaded."""

    @staticmethod
    def place(config: BackendConfig, frozen: M, ranks: Ranks) -> M:
        """Return a frozen model on the device, whole on each rank."""
        return place(frozen, ranks.device).requires_grad_(False)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        place(self.module, self.ranks.device)
        self.optimizer = build_optimizer(self.module, self.settings.optim, self.settings.value_lr)
        self.gradients = GradientSum(self.module.parameters(), self.ranks)
        scaled = self.settings.dtype is Dtype.float16
        self.scaler = torch.amp.GradScaler(self.ranks.device.type, enabled=scaled)

    def forward(self, batch: Batch, *extras: str) -> Outputs:
        """Run the trained module on a micro-batch, with gradients; see `Policy.forward` for `extras`."""
        with autocast(self.ranks.device, self.settings.dtype):
            return cast(Outputs, self.module(batch, *extras))

    def backward(self, loss: Tensor, last: bool) -> None:
        """Add the gradients of `loss`; with the last micro-batch, sum the gradients over the ranks."""
        with self.gradients.summed() if last else nullcontext():
            self.scaler.scale(loss).backward()

    def gradient_norm(self) -> Tensor:
        """Clip the gradients and return their norm before clipping."""
        self.scaler.unscale_(self.optimizer)
        return self.clip_gradients()

    def update(self, lr: float) -> None:
        """Make one optimizer step with the learning rate `lr`, then delete the gradients."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["scale"]
        _lay_out(self.optimizer)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.discard()

    def lower_scale(self) -> bool:
        """Halve the loss scale; return False if the scale is 1 or less, or the loss is not scaled."""
        if self.scaler.get_scale() <= 1:
            return False
        self.scaler.update()
        return True

    def discard(self) -> None:
        """Delete the gradients."""
        self.optimizer.zero_grad(set_to_none=True)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield name and tensor of every weight of the trained Hugging Face model, one tensor at a time."""
        yield from whole_weights(self.module.model)

    @contextmanager
    def borrow_policy(self) -> Iterator[PreTrainedModel]:
        """Yield the trained Hugging Face model, to generate in this process."""
        with autocast(self.ranks.device, self.settings.dtype):
            yield self.module.model

    def save_model(self, folder: Path) -> None:
        """Write the trained model in Hugging Face format."""
        if self.ranks.first:
            save(self.module.model, self.tokenizer, folder)

    def save(self, folder: Path) -> None:
        """Write trained weights and optimizer state for `load`; only rank 0 writes."""
        if not self.ranks.first:
            return
        for name, model in _models(self.module).items():
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
        """Restore the state that `save(folder)` wrote, with any number of ranks."""
        for name, model in _models(self.module).items():
            _restore(model, folder / name)
        state = torch.load(folder / OPTIMIZER_FILE, map_location=self.ranks.device, weights_only=True)
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        self.step_index = state["step_index"]


def _lay_out(optimizer: torch.optim.Optimizer) -> None:
    """Give gradients and moments the memory layout of their parameters.

    The fused AdamW reads parameters, gradients and moments in memory order, without comparing their strides.
    Sums over ranks and loaded checkpoints can have strides that differ from those of the parameters.
    """
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        if parameter.grad is not None and parameter.grad.stride() != parameter.stride():
            parameter.grad = torch.empty_like(parameter).copy_(parameter.grad)
        state = optimizer.state.get(parameter, {})
        for name, value in state.items():
            same = isinstance(value, Tensor) and value.shape == parameter.shape
            if same and value.stride() != parameter.stride():
                state[name] = torch.empty_like(parameter).copy_(value)


def _models(module: Policy | RewardModel | ActorCritic) -> dict[str, PreTrainedModel]:
    """Return the trained Hugging Face models by their names in a checkpoint."""
    critic = {"critic": module.critic.model} if isinstance(module, ActorCritic) else {}
    return {"model": module.model, **critic}


def _restore(model: PreTrainedModel, folder: Path) -> None:
    """Load the weights in `folder` into `model`; if the model has adapters, load only adapters.

    Raises:
        UserError: a file of the saved model is missing or damaged.
    """
    if is_adapted(model):
        return load_adapter(model, folder)
    check_saved(folder)
    model.load_state_dict(type(model).from_pretrained(folder, dtype=torch.float32).state_dict())


# The sum of gradients over the ranks, which runs while the backward pass computes the remaining gradients.
#
# Gradients are sent in buckets (Li et al., PyTorch Distributed, arXiv 2006.15704). A bucket is sent as soon
# as it is complete and all buckets before it were sent, so that all ranks send in the same order: the last
# layers first, as the backward pass reaches them.


class GradientSum:
    """The sum over the ranks of the gradients of some parameters.

    Args:
        parameters: parameters of a module; those that require no gradient are left out.
        ranks: the ranks, which all have the same parameters.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], ranks: Ranks) -> None:
        self.ranks = ranks
        self.buckets = buckets([each for each in parameters if each.requires_grad])[::-1]

    @contextmanager
    def summed(self) -> Iterator[None]:
        """Sum the gradients over the ranks, in place; a gradient that is None on all ranks stays None.

        The block must run one backward pass. Gradients are complete at the end of the block.

        Raises:
            RunError: another rank does not take part.
        """
        if self.ranks.size == 1:
            yield
            return
        place: dict[Tensor, int] = {}  # parameter -> index of its bucket
        for index, bucket in enumerate(self.buckets):
            place |= dict.fromkeys(bucket, index)
        missing = [len(bucket) for bucket in self.buckets]  # gradients that the backward pass has not reached
        sent: list[Any] = []  # handles of the sums of the first buckets
        used: list[float] = []

        def send() -> None:
            bucket = self.buckets[len(sent)]
            used.extend(float(each.grad is not None) for each in bucket)
            with together():
                sent.append(dist.all_reduce(_join(bucket), async_op=True))

        def reached(parameter: Tensor) -> None:
            missing[place[parameter]] -= 1
            while len(sent) < len(self.buckets) and not missing[len(sent)]:
                send()

        hooks = [each.register_post_accumulate_grad_hook(reached) for each in place]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        while len(sent) < len(self.buckets):
            send()
        users = self.ranks.sum(torch.tensor(used)).tolist()
        with together():
            for handle in sent:
                handle.wait()
        for parameter, count in zip(place, users, strict=True):
            if not count:
                parameter.grad = None


def _join(bucket: list[nn.Parameter]) -> Tensor:
    """Return the gradients of a bucket in one tensor [numel], and make each gradient a view of the tensor."""
    grads = [torch.zeros_like(each) if each.grad is None else each.grad for each in bucket]
    flat = torch.cat([grad.flatten() for grad in grads])
    for parameter, piece in zip(bucket, flat.split([grad.numel() for grad in grads]), strict=True):
        parameter.grad = piece.view_as(parameter)
    return flat


# The engine of a frozen model, for evaluation and relabelling.


class FrozenEngine(TorchEngine):
    """An engine without optimizer: a whole model on every rank, and its reference.

    Callers use only `infer`, `weights`, `borrow_policy` and `load`. `load` replaces the weights, so one
    engine can evaluate many checkpoints.

    Args:
        module: the model.
        reference: the frozen reference, or None.
        tokenizer: the tokenizer of the model.
        inference: limits of a forward on one rank.
        ranks: the ranks of the run, and the device of this rank.
        dtype: dtype of the forwards.
    """

    def __init__(
        self,
        module: Policy | RewardModel,
        reference: Policy | None,
        tokenizer: PreTrainedTokenizerFast,
        *,
        inference: Budget,
        ranks: Ranks,
        dtype: Dtype,
    ) -> None:
        Engine.__init__(  # skips TorchEngine.__init__, which creates an optimizer
            self,
            module,
            reference,
            tokenizer,
            ranks,
            EngineSettings(
                optim=OptimConfig(lr=0.0),
                total_steps=0,
                steps_per_batch=0,
                budget=inference,
                inference=inference,
                dtype=dtype,
            ),
        )
        # The weights still require gradients: autocast keeps 16-bit copies only of such weights.
        place(self.module, ranks.device)

    def load(self, folder: Path) -> None:
        """Load the weights of a model folder, or of an adapter folder if the model has adapters."""
        _restore(self.module.model, folder)
