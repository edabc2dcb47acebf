"""Tests of the session that a loop of one's own calls: what is refused, and what it does by itself."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from rlhf.config.run import ScheduleConfig
from rlhf.core.batch import Outputs
from rlhf.core.state import TrainState
from rlhf.terminal.console import Phases
from rlhf.training.session import Misuse, Parts, Session
from tests.training.test_replay import CountingEngine, N, batch

UPDATES = 3


class Recording:
    """Parts that record what a session does, in order."""

    def __init__(self, **schedule):
        self.done, self.stop_after, self.engine = [], None, CountingEngine()
        self.state = TrainState(num_updates=UPDATES, unevaluated=False)
        recorder = SimpleNamespace(
            timer=lambda name: nullcontext(),
            add=lambda figures: None,
            flush=lambda state, batch, engine: self.done.append(f"row {state.update}"),
            evaluation=lambda state, evaluation: self.done.append(f"evaluated {state.update}"),
        )
        parts = Parts(
            prompts=SimpleNamespace(scored=lambda batch: {}),
            generator=SimpleNamespace(wait=lambda: None, load=lambda weights, version: None),
            scorer=lambda batch: batch,
            replay=lambda batch: (batch, {}),
            engine=self.engine,
            objective=SimpleNamespace(
                needs=frozenset(), describe=lambda batch: {}, credit=lambda batch: batch
            ),
            recorder=recorder,
            evaluator=lambda state: None,
            checkpoints=SimpleNamespace(save=lambda state, *_: self.done.append(f"saved {state.update}")),
            phases=Phases(),
        )
        interruption = SimpleNamespace(
            asked=lambda: self.state.update == self.stop_after,
            check_ranks=lambda: None,
            check_alone=lambda: None,
        )
        stream = [batch(update) for update in range(UPDATES)]
        settings = {"prompts_per_update": N, "eval_every": 0, "save_every": 0, **schedule}
        self.session = Session(parts, stream, self.state, ScheduleConfig(**settings), interruption, seed=1)


def short(session):
    for rollouts in session.sample():
        session.forward_backward(rollouts)
        session.step()
        session.sync(rollouts)


def one_by_one(session):
    while not session.state.done:
        rollouts = next(session.sample())
        session.forward_backward(rollouts)
        session.step()
        session.sync(rollouts)


def deaf(session):
    for rollouts in session.sample():
        session.sync(rollouts)
        session.finish_update()


@pytest.mark.parametrize("loop", [short, deaf])
def test_every_loop_evaluates_saves_and_stops_after_a_signal(loop):
    whole = Recording(eval_every=2, save_every=1)
    whole.session.run(loop)
    assert whole.done == [
        *("row 1", "saved 1"),
        *("row 2", "evaluated 2", "saved 2"),
        *("row 3", "evaluated 3"),
    ]
    stopped = Recording()
    stopped.stop_after = 2
    stopped.session.run(loop)
    assert stopped.done == ["row 1", "row 2", "saved 2"] and not stopped.state.done


def no_sync(session):
    for rollouts in session.sample():
        session.annotate(rollouts)


def two_syncs(session):
    for rollouts in session.sample():
        session.sync(rollouts)
        session.sync(rollouts)


def sync_before_step(session):
    for rollouts in session.sample():
        session.forward_backward(rollouts)
        session.sync(rollouts)


def two_steps(session):
    for rollouts in session.sample():
        session.forward_backward(rollouts)
        session.step()
        session.step()


def two_gradients(session):
    for rollouts in session.sample():
        session.forward_backward(rollouts)
        session.forward_backward(rollouts)


def more_steps(session):
    for rollouts in session.sample():
        for _ in range(2):
            session.forward_backward(rollouts)
            session.step()


def finish_before_sync(session):
    for _ in session.sample():
        session.finish_update()


def save_before_sync(session):
    for _ in session.sample():
        session.save()


def too_early(session):
    for rollouts in session.sample():
        session.sync(rollouts)
        return


def nothing(session):
    yield session  # a generator, whose code never runs


@pytest.mark.parametrize(
    ("loop", "names", "line"),
    [
        (no_sync, r"session\.sync", 1),
        (two_syncs, r"session\.sync", 3),
        (sync_before_step, r"session\.step", 3),
        (two_steps, r"session\.forward_backward", 4),
        (two_gradients, r"session\.step", 3),
        (more_steps, "make 1 steps at most", 4),
        (finish_before_sync, r"session\.sync", 2),
        (save_before_sync, r"session\.sync", 2),
        (too_early, r"after update 1 of 3", None),
        (nothing, r"after update 0 of 3", None),
    ],
)
def test_calls_that_would_train_wrongly_are_refused_with_the_line_of_the_loop(loop, names, line):
    made = Recording()
    with pytest.raises(Misuse, match=names) as refused:
        made.session.run(loop)
    assert made.state.update <= 1
    if line is not None:
        assert f"({__file__}, line {loop.__code__.co_firstlineno + line})" in str(refused.value)


def test_rollouts_may_be_taken_one_by_one():
    made = Recording(save_every=1)
    made.session.run(one_by_one)
    assert made.done == ["row 1", "saved 1", "row 2", "saved 2", "row 3"]


@pytest.mark.parametrize("shape", [lambda x: x.mean(), lambda x: x.sum(-1)])
def test_a_loss_of_another_shape_is_refused_with_the_line_of_the_loop(shape):
    def loop(session):
        for rollouts in session.sample():
            session.forward_backward(rollouts, lambda logprobs, _: shape(logprobs))

    made = Recording()
    made.engine.forward_backward = lambda batch, objective: objective.loss(
        lambda each: Outputs(logprobs=torch.zeros(each.response_mask.shape)), batch
    )
    with pytest.raises(Misuse, match=r"losses of tokens \[N, K, T\] = .* got .*test_session.py, line"):
        made.session.run(loop)


def test_a_loss_of_ones_own_trains_prompts_without_signal():
    def loop(session):
        for rollouts in session.sample():
            tied = replace(rollouts, signal=torch.zeros(N, dtype=torch.bool))
            session.forward_backward(tied, lambda logprobs, _: -logprobs)
            session.step()
            session.sync(rollouts)

    made = Recording()
    found = []
    whole = made.engine.forward_backward
    made.engine.forward_backward = lambda batch, objective: (
        found.append((batch.signal, objective.count(batch))) or whole(batch, objective)
    )
    made.session.run(loop)
    assert found[0] == (None, {"policy": float(batch(0).response_mask.sum())})
