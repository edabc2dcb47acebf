"""Annotation of rollouts in a separate process, the annotator process.

Scores and reference log-probs do not depend on trained weights, so another process can compute them before
the trainer needs them. The annotator does not share a process with vLLM, which changes classes of
transformers. `Annotator` runs in the annotator process; `AnnotatedGenerator` runs in the trainer's process.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlhf.core.batch import Batch
from rlhf.core.errors import RunError
from rlhf.generators.generator import Generator, finished
from rlhf.models.placement import infer
from rlhf.processes.service import Service
from rlhf.processes.signals import call_at_signal, do_not_call_at_signal
from rlhf.processes.worker import Job

if TYPE_CHECKING:
    from rlhf.config.model import Dtype
    from rlhf.core.batch import Budget, Prompts, Rollouts, Sampling
    from rlhf.core.metrics import Metrics
    from rlhf.models.modules import Policy
    from rlhf.processes.ranks import Ranks
    from rlhf.processes.worker import Worker
    from rlhf.scorers.scorer import Scorer


class Annotator(Service):
    """A service that adds scores and reference log-probs to rollouts, inside the annotator process.

    Args:
        scorer: the scorer of the run.
        reference: the reference model; None: the objective does not need reference log-probs.
        budget: limits of a forward pass of the reference.
        ranks: the annotator process as a single rank, with its device.
        dtype: the dtype of forward passes.
    """

    def __init__(
        self,
        scorer: Scorer,
        reference: Policy | None,
        budget: Budget,
        ranks: Ranks,
        dtype: Dtype,
    ) -> None:
        self.scorer = scorer
        self.reference = reference
        self.budget = budget
        self.ranks = ranks
        self.dtype = dtype

    def annotate(self, rollouts: Rollouts) -> Batch:
        """Return the rollouts as a `Batch` with `scores`, `parts`, `ref_logprobs` and `annotate_ahead_s`.

        Raises:
            RunError: the scorer failed; the traceback of its cause is in the log of the annotator process.
        """
        start = time.perf_counter()
        try:
            batch = self.scorer(rollouts)
        except RunError as error:
            if error.__cause__ is None:
                raise
            traceback.print_exception(error.__cause__)
            raise RunError(f"{error} (traceback and output: annotator.log)") from error
        logprobs = self.reference_logprobs(batch)
        return replace(batch, ref_logprobs=logprobs, annotate_ahead_s=time.perf_counter() - start)

    def reference_logprobs(self, rollouts: Rollouts) -> torch.Tensor | None:
        """Return the log-probs [N, K, T] by the reference model; None without a reference model."""
        if self.reference is None:
            return None
        return infer(self.reference, rollouts, "logprobs", self.budget, self.ranks, self.dtype)


class AnnotatedGenerator(Generator):
    """A generator that returns training rollouts as a `Batch`, with scores and reference log-probs.

    Args:
        generator: the generator that samples the rollouts.
        annotator: the worker of the annotator process.
        asks_service: whether the scorer of the annotator waits for the answers of a service; a signal then
            ends the annotation.
    """

    def __init__(self, generator: Generator, annotator: Worker, asks_service: bool = False) -> None:
        self.generator = generator
        self.annotator = annotator
        self.stopping = False  # a signal has ended the annotation
        if asks_service:
            call_at_signal(self.stop_annotating)

    def submit(self, prompts: Prompts, sampling: Sampling) -> Future[Rollouts]:
        """Request K responses to each prompt; with the purpose "train", the future returns a `Batch`.

        Single responses are not annotated: `resume` annotates the group.

        Raises:
            RunError: the generator failed since the last call.
        """
        sampled = self.generator.submit(prompts, sampling)
        if sampling.purpose != "train" or sampling.begun:
            return sampled
        annotated: Future[Rollouts] = Future()
        sampled.add_done_callback(partial(self.annotate, annotated))
        return annotated

    def annotate(self, annotated: Future[Rollouts], sampled: Future[Rollouts]) -> None:
        """Queue sampled rollouts for the annotator.

        Args:
            annotated: future that receives the batch, or the error of the generator or annotator.
            sampled: finished future of the generator.
        """
        try:
            rollouts = sampled.result()
        except Exception as error:  # `add_done_callback` only logs exceptions of the callback
            annotated.set_exception(error)
            return
        job = Job("annotate", (rollouts,))
        job.future.add_done_callback(partial(self.deliver, annotated, rollouts))
        try:
            self.annotator.put(job)
        except Exception as error:
            job.future.set_exception(error)

    def resume(self, rollouts: Rollouts) -> Future[Rollouts]:
        """Return a future of rollouts of a checkpoint; they are annotated now if they were not before."""
        annotated: Future[Rollouts] = Future()
        if isinstance(rollouts, Batch):
            annotated.set_result(rollouts)
        else:
            self.annotate(annotated, finished(rollouts))
        return annotated

    def deliver(self, annotated: Future[Rollouts], sampled: Rollouts, answer: Future[Batch]) -> None:
        """Set the result of `annotated`: the answer of the annotator, or `sampled` after a signal."""
        error = answer.exception()
        if error is None:
            annotated.set_result(answer.result())
        elif self.stopping:
            annotated.set_result(sampled)
        else:
            annotated.set_exception(error)

    def stop_annotating(self) -> None:
        """End the annotator after a signal, because its scorer may wait for a service.

        From now on, rollouts are returned without annotations. The scorer of the trainer does not score them
        after a signal; they are annotated after the run resumes.
        """
        self.stopping = True
        self.annotator.close()

    @property
    def slots(self) -> int:
        """The number of responses that are sampled at a time."""
        return self.generator.slots

    @property
    def oldest(self) -> int:
        """The oldest version of the weights that may sample a response that is requested now."""
        return self.generator.oldest

    def when_loaded(self, call: Callable[[], None]) -> None:
        """Call a function whenever `oldest` may have changed."""
        self.generator.when_loaded(call)

    def cut(self, answer: Future[Rollouts]) -> None:
        """End a single response with the tokens that it has."""
        self.generator.cut(answer)

    def load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Load the weights into the generator, for later requests."""
        self.generator.load(weights, version)

    def wait(self) -> None:
        """Wait until the generator can take new weights."""
        self.generator.wait()

    def figures(self) -> Metrics:
        """Return the metrics of the generator and of the annotator."""
        return {**self.generator.figures(), **self.annotator.figures()}

    def close(self) -> None:
        """Close the generator, then the annotator, which may get rollouts until the generator is closed."""
        do_not_call_at_signal(self.stop_annotating)
        with ExitStack() as ends:
            ends.callback(self.annotator.close)
            ends.callback(self.generator.close)
