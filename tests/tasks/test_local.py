"""The task local: files and folders, the validation split, checks before a run, summary of the data."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from datasets import Dataset, DatasetDict

from rlhf.assembly.parts import make
from rlhf.checks.inputs import data_folders, data_of_tasks
from rlhf.config.algorithms import Data, Trains
from rlhf.config.tasks import ColumnsConfig, LocalConfig, PreferencesConfig
from rlhf.core.errors import UserError
from rlhf.tasks.columns import Wanted
from rlhf.tasks.files import LocalFiles
from rlhf.tasks.kinds import held_out_rows
from rlhf.tasks.source import word_tokenizer
from rlhf.tasks.task import Task, summarize
from tests.tasks.test_task import WORDS

ROWS = [{"question": f"w{i % 20} w{i // 20}", "answer": f" w{i % 7}"} for i in range(100)]
PAIRS = [{"prompt": row["question"], "chosen": " w1 w2", "rejected": " w3"} for row in ROWS]
DIALOGUES = [
    {
        "messages": [
            {"role": "user", "content": row["question"]},
            {"role": "assistant", "content": row["answer"]},
        ]
    }
    for row in ROWS
]


def write(file: Path, rows: list) -> str:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def found(path: str | None, data: Data = Data.prompts, pairs: str | None = None, **columns: str) -> list[str]:
    """Return the problems that the checks find before a run on the data."""
    config = LocalConfig(path=path, preferences_path=pairs, columns=ColumnsConfig(**columns))
    trains = Trains.reward if data is Data.preferences else Trains.policy
    algo = SimpleNamespace(name="some", trains=trains)
    cfg: Any = SimpleNamespace(task=config, data=data, reads_pairs=data is Data.preferences, algo=algo)
    return [*config.problems("task"), *data_folders(cfg), *data_of_tasks(cfg)]


def test_a_file_is_split_into_training_and_validation_rows(tmp_path):
    source = make(LocalConfig(path=write(tmp_path / "rows.jsonl", ROWS), validation_fraction=0.2))
    train, validation = (source.prompts(split) for split in ("train", "validation"))
    assert (len(train), len(validation)) == (80, 20)
    assert {*train["query"], *validation["query"]} == {row["question"] for row in ROWS}
    assert train[0] == {
        "query": ROWS[0]["question"],
        "reference_response": ROWS[0]["answer"],
        "place": f"line 1 of {tmp_path / 'rows.jsonl'}",
    }
    with pytest.raises(UserError, match="must contain the split test"):
        source.prompts("test")


def test_the_validation_rows_depend_only_on_the_prompts(tmp_path):
    prompts = [row["question"] for row in ROWS]

    def held_out(prompts, fraction):
        return set(np.flatnonzero(held_out_rows(prompts, fraction)))

    chosen = {prompts[i] for i in held_out(prompts, 0.1)}
    assert len(chosen) == 10
    assert {prompts[::-1][i] for i in held_out(prompts[::-1], 0.1)} == chosen
    more = [*prompts, *(f"new {i}" for i in range(10))]
    assert len(chosen & {more[i] for i in held_out(more, 0.1)}) >= 9
    same = held_out(["a", "b", "a", "b", "a"], 0.5)
    assert same in ({0, 2, 4}, {1, 3}), "rows with the same prompt are not separated"
    assert len(held_out(["a", "b"], 0.01)) == len(held_out(["a", "b"], 0.99)) == 1
    pairs = make(LocalConfig(path=write(tmp_path / "pairs.jsonl", PAIRS)))
    assert pairs.preferences("validation")["prompt"] == pairs.prompts("validation")["query"]


@pytest.mark.parametrize("name", ["validation", "val", "valid", "dev", "eval", "Validation"])
def test_a_folder_may_name_its_validation_file_in_usual_ways(tmp_path, name):
    write(tmp_path / "train.jsonl", ROWS)
    write(tmp_path / f"{name}.jsonl", ROWS[:3])
    source = make(LocalConfig(path=str(tmp_path)))
    assert (len(source.prompts("train")), len(source.prompts("validation"))) == (100, 3)
    assert found(str(tmp_path)) == []


def test_two_files_for_a_split_are_refused(tmp_path):
    write(tmp_path / "train.jsonl", ROWS)
    for name in ("val", "dev"):
        write(tmp_path / f"{name}.jsonl", ROWS[:3])
    (problem,) = found(str(tmp_path))
    assert "must contain one split for validation, got dev and val; rename one to validation" in problem
    write(tmp_path / "train.csv", ROWS[:3])
    (problem,) = found(str(tmp_path))
    assert "with train.csv and train.jsonl; remove or rename one of them" in problem


def test_parts_of_a_split_are_read_in_their_order_and_none_may_be_missing(tmp_path):
    write(tmp_path / "train-00000-of-00002.jsonl", ROWS[:50])
    write(tmp_path / "train-00001-of-00002.jsonl", ROWS[50:])
    assert len(make(LocalConfig(path=str(tmp_path))).prompts("train")) == 90, "a part is split off"
    (tmp_path / "train-00001-of-00002.jsonl").unlink()
    assert "1 of 2 parts of train" in found(str(tmp_path))[0]


def test_a_saved_data_set_is_read_with_and_without_splits(tmp_path):
    rows = Dataset.from_list(PAIRS)
    rows.save_to_disk(str(tmp_path / "one"))
    DatasetDict({"train": rows, "dev": rows.select(range(5))}).save_to_disk(str(tmp_path / "two"))
    for name, sizes in (("one", (90, 10)), ("two", (100, 5))):
        path = str(tmp_path / name)
        assert LocalFiles(path, ColumnsConfig()).first_prompt == PAIRS[0]["prompt"], (
            "without loading the rows"
        )
        source = make(LocalConfig(path=path))
        assert tuple(len(source.preferences(split)) for split in ("train", "validation")) == sizes
        assert found(path, Data.preferences) == found(path) == []


def test_dialogues_are_lists_of_messages_for_every_algorithm(tmp_path):
    path = write(tmp_path / "rows.jsonl", DIALOGUES)
    row = make(LocalConfig(path=path)).prompts("train")[0]
    assert row["messages"] == DIALOGUES[0]["messages"][:1]
    assert row["reference_response"] == DIALOGUES[0]["messages"][1:]
    assert found(path) == found(path, Data.references) == []
    write(tmp_path / "rows.jsonl", [*DIALOGUES, {"messages": DIALOGUES[0]["messages"][:1]}])
    assert found(path) == []
    (problem,) = found(path, Data.references)
    assert f"got line 101 of {path} with a last message of user" in problem


def test_columns_can_be_named(tmp_path):
    path = write(tmp_path / "rows.jsonl", [{"a": row["question"], "b": row["answer"]} for row in ROWS])
    (problem,) = found(path, Data.references)
    assert problem.endswith("for example, task.columns.prompt=a task.columns.response=b")
    assert found(path, Data.references, prompt="a", response="b") == []
    config = LocalConfig(path=path, columns=ColumnsConfig(prompt="b"))
    assert make(config).prompts("train")[0]["query"] == ROWS[0]["answer"]


@pytest.mark.parametrize(
    ("rows", "data", "says"),
    [
        ([*ROWS, {"question": "x"}], Data.references, "line 101 of {file} with the columns question"),
        ([*ROWS, {"question": None, "answer": "x"}], Data.prompts, "line 101 of {file} with null"),
        (ROWS, Data.preferences, "got {file} with question, answer; add chosen and rejected"),
        ([ROWS[0], DIALOGUES[0]], Data.prompts, "line 2 of {file} with the columns messages"),
        ([ROWS[0]] * 3, Data.prompts, "at least two different prompts"),
        ([], Data.prompts, "{file}, which is empty"),
    ],
)
def test_unusable_rows_are_a_problem_before_the_run(tmp_path, rows, data, says):
    file = write(tmp_path / "rows.jsonl", rows)
    (problem,) = found(file, data)
    assert says.format(file=file) in problem


def test_rows_of_large_files_are_checked_when_they_are_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr("rlhf.tasks.files.SCANNED_BYTES", 1000)
    file = write(tmp_path / "rows.jsonl", [*ROWS, {"question": None}])
    assert found(file) == []
    with pytest.raises(UserError, match=r"line 101 of .* with null"):
        make(LocalConfig(path=file)).prompts("train")


def test_a_path_without_data_is_a_problem_with_a_remedy(tmp_path):
    write(tmp_path / "rows.jsonl", ROWS)
    (tmp_path / "notes.txt").write_text("text")
    says = {
        "row.jsonl": f"did you mean task.path={tmp_path / 'rows.jsonl'}?",
        "notes.txt": "must name a file with a suffix that can be read",
        ".": f"with rows.jsonl (not read: notes.txt; the formats are .jsonl, .json, .csv (also with .gz) or "
        f".parquet); set task.path={tmp_path / 'rows.jsonl'}",
    }
    for name, text in says.items():
        (problem,) = found(str(tmp_path / name))
        assert text in problem
    (problem,) = found("nobody/data")
    assert 'load_dataset("nobody/data").save_to_disk("data/data")' in problem
    (problem,) = found(None)
    assert "set task.path=<file or folder>" in problem


def test_pairs_may_have_a_folder_of_their_own(tmp_path):
    prompts = write(tmp_path / "rows.jsonl", ROWS)
    for split in ("train", "validation"):
        write(tmp_path / "pairs" / f"{split}.jsonl", PAIRS[:9])
    pairs = str(tmp_path / "pairs")
    assert found(prompts, Data.preferences)
    assert found(prompts, Data.preferences, pairs) == []
    source = make(LocalConfig(path=prompts, preferences_path=pairs))
    assert (len(source.preferences("train")), len(source.prompts("train"))) == (9, 90)
    assert source.columns(Data.preferences) == "prompt, chosen, rejected"
    assert source.columns(Data.prompts) == "question as prompt, answer as response"


# -- the summary of the data -----------------------------------------------------------------------


def tokenizer():
    return word_tokenizer([*WORDS, *map(str.strip, WORDS)], r" ?\w+")


def task(path: str, data: Data, **changes: Any) -> Task:
    settings = {"prompts_per_update": 16, "max_prompt_tokens": 10, "seed": 1} | changes
    return Task(make(LocalConfig(path=path)), tokenizer(), data=data, **settings)


def test_the_summary_has_rows_columns_lengths_and_examples(tmp_path):
    long = {"question": " w1" * 12, "answer": " w2"}
    path = write(tmp_path / "rows.jsonl", [*ROWS, long, {**long, "question": ""}])
    summary = summarize(task(path, Data.references), response_length=2)
    rows = dict(summary.rows)
    skipped = rows["train"] + rows["validation"]
    assert sum(int(rows[split].partition(" ")[0]) for split in ("train", "validation")) == 100
    assert "1 skipped: prompt longer than 10 tokens" in skipped
    assert "1 skipped: empty prompt" in skipped
    assert ", split off" in rows["validation"]
    assert rows["columns"] == "question as prompt, answer as response"
    assert rows["prompt tokens"].startswith("median 2, 95% at most 2, longest ")
    assert rows["response tokens"] == "median 2, 95% at most 2, longest 2"
    assert len(summary.lines) == 3 and summary.warnings == []
    assert summary.lines[0] == f"{ROWS[0]['question']} -> {ROWS[0]['answer']}"


@pytest.mark.parametrize("prompt", [" w1" * 40 + "\nw2", " w3"])
@pytest.mark.parametrize("response", [" w4\n" * 50, " w5", ""])
def test_an_example_is_shortened_to_one_line(tmp_path, prompt, response):
    path = write(tmp_path / "rows.jsonl", [{"prompt": f"w{i}{prompt}", "response": response} for i in (7, 8)])
    (line,) = summarize(task(path, Data.prompts, max_prompt_tokens=99), 2).lines
    assert len(line) <= 76 and "\n" not in line and (" -> " in line) == (response != "")
    assert line.startswith("...") == (len(prompt) > 9) and line.endswith("...") == (len(response) > 9)


def test_the_summary_names_the_columns_that_rewards_receive(tmp_path):
    path = write(tmp_path / "rows.jsonl", [{**row, "unit": "g", "weight": 2, "note": ""} for row in ROWS])
    assert "reward columns" not in dict(summarize(task(path, Data.prompts), 2).rows)
    wanted = Wanted({"unit": ("scorer.path", "own.py:score")}, optional=frozenset({"weight", "price"}))
    summary = summarize(task(path, Data.prompts, wanted=wanted), 2)
    assert dict(summary.rows)["reward columns"] == "unit, weight"


def test_cut_responses_and_small_data_give_a_warning(tmp_path):
    path = write(tmp_path / "pairs.jsonl", PAIRS)
    cut, small = summarize(task(path, Data.preferences, prompts_per_update=128), 2).warnings
    assert cut.startswith("50.0% of the stored responses are longer than generator.response_length=2")
    assert cut.endswith("set generator.response_length=3")
    assert "the 90 training examples are fewer than schedule.prompts_per_update=128" in small
    assert small.endswith("set schedule.prompts_per_update=64")
    assert not summarize(task(path, Data.prompts), 2).warnings, "a policy samples its own responses"


def test_rows_that_teach_nothing_give_a_warning_with_their_place(tmp_path, caplog):
    rows = [
        *PAIRS,
        {**PAIRS[0], "rejected": " w1 w2"},
        {**PAIRS[0], "chosen": " "},
        {**PAIRS[0], "prompt": ""},
    ]
    path = write(tmp_path / "train.jsonl", rows)
    write(tmp_path / "validation.jsonl", PAIRS[:5])
    assert len(task(str(tmp_path), Data.preferences)) == 102
    empty_prompt, empty, equal = (record.message for record in caplog.records)
    assert "1 of 103 rows of the split train have an empty prompt; they are skipped" in empty_prompt
    assert f"an empty response; they are kept (first: line 102 of {path})" in empty
    assert (
        f"equal chosen and rejected responses, which teach nothing; they are kept (first: line 101 of {path}"
        in equal
    )


def test_empty_responses_are_counted_wherever_there_should_be_responses(tmp_path, caplog):
    def messages(rows: list, source: type, data: Data) -> list[str]:
        caplog.clear()
        write(tmp_path / "train.jsonl", rows)
        settings = {"prompts_per_update": 4, "max_prompt_tokens": 10, "seed": 1}
        len(Task(make(source(path=str(tmp_path))), tokenizer(), data=data, **settings))
        return [record.message for record in caplog.records]

    empty = [{"prompt": row["question"], "response": ""} for row in ROWS[:5]]
    assert messages(empty, LocalConfig, Data.prompts) == [], "the data may be prompts only"
    assert (
        "rows of the split train have an empty response" in messages(empty, LocalConfig, Data.references)[0]
    )
    same = [{**pair, "rejected": pair["chosen"]} for pair in PAIRS[:5]]
    (equal,) = messages(same, PreferencesConfig, Data.prompts)
    assert equal.startswith("5 of 5 rows of the split train have equal chosen and rejected responses")
    with pytest.raises(UserError, match="5 pairs of the split train, all with chosen equal to rejected"):
        messages(same, PreferencesConfig, Data.preferences)


def test_prompts_that_are_all_too_long_are_an_error_with_their_lengths(tmp_path):
    path = write(tmp_path / "rows.jsonl", [{"prompt": " w1" * (50 + i)} for i in range(20)])
    with pytest.raises(
        UserError, match=r"the shortest .* 5\d tokens, .* set task.max_prompt_tokens=(\d+)"
    ) as e:
        len(task(path, Data.prompts))
    remedy = int(str(e.value).rpartition("=")[2])
    assert len(task(path, Data.prompts, max_prompt_tokens=remedy)) >= 15
