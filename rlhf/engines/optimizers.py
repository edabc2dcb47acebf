"""The optimizers of a training engine: AdamW, Muon, and AdamW with moments of 8 bits.

Muon (Jordan et al., kellerjordan.github.io/posts/muon) replaces the momentum of a matrix by the nearest
orthogonal matrix, which Newton-Schulz iterations approximate. Each update is multiplied by
`0.2 * sqrt(max(rows, columns))`, so that its root mean square is that of AdamW, and Muon can use the learning
rate and the weight decay of AdamW (Liu et al., arXiv 2502.16982).

AdamW with moments of 8 bits: Dettmers et al., arXiv 2110.02861.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rlhf.config.schedule import Optimizer
from rlhf.models.modules import ActorCritic, RolloutModule, backbone

if TYPE_CHECKING:
    from rlhf.config.schedule import OptimConfig

Group = dict[str, Any]


def build_optimizer(module: nn.Module, optim: OptimConfig, value_lr: float | None) -> torch.optim.Optimizer:
    """Return the optimizer that `optim.optimizer` selects, for the parameters of a module that are trained.

    Args:
        module: the trained module, on its device.
        optim: optimizer settings.
        value_lr: learning rate of the value model; None: `optim.lr`.
    """
    parts = groups(module, optim.lr, value_lr)
    if optim.optimizer is Optimizer.muon:
        return MuonWithAdamW(parts, hidden_matrices(module), optim)
    if optim.optimizer is Optimizer.adamw_8bit:
        return _eight_bit(parts, optim)
    return torch.optim.AdamW(parts, fused=True, **adam(optim))


def groups(module: nn.Module, lr: float, value_lr: float | None) -> list[Group]:
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


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon for hidden matrices and AdamW for all other parameters, as one optimizer.

    Each parameter group is divided into a group of Muon and a group of AdamW. The state is that of both
    optimizers together, so it is saved and loaded as the state of one optimizer.

    Args:
        parts: parameter groups.
        matrices: the parameters for Muon.
        optim: optimizer settings.
    """

    def __init__(self, parts: Iterable[Group], matrices: set[nn.Parameter], optim: OptimConfig) -> None:
        divided: dict[bool, list[Group]] = {True: [], False: []}  # True: for Muon
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


def _eight_bit(parts: Iterable[Group], optim: OptimConfig) -> torch.optim.Optimizer:
    """Return the AdamW of bitsandbytes, with 8-bit moments for tensors of at least 4,096 elements."""
    from bitsandbytes.optim import AdamW8bit

    parts = list(parts)
    for parameter in (each for part in parts for each in part["params"]):
        parameter.data = parameter.data.contiguous()  # bitsandbytes updates tensors in the order of memory
    made: torch.optim.Optimizer = AdamW8bit(parts, **adam(optim))
    return made
