"""Records: the columns of the data that reward functions receive by the names of their parameters."""

import json
from datetime import date

import pyarrow
import pyarrow.parquet
import pytest
import torch
from datasets import Dataset, DatasetDict

from rlhf.assembly.training import build_scorer, build_task
from rlhf.config.algorithms import Data
from rlhf.core.errors import UserError
from rlhf.processes.ranks import ALONE
from rlhf.text.chat import set_format
from rlhf.text.encoding import encode_completions
from rlhf.words.compose import compose
from tests.chat_tokenizers import qwen
from tests.tiny_models import tiny_tokenizer

TURNS = [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2"}]
SOURCES = {  # overrides of the task -> columns of a row of its data
    "task=local": {"question": "w1", "answer": "w2", "tests": ["a", "b"]},
    "task=local generator=dataset": {"prompt": "w1", "chosen": "w2", "rejected": "w3", "tests": ["a", "b"]},
    "task=gsm8k": {"question": "w1", "answer": "w2", "tests": ["a", "b"]},
    "task=tldr": {"query": "w1", "reference_response": "w2", "tests": ["a", "b"]},
    "task=preferences": {"prompt": "w1", "chosen": "w2", "rejected": "w3", "tests": ["a", "b"]},
    "task=chat": {"messages": TURNS, "tests": ["a", "b"]},
    "task=arithmetic": {"query": "w1", "reference_response": "w2", "tests": ["a", "b"]},
}


def function(tmp_path, source):
    """Write a file with the function `score`, and return its address."""
    file = tmp_path / "own.py"
    file.write_text(f"{source}\n")
    return f"{file}:score"


def run_config(tmp_path, row, *words, form="jsonl"):
    folder = tmp_path / "data"
    folder.mkdir(exist_ok=True)
    rows = [{**row, "id": number} for number in range(6)]
    for split in ("train", "validation", "test"):
        if form == "jsonl":
            (folder / f"{split}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
        elif form == "parquet":
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / f"{split}.parquet")
    if form == "saved":
        DatasetDict(
            {split: Dataset.from_list(rows) for split in ("train", "validation", "test")}
        ).save_to_disk(folder)
    return compose([f"task.path={folder}", "scorer@gold=none", "scorer=function", "algo=dpo", *words])


def examples(cfg, split=None):
    tokenizer = tiny_tokenizer()
    if cfg.task.name == "chat":
        tokenizer = qwen()
        set_format(tokenizer, None, conversational=True)
    task = build_task(cfg, tokenizer, cfg.data, 3)
    prompts = next(task.prompts()) if split is None else task.held_out(2, split, Data.prompts)
    scorer = build_scorer(cfg, "scorer", tokenizer, ALONE)
    rollouts = encode_completions(prompts, [["w5", "w6"]] * len(prompts), tokenizer, None)
    return scorer(rollouts)


@pytest.mark.parametrize("form", ["jsonl", "parquet", "saved"])
@pytest.mark.parametrize("words", SOURCES)
def test_a_function_receives_columns_of_every_task_with_their_types(tmp_path, words, form):
    path = function(tmp_path, "def score(response, tests, id):\n    return id + tests.index('b')")
    cfg = run_config(tmp_path, SOURCES[words], *words.split(), f"scorer.path={path}", form=form)
    for split in (None, "validation"):
        batch = examples(cfg, split)
        assert batch.scores.tolist() == [[i + 1.0, i + 1.0] for i in batch.index.tolist()]
        assert batch.records == [{"tests": ["a", "b"], "id": i} for i in batch.index.tolist()]


def test_without_a_function_that_asks_for_columns_there_are_no_records(tmp_path):
    path = function(tmp_path, "def score(prompt, response, reference):\n    return 1")
    batch = examples(run_config(tmp_path, SOURCES["task=local"], "task=local", f"scorer.path={path}"))
    assert batch.records is None


def test_a_parameter_that_names_no_column_is_an_error_that_lists_the_columns(tmp_path):
    path = function(tmp_path, "def score(response, test):\n    return 1")
    cfg = run_config(tmp_path, SOURCES["task=local"], "task=local", f"scorer.path={path}")
    with pytest.raises(
        UserError, match=r"columns of the data \(question, answer, tests, id\), got .*own.py:score"
    ):
        examples(cfg)
    cfg = compose(["task=arithmetic", "scorer=function", f"scorer.path={path}", "task.train_size=4"])
    with pytest.raises(
        UserError, match=r"\(query, reference_response, demonstration\), got .*which task=arith"
    ):
        examples(cfg)


@pytest.mark.parametrize(
    ("arguments", "refused"),
    [
        ("tests, text, truth", "tests would be the prompt"),  # a column, but not that of the prompts
        ("question, tests, truth", "tests would be the response"),
        ("q, answer, truth", "answer would be the response"),
        ("question, text, tests", "tests would be the reference"),
        ("question, text, answer", None),
        ("q, text, truth, tests", None),
    ],
)
def test_a_value_by_position_takes_the_place_of_no_column(tmp_path, arguments, refused):
    path = function(tmp_path, f"def score({arguments}):\n    return 1")
    cfg = run_config(tmp_path, SOURCES["task=local"], "task=local", f"scorer.path={path}")
    if refused is None:
        assert examples(cfg).scores.tolist() == [[1.0, 1.0]] * 3
        return
    with pytest.raises(UserError, match=f"{refused}.*rename the parameter that is the response"):
        examples(cfg)


def test_a_parameter_with_a_default_receives_the_column_if_there_is_one(tmp_path):
    path = function(
        tmp_path, "def score(response, id=-1, scale=10, *, other=3):\n    return id * scale + other"
    )
    batch = examples(run_config(tmp_path, SOURCES["task=local"], "task=local", f"scorer.path={path}"))
    assert batch.scores[:, 0].tolist() == [10 * i + 3 for i in batch.index.tolist()]


def test_keyword_arguments_receive_all_other_columns(tmp_path):
    kept = {"question": "w1", "answer": "w2", "tests": ["a", "b"]}
    path = function(tmp_path, f"def score(response, id, **rest):\n    return rest == {kept}")
    row = {**SOURCES["task=local"], "prompt": "w1"}
    cfg = run_config(tmp_path, row, "task=local", "task.columns.prompt=question", f"scorer.path={path}")
    batch = examples(cfg)
    assert batch.records[0].keys() == {*kept, "id"} and batch.scores.tolist() == [[1.0, 1.0]] * 3


def test_other_types_of_parquet_are_passed_as_texts_and_missing_values_as_none(tmp_path):
    path = function(tmp_path, "def score(response, day, gone):\n    return len(day) + (gone is None)")
    row = {"prompt": "w1", "day": date(2026, 1, 2), "gone": None}
    cfg = run_config(tmp_path, row, "task=local", f"scorer.path={path}", form="parquet")
    assert set(examples(cfg).scores.flatten().tolist()) == {11.0}


def test_a_function_may_change_what_it_receives(tmp_path):
    body = "def score(response, tests, messages):\n    tests += [messages.pop()]\n    return len(tests)"
    cfg = run_config(tmp_path, SOURCES["task=chat"], "task=chat", f"scorer.path={function(tmp_path, body)}")
    batch = examples(cfg)
    assert batch.scores.tolist() == [[3.0, 3.0]] * 3
    assert batch.records[0]["tests"] == ["a", "b"] and batch.dialogues[0]


def test_each_part_of_a_mixture_has_the_columns_of_its_own_function(tmp_path):
    for part, column in (("one", "answers"), ("two", "tests")):
        rows = [{"prompt": f"w{i}", column: i, "junk": "x"} for i in range(8)]
        (tmp_path / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "own.py").write_text(
        "def one(response, answers):\n    return answers\ndef two(response, tests):\n    return 100 + tests\n"
    )
    words = ["task=mixture", "scorer=mixture", "scorer@gold=none", "algo=dpo"]
    for part in ("one", "two"):
        words += [f"+schema/task@task.parts.{part}=local", f"task.parts.{part}.path={tmp_path}/{part}.jsonl"]
        words += [
            f"+scorer@scorer.parts.{part}=function",
            f"scorer.parts.{part}.path={tmp_path}/own.py:{part}",
        ]
    batch = examples(compose(words))
    wanted = [("answers", "tests")[part] for part in batch.part.tolist()]
    assert [list(record) for record in batch.records] == [[name] for name in wanted]
    numbers = [int(text[1:]) for text in batch.texts]
    offsets = (100.0 * batch.part).tolist()
    assert batch.scores[:, 0].tolist() == [a + b for a, b in zip(numbers, offsets, strict=True)]
    single = [*(word for word in words if "scorer.parts" not in word), "scorer=function"]
    with pytest.raises(
        UserError, match=r"got .*own.py:one with the parameter answers, which .*two.jsonl lacks"
    ):
        examples(compose([*single, f"scorer.path={tmp_path}/own.py:one"]))


def test_records_are_selected_and_stored_with_the_rows_of_a_batch(tmp_path):
    path = function(tmp_path, "def score(response, id):\n    return id")
    batch = examples(run_config(tmp_path, SOURCES["task=local"], "task=local", f"scorer.path={path}"))
    chosen = batch.select(torch.tensor([2, 0]))
    assert [each["id"] for each in chosen.records] == chosen.index.tolist()
    torch.save({"records": batch.records}, tmp_path / "in_flight.pt")
    assert torch.load(tmp_path / "in_flight.pt", weights_only=True)["records"] == batch.records
