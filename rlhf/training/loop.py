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

from rlhf.training.session import Session


def train(session: Session) -> None:
    """Train until the stream ends, or until a signal asks to stop.

    After a signal, the current update is finished and a checkpoint is saved before the function returns. But
    if an evaluation is due, the function raises Interrupted instead, and the resumed run begins with it.

    Raises:
        Interrupted: after a signal, an evaluation was due, or a scorer did not wait for its service; the last
            evaluation or update is incomplete.
    """
    for rollouts in session.sample():
        batch = session.annotate(session.score(rollouts))
        for minibatch in session.minibatches(session.credit(batch)):
            session.forward_backward(minibatch)
            session.step()
        session.sync(batch)
        if session.finish_update():
            return
