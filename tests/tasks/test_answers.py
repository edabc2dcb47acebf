"""The comparison of answers, and the embedded arithmetic task, which is scored by this comparison."""

import pytest

from rlhf.assembly.parts import make
from rlhf.config.algorithms import Data
from rlhf.config.tasks import ArithmeticConfig, Difficulty
from rlhf.scorers.function import answer_matches, find_answer
from rlhf.tasks.task import Task

PATTERN = r"#### (\-?[0-9\.\,]+)"


@pytest.mark.parametrize(
    ("response", "reference", "equal"),
    [
        ("so\n#### 72", "#### 72", True),
        ("#### 1,234", "#### 1234", True),
        ("#### 5.0", "#### 5", True),
        ("#### 5.", "#### 5", True),
        ("#### -3", "#### -3.00", True),
        ("#### 1 no, #### 2", "#### 2", True),
        ("72", "#### 72", False),
        ("", "#### 72", False),
        ("#### 73", "#### 72", False),
        ("#### 72", "72", False),
        ("#### ,", "#### 0", False),
        ("#### 2 no, #### 1", "#### 2", False),
        ("#### .", "#### 1", False),
    ],
)
def test_answers_are_compared_as_numbers_and_the_last_one_counts(response, reference, equal):
    assert answer_matches(response, reference, PATTERN) is equal


def test_other_answers_are_texts_without_final_dots_and_a_pattern_may_have_no_group():
    assert answer_matches("answer: north.", "answer: north", r"answer: (\S+)")
    assert not answer_matches("answer: north.", "answer: south", r"answer: (\S+)")
    assert find_answer("the answer is (B).", r"\([A-E]\)") == "(B)"
    assert answer_matches("it is (B)", "(B)", r"\([A-E]\)")


@pytest.mark.parametrize("difficulty", list(Difficulty))
def test_references_have_the_correct_sum_and_texts_have_no_unknown_tokens(difficulty: Difficulty):
    source = make(ArithmeticConfig(train_size=300, difficulty=difficulty))
    tokenizer = source.tokenizer()
    for row in source.prompts("train"):
        total = sum(int(word) for word in row["query"].split() if word.isdigit())
        assert answer_matches(row["reference_response"], f"#### {total}", PATTERN)
        for text in (row["query"] + row["reference_response"], row["query"] + row["demonstration"]):
            ids = tokenizer(text)["input_ids"]
            assert tokenizer.unk_token_id not in ids and tokenizer.decode(ids) == text


def test_about_two_in_five_demonstrations_are_correct_and_the_others_forget_carries():
    rows = make(ArithmeticConfig(train_size=4000)).prompts("train")
    right = sum(answer_matches(row["demonstration"], row["reference_response"], PATTERN) for row in rows)
    assert 0.38 < right / 4000 < 0.46
    ends = [[int(row[name].split()[-1]) for name in ("reference_response", "demonstration")] for row in rows]
    assert {right - own for right, own in ends} == {0, 10, 20}


def test_a_split_is_reproducible_and_depends_on_data_seed():
    first = make(ArithmeticConfig(train_size=50)).prompts("train").to_dict()
    assert first == make(ArithmeticConfig(train_size=50)).prompts("train").to_dict()
    assert first != make(ArithmeticConfig(train_size=50, data_seed=1)).prompts("train").to_dict()
    assert make(ArithmeticConfig(train_size=80)).prompts("train")["query"][:50] == first["query"]


def test_sft_imitates_the_demonstrations():
    source = make(ArithmeticConfig(train_size=64))
    sizes = {"prompts_per_update": 64, "max_prompt_tokens": 32, "seed": 1}
    batch = next(Task(source, source.tokenizer(), data=Data.references, **sizes).prompts())
    assert any(own[0] != right for own, right in zip(batch.completions, batch.references, strict=True))
