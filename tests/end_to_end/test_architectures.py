"""Runs with models whose forwards or caches differ from those of most models."""

import json
from pathlib import Path

import pytest

from rlhf.checks.check import problems
from rlhf.core.errors import UserError
from rlhf.runs.folder import RunFolder
from rlhf.stages.run import run
from rlhf.trials import trials
from rlhf.words.compose import compose
from tests.end_to_end.conftest import rows
from tests.models.architectures import tiny
from tests.tiny_models import tiny_tokenizer

SMALL = [
    *(
        *("algo=rloo", "task=local", "task.path=prompts.jsonl", "scorer=function"),
        "scorer.path=rewards.py:brief",
    ),
    *("task.max_prompt_tokens=10", "generator.response_length=6", "schedule.prompts_per_update=4"),
    *("schedule.total_episodes=16", "eval.prompts=4", "backend.micro_batch=8", "progress=off"),
]


@pytest.fixture
def train(tmp_path, monkeypatch, capfd):
    """`train(kind, *overrides)` runs two updates with a tiny model; returns the rows and the output."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(trials, "KNOWN", {})
    texts = (" ".join(f"w{i * 7 % 90 + j}" for j in range(3 + i % 7)) for i in range(24))
    Path("prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    Path("rewards.py").write_text("def brief(prompt, response, reference):\n    return -len(response)\n")

    def go(kind: str, *overrides: str):
        tiny(kind).save_pretrained("model")
        tiny_tokenizer().save_pretrained("model")
        cfg = compose([*SMALL, "model.policy=model", *overrides])
        assert problems(cfg) == []
        folder = RunFolder(Path("outputs") / "run")
        run(cfg, folder)
        return rows(folder), " ".join(capfd.readouterr().out.split())

    return go


def assert_right(metrics):
    first = next(row for row in metrics if "mismatch/kl" in row)
    assert abs(first["mismatch/kl"]) < 1e-5 and abs(first["objective/kl"]) < 1e-5
    assert abs(first["policy/ratio"] - 1) < 1e-5


def test_a_model_with_alibi_by_cache_slot_trains_without_shared_prefix(train):
    metrics, output = train("mpt", "model.attention=eager")
    assert_right(metrics)
    assert output.count("model.shared_prefix is turned off for a mpt model (outputs differ by up to") == 1


@pytest.mark.parametrize("lag", [0, 1])
def test_a_recurrent_model_trains_and_samples_without_cache(train, lag):
    settings = ["model.attention=eager", "model.shared_prefix=false", f"schedule.max_lag={lag}"]
    metrics, output = train("rwkv", *settings)
    assert_right(metrics)
    assert output.count("sampling from a rwkv model uses no cache (the forward fails") == 1
    assert "shared_prefix" not in output


def test_an_attention_that_a_model_does_not_have_is_refused_with_the_remedy(train):
    with pytest.raises(UserError, match="no attention=sdpa for mpt models.*set model.attention=eager"):
        train("mpt")


def test_a_model_that_reads_later_tokens_is_refused_and_leaves_nothing(train):
    with pytest.raises(UserError, match="earlier tokens of the same sequence only.*got a doge model"):
        train("doge")
    assert not list(Path("outputs").rglob("*"))
