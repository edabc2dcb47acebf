"""The embedded tasks with an environment: what SFT trains on is an episode, and what pupils do."""

from collections import Counter

import pytest
import torch

from rlhf.assembly.parts import make
from rlhf.checks.check import problems
from rlhf.config.algorithms import Data
from rlhf.config.tasks import CalculatorTaskConfig, GuessNumberTaskConfig
from rlhf.core.batch import Sampling
from rlhf.environments.episodes import Episodes
from rlhf.tasks.columns import Wanted
from rlhf.tasks.task import Task
from rlhf.text.encoding import encode_completions
from rlhf.words.compose import compose

NAMES = ("calculator", "guess_number")
SECTIONS = {"calculator": CalculatorTaskConfig, "guess_number": GuessNumberTaskConfig}


def source(name: str, size: int = 2000, **changes):
    return make(SECTIONS[name](train_size=size, **changes))


def task_of(name: str, data: Data, size: int = 200) -> Task:
    cfg = compose([f"task={name}"])
    made = source(name, size)
    settings = {"prompts_per_update": 4, "max_prompt_tokens": cfg.task.max_prompt_tokens, "seed": 1}
    return Task(made, made.tokenizer(), data=data, wanted=Wanted(rest=True), **settings)


@pytest.mark.parametrize("name", NAMES)
def test_an_episode_with_the_replies_of_a_demonstration_has_the_tokens_that_sft_trains_on(name):
    cfg, task = compose([f"task={name}"]), task_of(name, Data.references)
    batch = task.batch([*range(200)])
    length = cfg.generator.response_length
    stored = encode_completions(batch, batch.completions, task.tokenizer, length)
    sampling = Sampling(samples=1, temperature=1.0, response_length=length, purpose="train")
    end = task.tokenizer.eos_token_id
    episodes = Episodes(batch, sampling, make(cfg.environment, task.tokenizer), [end], seed=1)
    for i in range(len(batch)):
        ids = stored.response_ids[i, 0][stored.response_mask[i, 0]].tolist()
        while ids:
            assert episodes.running().count(i) == 1, "the environment expects a reply"
            reply, ids = ids[: ids.index(end) + 1], ids[ids.index(end) + 1 :]
            assert len(reply) <= episodes.room(i)
            episodes.reply(i, reply, [-1.0] * len(reply))
    played = episodes.rollouts(task.tokenizer.pad_token_id)
    assert episodes.running() == [] and not played.episode["tool_errors"].any()
    width = stored.response_ids.shape[-1]
    for field in ("response_ids", "response_mask", "environment_mask"):
        assert torch.equal(getattr(played, field)[..., :width], getattr(stored, field))
    assert not played.real[..., width:].any() and stored.ended.all()
    assert (stored.response_ids != task.tokenizer.unk_token_id).all()
    assert (
        played.episode["turns"].unique().tolist()
        == {"calculator": [1, 3], "guess_number": [1, 2, 3, 4]}[name]
    )


@pytest.mark.parametrize("name", NAMES)
def test_prompts_of_rl_are_those_of_sft_and_records_hold_the_answer(name):
    batch, shown = (task_of(name, data).held_out(50, "train") for data in (Data.prompts, Data.references))
    assert batch.texts == shown.texts and batch.completions is None
    assert batch.references == [
        f"{' ####' if name == 'calculator' else ''} {each['secret']}" for each in batch.records
    ]
    assert all(text.startswith("<|user|>\n") and text.endswith("\n<|assistant|>\n") for text in batch.texts)
    assert all([message["role"] for message in dialogue] == ["user"] for dialogue in batch.dialogues)


@pytest.mark.parametrize("name", NAMES)
def test_a_split_is_reproducible_and_depends_on_data_seed(name):
    first = source(name, 50).prompts("train").to_dict()
    assert first == source(name, 50).prompts("train").to_dict()
    assert first != source(name, 50, data_seed=1).prompts("train").to_dict()
    assert first["secret"] != source(name, validation_size=50).prompts("validation")["secret"]


def test_three_in_five_pupils_add_by_head_and_a_fifth_of_the_others_copy_carelessly():
    kinds = Counter()
    for row in source("calculator").prompts("train"):
        terms = [int(word) for word in row["messages"][0]["content"].split() if word.isdigit()]
        talk, right = (
            [each["content"] for each in row["demonstration"]],
            row["reference_response"][0]["content"],
        )
        assert row["secret"] == sum(terms) and right == f" #### {sum(terms)}"
        kinds["calls" if len(talk) > 1 else "head", talk[-1] == right] += 1
        if len(talk) > 1:
            assert talk[:4] == [
                f" calc {terms[0]} + {terms[1]}", f" {terms[0] + terms[1]}",
                f" calc {terms[0] + terms[1]} + {terms[2]}", f" {sum(terms)}",
            ]  # fmt: skip
    calls = kinds["calls", True] + kinds["calls", False]
    assert 0.36 < calls / 2000 < 0.44
    assert 0.14 < kinds["calls", False] / calls < 0.24  # a careless number may be right
    assert 0.3 < kinds["head", True] / (2000 - calls) < 0.5


def test_pupils_who_guess_heed_about_half_of_the_answers():
    heeded = Counter()
    for row in source("guess_number").prompts("train"):
        low, high, talk = 1, 15, [each["content"] for each in row["demonstration"]]
        assert row["messages"][0]["content"] == "Guess: 1 to 15"
        for guess, answer in zip(talk[::2], [*talk[1::2], None], strict=True):
            number = int(guess)
            heeded[low <= number <= high] += bool((low, high) != (1, 15))
            assert answer == (None if answer is None else " higher" if number < row["secret"] else " lower")
            low, high = (max(low, number + 1), high) if answer == " higher" else (low, min(high, number - 1))
        assert (int(talk[-1]) == row["secret"]) or len(talk) == 7
    assert 0.6 < heeded[True] / heeded.total() < 0.8  # a heedless guess may fit, too


@pytest.mark.parametrize("name", NAMES)
def test_the_vocabulary_has_its_declared_size_and_texts_are_read_exactly(name):
    made = source(name, 300)
    tokenizer = made.tokenizer()
    assert len(tokenizer) == SECTIONS[name].vocabulary_size
    for row in made.prompts("train"):
        for message in (*row["messages"], *row["demonstration"]):
            assert tokenizer.decode(tokenizer(message["content"])["input_ids"]) == message["content"]


@pytest.mark.parametrize("name", NAMES)
def test_a_path_is_refused(name):
    found = problems(compose([f"task={name}", "task.path=data"]))
    assert any(
        text.startswith(f"task.path must be null for task={name} (its examples are generated), got data;")
        for text in found
    )


@pytest.mark.parametrize("algo", ["rloo", "ppo", "dpo"])
def test_every_algorithm_that_samples_has_the_tuned_settings_of_the_task(algo):
    cfg = compose(["task=calculator", f"algo={algo}"])
    assert (cfg.optim.lr, cfg.algo.samples_per_prompt) == (1e-4, 4)
    assert compose(["task=calculator", "algo=sft"]).optim.lr == 2e-3
    assert compose(["task=calculator", "algo=reward"]).optim.lr == 1e-5, "no settings of sampling"
    assert compose(["task=calculator", "model=pythia_410m", f"algo={algo}"]).optim.lr == 3e-6
