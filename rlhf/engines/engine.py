"""Training engines: a module, its frozen reference and its optimizer; and the engine on plain torch.

The base class annotates batches and accumulates losses; a backend implements forward, backward, the optimizer
step, and saving. N prompts, K samples of a prompt, T response tokens.
"""

from __future__ import annotations

import copy
import math
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from rlhf.config.models import BackendConfig, Dtype, MovingConfig
from rlhf.config.run import ESSScaling, LRSchedule, OptimConfig, Optimizer
from rlhf.core.batch import Batch, Budget, Outputs, Rollouts, microbatches
from rlhf.core.metrics import How, Metrics, Stat, merge
from rlhf.engines.moving import Moving, mix
from rlhf.models import modules
from rlhf.models.forward import autocast, infer, place, shared_copies
from rlhf.models.loading import check_saved, save
from rlhf.models.logprobs import EXTRAS
from rlhf.models.modules import ActorCritic, LogprobHead, Policy, RewardModel, RolloutModule, backbone
from rlhf.objectives.objective import Objective
from rlhf.processes.ranks import Ranks, buckets, together
from rlhf.scorers.teacher import Reference, ServedTeacher, compared_with
from rlhf.terminal.console import Phases

M = TypeVar("M", bound=RolloutModule)
OPTIMIZER_FILE = "optimizer.pt"
_INFERRED = {"logprobs": "log-probs"}  # outputs of a model, for the progress display


class NonFinite(RuntimeError):
    """An error: a loss or the gradient norm is NaN or infinite. The weights have not changed.

    Args:
        what: the losses and the gradient norm, as text.
        batch: the minibatch of N prompts. Its rows of the data set, as numbers (`index`) and as places of the
            files (`places`), reproduce the failure.
    """

    def __init__(self, what: str, batch: Batch) -> None:
        super().__init__(what)
        self.what = what
        self.index = batch.index.tolist()
        self.places = [batch.place(i) for i in range(len(batch))]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """The settings of an engine.

    Args:
        optim: optimizer settings.
        total_steps: optimizer steps of the whole run, for the learning-rate schedule.
        steps_per_batch: optimizer steps on one rollout batch. If 1, the old log-probs come from the training
            forward pass.
        budget: limits of a forward with gradients on one rank.
        inference: limits of a forward without gradients on one rank.
        stale: whether batches may come from older weights.
        exact_sampler: whether the sampler computes the same log-probs as the trainer if their weights are
            equal.
        dtype: dtype of the forwards; a 16-bit dtype uses autocast over float32 weights.
        value_lr: learning rate of the value model, with the schedule of `optim`; None: `optim.lr`.
        moving: how the reference moves; None: it is frozen.
    """

    optim: OptimConfig
    total_steps: int
    steps_per_batch: int
    budget: Budget
    inference: Budget
    stale: bool = False
    exact_sampler: bool = True
    dtype: Dtype = Dtype.float32
    value_lr: float | None = None
    moving: MovingConfig | None = None


@dataclass(frozen=True, slots=True)
class Gradients:
    """What `Engine.forward_backward` found: losses of this rank, and metrics of all ranks."""

    batch: Batch
    losses: dict[str, Tensor]
    metrics: Metrics
    exist: bool  # False: no prompt has signal, so there are no gradients


class Engine(ABC):
    """A training engine on one rank; all ranks call its methods together.

    Args:
        module: the trained module. Weights that require a gradient are trained, in float32.
        reference: the frozen policy, already placed by the backend; None if the objective needs none.
        tokenizer: tokenizer that is saved with the model.
        ranks: the ranks of the run, and the device of this rank.
        settings: the settings of the engine.
    """

    def __init__(
        self,
        module: Policy | RewardModel | ActorCritic,
        reference: Reference | None,
        tokenizer: PreTrainedTokenizerFast,
        ranks: Ranks,
        settings: EngineSettings,
    ) -> None:
        self.module, self.reference, self.tokenizer = module, reference, tokenizer
        self.ranks, self.settings = ranks, settings
        self.step_index = 0
        self.moving: Moving | None = None  # how the reference moves; None: it is frozen
        self.plan: PreTrainedModel | None = None  # the trained model without weights, if ranks divide them
        self.phases = Phases()  # what the engine computes now, for the progress display of a run
        # Called with each micro-batch that is trained on, and the outputs of the model for it.
        self.watch: Callable[[Batch, Outputs], None] = lambda micro, outputs: None

    # -- implemented by each backend ---------------------------------------------------------------

    @abstractmethod
    def forward(self, batch: Batch, *extras: str) -> Outputs:
        """Run the trained module on a micro-batch, with gradients; see `Policy.forward` for `extras`."""

    @abstractmethod
    def backward(self, loss: Tensor, last: bool) -> None:
        """Add the gradients of a micro-batch loss; `last` marks the last micro-batch of an optimizer step."""

    @abstractmethod
    def gradient_norm(self) -> Tensor:
        """Return the norm, before clipping to `optim.max_grad_norm`, of the gradients summed over ranks."""

    @abstractmethod
    def update(self, lr: float) -> None:
        """Make an optimizer step with clipped gradients, then clear the gradients."""

    @abstractmethod
    def discard(self) -> None:
        """Clear the gradients without an optimizer step."""

    @abstractmethod
    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield name and whole tensor of every weight of the Hugging Face model that generates.

        A tensor is valid only until the next tensor is requested. All ranks must iterate together, because a
        backend may gather shards.
        """

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write weights and optimizer state for `load`; called on every rank."""

    @abstractmethod
    def load(self, folder: Path) -> None:
        """Restore the state that `save(folder)` wrote; called on every rank."""

    def lower_scale(self) -> bool:
        """Lower the loss scale after gradients that are not finite.

        Returns:
            True if the scale was lowered; False if the scale is at its minimum, or the engine scales no loss.
        """
        return False

    @contextmanager
    def borrow_policy(self) -> Iterator[PreTrainedModel]:
        """Yield the trained model, for generation; if ranks divide it, a whole copy for this rank alone."""
        model = self.module.model if self.plan is None else self.whole(self.plan)
        with autocast(self.ranks.device, self.settings.dtype):
            yield model

    def whole(self, plan: PreTrainedModel) -> PreTrainedModel:
        """Return a copy of `plan`, a model without weights, with the current weights of the trained model.

        With bfloat16, weights that autocast would round are stored in bfloat16.
        """
        model = copy.deepcopy(plan)
        narrow = rounded_weights(model) if self.settings.dtype is Dtype.bfloat16 else {}
        state = {
            name: tensor.to(torch.bfloat16 if name in narrow else tensor.dtype, copy=True)
            for name, tensor in self.weights()
        }
        model.load_state_dict(state, assign=True)
        model.tie_weights()
        torch.nn.Module.to(model, self.ranks.device)  # buffers
        return model

    def save_model(self, folder: Path) -> None:
        """Write the trained model in Hugging Face format; called on every rank."""
        first, state = self.ranks.first, None
        if self.plan is not None:
            state = {name: tensor.to("cpu", copy=True) for name, tensor in self.weights() if first}
        if first:
            save(self.module.model, self.tokenizer, folder, state)

    def save_adapter(self, folder: Path) -> None:
        """Write the adapters of the trained model in PEFT's format, if the model has adapters."""
        if modules.is_adapted(model := self.module.model):
            tensors = {name: full(tensor) for name, tensor in modules.adapter_weights(model).items()}
            if self.ranks.first:
                modules.save_adapter(model, folder, tensors)

    # -- common to all backends --------------------------------------------------------------------

    @property
    def policy(self) -> Policy:
        """Return the trained policy, without its value model."""
        policy = self.module.actor if isinstance(self.module, ActorCritic) else self.module
        assert isinstance(policy, Policy)
        return policy

    def infer(self, module: RolloutModule | ServedTeacher, rollouts: Rollouts, field: str) -> Tensor:
        """Return the output `field` of `module` without gradient; see `rlhf.models.forward.infer`."""
        own, sequences = self.settings, rollouts.response_ids.shape[:2].numel() // self.ranks.size
        with self.phases(_INFERRED.get(field, field), sequences) as done:
            return infer(module, rollouts, field, own.inference, self.ranks, own.dtype, done)

    def annotate(self, batch: Batch, needs: frozenset[str]) -> Batch:
        """Return the batch with the tensors that the objective needs and the batch lacks, and `on_policy`.

        Args:
            batch: a rollout batch with scores.
            needs: names of tensors; see `rlhf.objectives.objective.NEEDS`.
        """
        filled: dict[str, Any] = {}
        if "ref_logprobs" in needs and batch.ref_logprobs is None:
            assert self.reference is not None, "the objective needs a reference, which was not built"
            filled = compared_with(self.reference, batch, self.infer)
        if self.settings.steps_per_batch > 1:
            needs_old = {"ratio", "old_logprobs", "correction"}
        elif self.settings.stale:
            needs_old = {"old_logprobs", "correction"}
        else:
            needs_old = set() if self.settings.exact_sampler else {"correction"}
        if needs & needs_old:
            filled["old_logprobs"] = self.infer(self.policy, batch, "logprobs")
        if "values" in needs:
            assert isinstance(self.module, ActorCritic), "the objective needs a value model"
            filled["values"] = self.infer(self.module.critic, batch, "values")
        known = self.settings.steps_per_batch == 1 or "old_logprobs" in filled
        return replace(
            batch, on_policy=known and self.settings.exact_sampler and not self.settings.stale, **filled
        )

    def step(self, batch: Batch, objective: Objective) -> Metrics:
        """Make one optimizer step on a minibatch, and return its metrics."""
        return self.optimizer_step(self.forward_backward(batch, objective))

    def forward_backward(self, batch: Batch, objective: Objective) -> Gradients:
        """Add up the gradients of a minibatch, and return its losses and metrics.

        Every rank gets the whole minibatch, and runs forward and backward on its share of the micro-batches.
        Each summed loss is divided by its count over the whole minibatch.
        """
        counts = objective.count(batch)
        extras = sorted(objective.needs & (EXTRAS | {"divergence"}))
        losses = {name: torch.zeros((), dtype=torch.float64, device=self.ranks.device) for name in counts}
        merged: Metrics = {}

        def forward(part: Batch) -> Outputs:
            outputs = self.forward(part, *extras)
            self.watch(part, outputs)
            return outputs

        micros = list(microbatches(batch, self.settings.budget, self.ranks.rank, self.ranks.size))
        with (
            shared_copies(self.ranks.device, self.settings.dtype),
            self.phases("micro-batch", len(micros)) as done,
        ):
            for place, (_, micro, counted) in enumerate(micros):
                sums, stats = objective.loss(forward, micro.to(self.ranks.device))
                means = {name: total / max(counts[name], 1) for name, total in sums.items()}
                weighted = [objective.loss_weights.get(name, 1.0) * x for name, x in means.items()]
                loss = torch.stack(weighted).sum()
                self.backward(loss if counted else 0.0 * loss, last=place == len(micros) - 1)
                for name, part in means.items():
                    losses[name] += part.detach() * counted
                merge(merged, stats if counted else {name: stat.emptied() for name, stat in stats.items()})
                done()
        metrics = self.ranks.merge(merged) | objective.observe(batch)
        return Gradients(batch, losses, metrics, bool(micros))

    def optimizer_step(self, found: Gradients) -> Metrics:
        """Make one optimizer step with the gradients of a minibatch, and return the metrics of the minibatch.

        A minibatch without signal makes no optimizer step (`policy/skipped_steps`). If gradients are not
        finite and the loss scale can be lowered (float16), the optimizer step is skipped too
        (`policy/overflows`). `optim.ess_scaling` multiplies the learning rate by a factor
        (`policy/lr_scale`), which is the same on all ranks.

        Raises:
            NonFinite: a loss is not finite, or the gradient norm is not finite and the loss scale cannot be
                lowered. The weights have not changed.
        """
        lr = learning_rate(self.settings.optim, self.step_index, self.settings.total_steps)
        losses, metrics = found.losses, dict(found.metrics)
        if found.exist and self.settings.optim.ess_scaling is not ESSScaling.none:
            scale = ess_scale(self.settings.optim, metrics["mismatch/step_ess"].value())
            metrics["policy/lr_scale"] = Stat(scale)
            lr *= scale
        metrics["lr"] = Stat(lr, 1.0, How.last)
        metrics["policy/skipped_steps"] = Stat(float(not found.exist), 1.0, How.sum)
        if found.exist:
            totals = self.ranks.sum(torch.stack(list(losses.values())))
            norm = self.gradient_norm()
            finite = bool(torch.isfinite(totals.sum() + norm))
            if finite:
                self.update(lr)
                metrics["policy/grad_norm"] = Stat(norm)
            else:
                self.discard()
                if not bool(torch.isfinite(totals.sum())) or not self.lower_scale():
                    named = zip(losses, totals.tolist(), strict=True)
                    values = ", ".join(f"loss/{name} {total}" for name, total in named)
                    raise NonFinite(f"{values}, gradient norm {float(norm)}", found.batch)
            if self.settings.dtype is Dtype.float16:
                metrics["policy/overflows"] = Stat(float(not finite), 1.0, How.sum)
            metrics |= {f"loss/{name}": Stat(total) for name, total in zip(losses, totals, strict=True)}
        self.step_index += 1
        return metrics

    def clip_gradients(self) -> Tensor:
        """Scale the gradients down to norm `optim.max_grad_norm`; return the norm before scaling."""
        bound = self.settings.optim.max_grad_norm or torch.inf
        return full(torch.nn.utils.clip_grad_norm_(self.module.parameters(), bound).detach())

    def peak_gib(self) -> float:
        """Return the peak memory so far in GiB: on the GPU, or, without a GPU, the RAM of this process."""
        if self.ranks.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.ranks.device) / 2**30
        import resource

        unit = 1 if sys.platform == "darwin" else 2**10  # bytes of one unit of ru_maxrss; see man getrusage
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


# The learning rate of an optimizer step: warm-up, schedule, and the factor for stale samples.


_ROUNDING = 1e-6  # float32 log-probs that should be equal change an effective sample size by less than this


def learning_rate(config: OptimConfig, step: int, steps: int) -> float:
    """Return the learning rate of optimizer step `step` (from 0) of `steps`: warm-up, then schedule."""
    warmup = config.warmup if config.warmup >= 1 or config.warmup == 0 else config.warmup * steps
    if step < warmup:
        return config.lr * (step + 1) / (warmup + 1)
    done = min(1.0, (step - warmup) / max(1.0, steps - warmup))
    if config.schedule is LRSchedule.linear:
        return config.lr * (1 - done)
    if config.schedule is LRSchedule.cosine:
        return config.lr * 0.5 * (1 + math.cos(math.pi * done))
    return config.lr


def ess_scale(config: OptimConfig, ess: float | None) -> float:
    """Return the factor of the learning rate of one optimizer step, after VCPO (arXiv 2602.17616).

    Args:
        config: the rule `ess_scaling` and the on-policy share `ess_on_policy`.
        ess: `mismatch/step_ess` of the minibatch: effective sample size of its responses over their number.
    """
    assert ess is not None, "at least one response is trained on, so there is a sample size"
    share = ess / config.ess_on_policy
    if not share < 1 - _ROUNDING:
        return 1.0
    return share if config.ess_scaling is ESSScaling.linear else math.sqrt(share)


# The optimizers of a training engine: AdamW, Muon, and AdamW with moments of 8 bits.
#
# Muon (Jordan et al., kellerjordan.github.io/posts/muon) replaces the momentum of a matrix by the nearest
# orthogonal matrix, which Newton-Schulz iterations approximate. Each update is multiplied by `0.2 *
# sqrt(max(rows, columns))`, so that its root mean square is that of AdamW, and Muon can use the learning rate
# and the weight decay of AdamW (Liu et al., arXiv 2502.16982).
#
# AdamW with moments of 8 bits: Dettmers et al., arXiv 2110.02861.


def build_optimizer(module: nn.Module, optim: OptimConfig, value_lr: float | None) -> torch.optim.Optimizer:
    """Return the optimizer that `optim.optimizer` selects, for the parameters of a module that are trained.

    Args:
        module: the trained module, on its device.
        optim: optimizer settings.
        value_lr: learning rate of the value model; None: `optim.lr`.
    """
    parts = groups(module, optim.lr, value_lr)
    if optim.optimizer is Optimizer.muon:
        return _MuonWithAdamW(parts, hidden_matrices(module), optim)
    if optim.optimizer is Optimizer.adamw_8bit:  # 8-bit moments for tensors of at least 4,096 elements
        from bitsandbytes.optim import AdamW8bit

        for parameter in (each for part in parts for each in part["params"]):
            parameter.data = parameter.data.contiguous()  # bitsandbytes updates tensors in memory order
        return AdamW8bit(parts, **adam(optim))
    return torch.optim.AdamW(parts, fused=True, **adam(optim))


def groups(module: nn.Module, lr: float, value_lr: float | None) -> list[dict[str, Any]]:
    """Return the optimizer's parameter groups: one group, or two groups for policy and value model.

    The entry `scale` of a group is the factor of its learning rate.

    Args:
        module: the trained module.
        lr: learning rate of the policy.
        value_lr: learning rate of the value model; None: `lr`.
    """
    if not isinstance(module, ActorCritic):
        return [{"params": trained(module), "scale": 1.0}]
    return [
        {"params": trained(module.actor), "scale": 1.0},
        {"params": trained(module.critic), "scale": 1.0 if value_lr is None else value_lr / lr},
    ]


def trained(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of a module that require a gradient."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def adam(optim: OptimConfig) -> dict[str, Any]:
    """Return the keyword arguments of the optimizer AdamW."""
    return {"lr": optim.lr, "betas": optim.betas, "eps": optim.eps, "weight_decay": optim.weight_decay}


def hidden_matrices(module: nn.Module) -> set[nn.Parameter]:
    """Return the matrices between the embeddings and the head of each model: the parameters for Muon."""
    models = [backbone(each.model) for each in module.modules() if isinstance(each, RolloutModule)]
    layers = [layer for model in models for layer in model.modules()]
    embeddings = {layer.weight for layer in layers if isinstance(layer, nn.Embedding)}
    return {each for model in models for each in model.parameters() if each.ndim == 2} - embeddings


class _MuonWithAdamW(torch.optim.Optimizer):
    """Muon for hidden matrices and AdamW for all other parameters, as one optimizer.

    Each parameter group is divided into a group of Muon and a group of AdamW. The state is that of both
    optimizers together, so it is saved and loaded as the state of one optimizer.

    Args:
        parts: parameter groups.
        matrices: the parameters for Muon.
        optim: optimizer settings.
    """

    def __init__(
        self, parts: Iterable[dict[str, Any]], matrices: set[nn.Parameter], optim: OptimConfig
    ) -> None:
        divided: dict[bool, list[dict[str, Any]]] = {True: [], False: []}  # True: for Muon
        for part in parts:
            for for_muon, chosen in divided.items():
                own = [each for each in part["params"] if (each in matrices) is for_muon]
                chosen.append({**part, "params": own})
        muon = torch.optim.Muon(
            divided[True],
            lr=optim.lr,
            weight_decay=optim.weight_decay,
            momentum=optim.momentum,
            adjust_lr_fn="match_rms_adamw",
        )
        self.members = (muon, torch.optim.AdamW(divided[False], fused=True, **adam(optim)))
        super().__init__([group for member in self.members for group in member.param_groups], {})
        self._share()

    def _share(self) -> None:
        """Give both optimizers the groups and the state of this optimizer."""
        remaining = iter(self.param_groups)
        for member in self.members:
            member.param_groups = [next(remaining) for _ in member.param_groups]
            member.state = self.state

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Make one step with both optimizers."""
        for member in self.members:
            member.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        super().load_state_dict(state_dict)
        self._share()


# The engine on plain torch: every rank has the whole model, and gradients are summed over ranks.


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
        if self.settings.moving is not None:
            assert isinstance(self.reference, Policy), "validated: the run has a reference of its own"
            self.moving = Moving(self.settings.moving, self.policy, self.reference)

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
        yield from modules.whole_weights(self.module.model)

    def save(self, folder: Path) -> None:
        """Write trained weights and optimizer state for `load`; only rank 0 writes."""
        if not self.ranks.first:
            return
        for name, model in _models(self.module).items():
            if modules.is_adapted(model):
                modules.save_adapter(model, folder / name)
            else:
                save(model, self.tokenizer, folder / name)
        state = {
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "step_index": self.step_index,
        }
        if self.moving is not None:
            state["moving"] = [each.detach() for each in self.moving.moved]
        torch.save(state, folder / OPTIMIZER_FILE)

    def load(self, folder: Path) -> None:
        """Restore the state that `save(folder)` wrote, with any number of ranks."""
        for name, model in _models(self.module).items():
            _restore(model, folder / name)
        state = torch.load(folder / OPTIMIZER_FILE, map_location=self.ranks.device, weights_only=True)
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        self.step_index = state["step_index"]
        if self.moving is not None:
            mix(self.moving.moved, state["moving"], 1.0)


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
    if modules.is_adapted(model):
        return modules.load_adapter(model, folder)
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
            grads = [torch.zeros_like(each) if each.grad is None else each.grad for each in bucket]
            flat = torch.cat([grad.flatten() for grad in grads])
            for parameter, piece in zip(bucket, flat.split([grad.numel() for grad in grads]), strict=True):
                parameter.grad = piece.view_as(parameter)
            with together():
                sent.append(dist.all_reduce(flat, async_op=True))

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


# Tensors of one rank or of all ranks, and models without weights.


def full(tensor: Tensor) -> Tensor:
    """Return a tensor that FSDP2 may have divided over the ranks as a whole tensor."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def hollow(model: PreTrainedModel) -> PreTrainedModel:
    """Return a model of the same class and config, without adapters and weights; only buffers use memory."""
    with torch.device("meta"):
        made = type(model)(model.config).eval().requires_grad_(False)
    for name, buffer in model.named_buffers():
        owner, _, own = name.rpartition(".")
        made.get_submodule(owner).register_buffer(own, buffer.clone(), persistent=name in made.state_dict())
    head = model.get_output_embeddings()
    if isinstance(head, LogprobHead):
        made.set_output_embeddings(LogprobHead.of(made.get_output_embeddings(), head.float32, head.absent))
    return made


def rounded_weights(module: nn.Module) -> dict[str, Any]:
    """Return the weights that autocast rounds to 16 bits before every use, by name.

    These are the weights of linear layers, except weights that another layer uses as well and the weights of
    heads that compute in float32.
    """
    users = Counter(id(own) for part in module.modules() for own in part.parameters(recurse=False))
    exact = {
        id(own)
        for part in module.modules()
        if isinstance(part, RewardModel | modules.ValueModel)
        for own in modules.score_head(part.model).parameters()
    }
    return {
        f"{name}.weight": part.weight
        for name, part in module.named_modules()
        if (type(part) is nn.Linear or (isinstance(part, LogprobHead) and not part.float32))
        and users[id(part.weight)] == 1
        and id(part.weight) not in exact
    }


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
        reference: Reference | None,
        tokenizer: PreTrainedTokenizerFast,
        *,
        inference: Budget,
        ranks: Ranks,
        dtype: Dtype,
    ) -> None:
        limits: dict[str, Any] = {"budget": inference, "inference": inference, "optim": OptimConfig(lr=0.0)}
        settings = EngineSettings(**limits, total_steps=0, steps_per_batch=0, dtype=dtype)
        # Not TorchEngine.__init__, which creates an optimizer
        Engine.__init__(self, module, reference, tokenizer, ranks, settings)
        # The weights still require gradients: autocast keeps 16-bit copies only of such weights.
        place(self.module, ranks.device)

    def load(self, folder: Path) -> None:
        """Load the weights of a model folder, or of an adapter folder if the model has adapters."""
        _restore(self.module.model, folder)
