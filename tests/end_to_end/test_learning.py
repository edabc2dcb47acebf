"""Tests of runs with all their stages that learn: the default run, and problems with verifiers."""

import json
from pathlib import Path

import pytest

from rlhf.runs.folder import RunFolder
from rlhf.stages.run import run
from rlhf.words.compose import compose
from tests.end_to_end.test_own_data import documented


def evaluations(folder: Path) -> list[dict]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if any(name.startswith("eval/") for name in row)]


@pytest.mark.nightly
@pytest.mark.timeout(2400)  # trains three models: minutes on one core
def test_training_on_the_reward_model_raises_the_win_rate_of_the_gold_scorer(tmp_path):
    cfg = compose(["algo=dpo", "model=pythia", f"cache_dir={tmp_path / 'artefacts'}", "progress=plain"])
    folder = RunFolder(tmp_path / "run")

    result = run(cfg, folder)

    (sft,) = (tmp_path / "artefacts").glob("sft-*/")
    tuned = evaluations(sft)[-1]
    assert tuned["eval/norm_reward"] <= 0, "the SFT model must not be better than its flawed references"

    (reward,) = (tmp_path / "artefacts").glob("reward-*/")
    judged = evaluations(reward)
    assert judged[0]["eval/accuracy"] < 0.65 < judged[-1]["eval/accuracy"]

    before, *_, after = evaluations(folder.path)
    assert 0.2 <= before["eval/win_rate"] <= 0.45
    assert abs(before["eval/kl"]) < 1e-4
    assert after["eval/win_rate"] == result >= 0.75
    assert after["eval/kl"] > 0.1

    trained = [row for row in map(json.loads, folder.metrics.read_text().splitlines()) if "lr" in row]
    first = trained[0]
    assert abs(first["objective/kl"]) < 1e-4
    assert abs(first["policy/ratio"] - 1) < 1e-4
    fifth = len(trained) // 5
    early, late = trained[:fifth], trained[-fifth:]
    assert mean(late, "objective/scores") > mean(early, "objective/scores"), (
        "the score of the reward model must rise"
    )


@pytest.mark.nightly
@pytest.mark.timeout(1200)  # trains two models: minutes on one core
def test_the_documented_run_on_problems_with_verifiers_learns_to_solve_held_out_ones(tmp_path):
    words = documented("own_data.md", "task=reasoning_gym", "task.dataset=aiw")
    folder = RunFolder(tmp_path / "run")

    run(compose([*words, f"cache_dir={tmp_path / 'artefacts'}", "progress=plain"]), folder)

    before, *_, after = evaluations(folder.path)
    assert before["eval/score"] < 0.75
    assert after["eval/score"] > before["eval/score"] + 0.15


def mean(rows: list[dict], name: str) -> float:
    return sum(row[name] for row in rows) / len(rows)
