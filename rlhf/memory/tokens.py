"""The number of the longest sequences in a forward pass, given `backend.micro_batch` and `backend.tokens`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf.config.backend import WITHOUT_GRADIENT

if TYPE_CHECKING:
    from rlhf.config.root import Config


def longest(cfg: Config) -> int:
    """Return the tokens of the longest possible sequence: prompt and response."""
    return cfg.task.max_prompt_tokens + cfg.generator.response_length


def with_gradient(cfg: Config) -> int:
    """Return the largest number of the longest sequences in a forward pass with gradients."""
    backend = cfg.backend
    if not backend.tokens:
        return backend.micro_batch
    return max(1, min(backend.micro_batch, backend.tokens // longest(cfg)))


def without_gradient(cfg: Config) -> int:
    """Return the largest number of the longest sequences in a forward pass without gradients."""
    backend = cfg.backend
    if not backend.tokens:
        return backend.micro_batch
    most = WITHOUT_GRADIENT * backend.tokens // longest(cfg)
    return max(1, min(WITHOUT_GRADIENT * backend.micro_batch, most))
