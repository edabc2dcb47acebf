"""The table of metrics at the end of a run."""

from types import SimpleNamespace

import pytest

from rlhf.core.state import TrainState
from rlhf.runs.folder import RunFolder
from rlhf.stages.words import print_closing
from rlhf.words.compose import compose

ANSWERS = {
    "eval/win_rate": 0.0,
    "eval/win_rate_vs_initial": 0.6,
    "eval/accuracy": 0.5,
    "eval/gold_score": 0.5,
}
LOCAL = ("task=local", "task.path=x.jsonl", "model.policy=x", "scorer=answer")


@pytest.mark.parametrize(
    "words", [("task=arithmetic",), ("task=reasoning_gym",), LOCAL, (*LOCAL, "scorer@gold=answer")]
)
def test_the_first_result_of_a_run_with_answers_is_their_accuracy_and_no_win_rate_is_shown(
    words, tmp_path, capsys
):
    cfg = compose(["algo=grpo", *words])
    recorder = SimpleNamespace(first=ANSWERS, evaluated={**ANSWERS, "eval/kl": 0.1}, evaluated_on=16)
    print_closing(cfg, cfg, RunFolder(tmp_path), recorder, TrainState(num_updates=1), 1.0, False)
    table = capsys.readouterr().out.splitlines()[1:]
    assert table[1].startswith("  accuracy of answers") and "0.500" in table[1]
    assert not [line for line in table if "win rate" in line]


def test_the_accuracy_of_a_reward_model_is_that_of_pairs(tmp_path, capsys):
    cfg = compose(["algo=reward", "task=arithmetic"])
    recorder = SimpleNamespace(
        first={}, evaluated={"eval/accuracy": 0.5, "eval/margin": 1.0}, evaluated_on=16
    )
    print_closing(cfg, cfg, RunFolder(tmp_path), recorder, TrainState(num_updates=1), 1.0, False)
    assert "accuracy on held-out pairs" in capsys.readouterr().out
