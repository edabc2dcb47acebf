"""The loop. One for every algorithm, generator and backend; it knows none of them.

  prompts          rollouts            batch                 minibatches
Task ──▶ Stream ──▶ Generator ──▶ Scorer ──▶ Engine.annotate ──▶ Objective.credit ──▶ Engine.step
                        ▲                                                               │
                        └────────────── weights, version ───────────────────────────────┘

| step     | waits for                        | unblocked by                              |
|----------|----------------------------------|-------------------------------------------|
| rollouts | the oldest request in flight     | the generator, `max_lag` batches ahead    |
| step     | the batch: scores, log-probs     | nothing else; the next request may be running |
| load     | the optimizer step               | first in, first out behind requests made before |
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlhf.config.schedule import ScheduleConfig
    from rlhf.core.state import TrainState
    from rlhf.engines.engine import Engine
    from rlhf.generators.generator import Generator
    from rlhf.objectives.objective import Objective
    from rlhf.processes.signals import Interruption
    from rlhf.scorers.scorer import Scorer
    from rlhf.training.checkpoint import Checkpoints
    from rlhf.training.evaluators import Evaluator
    from rlhf.training.recorder import Recorder
    from rlhf.training.stream import Stream


def train(
    stream: Stream,
    generator: Generator,
    scorer: Scorer,
    engine: Engine,
    objective: Objective,
    state: TrainState,
    schedule: ScheduleConfig,
    recorder: Recorder,
    evaluator: Evaluator,
    checkpoints: Checkpoints,
    interruption: Interruption,
    seed: int,
) -> None:
    """Train until the stream ends, or a signal asks to stop: then a checkpoint says where to go on."""
    timer = recorder.timer
    if state.update == 0 and schedule.eval_every:
        recorder.evaluation(state, evaluator(state))
    for rollouts in stream:
        with timer("score"):
            batch = scorer(rollouts)
        with timer("annotate"):
            batch = engine.annotate(batch, objective.needs)
        recorder.add(objective.describe(batch))
        batch = objective.credit(batch)
        with timer("train"):
            for minibatch in batch.minibatches(schedule.minibatches, schedule.epochs, seed, state.update):
                recorder.add(engine.step(minibatch, objective))
        state.advance(rollouts)
        with timer("sync"):
            generator.load(engine.weights(), state.version)
        recorder.flush(state, rollouts, engine)
        if state.due(schedule.eval_every, at_end=True):
            recorder.evaluation(state, evaluator(state))
        stop = interruption.asked()
        if (stop or state.due(schedule.save_every)) and not state.done:
            checkpoints.save(state, engine, stream, recorder)
        if stop:
            return
