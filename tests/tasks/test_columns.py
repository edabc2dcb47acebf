"""Recognised columns, and the conversion of rows: texts, dialogues, pairs, formats of TRL and Alpaca."""

import pytest

from rlhf.config.algorithms import Data
from rlhf.config.tasks import PREFERENCE_COLUMNS, ColumnsConfig
from rlhf.core.errors import UserError
from rlhf.tasks.columns import BadRow, Layout, conversion, converted, recognise

ASK, MORE = {"role": "user", "content": "ask"}, {"role": "user", "content": "more"}
GOOD, BAD = {"role": "assistant", "content": "good"}, {"role": "assistant", "content": "bad"}
SYSTEM = {"role": "system", "content": "be brief"}
pair = conversion(PREFERENCE_COLUMNS)


def layout(names: str, data: Data = Data.prompts, **columns: str) -> Layout:
    return recognise(names.split(), ColumnsConfig(**columns), data, "task.path", "x.jsonl")


@pytest.mark.parametrize(
    ("names", "data", "described"),
    [
        ("prompt", Data.prompts, "prompt"),
        ("Query id", Data.prompts, "Query as prompt"),
        ("question answer", Data.references, "question as prompt, answer as response"),
        ("instruction input output", Data.references, "instruction + input as prompt, output as response"),
        ("query reference_response", Data.references, "query as prompt, reference_response as response"),
        ("prompt chosen rejected", Data.preferences, "prompt, chosen, rejected"),
        ("chosen rejected score", Data.preferences, "chosen, rejected"),
        ("prompt chosen rejected", Data.references, "prompt, chosen, rejected"),
        ("prompt messages", Data.references, "messages"),
        ("prompt prompt_id chosen rejected messages", Data.preferences, "prompt, chosen, rejected"),
    ],
)
def test_usual_names_are_recognised(names, data, described):
    assert layout(names, data).described() == described


def test_named_columns_replace_the_recognised_columns():
    found = layout("question frage antwort", Data.references, prompt="frage", response="antwort")
    assert (found.prompt, found.response) == ("frage", "antwort")
    assert layout("instruction input output", prompt="instruction").context is None
    assert layout("prompt response messages", prompt="prompt").messages is None
    assert layout("prompt response messages", messages="messages").prompt is None
    assert layout("answer output", Data.references, prompt="answer").response == "output"


@pytest.mark.parametrize(
    ("names", "data", "columns", "says"),
    [
        ("prompt question", Data.prompts, {}, "prompt and question; set task.columns.prompt=prompt"),
        ("prompt answer output", Data.prompts, {}, "set task.columns.response=answer"),
        ("prompt response messages", Data.prompts, {}, "set task.columns.messages=messages or"),
        ("text label", Data.references, {}, "task.columns.prompt=text task.columns.response=label"),
        ("prompt", Data.references, {}, "got x.jsonl with prompt; add response"),
        ("prompt response", Data.preferences, {}, "add chosen and rejected"),
        ("chosen", Data.preferences, {}, "add prompt and rejected"),
        (
            "a b",
            Data.prompts,
            {"prompt": "c"},
            "task.columns.prompt must name a column of the data (a, b), got c",
        ),
    ],
)
def test_columns_that_do_not_suffice_are_an_error_with_a_remedy(names, data, columns, says):
    with pytest.raises(UserError) as caught:
        layout(names, data, **columns)
    assert says in str(caught.value)


def test_the_input_of_alpaca_follows_the_instruction():
    found = layout("instruction input output")
    row = {"instruction": "Add.", "input": "1 2", "output": "3"}
    assert found.example(row) == {"query": "Add.\n\n1 2", "reference_response": "3"}
    assert found.example({**row, "input": ""})["query"] == "Add."
    assert found.example({**row, "input": None})["query"] == "Add."
    assert layout("prompt").example({"prompt": "ask"}) == {"query": "ask", "reference_response": ""}


@pytest.mark.parametrize(
    ("row", "messages", "reference"),
    [
        ({"messages": [SYSTEM, ASK, GOOD]}, [SYSTEM, ASK], "good"),
        ({"messages": [ASK, GOOD, MORE, BAD]}, [ASK, GOOD, MORE], "bad"),
        ({"messages": [ASK]}, [ASK], ""),
        ({"prompt": [ASK], "completion": [GOOD]}, [ASK], "good"),
        ({"prompt": [ASK], "completion": "good"}, [ASK], "good"),
        ({"prompt": "ask", "completion": [GOOD]}, [ASK], "good"),
        ({"prompt": [ASK]}, [ASK], ""),
        ({"prompt": [ASK], "chosen": [GOOD], "rejected": [BAD]}, [ASK], "good"),
        ({"chosen": [ASK, GOOD], "rejected": [ASK, BAD]}, [ASK], "good"),
    ],
)
def test_dialogues_give_the_messages_before_the_last_answer(row, messages, reference):
    made = layout(" ".join(row)).example(row)
    answers = [] if not reference else [{"role": "assistant", "content": reference}]
    assert (made["messages"], made["reference_response"]) == (messages, answers)


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"prompt": "ask", "chosen": "good", "rejected": "bad"}, "ask"),
        ({"prompt": [ASK], "chosen": [GOOD], "rejected": [BAD]}, [ASK]),
        ({"prompt": [ASK], "chosen": [ASK, GOOD], "rejected": [ASK, BAD]}, [ASK]),
        ({"prompt": "ask", "chosen": [ASK, GOOD], "rejected": [ASK, BAD]}, [ASK]),
        ({"prompt": "ask", "chosen": [SYSTEM, GOOD], "rejected": [SYSTEM, BAD]}, [SYSTEM, ASK]),
        ({"prompt": "ask", "chosen": [GOOD], "rejected": [BAD]}, [ASK]),
        ({"chosen": [SYSTEM, ASK, GOOD], "rejected": [SYSTEM, ASK, BAD]}, [SYSTEM, ASK]),
    ],
)
def test_pairs_of_texts_and_of_messages_become_a_prompt_and_two_responses(row, prompt):
    texts = isinstance(prompt, str)
    expected = {
        "prompt": prompt,
        "chosen": "good" if texts else [GOOD],
        "rejected": "bad" if texts else [BAD],
    }
    assert pair(row) == expected
    assert layout(" ".join(row), Data.preferences).pair(row) == expected


@pytest.mark.parametrize(
    ("row", "rule", "got"),
    [
        ({"chosen": "a", "rejected": "b"}, "have a column of prompts", "without them"),
        ({"prompt": "a", "chosen": None, "rejected": "b"}, "have a text in its column chosen", "with null"),
        ({"prompt": 3.5, "chosen": "a", "rejected": "b"}, "in its column prompt", "with a number (3.5)"),
        ({"prompt": "a", "chosen": "a"}, "have the column rejected", "with the columns prompt, chosen"),
        ({"chosen": [ASK, GOOD], "rejected": [MORE, BAD]}, "have the same messages", "different"),
        ({"chosen": [GOOD], "rejected": [BAD]}, "have prompts", "without a prompt"),
        ({"chosen": [ASK, GOOD, MORE], "rejected": [ASK, BAD]}, "message of the assistant", "of user"),
        ({"chosen": [], "rejected": []}, "have dialogues", "with an empty list"),
        ({"chosen": [{"from": "user"}], "rejected": [BAD]}, "have dialogues", "with from in place of"),
        ({"chosen": [ASK, {**GOOD, "content": None}], "rejected": []}, "have dialogues", "with null"),
        ({"prompt": "\ud83d", "chosen": "a", "rejected": "b"}, "whole Unicode characters", "surrogate"),
    ],
)
def test_a_row_with_another_content_is_refused_with_what_it_has(row, rule, got):
    with pytest.raises(UserError) as caught:
        list(converted(iter([("line 3 of x.jsonl", row)]), pair, "task.path"))
    text = caught.value.problems[0]
    assert text.startswith("task.path must have ")
    assert rule in text.partition(", got line 3 of x.jsonl ")[0]
    assert got in text.partition(", got line 3 of x.jsonl ")[2]


def test_sft_refuses_a_dialogue_without_an_answer_at_its_end():
    found = layout("messages", Data.references)
    assert found.demonstration({"messages": [ASK, GOOD]})["reference_response"] == [GOOD]
    with pytest.raises(BadRow, match="end with a message of the assistant"):
        found.demonstration({"messages": [ASK, GOOD, MORE]})
