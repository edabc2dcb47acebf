"""A run whose reward functions read columns and messages, in generator and annotator processes."""

import json

import pytest

from rlhf import Experiment
from tests.chat_tokenizers import qwen
from tests.end_to_end.test_chat import SHORT, write_model

REWARDS = """
def level(response, level, messages):
    assert messages[-1]["content"] == f"Count to {level}.", messages
    return level


def brief(prompt, response, reference, limits):
    assert prompt.startswith("<|im_start|>") and limits == {"words": 3}
    return -len(response)
"""


@pytest.mark.parametrize("lag", [0, 1])
def test_columns_and_messages_reach_reward_functions_and_judges_wherever_they_run(tmp_path, lag):
    (tmp_path / "own.py").write_text(REWARDS)
    file = tmp_path / "dialogues.jsonl"
    rows = [
        {"messages": [{"role": "user", "content": f"Count to {i}."}], "level": i, "limits": {"words": 3}}
        for i in range(12)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = tmp_path / "own.py"
    experiment = Experiment(
        *SHORT, "task=local", "algo=rloo", f"task.path={file}", f"output_dir={tmp_path}",
        f"schedule.max_lag={lag}",
        f"model.policy={write_model(tmp_path / 'model', qwen())}", "schedule.total_episodes=32",
        "scorer=function", f"scorer.path=[{own}:level,{own}:brief]", "scorer.weights=[1,0.5]",
        "scorer@gold=function", f"gold.path={own}:level",
    )  # fmt: skip
    result = experiment.run()
    assert 0 <= result["eval/gold_score"] < 12
    for row in experiment.metrics().to_dict("records"):
        if "objective/scores" in row and row["objective/scores"] == row["objective/scores"]:
            parts = row["objective/scores/level"] + 0.5 * row["objective/scores/brief"]
            assert row["objective/scores"] == pytest.approx(parts, rel=1e-5)
    (measured,) = experiment.evaluate(only=["model"]).to_dict("records")
    assert measured["eval/score"] == pytest.approx(result["eval/score"])
