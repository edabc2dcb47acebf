"""Runs on a mixture of tasks: metrics of each part, a resumed run, and other algorithms."""

import json

import pytest

from rlhf.runs.folder import RunFolder
from rlhf.stages.run import run
from rlhf.words.compose import compose
from tests.end_to_end.conftest import assert_same_end, interrupted, rows


def length(prompt: str, response: str, reference: str) -> float:
    """Return the number of characters of a response."""
    return float(len(response))


@pytest.fixture(scope="module")
def mixture(tmp_path_factory, cache_dir):
    """`mixture(*words)` returns the config of a tiny run on sums and words, with a scorer for each part."""
    folder = tmp_path_factory.mktemp("data")
    found = ["debug=tiny", "task=mixture", f"cache_dir={cache_dir}"]
    formats = {"sums": ("Sum {i} 1 :", " #### {j}"), "words": ("Say tea {i} :", " ok")}
    for name, (prompt, answer) in formats.items():
        data = [{"prompt": prompt.format(i=i), "response": answer.format(j=i + 1)} for i in range(40)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in data))
        found += [f"+schema/task@task.parts.{name}=local", f"task.parts.{name}.path={folder / name}.jsonl"]

    def config(*words, scorer=True):
        chosen = []
        for at, key in (("gold", "scorer@gold"), *([("scorer", "scorer")] if scorer else [])):
            chosen += [f"{key}=mixture", f"+scorer@{at}.parts.sums=answer"]
            chosen += [f"+scorer@{at}.parts.words=function", f"{at}.parts.words.path={__name__}:length"]
        return compose([*found, *chosen, "+task.weights.words=3", "progress=off", *words])

    return config


ONLINE = ["algo=rloo", "schedule.total_episodes=96", "schedule.save_every=1", "schedule.max_lag=1"]


def test_rows_have_metrics_of_each_part_and_a_resumed_run_ends_equally(mixture, tmp_path):
    words = [*ONLINE, "generator.worker=false", "schedule.replay=2"]
    whole, parts = RunFolder(tmp_path / "whole"), RunFolder(tmp_path / "parts")
    run(mixture(*words), whole)
    with interrupted(update=3):
        run(mixture(*words), parts)
    run(mixture(*words), parts)
    assert_same_end(whole, parts)
    found = rows(whole)
    updates, evaluations = ([row for row in found if key in row] for key in ("lr", "eval/score"))
    prompts = [[row[f"part/{name}/prompts"] for row in updates] for name in ("sums", "words")]
    assert all(sum(counts) == 8 for counts in zip(*prompts, strict=True)) and sum(prompts[1]) > sum(
        prompts[0]
    )
    for row in evaluations:
        for name in ("score", "gold_score", "win_rate", "response_tokens"):
            values = [row[f"eval/part/{part}/{name}"] for part in ("sums", "words")]
            assert min(values) <= row[f"eval/{name}"] <= max(values)
        assert row["eval/part/sums/score"] <= 1


@pytest.mark.parametrize("algo", ["sft", "dpo"])
def test_other_algorithms_train_on_a_mixture(mixture, tmp_path, algo):
    folder = RunFolder(tmp_path / "run")
    run(mixture(f"algo={algo}", scorer=algo != "sft"), folder)
    assert folder.finished()
    assert any("eval/part/words/gold_score" in row for row in rows(folder))
