"""Annotating in a process of its own: scores and reference log-probs do not depend on trained weights, so
another process can compute them before the trainer needs them. Both sides of that process are here.
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
    """Adds scores and reference log-probs to rollouts, inside the annotator process.

    Args:
        scorer: computes the scores.
        reference: computes the reference log-probs; None: the objective does not need them.
        micro_batch: sequences per forward pass of the reference.
        ranks: this process as the only rank, and its device.
        dtype: the dtype of forward passes.
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
        """Return the rollouts with `scores`, `parts`, `ref_logprobs` and the seconds of this call.

        Raises:
            RunError: the scorer failed; its traceback is in the log of the process.
        """
        start = time.perf_counter()
        try:
            batch = self.scorer(rollouts)
        except RunError as error:
            traceback.print_exc()
            raise RunError(f"{error} (traceback and output: annotator.log)") from error
        logprobs = self.reference_logprobs(batch)
        return replace(batch, ref_logprobs=logprobs, annotate_ahead_s=time.perf_counter() - start)

    def reference_logprobs(self, rollouts: Rollouts) -> torch.Tensor | None:
        """Return the log-probs [N, K, T] of the reference; None without a reference."""
        if self.reference is None:
            return None
        return infer(self.reference, rollouts, "logprobs", self.micro_batch, self.ranks, self.dtype)


class AnnotatedGenerator(Generator):
    """A generator whose training rollouts already have scores and reference log-probs: a `Batch`.

    Args:
        generator: samples the rollouts.
        annotator: the worker whose process annotates them.
    """

    def __init__(self, generator: Generator, annotator: Worker) -> None:
        self.generator = generator
        self.annotator = annotator

    def submit(self, prompts: Prompts, sampling: Sampling) -> Future[Rollouts]:
        """Request K responses to each prompt; with the purpose "train", the future returns a `Batch`.

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
        """Queue sampled rollouts for the annotator; `annotated` receives the batch or the error."""
        try:
            self.annotator.put(Job("annotate", (sampled.result(),), annotated))
        except Exception as error:  # an exception in a callback would be lost
            annotated.set_exception(error)

    def load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Load the weights into the generator, for later requests."""
        self.generator.load(weights, version)

    def figures(self) -> Metrics:
        """Return the metrics of the generator and of the annotator."""
        return {**self.generator.figures(), **self.annotator.figures()}

    def close(self) -> None:
        """Close the generator, then the annotator: it may receive rollouts until the generator is closed."""
        with ExitStack() as ends:
            ends.callback(self.annotator.close)
            ends.callback(self.generator.close)
