"""Tests of the forms of data: messages as JSON text, numbers, tables of pandas, hh-rlhf, KTO."""

from __future__ import annotations

import csv
import gzip
import json

import pyarrow
import pyarrow.parquet
import pytest
from datasets import (
    Array2D,
    ClassLabel,
    Dataset,
    DatasetDict,
    Features,
    Image,
    Json,
    LargeList,
    List,
    Translation,
    Value,
    load_from_disk,
)

from rlhf.config.algorithms import Data
from rlhf.config.tasks import ColumnsConfig, LocalConfig
from rlhf.core.errors import UserError
from rlhf.experiment import written
from rlhf.tasks.columns import Wanted, recognise
from rlhf.tasks.files import rows
from rlhf.tasks.kinds import LocalSource
from rlhf.tasks.source import numbered

DIALOGUE = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "It's \u00fc"}]
OTHER = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Me"}]
TABLE = {"prompt": {"0": "a", "1": "b"}, "response": {"0": "x", "1": "y"}}


def source(file, text):
    file.write_text(text)
    return LocalSource(LocalConfig(path=str(file)))


def prompts(data):
    """Return prompt and reference of all rows, sorted by the prompt."""
    rows = [row for split in ("train", "validation") for row in data.prompts(split)]
    return sorted((str(row.get("query") or row.get("messages")), row["reference_response"]) for row in rows)


def lines(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.mark.parametrize("write", [json.dumps, str], ids=["JSON", "Python"])
def test_messages_as_text_are_read_as_messages(tmp_path, write):
    plain = source(tmp_path / "a.jsonl", lines({"messages": DIALOGUE}, {"messages": OTHER}))
    texts = source(tmp_path / "b.jsonl", lines({"messages": write(DIALOGUE)}, {"messages": write(OTHER)}))
    assert prompts(texts) == prompts(plain)
    with (tmp_path / "c.csv").open("w") as file:
        csv.writer(file).writerows([["messages"], [write(DIALOGUE)], [write(OTHER)]])
    assert prompts(LocalSource(LocalConfig(path=str(tmp_path / "c.csv")))) == prompts(plain)


def test_numbers_are_read_as_they_are_written(tmp_path, caplog):
    rows = '{"prompt": "1/8 =", "answer": 0.1250}\n{"prompt": "10^3 =", "answer": 1e3}\n'
    rows += '{"prompt": "2+2 =", "answer": 4}\n'
    read = prompts(source(tmp_path / "a.jsonl", rows))
    assert [reference for _, reference in read] == ["0.1250", "1e3", "4"]


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(TABLE),
        json.dumps(TABLE, indent=2),
        json.dumps({"0": {"prompt": "a", "response": "x"}, "1": {"prompt": "b", "response": "y"}}),
        json.dumps({"columns": ["prompt", "response"], "index": [0, 1], "data": [["a", "x"], ["b", "y"]]}),
    ],
    ids=["columns", "indented", "index", "split"],
)
def test_tables_of_pandas_are_read_by_rows(tmp_path, text):
    assert prompts(source(tmp_path / "a.json", text)) == [("a", "x"), ("b", "y")]


@pytest.mark.parametrize("text", ["[1, 2]", "[{]", '[{"a": 1}]', "[x] {y}", "[]", '{"a": {"0": 1}}'])
def test_texts_with_brackets_stay_texts_and_rows_with_objects_are_no_tables(tmp_path, text):
    rows = [{"prompt": text, "response": "", "more": {"0": 1}}, {"prompt": "b", "response": "y", "more": {}}]
    assert sorted(prompts(source(tmp_path / "a.jsonl", lines(*rows)))) == sorted([(text, ""), ("b", "y")])


def turn(**message):
    return [{"messages": [message]}] * 2


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([{"prompt": "a", "answer": None}] * 2, "line 1 of .*with null; correct or remove the rows"),
        ([{"prompt": "a", "answer": True}] * 2, "line 1 of .*as text, in quotes"),
        ([{"prompt": "a", "answer": {}}] * 2, "line 1 of .*field"),
        (turn(**{"from": "human", "value": "Hi"}), "user in place of human and assistant in place of gpt$"),
        (turn(role="human", content="Hi"), "write user in place of human in all rows$"),
        (turn(role="bot", content="Hi"), "write assistant in place of bot in all rows$"),
        (turn(role="user", content=[{"text": "Hi"}]), "as one text$"),
        ([{"messages": ["Hi"]}], 'write {"role": ..., "content": ...} for each message$'),
        (turn(role="system", content="Be kind."), "line 1 of .*system message only"),
    ],
)
def test_values_of_another_kind_are_refused_with_their_line_and_a_remedy_for_all_rows(tmp_path, rows, said):
    with pytest.raises(UserError, match=said):
        prompts(source(tmp_path / "a.jsonl", lines(*rows)))


def test_labels_of_kto_are_refused_unless_the_user_names_the_responses():
    for names in (["prompt", "completion", "label"], ["id", "prompt", "completion", "label"]):
        with pytest.raises(UserError, match="a good and a bad completion"):
            recognise(names, ColumnsConfig(), Data.preferences, "task.path", "x")
        with pytest.raises(UserError, match="or set task.columns.response=completion for all rows"):
            recognise(names, ColumnsConfig(), Data.references, "task.path", "x")
        assert recognise(names, ColumnsConfig(), Data.prompts, "task.path", "x")
        named = ColumnsConfig(response="completion")
        assert recognise(names, named, Data.references, "task.path", "x").response == "completion"


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ("input non_preferred preferred", "prompt=input .*chosen=preferred .*rejected=non_preferred$"),
        ("prompt responses scores", "task.columns.chosen=<column> task.columns.rejected=<column>$"),
        (" ".join(map(str, range(30))), "10, 11 and 18 others; "),
    ],
)
def test_only_columns_with_names_of_that_kind_are_proposed_as_pairs(names, said):
    with pytest.raises(UserError, match=said):
        recognise(names.split(), ColumnsConfig(), Data.preferences, "task.path", "x")


def test_pairs_of_hh_rlhf_are_read(tmp_path):
    start = "\n\nHuman: A\n\nAssistant: b\n\nHuman: {}\n\nAssistant:"  # to the last common answer
    rows = [{"chosen": start.format(n) + " yes", "rejected": start.format(n) + " no"} for n in "ab"]
    data = source(tmp_path / "a.jsonl", lines(*rows))
    read = [row for split in ("train", "validation") for row in data.preferences(split)]
    assert sorted(row["prompt"] for row in read) == [start.format(n) for n in "ab"]
    assert {(row["chosen"], row["rejected"]) for row in read} == {(" yes", " no")}


TEXT, NUMBER = Value("string"), Value("int64")


def call(arguments):
    """Return a row with a call of a tool whose arguments, and the schema of whose parameters, are its own."""
    function = {"name": "f", "arguments": arguments}
    answer = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
    parameters = {"properties": {name: {"enum": [value, None]} for name, value in arguments.items()}}
    return {
        "messages": [{"role": "user", "content": str(arguments)}, answer],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": parameters}}],
        "case": {"stdin": None, "args": [arguments, None]},
    }


CALLS = [call({"a": 1}), call({"b": {"c": None, "d": 0.25}}), call({"e": ["x", None]}), call({"a": "1e3"})]
MESSAGE = {"role": TEXT, "content": TEXT}
FUNCTION = {"type": TEXT, "function": {"name": TEXT, "arguments": Json()}}
CASE = {"stdin": TEXT, "args": List(Json())}
JSON_AT = {
    "columns": {"messages": Json(), "tools": Json(), "case": Json()},
    "messages": {"messages": List(Json()), "tools": LargeList(Json()), "case": CASE},
    "calls": {"messages": List({**MESSAGE, "tool_calls": Json()}), "tools": List(Json()), "case": CASE},
    "arguments": {
        "messages": List({**MESSAGE, "tool_calls": List(FUNCTION)}),
        "tools": List({"type": TEXT, "function": {"name": TEXT, "parameters": {"properties": Json()}}}),
        "case": CASE,
    },
}


def parts_of(made, folder):
    for part in range(2):
        made.select(range(2 * part, 2 * part + 2)).to_parquet(folder / f"train-0000{part}-of-00002.parquet")
    return folder


def saved(made, path):
    made.save_to_disk(path)
    return path


def compressed(path):
    path.write_bytes(gzip.compress(lines(*CALLS).encode()))
    return path


WRITERS = {
    "gzip": lambda made, folder: compressed(folder / "a.jsonl.gz"),
    "Parquet": lambda made, folder: made.to_parquet(folder / "a.parquet") and folder / "a.parquet",
    "parts": parts_of,
    "saved": lambda made, folder: saved(made, folder / "saved"),
    "saved splits": lambda made, folder: saved(DatasetDict(train=made), folder / "saved"),
    "object": written,
}


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("features", JSON_AT)
def test_json_inside_columns_of_arrow_means_the_same_as_in_json_lines(tmp_path, features, writer):
    wanted = Wanted(optional=frozenset({"case", "tools"}))

    def read(path):
        data = LocalSource(LocalConfig(path=str(path)))
        rows = [row for split in ("train", "validation") for row in data.prompts(split, wanted)]
        return sorted(json.dumps({name: row[name] for name in row if name != "place"}) for row in rows)

    plain = tmp_path / "plain.jsonl"
    plain.write_text(lines(*CALLS))
    made = Dataset.from_list(CALLS, features=Features(JSON_AT[features]))
    assert read(WRITERS[writer](made, tmp_path)) == read(plain)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (Json(), [{"a": None}, None, [1, {"b": 0.5}], "text", 3, True]),
        ({"a": {"b": List(Json())}, "c": NUMBER}, [{"a": {"b": [{"q": None}, None]}, "c": None}, None]),
        ({"stdin": TEXT, "out": TEXT}, [{"stdin": None, "out": "3"}, {"stdin": "1", "out": None}]),
        (List({"in": TEXT, "out": List(TEXT)}), [[{"in": None, "out": ["3", None]}, None], []]),
        (List(Json(), length=1), [[{"a": 1}], [[2]]]),
        (ClassLabel(names=["no", "yes"]), [0, 1]),
        (List(ClassLabel(names=["no", "yes"])), [[0, 1]]),
        (Translation(["de", "en"]), [{"de": "a", "en": "b"}]),
        (Array2D((1, 2), "int32"), [[[1, 2]]]),
        (Value("null"), [None]),
        (Value("float16"), [0.5]),
        (Value("large_string"), ["a"]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_type_of_column_has_the_values_of_json_lines_in_every_format(tmp_path, kind, values):
    features = Features({"x": kind})
    made = Dataset.from_dict({"x": values}, features=features)
    made.to_parquet(tmp_path / "a.parquet")
    made.save_to_disk(tmp_path / "saved")
    assert [row["x"] for _, row in rows(tmp_path / "a.parquet", "key")] == values
    assert [row["x"] for _, row in numbered(load_from_disk(tmp_path / "saved"), "saved")] == values


def test_absent_keys_of_messages_and_tools_are_not_null(tmp_path):
    tools = [{"name": "f", "parameters": {"a": 1}}, {"name": "g", "parameters": {"b": {"c": 2}}}]
    row = {"messages": DIALOGUE + [{"role": "user", "content": "x", "name": "Ann"}], "tools": tools}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "a.parquet")
    assert [row for _, row in rows(tmp_path / "a.parquet", "key")] == [row]


@pytest.mark.parametrize("form", ["parquet", "saved"])
@pytest.mark.parametrize(
    ("kind", "value"), [(Image(), {"bytes": b"a", "path": None}), (Value("binary"), b"a")]
)
def test_binary_data_for_a_function_are_refused_with_their_column(tmp_path, kind, value, form):
    features = Features({"prompt": TEXT, "picture": List(kind)})
    made = Dataset.from_dict({"prompt": ["a", "b"], "picture": [[value]] * 2}, features=features)
    path = WRITERS["Parquet" if form == "parquet" else "saved"](made, tmp_path)
    data = LocalSource(LocalConfig(path=str(path)))
    assert len(data.prompts("train")) == 1  # nobody reads the column
    for wanted in (Wanted(rest=True), Wanted(optional=frozenset({"picture"}))):
        with pytest.raises(UserError, match=r"in its column picture.*row 1 of.*remove the column picture"):
            data.prompts("train", wanted)


def test_a_map_of_parquet_is_an_object(tmp_path):
    table = pyarrow.table({"x": pyarrow.array([[("a", 1)]], pyarrow.map_(pyarrow.string(), pyarrow.int64()))})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert [row for _, row in rows(tmp_path / "a.parquet", "key")] == [{"x": {"a": 1}}]


def test_numbers_of_json_compute_and_print_as_written(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"x": 1.50}\n')
    ((_, row),) = rows(tmp_path / "a.jsonl", "key")
    assert (str(row["x"]), row["x"] + 1, json.dumps(row["x"])) == ("1.50", 2.5, "1.5")
