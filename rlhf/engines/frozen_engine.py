"""Models that are measured, not trained."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerFast

from rlhf.config.schedule import OptimConfig
from rlhf.engines.engine import Engine
from rlhf.engines.torch_engine import TorchEngine, restore
from rlhf.models.placement import place

if TYPE_CHECKING:
    from rlhf.config.model import Dtype
    from rlhf.models.modules import Policy, RewardModel
    from rlhf.processes.ranks import Ranks


class FrozenEngine(TorchEngine):
    """A model whole on every rank, and its reference, without optimizer: what `infer`, `weights` and
    `borrow_policy` need.

    Its weights are those of a folder at a time, so that many can be measured by one engine.
    """

    def __init__(
        self,
        module: Policy | RewardModel,
        reference: Policy | None,
        tokenizer: PreTrainedTokenizerFast,
        *,
        micro_batch: int,
        ranks: Ranks,
        dtype: Dtype,
    ) -> None:
        Engine.__init__(  # without the optimizer that TorchEngine makes
            self,
            module,
            reference,
            tokenizer,
            OptimConfig(lr=0.0),
            total_steps=0,
            steps_per_batch=0,
            micro_batch=micro_batch,
            ranks=ranks,
            dtype=dtype,
        )
        place(self.module, ranks.device).requires_grad_(False)

    def load(self, folder: Path) -> None:
        """Have the weights of a model's folder, or of an adapter's where the model has one."""
        restore(self.module.model, folder)
