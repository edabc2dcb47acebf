"""A logits processor of vLLM that masks the ids that no token has.

vLLM imports this module in its workers. Its log-probs (`processed_logprobs`) are computed after the mask, so
they equal the log-probs of the trainer, whose head has the same mask (`rlhf.models.modules.LogprobHead`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor as RunnerV2Processor

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class AbsentIds(LogitsProcessor, RunnerV2Processor):
    """A logits processor for both model runners of vLLM: 1 on a CPU, 2 by default on a GPU.

    Args:
        vllm_config: the config of vLLM, whose `additional_config` has the masked ids.
        place: the device (runner 1), or an object with the device as attribute (runner 2).
    """

    def __init__(self, vllm_config: VllmConfig, place: Any, *_: Any) -> None:
        device = place if isinstance(place, torch.device) else place.device
        self.ids = torch.tensor(vllm_config.additional_config["absent_ids"], device=device)

    def apply(self, logits: Tensor, *_: Any) -> Tensor:
        """Set the logits [rows, V] of the masked ids to -inf, in place."""
        return logits.index_fill_(-1, self.ids, -torch.inf)

    def is_argmax_invariant(self) -> bool:
        """Return False: a masked id may have the largest logit."""
        return False

    def update_state(self, batch_update: Any) -> None:
        """Do nothing: the mask is the same for all requests."""
