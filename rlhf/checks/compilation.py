"""Rule for compiled blocks: the backend must be able to use them."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf.checks.rules import training_rule
from rlhf.config.root import Config


@training_rule
def blocks_can_be_compiled(cfg: Config) -> Iterator[str]:
    """Yield an error if compiled blocks are required and the backend cannot use them."""
    if cfg.backend.compile and not cfg.backend.compiles:
        yield (
            f"backend.compile must be null or false with backend={cfg.backend.name} (DeepSpeed changes the "
            "modules of a model), got true; set backend.compile=null, or backend=torch"
        )
