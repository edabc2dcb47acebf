"""What trains: a module and its optimizer behind one interface. Backends say how gradients become a step."""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from rlhf.config.model import Dtype
from rlhf.config.schedule import LRSchedule
from rlhf.core.batch import microbatches
from rlhf.core.metrics import How, Stat, merge
from rlhf.models.inference import infer
from rlhf.models.lora import is_adapted, save_adapter
from rlhf.models.modules import ActorCritic, Policy

if TYPE_CHECKING:
    from rlhf.config.schedule import OptimConfig
    from rlhf.core.batch import Batch, Outputs, Rollouts
    from rlhf.core.metrics import Metrics
    from rlhf.models.modules import OverRollouts, RewardModel
    from rlhf.objectives.objective import Objective
    from rlhf.processes.ranks import Ranks


class NonFinite(RuntimeError):
    """A loss or gradient norm that is NaN or infinite; the weights are still those before the step."""

    def __init__(self, what: str, index: Tensor) -> None:
        super().__init__(what)
        self.what = what
        self.index = index.tolist()  # rows of the task's data set in the minibatch, for replay


class Engine(ABC):
    """Trains `module` against an objective, and holds the frozen `reference`; on every rank, with the others.

    Args:
        module: what is trained: those of its weights that require a gradient, in float32.
        reference: the frozen policy where the backend has placed it, or None where the objective needs none.
        tokenizer: saved beside the model.
        optim: optimizer settings.
        total_steps: optimizer steps of the whole run, for the learning-rate schedule.
        steps_per_batch: optimizer steps on one rollout batch; with 1, the first forward gives the old
            log-probs.
        micro_batch: sequences a forward and rank.
        ranks: the processes that train together, and this one's device.
        stale: a batch may be sampled by older weights; else the sampler's log-probs are those of the module.
        dtype: what forwards compute in; 16 bits are autocast over float32 weights.
        value_lr: learning rate of a value model, which follows the same schedule; None: `optim.lr`.
    """

    def __init__(
        self,
        module: Policy | RewardModel | ActorCritic,
        reference: Policy | None,
        tokenizer: PreTrainedTokenizerFast,
        optim: OptimConfig,
        *,
        total_steps: int,
        steps_per_batch: int,
        micro_batch: int,
        ranks: Ranks,
        stale: bool = False,
        dtype: Dtype = Dtype.float32,
        value_lr: float | None = None,
    ) -> None:
        self.module = module
        self.reference = reference
        self.tokenizer = tokenizer
        self.optim = optim
        self.total_steps = total_steps
        self.steps_per_batch = steps_per_batch
        self.micro_batch = micro_batch
        self.ranks = ranks
        self.stale = stale
        self.dtype = dtype
        self.value_lr = value_lr
        self.step_index = 0

    # -- what a backend says -----------------------------------------------------------------------

    @abstractmethod
    def forward(self, batch: Batch) -> Outputs:
        """The module that is trained, on a micro-batch."""

    @abstractmethod
    def backward(self, loss: Tensor, last: bool) -> None:
        """Add the gradients of a micro-batch's part of the loss; with `last` nothing more comes this step."""

    @abstractmethod
    def gradient_norm(self) -> Tensor:
        """The norm of the gradients, summed over ranks, before they are clipped to `optim.max_grad_norm`."""

    @abstractmethod
    def update(self, lr: float) -> None:
        """Move the weights with the gradients clipped, and forget these."""

    @abstractmethod
    def discard(self) -> None:
        """Forget the gradients."""

    @abstractmethod
    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The weights of the Hugging Face model that is sampled from, whole, one tensor at a time: each only
        until the next is asked for. All ranks must go through them together.
        """

    @abstractmethod
    def borrow_policy(self) -> AbstractContextManager[PreTrainedModel]:
        """The Hugging Face model that is trained, whole and on this device, to generate in this process."""

    @abstractmethod
    def save_model(self, folder: Path) -> None:
        """Write the model that is trained in Hugging Face format; called on every rank."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write weights and optimizer state for `load`; called on every rank."""

    @abstractmethod
    def load(self, folder: Path) -> None:
        """Stand where `save(folder)` stood; called on every rank."""

    def lower_scale(self) -> bool:
        """After gradients that are not finite: scale the loss by less, or False where that cannot help."""
        return False

    def save_adapter(self, folder: Path) -> None:
        """Write the adapter of the model that is trained in the format of PEFT, where it has one."""
        if self.ranks.first and is_adapted(self.module.model):
            save_adapter(self.module.model, folder)

    # -- what all have in common -------------------------------------------------------------------

    @property
    def policy(self) -> Policy:
        """The policy that is trained, without its value model."""
        policy = self.module.actor if isinstance(self.module, ActorCritic) else self.module
        assert isinstance(policy, Policy)
        return policy

    def infer(self, module: OverRollouts, rollouts: Rollouts, field: str) -> Tensor:
        """The output `field` of `module`, without gradient: [N, K, T], [N, K, T+1] or [N, K]."""
        return infer(module, rollouts, field, self.micro_batch, self.ranks, self.dtype)

    def annotate(self, batch: Batch, needs: frozenset[str]) -> Batch:
        """Fill in what the objective `needs` (see `Objective.needs`) and the batch does not have yet."""
        filled: dict[str, Any] = {}
        if "ref_logprobs" in needs and batch.ref_logprobs is None:
            assert self.reference is not None, "the objective needs a reference that was not built"
            filled["ref_logprobs"] = self.infer(self.reference, batch, "logprobs")
        several = self.steps_per_batch > 1
        if ("ratio" in needs and several) or ("old_logprobs" in needs and (several or self.stale)):
            filled["old_logprobs"] = self.infer(self.policy, batch, "logprobs")
        if "values" in needs:
            assert isinstance(self.module, ActorCritic), "the objective needs a value model"
            filled["values"] = self.infer(self.module.critic, batch, "values")
        return replace(batch, **filled)

    def step(self, batch: Batch, objective: Objective) -> Metrics:
        """One optimizer step on a minibatch: each sum of losses divided by its global count, once.

        Every rank is given the whole minibatch, and differentiates its micro-batches of it. Where only the
        scale of the loss was too high (float16), the step is left out and counted.

        Raises:
            NonFinite: the loss or the gradient norm is not finite; no weight has changed.
        """
        lr = learning_rate(self.optim, self.step_index, self.total_steps)
        counts = objective.count(batch)
        losses = {name: torch.zeros((), dtype=torch.float64, device=self.ranks.device) for name in counts}
        found: Metrics = {}
        micros = list(microbatches(batch, self.micro_batch, self.ranks.rank, self.ranks.size))
        for place, (_, micro, ours) in enumerate(micros):
            sums, stats = objective.loss(self.forward, micro.to(self.ranks.device))
            means = {name: total / max(counts[name], 1) for name, total in sums.items()}
            loss = torch.stack([objective.loss_weights.get(name, 1.0) * x for name, x in means.items()]).sum()
            self.backward(loss if ours else 0.0 * loss, last=place == len(micros) - 1)
            for name, part in means.items():
                losses[name] += part.detach() * ours
            merge(found, stats if ours else {name: stat.emptied() for name, stat in stats.items()})
        figures = self.ranks.merge(found)
        figures["lr"] = Stat(lr, 1.0, How.last)
        figures["policy/skipped_steps"] = Stat(float(not micros), 1.0, How.sum)
        if micros:
            totals = self.ranks.sum(torch.stack(list(losses.values())))
            norm = self.gradient_norm()
            finite = bool(torch.isfinite(totals.sum() + norm))
            if finite:
                self.update(lr)
                figures["policy/grad_norm"] = Stat(norm)
            else:
                self.discard()
                if not bool(torch.isfinite(totals.sum())) or not self.lower_scale():
                    named = zip(losses, totals.tolist(), strict=True)
                    told = ", ".join(f"loss/{name} {total}" for name, total in named)
                    raise NonFinite(f"{told}, gradient norm {float(norm)}", batch.index)
            if self.dtype is Dtype.float16:
                figures["policy/overflows"] = Stat(float(not finite), 1.0, How.sum)
            figures |= {f"loss/{name}": Stat(total) for name, total in zip(losses, totals, strict=True)}
        self.step_index += 1
        return figures

    def clip_gradients(self) -> Tensor:
        """Scale whole gradients down to `optim.max_grad_norm`; returns the norm that they had."""
        bound = self.optim.max_grad_norm or torch.inf
        return torch.nn.utils.clip_grad_norm_(self.module.parameters(), bound).detach()

    def peak_gib(self) -> float:
        """Largest memory in use so far, in GiB: of the GPU where there is one, else of this process."""
        if self.ranks.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.ranks.device) / 2**30
        import resource

        unit = 1 if sys.platform == "darwin" else 2**10  # bytes: man getrusage
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def learning_rate(config: OptimConfig, step: int, steps: int) -> float:
    """The learning rate of optimizer step `step` (from 0) of `steps`: linear warm-up, then the schedule."""
    warmup = config.warmup if config.warmup >= 1 or config.warmup == 0 else config.warmup * steps
    if step < warmup:
        return config.lr * (step + 1) / (warmup + 1)
    done = min(1.0, (step - warmup) / max(1.0, steps - warmup))
    if config.schedule is LRSchedule.linear:
        return config.lr * (1 - done)
    if config.schedule is LRSchedule.cosine:
        return config.lr * 0.5 * (1 + math.cos(math.pi * done))
    return config.lr


def groups(module: torch.nn.Module, lr: float, value_lr: float | None) -> list[dict[str, Any]]:
    """The optimizer's groups: what is trained, or that of policy and value model; `scale` is of the rate."""
    if not isinstance(module, ActorCritic):
        return [{"params": trained(module), "scale": 1.0}]
    return [
        {"params": trained(module.actor), "scale": 1.0},
        {"params": trained(module.critic), "scale": 1.0 if value_lr is None else value_lr / lr},
    ]


def trained(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """The parameters that are trained."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def adam(optim: OptimConfig) -> dict[str, Any]:
    """The arguments of AdamW."""
    return {"lr": optim.lr, "betas": optim.betas, "eps": optim.eps, "weight_decay": optim.weight_decay}
