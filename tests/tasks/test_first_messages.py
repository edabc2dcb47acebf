"""Prompts that an environment returns from `reset`."""

import json

import pytest

from rlhf.checks.check import problems
from rlhf.core.errors import UserError
from rlhf.models.loading import save
from rlhf.runs.folder import RunFolder
from rlhf.stages.run import run
from rlhf.words.compose import compose
from tests.environments.templates import family
from tests.tiny_models import tiny_lm

WORDS = (
    *("task=environment", "task.train_size=12", "task.validation_size=4", "task.max_prompt_tokens=100"),
    *("model.policy=model", "algo=rloo", "schedule.prompts_per_update=4", "schedule.total_episodes=16"),
    *(
        "generator.response_length=24",
        "eval.prompts=4",
        "progress=off",
        "optim.lr=1e-3",
        "backend.micro_batch=4",
    ),
)
LAKE = ("environment=gymnasium", "environment.id=FrozenLake-v1", "+environment.actions={left: 0, right: 2}")
SOURCE = """
class Counter:
    made = 0
    def reset(self, example):
        Counter.made += 1
        return {text}
    def step(self, reply):
        return "", 1.0, True
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return a working directory with a tiny chat model."""
    tokenizer = family("chatml")
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 1024}
    save(tiny_lm("llama", eos_token_id=tokenizer.eos_token_id, **sizes), tokenizer, tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_prompts_of_a_game_of_gymnasium_are_its_first_observations(folder):
    run(compose([*WORDS, *LAKE]), RunFolder(folder / "run"))
    samples = [json.loads(line) for line in (folder / "run" / "completions.jsonl").open()]
    assert len(samples) == 12 and all(
        "0\nAnswer with one of: left, right" in each["prompt"] for each in samples
    )
    assert all(each["messages"][0]["role"] == "assistant" for each in samples)


@pytest.mark.parametrize(
    ("text", "error", "said"),
    [
        ("None", UserError, "must return a text from reset for task=environment"),
        ("f'start {Counter.made}'", UserError, "must return the same text from reset for the same seed"),
        ("1 / 0", UserError, "must answer without an error in reset"),
    ],
)
def test_a_class_without_a_first_message_of_its_seed_stops_the_run(folder, text, error, said):
    name = f"counter_{len(text)}"
    (folder / f"{name}.py").write_text(SOURCE.replace("{text}", text))
    words = [*WORDS, "environment=python", f"environment.path={name}.py:Counter"]
    with pytest.raises(error, match=said):
        run(compose(words), RunFolder(folder / "run"))


def test_first_messages_need_an_environment_that_gives_rewards(folder):
    assert any(each.startswith("environment must be a class") for each in problems(compose([*WORDS])))
    tools = (
        "environment=tools",
        "environment.functions=[tests.environments.test_tools:add]",
        "scorer=answer",
    )
    assert any(
        "environment must be a class or a library" in each for each in problems(compose([*WORDS, *tools]))
    )
