"""Tests of the task `lookup` and its tools: a search over a text file, and a calculator."""

import re

import pytest

from rlhf.assembly.parts import make
from rlhf.environments.library import schemas
from rlhf.environments.tools import TOWNS, Search, calculate, lines
from rlhf.words.compose import compose


def test_search_returns_the_lines_with_most_words_of_the_query():
    search = Search().search
    assert search("Arlow") == next(line for line in lines(TOWNS) if line.startswith("Arlow "))
    assert search("zebra") == "nothing found"
    assert len(search("inhabitants").splitlines()) == 3


def test_a_subclass_searches_another_file(tmp_path):
    notes = tmp_path / "notes.txt"
    notes.write_text("tea is green\ncoffee is black\n")
    assert type("Notes", (Search,), {"file": notes})().search("black tea") == "tea is green\ncoffee is black"


@pytest.mark.parametrize(
    ("call", "found"),
    [((7, "+", 5), "12"), ((7, "-", 9.5), "-2.5"), ((1, "/", 8), "0.125"), ((6, "*", 7), "42")],
)
def test_calculator(call, found):
    assert calculate(*call) == found


def test_tools_answer_every_question_and_held_out_pairs_of_towns_are_not_trained_on():
    cfg = compose(
        ["task=lookup", "model=qwen3_1_7b", "algo=grpo", "task.train_size=200", "task.validation_size=50"]
    )
    asked = {}
    for split in ("train", "validation"):
        rows = make(cfg.task).prompts(split)
        asked[split] = set()
        for row in rows:
            question = row["messages"][0]["content"].splitlines()[0]
            names = [name for name in re.findall(r"[A-Z][a-z]+", question) if name != "How"]
            asked[split].add(frozenset(names))
            found = [Search().search(name) for name in names]
            assert all(line.startswith(name) for line, name in zip(found, names, strict=True))
            answer = float(row["reference_response"][0]["content"].removeprefix("#### "))
            numbers = [[int(each) for each in re.findall(r"\d+", line)] for line in found]
            results = {
                calculate(a, sign, b)
                for i in range(3)
                for sign in "+-"
                for a, b in ((numbers[0][i], numbers[1][i]), (numbers[1][i], numbers[0][i]))
            }
            assert f"{answer:.10g}" in results
    assert len(asked["train"]) > 100 and not asked["train"] & asked["validation"]


def test_tools_are_described_to_the_model():
    cfg = compose(["task=lookup", "model=qwen3_1_7b", "algo=grpo"])
    described = schemas(cfg.environment.tools)
    assert [each["function"]["name"] for each in described] == ["calculate", "search"]
