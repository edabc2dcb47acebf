"""The verbs of a training run: what `rlhf.training.loop` calls, and what a loop of your own calls (`loop=`).

    def loop(session):
        for rollouts in session.sample():
            batch = session.annotate(session.score(rollouts))
            for minibatch in session.minibatches(session.credit(batch)):
                session.forward_backward(minibatch)
                session.step()
            session.sync(batch)
            if session.finish_update():
                return

What surrounds the loop, such as lock, resuming, signals, evaluation, ranks and the model card, works with
every loop. A loop may call the verbs in another order, leave some out, or give `forward_backward` another
loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from torch import Tensor

from rlhf.config.run import ScheduleConfig
from rlhf.core.batch import Batch, Rollouts
from rlhf.core.errors import RunError
from rlhf.core.metrics import Metrics, mean, selected
from rlhf.core.state import TrainState
from rlhf.engines.engine import Engine, Gradients
from rlhf.generators.generator import Generator
from rlhf.objectives.objective import Counts, Forward, Losses, Objective, drift
from rlhf.processes.signals import Interruption
from rlhf.scorers.scorer import Scorer
from rlhf.tasks.task import PromptOrder
from rlhf.terminal.console import Phases
from rlhf.training.checkpoint import Checkpoints
from rlhf.training.evaluators import Evaluator
from rlhf.training.recorder import Recorder
from rlhf.training.stream import ONCE, Refill, Replay, RolloutStream

TokenLoss = Callable[[Tensor, Batch], Tensor]  # log-probs [N, K, T], minibatch -> losses [N, K, T]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The parts of a training run."""

    prompts: PromptOrder
    generator: Generator
    scorer: Scorer
    replay: Replay
    engine: Engine
    objective: Objective
    recorder: Recorder
    evaluator: Evaluator
    checkpoints: Checkpoints
    refill: Refill | None = None  # which groups the stream replaces; None: none
    phases: Phases = field(default_factory=Phases)  # what the run does now, for its progress display


@dataclass(slots=True)
class Session:
    """A training run whose parts are made, and whose checkpoint, if any, is loaded.

    Args:
        parts: the parts of the run.
        stream: rollouts of all remaining updates.
        state: counters of the run, changed in place.
        schedule: minibatches, epochs, and how often to evaluate and to save.
        interruption: whether a signal asked the run to stop.
        seed: seed of the run, for the order of minibatches.
    """

    parts: Parts
    stream: RolloutStream
    state: TrainState
    schedule: ScheduleConfig
    interruption: Interruption
    seed: int
    _gradients: Gradients | None = None

    def sample(self) -> Iterator[Rollouts]:
        """Yield the rollouts of all remaining updates; before the first, evaluate if that is due.

        Raises:
            Interrupted: after a signal, an evaluation was due.
            RunError: `sync` was not called for the last rollouts.
        """
        if self.state.unevaluated and self.schedule.eval_every:
            self.evaluate()
        for rollouts in self.stream:
            update = self.state.update
            yield rollouts
            if self.state.update == update:
                raise RunError(
                    f"loop must call session.sync(batch) once for all rollouts that it gets, update {update} "
                    "(from 0) ended without; call it after the last step of the update"
                )

    def score(self, rollouts: Rollouts) -> Batch:
        """Return the rollouts with scores [N, K].

        Raises:
            Interrupted: a signal came while the scorer waited for its service.
        """
        with self.parts.recorder.timer("score"), self.parts.phases("scoring"):
            scored = self.parts.scorer(rollouts)
            self.parts.recorder.add(self.parts.prompts.scored(scored))
        return scored

    def annotate(self, batch: Batch) -> Batch:
        """Return the batch with the log-probs and values that the objective needs; some prompts replayed."""
        engine, needs = self.parts.engine, self.parts.objective.needs
        with self.parts.recorder.timer("annotate"):
            batch, figures = self.parts.replay(engine.annotate(batch, needs & ONCE))
            batch = engine.annotate(batch, needs)
        self.parts.recorder.add(self.parts.objective.describe(batch) | figures)
        return batch

    def credit(self, batch: Batch) -> Batch:
        """Return the batch with advantages, or with the samples that the objective compares."""
        return self.parts.objective.credit(batch)

    def minibatches(self, batch: Batch) -> Iterator[Batch]:
        """Yield the minibatches of all epochs of an update."""
        schedule = self.schedule
        steps = schedule.minibatches * schedule.epochs
        with self.parts.recorder.timer("train"), self.parts.phases("training", steps) as done:
            for each in batch.minibatches(
                schedule.minibatches, schedule.epochs, self.seed, self.state.update
            ):
                yield each
                done()

    def forward_backward(self, minibatch: Batch, loss: Objective | TokenLoss | None = None) -> Metrics:
        """Compute the gradients of a minibatch, and return its metrics.

        Args:
            minibatch: the minibatch.
            loss: an objective, or a function of log-probs and minibatch whose mean over the response tokens
                is the loss; None: the objective of the run.

        Raises:
            RunError: there are gradients of another minibatch, for which `step` was not called.
        """
        if self._gradients is not None:
            raise RunError("loop must call session.step() between two calls of session.forward_backward")
        if loss is None:
            loss = self.parts.objective
        objective = loss if isinstance(loss, Objective) else _OwnLoss(loss)
        self._gradients = self.parts.engine.forward_backward(minibatch, objective)
        return self._gradients.metrics

    def step(self) -> Metrics:
        """Make an optimizer step with these gradients, and return all metrics of the minibatch.

        Raises:
            NonFinite: a loss or the gradient norm is not finite. The weights have not changed.
            RunError: there are no gradients.
        """
        if self._gradients is None:
            raise RunError("loop must call session.forward_backward(minibatch) before session.step()")
        found, self._gradients = self._gradients, None
        metrics = self.parts.engine.optimizer_step(found)
        self.parts.recorder.add(metrics)
        return metrics

    def sync(self, batch: Batch) -> None:
        """End an update: count `batch`, send the weights to the generator, and write a row of metrics."""
        parts, timer = self.parts, self.parts.recorder.timer
        self.state.advance(batch)
        if parts.engine.moving is not None:  # before the weights are sent: it may reset the policy
            parts.engine.moving(self.state.version)
        with timer("wait"), parts.phases("waiting for the generator"):
            parts.generator.wait()
        with timer("sync"), parts.phases("sending weights"):
            parts.generator.load(parts.engine.weights(), self.state.version)
        parts.recorder.flush(self.state, batch, parts.engine)

    def finish_update(self) -> bool:
        """Evaluate and save if that is due, and return whether a signal asks to stop, after a checkpoint."""
        if self.state.due(self.schedule.eval_every, at_end=True):
            self.evaluate()
        stop = self.interruption.asked()
        if (stop or self.state.due(self.schedule.save_every)) and not self.state.done:
            self.save()
        return stop

    def save(self) -> None:
        """Write a checkpoint, from which the same command resumes."""
        parts = self.parts
        with parts.phases("saving a checkpoint"):
            parts.checkpoints.save(self.state, parts.engine, self.stream, parts.recorder)

    def evaluate(self) -> None:
        """Evaluate the trained model and record the result.

        A signal during the evaluation ends it between two batches, if the run has one rank. Several ranks
        finish the evaluation, because they could not stop at the same batch.

        Raises:
            Interrupted: a signal was received, and there is no result.
        """
        self.state.unevaluated = True
        self.interruption.check_ranks()
        with self.parts.phases("evaluating", between=self.interruption.check_alone):
            evaluation = self.parts.evaluator(self.state)
        self.parts.recorder.evaluation(self.state, evaluation)


class _OwnLoss(Objective):
    """A function of log-probs as an objective: its mean over response tokens."""

    def __init__(self, function: TokenLoss) -> None:
        self.function = function

    def credit(self, batch: Batch) -> Batch:
        return batch

    def count(self, batch: Batch) -> Counts:
        return {"policy": float(batch.response_mask.sum())}

    def loss(self, forward: Forward, batch: Batch) -> tuple[Losses, Metrics]:
        logprobs = forward(batch).logprobs
        assert logprobs is not None
        losses = selected(self.function(logprobs, batch), batch.response_mask)
        figures = {"policy/token_loss": mean(losses.detach(), batch.response_mask), **drift(logprobs, batch)}
        return {"policy": losses.sum()}, figures
