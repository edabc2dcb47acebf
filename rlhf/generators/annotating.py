"""What an annotating process does: scores and reference log-probs, which depend on no weight that training
changes, so that rollouts can have them before the trainer gets to them.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterable
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlhf.core.errors import RunError
from rlhf.generators.generator import Generator
from rlhf.models.inference import infer
from rlhf.processes.service import Service
from rlhf.processes.worker import Job

if TYPE_CHECKING:
    from rlhf.config.model import Dtype
    from rlhf.core.batch import Batch, Prompts, Rollouts, Sampling
    from rlhf.core.metrics import Metrics
    from rlhf.models.modules import Policy
    from rlhf.processes.ranks import Ranks
    from rlhf.processes.worker import Worker
    from rlhf.scorers.scorer import Scorer


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


class AnnotatedGenerator(Generator):
    """Answers a request for training with a `Batch`: rollouts that have scores and reference log-probs.

    Args:
        generator: samples.
        annotator: the worker whose process annotates.
    """

    def __init__(self, generator: Generator, annotator: Worker) -> None:
        self.generator = generator
        self.annotator = annotator

    def submit(self, prompts: Prompts, sampling: Sampling) -> Future[Rollouts]:
        """Ask for K responses to each prompt; those to train on come as a `Batch`.

        Raises:
            RunError: the generator failed since the last call.
        """
        sampled = self.generator.submit(prompts, sampling)
        if sampling.purpose != "train":
            return sampled
        annotated: Future[Rollouts] = Future()
        sampled.add_done_callback(partial(self.annotate, annotated))
        return annotated

    def annotate(self, annotated: Future[Rollouts], sampled: Future[Rollouts]) -> None:
        """Queue what was sampled; `annotated` has the batch, or what went wrong on the way."""
        try:
            self.annotator.put(Job("annotate", (sampled.result(),), annotated))
        except Exception as error:  # here it would be lost: nobody waits for a callback
            annotated.set_exception(error)

    def load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Sample later requests with these weights."""
        self.generator.load(weights, version)

    def figures(self) -> Metrics:
        """Figures of both."""
        return {**self.generator.figures(), **self.annotator.figures()}

    def close(self) -> None:
        """End both; the annotator last, which the generator's end may still hand something."""
        with ExitStack() as ends:
            ends.callback(self.annotator.close)
            ends.callback(self.generator.close)
