"""The comparison of answers, and the embedded arithmetic task, which is scored by this comparison."""

from itertools import islice

import pytest

from rlhf.assembly.parts import make
from rlhf.config.algorithms import Data
from rlhf.config.tasks import ArithmeticConfig, Difficulty
from rlhf.scorers.function import answer_matches, find_answer
from rlhf.tasks.kinds import forgetful_add
from rlhf.tasks.task import Task

PATTERN = r"#### (\-?[0-9\.\,]+)"


@pytest.mark.parametrize(
    ("response", "reference"),
    [
        ("so\n#### 72", "#### 72"),
        ("#### 1,234", "#### 1234"),
        ("#### 5.0", "#### 5"),
        ("#### 5.", "#### 5"),
        ("#### -3", "#### -3.00"),
        ("#### 1 no, #### 2", "#### 2"),
    ],
)
def test_equal_numbers_match(response: str, reference: str):
    assert answer_matches(response, reference, PATTERN)


@pytest.mark.parametrize(
    ("response", "reference"),
    [
        ("72", "#### 72"),
        ("", "#### 72"),
        ("#### 73", "#### 72"),
        ("#### 72", "72"),
        ("#### ,", "#### 0"),
        ("#### 2 no, #### 1", "#### 2"),
        ("#### .", "#### 1"),
    ],
)
def test_different_or_missing_answers_do_not_match(response: str, reference: str):
    assert not answer_matches(response, reference, PATTERN)


def test_a_final_full_stop_is_not_part_of_a_text_answer():
    assert answer_matches("answer: north.", "answer: north", r"answer: (\S+)")
    assert not answer_matches("answer: north.", "answer: south", r"answer: (\S+)")


def test_a_pattern_without_group_gives_the_whole_match():
    assert find_answer("the answer is (B).", r"\([A-E]\)") == "(B)"
    assert answer_matches("it is (B)", "(B)", r"\([A-E]\)")


@pytest.mark.parametrize("difficulty", list(Difficulty))
def test_references_have_the_correct_sum_and_texts_have_no_unknown_tokens(difficulty: Difficulty):
    config = ArithmeticConfig(train_size=300, difficulty=difficulty)
    source = make(config)
    tokenizer = source.tokenizer()
    for row in source.prompts("train"):
        total = sum(int(word) for word in row["query"].split() if word.isdigit())
        assert answer_matches(row["reference_response"], f"#### {total}", PATTERN)
        for text in (row["query"] + row["reference_response"], row["query"] + row["demonstration"]):
            ids = tokenizer(text)["input_ids"]
            assert tokenizer.unk_token_id not in ids
            assert tokenizer.decode(ids) == text


def test_about_two_in_five_demonstrations_are_correct():
    rows = make(ArithmeticConfig(train_size=4000)).prompts("train")
    right = sum(answer_matches(row["demonstration"], row["reference_response"], PATTERN) for row in rows)
    assert 0.38 < right / 4000 < 0.46


def test_a_forgotten_carry_lowers_the_sum_by_ten_only_if_there_is_a_carry():
    assert forgetful_add(17, 5, forgets=True) == 12
    assert forgetful_add(17, 5, forgets=False) == 22
    assert forgetful_add(12, 5, forgets=True) == 17


def test_a_split_is_reproducible_and_depends_on_data_seed():
    first = make(ArithmeticConfig(train_size=50)).prompts("train").to_dict()
    assert first == make(ArithmeticConfig(train_size=50)).prompts("train").to_dict()
    assert first != make(ArithmeticConfig(train_size=50, data_seed=1)).prompts("train").to_dict()
    longer = make(ArithmeticConfig(train_size=80)).prompts("train").to_dict()
    assert longer["query"][:50] == first["query"]


def test_sft_imitates_the_demonstrations():
    source = make(ArithmeticConfig(train_size=64))
    task = Task(
        source,
        source.tokenizer(),
        data=Data.references,
        prompts_per_update=64,
        max_prompt_tokens=32,
        seed=1,
    )
    (batch,) = islice(task.prompts(), 1)
    assert batch.completions is not None
    assert any(
        texts[0] != reference for texts, reference in zip(batch.completions, batch.references, strict=True)
    )
