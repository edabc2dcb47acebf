"""What an annotating process does: scores and reference log-probs, which depend on no weight that training
changes, so that rollouts can have them before the trainer gets to them.
"""

from __future__ import annotations

import time
import traceback
from dataclasses import dataclass, replace

import torch

from rlhf.batch import Batch, Rollouts
from rlhf.build import build_device, build_reference, build_tokenizer
from rlhf.config import Config, Dtype
from rlhf.engines.config import TorchConfig
from rlhf.errors import RunError
from rlhf.infer import infer
from rlhf.models import Policy
from rlhf.ranks import Ranks
from rlhf.scorers.scorer import Scorer
from rlhf.serve import Channel, Service


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


class Annotator(Service):
    """Makes batches of rollouts.

    Args:
        scorer: gives the scores.
        reference: gives the reference log-probs; None: there are to be none.
        micro_batch: sequences a forward of the reference.
        ranks: this process alone, and its device.
        dtype: what forwards compute in.
    """

    def __init__(
        self,
        scorer: Scorer,
        reference: Policy | None,
        micro_batch: int,
        ranks: Ranks,
        dtype: Dtype,
    ) -> None:
        self.scorer = scorer
        self.reference = reference
        self.micro_batch = micro_batch
        self.ranks = ranks
        self.dtype = dtype

    def annotate(self, rollouts: Rollouts) -> Batch:
        """The rollouts with `scores`, `parts`, `ref_logprobs` and the seconds that these took.

        Raises:
            RunError: of the scorer; where it was raised is in the log.
        """
        start = time.perf_counter()
        try:
            batch = self.scorer(rollouts)
        except RunError as error:
            traceback.print_exc()
            raise RunError(f"{error} (the traceback, and what was printed, is in annotator.log)") from error
        logprobs = self.reference_logprobs(batch)
        return replace(batch, ref_logprobs=logprobs, annotate_ahead_s=time.perf_counter() - start)

    def reference_logprobs(self, rollouts: Rollouts) -> torch.Tensor | None:
        """The log-probs [N, K, T] of the reference, where there is one."""
        if self.reference is None:
            return None
        return infer(self.reference, rollouts, "logprobs", self.micro_batch, self.ranks, self.dtype)
