"""Construction of the annotator of a run, inside the annotator process."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rlhf.assembly.budgets import inference_budget
from rlhf.assembly.device import build_device
from rlhf.assembly.models import build_reference
from rlhf.assembly.parts import make
from rlhf.assembly.scorer import build_training_scorer
from rlhf.assembly.tokenizer import build_tokenizer
from rlhf.config.backend import TorchConfig
from rlhf.generators.annotating import Annotator
from rlhf.processes.ranks import Ranks

if TYPE_CHECKING:
    from rlhf.config.root import Config
    from rlhf.processes.service import Channel


@dataclass(frozen=True, slots=True)
class AnnotatorFactory:
    """A factory of the annotator of the run `cfg`, which has the scorer and the reference of the trainer."""

    cfg: Config

    def build(self, channel: Channel) -> Annotator:
        """Return the annotator, with unsharded models.

        The reference is loaded only if the objective needs its log-probs.

        Args:
            channel: the connection to the trainer; the annotator does not use it.
        """
        backend = TorchConfig(micro_batch=self.cfg.backend.micro_batch, tokens=self.cfg.backend.tokens)
        cfg, alone = replace(self.cfg, backend=backend), Ranks(build_device(self.cfg))
        tokenizer = build_tokenizer(cfg)
        scorer = build_training_scorer(cfg, tokenizer, alone)
        wanted = "ref_logprobs" in make(cfg.algo).needs
        reference = build_reference(cfg, tokenizer, alone) if wanted else None
        return Annotator(scorer, reference, inference_budget(cfg), alone, cfg.model.dtype)
