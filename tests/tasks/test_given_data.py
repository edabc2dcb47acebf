"""Data sets that are given as objects are written as files, which the task `local` reads."""

import datetime
import json

import numpy as np
import pytest
from datasets import Dataset, DatasetDict, IterableDataset
from pandas import DataFrame

from rlhf.checks.check import problems
from rlhf.config.tasks import LocalConfig
from rlhf.core.errors import UserError
from rlhf.experiment import written
from rlhf.tasks.kinds import LocalSource
from rlhf.words.compose import compose

ROWS = [{"prompt": f"Frage {n}: Grüße?\nAnswer:", "response": " Ja.", "votes": n} for n in range(6)]
DIALOGUES = [
    {"messages": [{"role": "user", "content": f"Hi {n}"}, {"role": "assistant", "content": "Hello."}]}
    for n in range(3)
]
CALLS = [
    {"messages": [{"role": "user", "content": "Hi", "name": "Ann"}, {"role": "assistant", "content": "."}]}
]


def rows(folder, split="train"):
    return [json.loads(line) for line in (folder / f"{split}.jsonl").read_text("utf-8").splitlines()]


@pytest.mark.parametrize("given", [ROWS, DIALOGUES, DIALOGUES + CALLS])
def test_a_list_and_a_dataset_of_the_same_rows_give_the_same_files(tmp_path, given):
    place = written(given, tmp_path)
    assert rows(place) == given
    made = Dataset.from_list(given)
    for same in (made, made.with_format("numpy"), {"train": tuple(given)}, DatasetDict(train=made)):
        assert written(same, tmp_path) == place
    assert len(list(tmp_path.iterdir())) == 1


def test_other_content_gives_another_folder_and_damaged_files_are_written_again(tmp_path):
    place = written(ROWS, tmp_path)
    others = [ROWS[:-1], ROWS[::-1], {"training": ROWS}, {"train": ROWS, "test": ROWS[:1]}]
    assert len({place, *(written(other, tmp_path) for other in others)}) == 5
    file = place / "train.jsonl"
    before, stamp = file.read_bytes(), file.stat().st_mtime_ns
    assert written(ROWS, tmp_path) == place and file.stat().st_mtime_ns == stamp
    file.write_bytes(before[:-5])
    written(ROWS, tmp_path)
    assert file.read_bytes() == before and [each.name for each in place.iterdir()] == ["train.jsonl"]


def test_the_task_reads_all_splits(tmp_path):
    place = written(DatasetDict(train=Dataset.from_list(ROWS), dev=Dataset.from_list(ROWS[:2])), tmp_path)
    source = LocalSource(LocalConfig(path=str(place)))
    assert source.prompts("train")["query"] == [row["prompt"] for row in ROWS]
    assert len(source.prompts("validation")) == 2
    cfg = compose(["task=local", f"task.path={place}", "algo=sft", "debug=tiny"])
    assert not [text for text in problems(cfg) if text.startswith("task")]


def test_values_of_numpy_become_plain(tmp_path):
    place = written([{"prompt": "a", "x": np.float32(0.5), "y": np.arange(2)}], tmp_path)
    assert rows(place) == [{"prompt": "a", "x": 0.5, "y": [0, 1]}]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("data/tea.jsonl", "type str; for files set task=local task.path=<file or folder>"),
        (DataFrame(ROWS), "write dataset=frame.to_dict('records')"),
        (
            IterableDataset.from_generator(lambda: iter(ROWS)),
            "write datasets.Dataset.from_list(list(dataset))",
        ),
        (iter(ROWS), "write [{'prompt': '...'}, ...]"),
        ({"prompt": ["a"], "response": "b"}, "a dict whose value 'response' is an object of type str"),
        ({"prompt": ["a", "b"]}, "got row 1 of prompt with 'a'; write {'prompt': '...'}"),
        ({"a/b": ROWS}, "a dict whose value 'a/b'"),
        ([*ROWS, "b"], "got row 7 of train with 'b'"),
        ([{1: "a"}], "with texts as keys"),
        ([], "got none in the split train"),
        (Dataset.from_list([]), "got none in the split train"),
        ({}, "got no split"),
        (
            [{"prompt": "a", "when": datetime.date(2024, 1, 1)}],
            "in the column when (date has no form in JSON)",
        ),
        ([{"prompt": "a", "x": float("nan")}], "in the column x"),
        ([{"prompt": "\ud800"}], "in the column prompt"),
    ],
)
def test_other_objects_are_refused_and_nothing_is_written(tmp_path, wrong, message):
    with pytest.raises(UserError, match="dataset must have|dataset must be") as refused:
        written(wrong, tmp_path)
    assert message in str(refused.value)
    assert not list(tmp_path.iterdir())
