"""Tests of runs with all their stages that learn: the default run, and problems with verifiers."""

import json
from pathlib import Path

import pytest
from pyarrow.parquet import read_table

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
    words = documented("results.md", "task=reasoning_gym", "task.dataset=aiw")
    folder = RunFolder(tmp_path / "run")

    run(compose([*words, f"cache_dir={tmp_path / 'artefacts'}", "progress=plain"]), folder)

    before, *_, after = evaluations(folder.path)
    assert before["eval/score"] < 0.75
    assert after["eval/score"] > before["eval/score"] + 0.15


def mean(rows: list[dict], name: str) -> float:
    return sum(row[name] for row in rows) / len(rows)


@pytest.mark.nightly
@pytest.mark.timeout(3600)  # a teacher, and for each of three seeds four runs of a minute
def test_a_student_reaches_its_teacher_and_ends_nearer_to_it_than_after_sft_on_its_samples(tmp_path):
    common = ["task=arithmetic", f"cache_dir={tmp_path / 'artefacts'}", "backend.threads=1", "progress=plain"]

    def trained(name: str, *words: str) -> tuple[list[dict], Path]:
        folder = RunFolder(tmp_path / name)
        run(compose([*common, "schedule.save_every=0", *words]), folder)
        return evaluations(folder.path), folder.path

    found, folder = trained("teacher", "algo=grpo")
    teacher, initial = found[-1], next((tmp_path / "artefacts").glob("sft-*/model"))
    distil = ["algo=distill", f"model.reference={folder / 'model'}", "schedule.eval_every=1.0"]
    small = ["schedule.prompts_per_update=16", "schedule.total_episodes=1600", "optim.lr=3e-4"]
    for number in (1, 2, 3):
        seed = f"seed={number}"
        long = ["schedule.prompts_per_update=64", "schedule.total_episodes=6400", "optim.lr=1e-4", seed]
        after = trained(f"long-{number}", *distil, *long)[0][-1]
        assert after["eval/accuracy"] >= teacher["eval/accuracy_low"]
        assert after["eval/kl"] < 0.1

        short = trained(f"short-{number}", *distil, *small, seed)[0][-1]
        still = ["algo=gpg", "optim.lr=1e-12", "schedule.eval_every=0", "save_generations=true", seed]
        _, sampled = trained(f"samples-{number}", f"model.policy={folder / 'model'}", *still, *small[:2])
        rows = [row for file in sorted(sampled.glob("generations/*")) for row in read_table(file).to_pylist()]
        data = tmp_path / f"{number}.jsonl"
        data.write_text(
            "".join(json.dumps({k: row[k] for k in ("prompt", "response")}) + "\n" for row in rows)
        )
        start = [f"model.policy={initial}", f"model.base={initial}", "schedule.total_epochs=null"]
        local = ["task=local", f"task.path={data}", "algo=sft", "task.max_prompt_tokens=32", *start]
        _, tuned = trained(f"sft-{number}", *local, *small, seed)
        measure = ["schedule.total_episodes=16", "schedule.prompts_per_update=16", "optim.lr=1e-12", seed]
        other = trained(f"measured-{number}", *distil, f"model.policy={tuned / 'model'}", *measure)[0][0]
        assert short["eval/kl"] < other["eval/kl"]
