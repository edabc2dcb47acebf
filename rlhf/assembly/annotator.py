"""Build the annotator of a run inside its own process."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rlhf.assembly.device import build_device
from rlhf.assembly.models import build_reference, build_tokenizer
from rlhf.config.backend import TorchConfig
from rlhf.generators.annotating import Annotator
from rlhf.processes.ranks import Ranks

if TYPE_CHECKING:
    from rlhf.config.root import Config
    from rlhf.processes.service import Channel


@dataclass(frozen=True, slots=True)
class AnnotatorFactory:
    """Makes the annotator of the run `cfg`, with scorer and reference as the trainer has them."""

    cfg: Config

    def build(self, channel: Channel) -> Annotator:
        """Load the models, whole; a reference only where the objective reads its log-probs."""
        backend = TorchConfig(micro_batch=self.cfg.backend.micro_batch)
        cfg, alone = replace(self.cfg, backend=backend), Ranks(build_device(self.cfg))
        scorer = cfg.scorer.build(cfg, build_tokenizer(cfg), alone)
        assert scorer is not None, "validated: training needs a scorer"
        wanted = "ref_logprobs" in cfg.algo.build().needs
        reference = build_reference(cfg, alone) if wanted else None
        return Annotator(scorer, reference, cfg.backend.micro_batch, alone, cfg.model.dtype)
