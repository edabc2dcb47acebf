"""The engine on plain torch: module, frozen reference, optimizer and schedule on one device."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from rlhf.batch import Batch, Rollouts, microbatches
from rlhf.config import Dtype, LRSchedule, OptimConfig
from rlhf.engines.engine import NonFinite
from rlhf.infer import autocast, infer
from rlhf.metrics import How, Metrics, Stat, merge
from rlhf.models import ActorCritic, Outputs, OverRollouts, Policy, RewardModel, save
from rlhf.objectives.objective import Objective

OPTIMIZER_FILE = "optimizer.pt"


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
    """The optimizer's groups: all parameters, or those of policy and value model; `scale` is of the rate."""
    if not isinstance(module, ActorCritic):
        return [{"params": list(module.parameters()), "scale": 1.0}]
    return [
        {"params": list(module.actor.parameters()), "scale": 1.0},
        {"params": list(module.critic.parameters()), "scale": 1.0 if value_lr is None else value_lr / lr},
    ]


def restore(model: PreTrainedModel, folder: Path) -> None:
    """Give `model` the weights of a checkpoint."""
    model.load_state_dict(type(model).from_pretrained(folder, dtype=torch.float32).state_dict())


class TorchEngine:
    """Trains `module` against an objective; holds the reference and everything that knows of devices.

    Args:
        module: what is trained, weights in float32.
        reference: the frozen policy, or None where the objective needs none.
        tokenizer: saved beside the model.
        optim: optimizer settings.
        total_steps: optimizer steps of the whole run, for the learning-rate schedule.
        steps_per_batch: optimizer steps on one rollout batch; with 1, the first forward gives the old
            log-probs.
        stale: a batch may be sampled by older weights; else the sampler's log-probs are those of the module.
        micro_batch: sequences a forward.
        device: where module and reference go.
        dtype: what forwards compute in; bfloat16 is autocast over float32 weights.
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
        device: torch.device,
        stale: bool = False,
        dtype: Dtype = Dtype.float32,
        value_lr: float | None = None,
    ) -> None:
        self.module = module.to(device)
        self.reference = reference.to(device).requires_grad_(False) if reference else None
        self.tokenizer = tokenizer
        self.optim = optim
        self.total_steps = total_steps
        self.steps_per_batch = steps_per_batch
        self.stale = stale
        self.micro_batch = micro_batch
        self.device = device
        self.dtype = dtype
        self.step_index = 0
        self.optimizer = torch.optim.AdamW(
            groups(self.module, optim.lr, value_lr),
            lr=optim.lr,
            betas=optim.betas,
            eps=optim.eps,
            weight_decay=optim.weight_decay,
        )

    @property
    def policy(self) -> Policy:
        """The policy that is trained, without its value model."""
        policy = self.module.actor if isinstance(self.module, ActorCritic) else self.module
        assert isinstance(policy, Policy)
        return policy

    def infer(self, module: OverRollouts, rollouts: Rollouts, field: str) -> Tensor:
        """The output `field` of `module`, without gradient: [N, K, T], [N, K, T+1] or [N, K]."""
        return infer(module, rollouts, field, self.micro_batch, self.device, self.dtype)

    def annotate(self, batch: Batch, needs: frozenset[str]) -> Batch:
        """Fill in what the objective `needs` (see `Objective.needs`)."""
        filled: dict[str, Any] = {}
        if "ref_logprobs" in needs:
            assert self.reference is not None, "the objective needs a reference that was not built"
            filled["ref_logprobs"] = self.infer(self.reference, batch, "logprobs")
        several = self.steps_per_batch > 1
        if ("ratio" in needs and several) or ("old_logprobs" in needs and (several or self.stale)):
            filled["old_logprobs"] = self.infer(self.policy, batch, "logprobs")
        if "values" in needs:
            assert isinstance(self.module, ActorCritic), "the objective needs a value model"
            filled["values"] = self.infer(self.module.critic, batch, "values")
        return replace(batch, **filled)

    def forward(self, batch: Batch) -> Outputs:
        """The module that is trained, on a micro-batch."""
        with autocast(self.device, self.dtype):
            return cast(Outputs, self.module(batch))

    def step(self, batch: Batch, objective: Objective) -> Metrics:
        """One optimizer step on a minibatch: micro-batches, global counts, clipping.

        Raises:
            NonFinite: the loss or the gradient norm is not finite; no weight has changed.
        """
        lr = learning_rate(self.optim, self.step_index, self.total_steps)
        figures: Metrics = {"lr": Stat(lr, 1.0, How.last)}
        counts = objective.count(batch)
        losses = {name: torch.zeros((), dtype=torch.float64, device=self.device) for name in counts}
        seen = False
        for _, micro in microbatches(batch, self.micro_batch):
            sums, stats = objective.loss(self.forward, micro.to(self.device))
            means = {name: total / max(counts[name], 1) for name, total in sums.items()}
            parts = [objective.loss_weights.get(name, 1.0) * part for name, part in means.items()]
            torch.stack(parts).sum().backward()
            for name, part in means.items():
                losses[name] += part.detach()
            merge(figures, stats)
            seen = True
        figures["policy/skipped_steps"] = Stat(float(not seen), 1.0, How.sum)
        if seen:
            limit = self.optim.max_grad_norm or torch.inf
            norm = torch.nn.utils.clip_grad_norm_(self.module.parameters(), limit)
            if not bool(torch.isfinite(sum(losses.values()) + norm)):
                self.optimizer.zero_grad(set_to_none=True)
                told = ", ".join(f"loss/{name} {float(loss)}" for name, loss in losses.items())
                raise NonFinite(f"{told}, gradient norm {float(norm)}", batch.index)
            for group in self.optimizer.param_groups:
                group["lr"] = lr * group["scale"]
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            figures |= {f"loss/{name}": Stat(loss) for name, loss in losses.items()}
            figures["policy/grad_norm"] = Stat(norm.detach())
        self.step_index += 1
        return figures

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The weights of the Hugging Face model that is trained, one tensor at a time."""
        yield from self.module.model.state_dict().items()

    @contextmanager
    def borrow_policy(self) -> Iterator[PreTrainedModel]:
        """The Hugging Face model that is trained, whole and on this device, to generate in this process."""
        with autocast(self.device, self.dtype):
            yield self.module.model

    def save_model(self, folder: Path) -> None:
        """Write the model that is trained in Hugging Face format."""
        save(self.module.model, self.tokenizer, folder)

    def save(self, folder: Path) -> None:
        """Write weights and optimizer state for `load`."""
        self.save_model(folder / "model")
        if isinstance(self.module, ActorCritic):
            self.module.critic.model.save_pretrained(folder / "critic")
        state = {"optimizer": self.optimizer.state_dict(), "step_index": self.step_index}
        torch.save(state, folder / OPTIMIZER_FILE)

    def load(self, folder: Path) -> None:
        """Stand where `save(folder)` stood."""
        restore(self.module.model, folder / "model")
        if isinstance(self.module, ActorCritic):
            restore(self.module.critic.model, folder / "critic")
        state = torch.load(folder / OPTIMIZER_FILE, map_location=self.device, weights_only=True)
        self.optimizer.load_state_dict(state["optimizer"])
        self.step_index = state["step_index"]

    def peak_gib(self) -> float:
        """Largest memory in use so far: of the GPU where there is one, else of this process."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) / 2**30
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
