"""Rows of data files: formats, places of rows, and errors that name the file and the line."""

import gzip
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from rlhf.core.errors import UserError
from rlhf.tasks.files import rows

TEXTS = [{"prompt": f"p{i}", "response": 'a, "b"\nc'} for i in range(3)]
LINES = "".join(json.dumps(row) + "\n" for row in TEXTS)


def read(file: Path) -> list[dict[str, object]]:
    return [row for _, row in rows(file, "task.path")]


def problem(file: Path) -> str:
    with pytest.raises(UserError) as caught:
        read(file)
    (text,) = caught.value.problems
    assert text.startswith("task.path must ")
    assert str(file) in text
    assert "; " in text
    return text


def write(folder: Path, name: str, content: str | bytes) -> Path:
    file = folder / name
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    return file


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", LINES),
        ("a.JSONL", LINES.replace("\n", "\r\n")),
        ("bom.jsonl", "\ufeff" + LINES),
        ("blank.jsonl", "\n" + LINES + "\n  \n"),
        ("a.json", json.dumps(TEXTS, indent=1)),
        ("lines.json", LINES),
        ("array.jsonl", json.dumps(TEXTS)),
        ("a.csv", "prompt,response\n" + "".join(f'p{i},"a, ""b""\nc"\n' for i in range(3))),
        ("bom.csv", "\ufeffprompt, response\n" + "".join(f'p{i},"a, ""b""\nc"\n\n' for i in range(3))),
        ("a.jsonl.gz", gzip.compress(LINES.encode())),
        ("a.Json.GZ", gzip.compress(json.dumps(TEXTS).encode())),
    ],
    ids=lambda value: (
        value if isinstance(value, str) and len(value) < 16 else "content"
    ),  # same in each worker
)
def test_every_text_format_gives_the_same_rows(tmp_path, name, content):
    assert read(write(tmp_path, name, content)) == TEXTS


@pytest.mark.parametrize("header", ["prompt, response", ' "prompt", "response"', "\ufeffprompt,  response"])
@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_blanks_after_the_commas_of_a_header_are_left_out_of_all_cells(tmp_path, header, ending):
    lines = [header, '"a", "b"', 'c, d "e"', '"f",  "g, ""h"""', '"", "i', 'j"', '"k"," ""l"""', "m,n"]
    places, found = zip(*rows(write(tmp_path, "a.csv", ending.join(lines)), "key"), strict=True)
    expected = ["ab", ("c", 'd "e"'), ("f", 'g, "h"'), ("", f"i{ending}j"), ("k", ' "l"'), "mn"]
    assert [tuple(row.values()) for row in found] == [tuple(each) for each in expected]
    assert [place.split()[1] for place in places] == ["2", "3", "4", "5", "7", "8"]
    assert set(found[0]) == {"prompt", "response"}


def test_blanks_after_commas_are_text_if_the_header_has_none(tmp_path):
    file = write(tmp_path, "a.csv", 'prompt,response\nHow?, Yes.\n"Why?"," ""So"""\n  \nsay "hi", x\n')
    assert [row["response"] for row in read(file)] == [" Yes.", ' "So"', " x"]


@pytest.mark.parametrize("cell", [' "b"', ' "b, c"', '\t"b"', '\u00a0"b"', ' "b\nc"'])
@pytest.mark.parametrize("line", ["a,{}", "{},a", '"a",{}'])
def test_a_blank_before_quotes_is_refused_with_its_line(tmp_path, cell, line):
    content = f"prompt,response\nx,y\n{line.format(cell)}\n"
    assert "got line 3 of" in (said := problem(write(tmp_path, "a.csv", content)))
    assert "blank before" in said


def test_parquet_gives_the_rows_of_the_requested_columns(tmp_path):
    file = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{**row, "more": [1]} for row in TEXTS]), file)
    assert [row for _, row in rows(file, "key", ["prompt", "response", "absent"])] == TEXTS


def test_places_count_lines_from_one(tmp_path):
    file = write(tmp_path, "a.jsonl", '{"a": "b"}\n\n{"a": "c"}\n')
    assert [place for place, _ in rows(file, "key")] == [f"line 1 of {file}", f"line 3 of {file}"]
    file = write(tmp_path, "a.csv", 'a\n"b\nc"\nd\n')
    assert [place for place, _ in rows(file, "key")] == [f"line 2 of {file}", f"line 4 of {file}"]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.jsonl", LINES + '{"prompt": "x\n' + LINES, "line 4 of"),
        ("a.jsonl", LINES[:-5], "(the text is cut off)"),
        ("a.jsonl", LINES + "[1]\n", "line 4 of {file} with a list"),
        ("a.jsonl", '"text"', "with a text"),
        (
            "a.jsonl",
            "not JSON",
            "line 1 of {file} ('not JSON'); correct or remove the line; if the file is CSV",
        ),
        ("a.json", '{\n"a": "b"}', "(an object over several lines); write the rows as an array"),
        (
            "a.json",
            '{"schema": {}, "data": [{"a": "b"}]}',
            "an object whose data is an array; write that array alone",
        ),
        ("a.jsonl", "1" * 5000, "('1111"),
        ("a.jsonl", "[" * 100_000, "line 1 of {file} ("),
        ("a.jsonl", "", "which is empty (0 bytes)"),
        ("a.jsonl", "\n \n", "which is empty (no rows)"),
        ("a.jsonl", LINES.encode() + '{"a": "ü"}'.encode("latin-1"), "line 4 of {file} with the byte 0xfc"),
        ("a.jsonl", LINES.encode("utf-16"), "iconv -f utf-16"),
        ("a.json", '[{"a": "b"},\n{"a": }]', "line 2 of"),
        ("a.json", '\n\n[{"a": "b"},\n{"a": }]', "line 4 of"),
        ("a.json", '[{"a": "b"}, 3]', "row 2 of {file} with a number (3)"),
        ("a.csv", "a,b\n", "which is empty (no rows)"),
        ("a.csv", "a,b\nc,d\ne\n", "line 3 of {file} with 1"),
        ("a.csv", "a,b\nc,d,e\n", "line 2 of {file} with 3"),
        ("a.csv", 'a,b\nc,"d', "line 2 of {file} (unexpected end of data)"),
        ("a.csv", "a;b\nc;d\n", "line 1 of {file} with 'a;b'"),
        ("a.csv", '"a"\t"b"\n"c"\t"d"\n', "must have commas between the cells"),
        ("a.csv", 'a,b\nc,"d" \n', "no blank follows a closing one"),
        ("a.csv", "a,a\nc,d\n", "'a' twice"),
        ("a.parquet", "no Parquet", "readable Parquet"),
        ("a.jsonl.gz", "not compressed", "not compressed; rename it to a.jsonl"),
        ("a.jsonl.gz", gzip.compress(LINES.encode() * 99)[:-9], "damaged after line"),
    ],
)
def test_a_damaged_file_is_an_error_that_names_the_place(tmp_path, name, content, says):
    file = write(tmp_path, name, content)
    assert says.format(file=file) in problem(file)


def test_a_damaged_part_of_a_parquet_file_is_an_error(tmp_path):
    file = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"a": [str(i) * 50 for i in range(5000)]}), file)
    damaged = bytearray(file.read_bytes())
    damaged[4:2000] = b"\xff" * 1996
    file.write_bytes(damaged)
    assert "readable Parquet files" in problem(file)
