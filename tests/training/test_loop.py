"""Evaluations of the training loop and signals."""

from signal import SIGTERM
from types import SimpleNamespace

import pytest

from rlhf.core.errors import Interrupted
from rlhf.core.metrics import Evaluation
from rlhf.core.state import TrainState
from rlhf.processes.signals import Interruption
from rlhf.terminal.console import Phases
from rlhf.training.session import Session

STATE = TrainState(num_updates=2, update=1)


def evaluated(interruption, batches=()):
    """Evaluate with `batches`, functions called in turn, and return the evaluations that were recorded."""
    phases, recorded = Phases(), []

    def evaluator(state):
        with phases("sampling", len(batches)) as done:
            for batch in batches:
                batch()
                done()
        return Evaluation({})

    parts = SimpleNamespace(
        phases=phases,
        evaluator=evaluator,
        recorder=SimpleNamespace(evaluation=lambda state, evaluation: recorded.append(evaluation)),
    )
    Session(parts, (), STATE, None, interruption, seed=1).evaluate()
    return recorded


def signalled():
    interruption = Interruption()
    interruption.received = SIGTERM
    return interruption


def test_after_a_signal_to_any_rank_no_evaluation_starts():
    here, elsewhere = signalled(), Interruption()
    here.agree = lambda flag: flag  # of two ranks
    elsewhere.agree = lambda flag: True  # the other rank received the signal
    for interruption in (signalled(), here, elsewhere):
        with pytest.raises(Interrupted):
            evaluated(interruption, [pytest.fail])


def test_a_signal_during_an_evaluation_ends_it_after_the_current_batch():
    interruption, seen = Interruption(), []
    batches = [lambda: setattr(interruption, "received", SIGTERM), lambda: seen.append("a later batch")]
    with pytest.raises(Interrupted):
        evaluated(interruption, batches)
    assert seen == []


def test_several_ranks_finish_an_evaluation_because_they_could_not_stop_at_the_same_batch():
    interruption = Interruption()
    interruption.agree = lambda flag: flag
    assert len(evaluated(interruption, [lambda: setattr(interruption, "received", SIGTERM)] * 2)) == 1


def test_a_run_that_is_asked_to_stop_by_a_hook_still_evaluates():
    interruption = Interruption()
    interruption.request()
    assert len(evaluated(interruption)) == 1
