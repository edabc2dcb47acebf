"""The limits of forward passes of a run, from its config and its memory plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf.config.backend import WITHOUT_GRADIENT
from rlhf.core.batch import Budget
from rlhf.memory.plan import with_token_limit

if TYPE_CHECKING:
    from rlhf.config.root import Config


def training_budget(cfg: Config) -> Budget:
    """Return the limits of a forward pass with gradients."""
    backend = with_token_limit(cfg).backend
    return Budget(backend.micro_batch, backend.tokens)


def inference_budget(cfg: Config) -> Budget:
    """Return the limits of a forward pass without gradients, which needs less memory per token."""
    training = training_budget(cfg)
    if training.tokens is None:
        return training
    return Budget(WITHOUT_GRADIENT * training.sequences, WITHOUT_GRADIENT * training.tokens)
