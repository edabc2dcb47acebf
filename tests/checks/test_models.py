"""Tests of the rules for models: required model names, and the minimum context length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlhf.checks import check, inputs
from rlhf.config.models import ModelConfig
from rlhf.core.machine import Machine
from rlhf.words.compose import compose
from tests.model_folders import LLAMA, REWARD, write_model


def model(folder: Path, positions: int, config: dict[str, Any] = LLAMA) -> str:
    return write_model(folder, config, max_position_embeddings=positions)


def problems(*overrides: str) -> list[str]:
    return check.problems(compose([*overrides]))


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        ("algo=sft", ["model.base"]),
        ("algo=reward", ["model.policy"]),
        ("algo=dpo", ["model.policy", "model.reward"]),
        ("algo=dpo scorer=reward_model scorer.path=some/reward", ["model.policy"]),
        ("algo=dpo scorer=function scorer.path=json:loads", ["model.policy"]),
        ("algo=dpo stages.stand_ins=true", []),
        ("algo=dpo model.policy=some/policy model.reward=some/reward", []),
    ],
)
def test_hub_task_requires_the_names_of_the_models_that_the_run_loads(overrides, keys):
    named = "task=tldr scorer@gold=none task.max_prompt_tokens=128 schedule.total_episodes=1280"
    words = [*named.split(), *overrides.split(), "model.context=1024"]
    if "algo=dpo" not in words:
        words.remove("schedule.total_episodes=1280")
    found = [text for text in problems(*words) if "must name a model for task=tldr" in text]
    assert [text.split(" ")[0] for text in found] == keys


def test_shortest_context_length_of_all_models_is_the_limit(tmp_path):
    long, short = model(tmp_path / "long", 1024), model(tmp_path / "short", 128)
    reward = model(tmp_path / "reward", 1024, REWARD)
    short_reward = model(tmp_path / "short_reward", 128, REWARD)
    whole = [f"model.policy={long}", f"model.reward={reward}"]
    assert problems(*whole) == []
    for key, path in (("policy", short), ("reference", short), ("reward", short_reward)):
        (problem,) = problems(*whole, f"model.{key}={path}")
        assert "must be <= 128 (the context length of the model), got 192 + 40 = 232" in problem
    (problem,) = problems("scorer@gold=reward_model", f"gold.path={short_reward}", f"model.policy={long}")
    assert "must be <= 128" in problem


def test_longrope_limits_the_length_to_its_original_context(tmp_path):
    longrope = {"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 128}
    policy = write_model(tmp_path / "policy", {**LLAMA, "max_position_embeddings": 4096, **longrope})
    (problem,) = problems(f"model.policy={policy}", f"model.reference={policy}")
    assert "must be <= 128 (the original context; with rope_type=longrope" in problem
    fits = ["task.max_prompt_tokens=88", "generator.response_length=40"]
    assert problems(f"model.policy={policy}", *fits) == []


def test_missing_scorer_model_is_reported_with_the_key_of_that_scorer(tmp_path):
    missing = tmp_path / "nowhere"
    for overrides, key in (
        (["scorer@gold=reward_model"], "gold.path"),
        (["scorer=weighted", "+scorer@scorer.parts.x=reward_model"], "scorer.parts.x.path"),
    ):
        (problem,) = problems(*overrides, f"{key}={missing}")
        assert problem.startswith(f"{key} must name a model on the hub or a folder")


@pytest.mark.parametrize(
    ("chosen", "without_gpu", "package", "conflicts", "free"),
    [
        (
            "model.attention=flash_attention_2 model.dtype=bfloat16",
            "model.attention=sdpa",
            "pip install flash-attn",
            ["model.dtype=float32"],
            "model.attention=auto",
        ),
        (
            "model.fused_head=true",
            "model.fused_head=null",
            "pip install -e '.[liger]'",
            ["model.float32_head=true", "backend=zero3"],
            "model.fused_head=false",
        ),
    ],
)
def test_kernels_need_a_gpu_and_a_package(monkeypatch, chosen, without_gpu, package, conflicts, free):
    key = chosen.partition("=")[0]

    def refused(*words: str) -> list[str]:
        return [text for text in problems(*chosen.split(), *words) if text.startswith(key)]

    (cpu,) = refused()
    assert " without a GPU" in cpu and cpu.endswith(f"set {without_gpu}")
    assert refused(free) == refused(without_gpu) == []
    monkeypatch.setattr(inputs, "this_machine", lambda: Machine(2**35, (2**35,)))
    monkeypatch.setattr(inputs.importlib.util, "find_spec", lambda name: None)
    (missing,) = refused()
    assert f"run: {package}" in missing
    monkeypatch.setattr(inputs.importlib.util, "find_spec", lambda name: name)
    assert refused() == []
    for word in conflicts:
        (found,) = refused(word)
        assert f"with {word}" in found


def test_a_chat_template_with_a_syntax_error_is_refused_with_its_line(tmp_path):
    file = tmp_path / "template, mine.jinja"
    file.write_text("{% for m in messages %}\n{{ m.content }\n{% endfor %}")
    [found] = ModelConfig(name="hub", chat_template=str(file)).problems("model")
    assert "must be a valid Jinja template" in found and "line 2: unexpected '}'" in found
    file.write_text("{% for m in x %}{% generation %}{{ m }}{% endgeneration %}{% break %}{% endfor %}")
    assert list(ModelConfig(name="hub", chat_template=str(file)).problems("model")) == []
