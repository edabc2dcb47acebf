"""The engine of a frozen model, for evaluation and relabelling."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerFast

from rlhf.config.schedule import OptimConfig
from rlhf.engines.engine import Engine, EngineSettings
from rlhf.engines.torch_engine import TorchEngine, restore
from rlhf.models.placement import place

if TYPE_CHECKING:
    from rlhf.config.model import Dtype
    from rlhf.core.batch import Budget
    from rlhf.models.modules import Policy, RewardModel
    from rlhf.processes.ranks import Ranks


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
        restore(self.module.model, folder)
