"""The group `environment`: what is refused before a run folder exists, and the names of runs without one."""

import pytest

from rlhf.checks.check import composed, problems, warnings
from rlhf.words.compose import compose, compose_node, run_name, what_counts

GUESS = "environment=guess_number"
GYM = ("task=reasoning_gym", "task.chat=true", "algo=grpo", "scorer=environment", "scorer@gold=none")
SOURCE = """
class Counter:
    def __init__(self, most=3):
        self.most = most
    def reset(self, example):
        pass
    def step(self, reply):
        return "", 1.0, True

class Half:
    def reset(self, example):
        pass
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "own_game.py"
    path.write_text(SOURCE)
    return path


def own(file, name="Counter", *words):
    return compose([*GYM, "environment=python", f"environment.path={file}:{name}", *words])


@pytest.mark.parametrize(
    ("name", "words", "said"),
    [
        ("Conter", [], "did you mean environment.path="),
        ("Half", [], "it has no step"),
        ("Counter", ["+environment.arguments={least: 2}"], "got an unexpected keyword argument 'least'"),
    ],
)
def test_a_class_that_cannot_play_ends_the_command_before_the_run_folder_exists(
    command, file, name, words, said
):
    answer = command(*GYM, "environment=python", f"environment.path={file}:{name}", *words)
    assert answer.code == 2 and not answer.runs and said in answer.err
    cfg = own(file, "Counter", "+environment.arguments={most: 2}")
    assert problems(cfg) == [] and list(cfg.environment.job_problems("environment")) == []
    assert "[" not in answer.err.partition("set environment.path=")[2][:1], "one class, not a list"


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        ("reply_tokens=8", "environment.message_tokens=74"),  # 4 * 8 + 3 * 74 <= 256
        ("reply_tokens=60", "environment.message_tokens=64 environment.max_turns=2"),
        ("reply_tokens=100000 max_turns=8", "environment.message_tokens=64 environment.max_turns=1"),
        ("reply_tokens=30 max_turns=8 message_tokens=2", ""),  # 8 * 30 + 7 * 2 <= 256
    ],
)
def test_too_few_tokens_for_every_turn_are_doubtful_and_the_remedy_works(settings, remedy):
    words = [
        *GYM,
        GUESS,
        "generator.response_length=256",
        *(f"environment.{each}" for each in settings.split()),
    ]
    found = [text for text in warnings(compose(words)) if "no room" in text]
    assert len(found) == bool(remedy)
    if remedy:
        assert f"set {remedy}" in found[0]
    if remedy and "max_turns=1" not in remedy:
        assert not [text for text in warnings(compose([*words, *remedy.split()])) if "no room" in text]


OWN = ("task=local", "task.path=q.jsonl", "algo=grpo", "model.policy=m")
PYTHON = ("environment=python", "environment.path=own.py:Game")


def test_the_rewards_of_an_environment_are_the_scores_of_own_data_without_a_reward_model():
    for words in (PYTHON, ("environment=gymnasium", "environment.id=X-v1"), ("environment=openenv",)):
        cfg = compose([*OWN, *words])
        assert cfg.scorer.name == "environment"
        assert run_name(cfg) == run_name(compose([*OWN, *words, "scorer=environment"]))
        assert run_name(compose_node([*OWN, *words])) == run_name(cfg), "before and after the run starts"
    cfg = compose([*OWN, *PYTHON, "scorer.missing_eos_penalty=1"])
    assert cfg.scorer.name == "environment" and cfg.scorer.missing_eos_penalty == 1
    assert composed([*OWN, *PYTHON]) == compose([*OWN, *PYTHON])


def test_a_chosen_scorer_and_that_of_a_task_stay():
    tools = ("environment=tools", "environment.functions=[own.py:f]")
    chosen = {
        (*OWN, *PYTHON, "model.reward=r"): "reward_model",
        (*OWN, *PYTHON, "scorer.path=r"): "reward_model",
        (*OWN, *PYTHON, "scorer=answer"): "answer",
        (*OWN, *tools): "reward_model",
        OWN: "reward_model",
        ("task=gsm8k", "task.path=q", "model.policy=m", "algo=grpo", *PYTHON): "answer",
    }
    for words, name in chosen.items():
        assert compose([*words]).scorer.name == name, words
    typed = composed([*OWN, *PYTHON, "scorer=reward_model"])
    assert any(problem.startswith("model.reward must name") for problem in problems(typed))


def test_a_run_without_an_environment_has_the_name_of_earlier_versions(file):
    plain = compose(["task=arithmetic", "algo=grpo"])
    assert "environment" not in str(what_counts(plain)) and "environment" in str(what_counts(own(file)))
    assert run_name(own(file)) != run_name(own(file, "Counter", "environment.max_turns=2"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["environment.id=Nope-v9"], "environment.id must be an environment that gymnasium makes"),
        (["+environment.options={size: 3}"], "environment.id must be an environment that gymnasium makes"),
        (["+environment.actions={left: 0, fly: 9}"], "environment.actions must be actions of FrozenLake-v1"),
        ([], "environment.actions must say which action of FrozenLake-v1 each word means (Discrete(4)"),
        (["+environment.actions={left: 0}"], None),
    ],
)
def test_a_game_is_made_before_a_run_and_has_the_actions(words, said):
    config = compose([*GYM, "environment=gymnasium", "environment.id=FrozenLake-v1", *words]).environment
    found = [*config.job_problems("environment")]
    assert [each[: len(said)] for each in found] == [said] if said else not found


def test_a_tool_must_be_a_function_or_a_class(file):
    words = [*GYM, "environment=tools", f"environment.functions=[{file}:Counter]"]
    assert not problems(compose(words))
    file.write_text(f"{file.read_text()}\nNUMBER = 3\n")
    (problem,) = problems(compose([*words[:-1], f"environment.functions=[{file}:NUMBER]"]))
    assert problem.startswith("environment.functions must name a function")
