"""A run whose policy learns to repeat a word gives one hint; one whose reward rises by itself gives none."""

from __future__ import annotations

import itertools
import random

import pytest

from rlhf import Experiment
from tests.end_to_end.conftest import nightly

TEXT = "take the cold water and heat it for four minutes then put in some green leaves and wait a while"
WORDS = TEXT.split()
SOURCE = random.Random(0)
ROWS = [
    {"prompt": f"Question {n}: tea?\nAnswer:", "response": " " + " ".join(SOURCE.choices(WORDS, k=40))}
    for n in range(64)
]
LEARNING = ("algo=rloo", "debug=tiny", "schedule.total_episodes=512", "schedule.prompts_per_update=8")
LEARNING += ("algo.samples_per_prompt=4", "algo.kl_coef=0", "optim.lr=3e-3", "generator.response_length=48")


def waters(response):
    return response.count("water") / 10


calls = itertools.count()


def later(response):  # gets the responses of a whole update, and scores all alike: nothing to learn
    return [next(calls) / 10] * len(response)


@pytest.mark.parametrize(("reward", "hints"), [(waters, 1), nightly(later, 0)])
def test_a_run_hints_at_repetition_that_the_reward_likes(reward, hints, cache_dir, tmp_path, capsys):
    folders = (f"cache_dir={cache_dir}", f"output_dir={tmp_path}", "progress=off", "schedule.eval_every=0")
    batched = f"scorer.batched={reward is later}"
    run = Experiment(*LEARNING, *folders, batched, dataset=ROWS, reward=reward)
    run.run()
    scores = run.metrics()["objective/scores"]
    assert len(scores) == 16 and scores.iloc[-4:].mean() > scores.iloc[:4].mean() + 0.1
    assert (run.metrics()["objective/tie_rate"] == 1).all() == (reward is later)
    text = "responses repeat themselves more while the reward rises: "
    assert capsys.readouterr().out.count(text) == hints
    assert run.files.log.read_text().count(text) == hints
    assert not [name for name in run.metrics() if "repe" in name]
