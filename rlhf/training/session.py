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
every loop. A loop may leave verbs out, or give `forward_backward` another loss. A verb that is called where
it would train wrongly raises an error: each batch of rollouts ends with one `sync`, and each `step` needs one
`forward_backward`. If a loop does not call `finish_update`, `sample` does before it yields again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from torch import Tensor

from rlhf.config.run import ScheduleConfig
from rlhf.core.batch import Batch, Rollouts
from rlhf.core.errors import CommonError, place_in_code
from rlhf.core.metrics import Metrics, of_scorer, selected
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

_SYNC = "call session.sync(batch) after the last step of an update"
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


class Misuse(CommonError):
    """A loop called a verb where it would train wrongly, or returned too early."""


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
    _gradients: Gradients | None = None  # those for which `step` is to be called
    _steps: int = 0  # optimizer steps of this update
    _open: bool = False  # `sync` is to be called for the rollouts
    _unfinished: bool = False  # `finish_update` is to be called
    _stop: bool = False  # a signal asked to stop, and the checkpoint is saved

    def run(self, loop: Callable[[Session], None]) -> None:
        """Call a loop, which must train to the end of the run, or until a signal asks to stop.

        Raises:
            Misuse: the loop called a verb where it is not allowed, or returned before the end. The message
                names the line of the loop.
        """
        try:
            loop(self)
            stopped = self._settled()
            self._require(stopped or self.state.done, "train until session.sample() ends, but it returned")
        except Misuse as error:
            raise Misuse(f"{error}{place_in_code(error, __file__)}") from None

    def sample(self) -> Iterator[Rollouts]:
        """Yield the rollouts of all remaining updates; before the first, evaluate if that is due.

        After a signal, nothing more is yielded.

        Raises:
            Interrupted: after a signal, an evaluation was due.
            Misuse: `sync` was not called for the rollouts before.
        """
        if self._settled():
            return
        if self.state.unevaluated and self.schedule.eval_every:
            self.evaluate()
        for rollouts in self.stream:
            self._open, self._steps = True, 0
            yield rollouts
            if self._settled():
                return

    def score(self, rollouts: Rollouts) -> Batch:
        """Return the rollouts with scores [N, K].

        Raises:
            Interrupted: a signal came while the scorer waited for its service.
        """
        with self.parts.recorder.timer("score"), self.parts.phases("scoring"):
            scored = self.parts.scorer(rollouts)
            self.parts.recorder.add(self.parts.prompts.scored(scored) | of_scorer(scored.figures))
        return replace(scored, figures=None)

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
        parts, epochs = self.schedule.minibatches, self.schedule.epochs
        with self.parts.recorder.timer("train"), self.parts.phases("training", parts * epochs) as done:
            for each in batch.minibatches(parts, epochs, self.seed, self.state.update):
                yield each
                done()

    def forward_backward(self, minibatch: Batch, loss: Objective | TokenLoss | None = None) -> Metrics:
        """Compute the gradients of a minibatch, and return its metrics.

        Args:
            minibatch: the minibatch.
            loss: an objective, which also gave the minibatch its credit, or a function of log-probs [N, K, T]
                and minibatch that returns the losses [N, K, T] of tokens, whose mean over the response tokens
                of all prompts is the loss; None: the objective of the run.

        Raises:
            Misuse: `step` was not called for the gradients of another minibatch, or the function returned
                another shape.
        """
        self._require(self._gradients is None, "call session.step() after session.forward_backward()")
        objective = self.parts.objective if loss is None else loss
        if not isinstance(objective, Objective):  # a prompt without advantages may have such a loss
            objective, minibatch = _OwnLoss(objective), replace(minibatch, signal=None)
        self._gradients = self.parts.engine.forward_backward(minibatch, objective)
        return self._gradients.metrics

    def step(self) -> Metrics:
        """Make an optimizer step with these gradients, and return all metrics of the minibatch.

        Raises:
            NonFinite: a loss or the gradient norm is not finite. The weights have not changed.
            Misuse: there are no gradients, or the update already had as many steps as the schedule says, on
                which the learning rate and the log-probs before the update depend.
        """
        most = self.schedule.minibatches * self.schedule.epochs
        self._require(self._gradients is not None, "call session.forward_backward() before session.step()")
        self._require(self._steps < most, f"make {most} steps at most, schedule.minibatches x epochs")
        assert self._gradients is not None
        found, self._gradients, self._steps = self._gradients, None, self._steps + 1
        metrics = self.parts.engine.optimizer_step(found)
        self.parts.recorder.add(metrics)
        return metrics

    def sync(self, batch: Batch) -> None:
        """End an update: count the batch of `annotate`, send the weights, and write a row of metrics.

        Raises:
            Misuse: `step` was not called for the last gradients, or there are no new rollouts.
        """
        parts, timer = self.parts, self.parts.recorder.timer
        self._require(self._gradients is None, "call session.step() after session.forward_backward()")
        self._require(self._open, "call session.sync(batch) once for the rollouts of an update")
        self._open, self._unfinished = False, True
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
        self._require(not self._open, _SYNC)
        self._unfinished = False
        if self.state.due(self.schedule.eval_every, at_end=True):
            self.evaluate()
        self._stop = self.interruption.asked()
        if (self._stop or self.state.due(self.schedule.save_every)) and not self.state.done:
            self.save()
        return self._stop

    def _settled(self) -> bool:
        """Finish the update before, if the loop did not, and return whether a signal asked to stop."""
        return self.finish_update() if self._open or self._unfinished else self._stop

    def _require(self, holds: bool, rule: str) -> None:
        if not holds:
            at = f"after update {self.state.update} of {self.state.num_updates}"
            raise Misuse(f"loop must {rule} ({at}); correct it, and the same command resumes the run")

    def save(self) -> None:
        """Write a checkpoint, from which the same command resumes."""
        parts = self.parts
        self._require(not self._open, _SYNC)
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

    def count(self, batch: Batch) -> Counts:
        return {"policy": float(batch.response_mask.sum())}

    def loss(self, forward: Forward, batch: Batch) -> tuple[Losses, Metrics]:
        logprobs = forward(batch).logprobs
        assert logprobs is not None
        losses = self.function(logprobs, batch)
        if losses.shape != logprobs.shape:
            shapes = f"{list(logprobs.shape)}, got {list(losses.shape)}"
            raise Misuse(f"the loss of loop must return the losses of tokens [N, K, T] = {shapes}")
        return {"policy": selected(losses, batch.response_mask).sum()}, drift(logprobs, batch)
