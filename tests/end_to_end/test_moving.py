"""Runs with a moving reference, Elastic Reset, GDPO, a penalty on long responses, an order by pass rate."""

import pytest

from rlhf.runs.folder import RunFolder
from rlhf.stages.run import run
from tests.end_to_end.conftest import assert_same_end, interrupted, rows
from tests.end_to_end.test_solved_prompts import RUN as TWO_EPOCHS

RUN = [
    *("algo=grpo", "algo.samples_per_prompt=2", "schedule.total_episodes=80", "schedule.max_lag=1"),
    *("generator.worker=false", "schedule.save_every=1", "schedule.eval_every=0", "optim.lr=1e-3"),
    *("scorer.missing_eos_score=null", "scorer.overlong_buffer=4"),
]
WORDS = "tests.end_to_end.test_moving"
OPTIONS = {
    "moving": [*RUN, "model.moving.every=2", "model.moving.share=0.6"],
    "reset": [*RUN, "model.moving.every=2", "model.moving.decay=0.9"],
    "scores": [
        *(word for word in TWO_EPOCHS if not word.startswith(("scorer.path", "schedule.solved_at"))),
        *(f"scorer.path=[{WORDS}:short,{WORDS}:even]", "scorer.weights=[1,-0.5]"),
        *("algo.advantage=decoupled", "schedule.pass_rate=0.5"),
    ],
}


def short(response: str) -> float:
    """Return 1 for at most 30 characters."""
    return float(len(response) <= 30)


def even(prompt: str, response: str, reference: str) -> float | None:
    """Judge only some prompts, by the number of words."""
    return None if len(prompt) % 4 == 0 else float(len(response.split()) % 2)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_run_that_is_interrupted_and_resumed_equals_an_uninterrupted_one(tiny, tmp_path, name):
    whole, parts = RunFolder(tmp_path / "whole"), RunFolder(tmp_path / "parts")
    run(tiny(*OPTIONS[name]), whole)
    with interrupted(update=4):  # the reference has moved once, the second epoch has begun
        run(tiny(*OPTIONS[name]), parts)
    run(tiny(*OPTIONS[name]), parts)
    assert_same_end(parts, whole)


def test_a_reference_that_keeps_its_weights_changes_nothing_and_one_that_moves_does(finished):
    frozen, same = finished(*RUN), finished(*RUN, "model.moving.every=1", "model.moving.share=0")
    assert_same_end(same, frozen)
    moved = rows(finished(*OPTIONS["moving"]))
    first = [row for row in rows(frozen) if row["update"] < 2]
    assert moved[: len(first)] == first
    assert [row["loss/policy"] for row in moved if "lr" in row][2:] != [
        row["loss/policy"] for row in rows(frozen) if "lr" in row
    ][2:]
