"""A generator whose rollouts are annotated while the trainer trains on the batch before.

    request ──▶ generator ──▶ rollouts ──▶ annotator (rlhf/annotator.py) ──▶ batch: + scores, reference
    load    ──▶ generator

Both are processes that work first in, first out, so what is asked for first is ready first.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial

from torch import Tensor

from rlhf.batch import Prompts, Rollouts
from rlhf.generators.generator import Generator, Sampling
from rlhf.metrics import Metrics
from rlhf.worker import Job, Worker


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
