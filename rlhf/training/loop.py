"""The training loop, which is the same for every algorithm, generator, scorer and backend.

  prompts          rollouts            batch                 minibatches
Task ──▶ Stream ──▶ Generator ──▶ Scorer ──▶ Engine.annotate ──▶ Objective.credit ──▶ Engine.step
                        ▲                                                               │
                        └────────────── weights, version ───────────────────────────────┘

With `schedule.replay` above 1, a replay buffer between Scorer and Engine.annotate exchanges a part of the new
prompts for earlier prompts; their scores and reference log-probs are not computed again. With
`schedule.refill`, Stream asks Scorer, and the loop gets rollouts that have scores.

| phase    | the loop waits for                       | the generator can meanwhile                   |
|----------|------------------------------------------|-----------------------------------------------|
| wait     | rollouts of the oldest request in flight | sample up to `schedule.max_lag` later batches |
| score    | scores of the batch                      | sample these later batches                    |
| annotate | log-probs and values of the batch        | sample these later batches                    |
| train    | optimizer steps                          | sample these later batches                    |
| wait     | the load of an earlier copy of weights   | sample these later batches                    |
| sync     | a copy of the new weights                | answer earlier requests, then load the copy   |

Metrics report the seconds of a phase as `time/<phase>_s`. With `schedule.update=in_flight`, the generator
loads new weights in the middle of a request.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rlhf.config.run import ScheduleConfig
from rlhf.core.state import TrainState
from rlhf.engines.engine import Engine
from rlhf.generators.generator import Generator
from rlhf.objectives.objective import Objective
from rlhf.processes.signals import Interruption
from rlhf.scorers.scorer import Scorer
from rlhf.tasks.task import PromptOrder
from rlhf.terminal.console import Phases
from rlhf.training.checkpoint import Checkpoints
from rlhf.training.evaluators import Evaluator
from rlhf.training.recorder import Recorder
from rlhf.training.stream import ONCE, Refill, Replay, RolloutStream


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


def train(
    parts: Parts,
    stream: RolloutStream,
    state: TrainState,
    schedule: ScheduleConfig,
    interruption: Interruption,
    seed: int,
) -> None:
    """Train until the stream ends, or until a signal asks to stop.

    After a signal, the current update is finished and a checkpoint is saved before the function returns. But
    if an evaluation is due, the function raises Interrupted instead, and the resumed run begins with it.

    Args:
        parts: the parts of the run.
        stream: rollouts of all remaining updates.
        state: counters of the run, changed in place.
        schedule: minibatches, epochs, and how often to evaluate and to save.
        interruption: whether a signal asked the run to stop.
        seed: seed of the run, for the order of minibatches.

    Raises:
        Interrupted: after a signal, an evaluation was due, or a scorer did not wait for its service; the last
            evaluation or update is incomplete.
    """
    generator, scorer, engine, objective = parts.generator, parts.scorer, parts.engine, parts.objective
    prompts, recorder, phases = parts.prompts, parts.recorder, parts.phases
    timer = recorder.timer
    steps = schedule.minibatches * schedule.epochs
    if state.unevaluated and schedule.eval_every:
        evaluate(parts, state, interruption)
    for rollouts in stream:
        with timer("score"), phases("scoring"):
            new = scorer(rollouts)
            recorder.add(prompts.scored(new))
        with timer("annotate"):
            batch, figures = parts.replay(engine.annotate(new, objective.needs & ONCE))
            batch = engine.annotate(batch, objective.needs)
        recorder.add(objective.describe(batch) | figures)
        credited = objective.credit(batch)
        with timer("train"), phases("training", steps) as done:
            for minibatch in credited.minibatches(schedule.minibatches, schedule.epochs, seed, state.update):
                recorder.add(engine.step(minibatch, objective))
                done()
        state.advance(batch)
        with timer("wait"), phases("waiting for the generator"):
            generator.wait()
        with timer("sync"), phases("sending weights"):
            generator.load(engine.weights(), state.version)
        recorder.flush(state, batch, engine)
        if state.due(schedule.eval_every, at_end=True):
            evaluate(parts, state, interruption)
        stop = interruption.asked()
        if (stop or state.due(schedule.save_every)) and not state.done:
            with phases("saving a checkpoint"):
                parts.checkpoints.save(state, engine, stream, recorder)
        if stop:
            return


def evaluate(parts: Parts, state: TrainState, interruption: Interruption) -> None:
    """Evaluate the trained model and record the result.

    A signal during the evaluation ends it between two batches, if the run has one rank. Several ranks finish
    the evaluation, because they could not stop at the same batch.

    Raises:
        Interrupted: a signal was received, and there is no result.
    """
    state.unevaluated = True
    interruption.check_ranks()
    with parts.phases("evaluating", between=interruption.check_alone):
        evaluation = parts.evaluator(state)
    parts.recorder.evaluation(state, evaluation)
