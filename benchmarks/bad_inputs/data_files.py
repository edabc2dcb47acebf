"""Data folders and files, valid and broken, for the rows."""

from __future__ import annotations

import gzip
import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

NOUNS = ("tea", "bread", "river", "garden", "train", "letter", "music", "winter", "paper", "window")
VERBS = ("make", "find", "paint", "carry", "describe", "repair", "borrow", "measure")
ENDS = ("slowly", "in two steps", "with a friend", "before noon", "for free")
TRAIN, VALIDATION = 560, 40  # a broken row 501 is beyond the first rows that a check reads

Rows = list[dict[str, Any]]


def make_pairs(count: int, seed: int) -> Rows:
    """Return preference pairs: an instruction, a longer and a shorter answer."""
    draw = random.Random(seed)
    rows = []
    for _ in range(count):
        noun, other = draw.sample(NOUNS, 2)
        verb, end = draw.choice(VERBS), draw.choice(ENDS)
        rows.append(
            {
                "prompt": f"How do I {verb} {noun} {end}?\n",
                "chosen": f" First {verb} the {noun}, then the {other}, {end}.",
                "rejected": f" I never {verb} {noun}.",
            }
        )
    return rows


def lines(rows: Rows) -> bytes:
    """Return rows as JSON lines in UTF-8."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def csv(rows: Rows, separator: str = ",") -> bytes:
    """Return rows as a CSV file."""

    def cell(text: Any) -> str:
        return '"' + str(text).replace('"', '""') + '"'

    header = separator.join(rows[0])
    return "\n".join([header, *(separator.join(map(cell, row.values())) for row in rows), ""]).encode()


def parquet(rows: Rows) -> bytes:
    """Return rows as a Parquet file."""
    import pyarrow as pa
    from pyarrow import parquet

    sink = pa.BufferOutputStream()
    parquet.write_table(pa.Table.from_pylist(rows), sink)
    return sink.getvalue().to_pybytes()


def renamed(rows: Rows, **names: str) -> Rows:
    """Return rows with other column names; columns without a new name are left out."""
    return [{names[key]: value for key, value in row.items() if key in names} for row in rows]


def conversation(rows: Rows) -> Rows:
    """Return pairs as conversations of one user turn and one assistant turn."""
    return [
        {
            "messages": [
                {"role": "user", "content": row["prompt"]},
                {"role": "assistant", "content": row["chosen"]},
            ]
        }
        for row in rows
    ]


def as_messages(rows: Rows) -> Rows:
    """Return pairs in which each response is a list with one message, the conversational form of TRL."""
    return [
        {
            "prompt": [{"role": "user", "content": row["prompt"]}],
            **{name: [{"role": "assistant", "content": row[name]}] for name in ("chosen", "rejected")},
        }
        for row in rows
    ]


def changed(rows: Rows, place: int, **values: Any) -> Rows:
    """Return rows with other values in the row `place`."""
    return [{**row, **values} if i == place else row for i, row in enumerate(rows)]


def make_data(folder: Path) -> None:
    """Write the data folders and files. Each folder has one defect, which its name describes."""
    train, held = make_pairs(TRAIN, 1), make_pairs(VALIDATION, 2)
    good, valid = lines(train), lines(held)
    cut = b"\n".join(good.split(b"\n")[:500]) + b"\n" + b'{"prompt": "How do I\n'
    rest = b"\n".join(good.split(b"\n")[501:])
    first = good.replace(b"tea", "thé".encode())

    def whole(train: bytes, validation: bytes | None = valid, suffix: str = "jsonl") -> dict[str, bytes]:
        files = {f"train.{suffix}": train}
        if validation is not None:
            files[f"validation.{suffix}"] = validation
        return files

    def both(change: Callable[[Rows], Rows]) -> dict[str, bytes]:
        return whole(lines(change(train)), lines(change(held)))

    folders: dict[str, dict[str, bytes]] = {
        "pairs": whole(good),
        "pairs_parquet": whole(parquet(train), parquet(held), "parquet"),
        "pairs_csv": whole(csv(train), csv(held), "csv"),
        "array": {"train.json": json.dumps(train).encode(), "validation.json": json.dumps(held).encode()},
        "broken500": whole(cut + rest),
        "badval": whole(good, valid[:-30]),
        "latecols": whole(lines([*train[:500], *renamed(train[500:], prompt="question", chosen="good")])),
        "extra_late": whole(lines(changed(train, 500, comment="see above"))),
        "empty_chosen": both(lambda rows: [{**row, "chosen": ""} for row in rows]),
        "same_pairs": both(lambda rows: [{**row, "rejected": row["chosen"]} for row in rows]),
        "integers": both(lambda rows: [{**row, "prompt": i} for i, row in enumerate(rows)]),
        "one_number": whole(lines(changed(train, 300, chosen=5))),
        "one_null": whole(lines(changed(train, 300, prompt=None))),
        "one_nan": whole(lines(changed(train, 300, prompt=math.nan))),
        "one_empty_prompt": whole(lines(changed(train, 300, prompt=""))),
        "long_prompt": whole(lines(changed(train, 300, prompt="tea and bread " * 70_000))),
        "all_long": both(lambda rows: [{**row, "prompt": row["prompt"] * 40} for row in rows]),
        "bom": whole(b"\xef\xbb\xbf" + good, b"\xef\xbb\xbf" + valid),
        "latin1": whole(first.decode().encode("latin-1")),
        "utf16": whole(good.decode().encode("utf-16")),
        "crlf": whole(good.replace(b"\n", b"\r\n")),
        "blank_lines": whole(good.replace(b"\n", b"\n\n")),
        "list_line": whole(good + b"[1, 2]\n"),
        "text_line": whole(b"hello\n" + good),
        "two_objects": whole(good.replace(b"}\n", b"} ", 1)),
        "nul_bytes": whole(good[:2000] + b"\0" * 200 + good[2000:]),
        "two_formats": {**whole(good), "train.csv": csv(train[:50])},
        "semicolons": whole(csv(train, ";"), csv(held, ";"), "csv"),
        "tabs": whole(csv(train, "\t"), csv(held, "\t"), "csv"),
        "ragged_csv": whole(csv(train) + b'"only one cell"\n', csv(held), "csv"),
        "same_header": whole(csv(train).replace(b"rejected", b"chosen", 1), csv(held), "csv"),
        "header_only": whole(b"prompt,chosen,rejected\n", csv(held), "csv"),
        "empty_train": whole(b""),
        "empty_validation": whole(good, b""),
        "empty_folder": {},
        "gz": {"train.jsonl.gz": gzip.compress(good), "validation.jsonl.gz": gzip.compress(valid)},
        "not_gz": {"train.jsonl.gz": good, "validation.jsonl": valid},
        "gz_cut": {"train.jsonl.gz": gzip.compress(good)[:-400], "validation.jsonl": valid},
        "capitals": {"train.JSONL": good, "validation.JSONL": valid},
        "no_validation": whole(good, None),
        "train_is_folder": {"train.jsonl/part.jsonl": good, "validation.jsonl": valid},
        "not_parquet": whole(b"PAR1 and then something else", valid, "parquet"),
        "parquet_cut": whole(parquet(train)[:-600], parquet(held), "parquet"),
        "parquet_empty": whole(b"", parquet(held), "parquet"),
        "parquet_ints": whole(
            parquet([{**row, "prompt": 1} for row in train]),
            parquet([{**row, "prompt": 1} for row in held]),
            "parquet",
        ),
        "txt": whole(b"one\ntwo\n", b"three\n", "txt"),
        "only_test": {"test.jsonl": good},
        "alpaca": both(lambda rows: renamed(rows, prompt="instruction", chosen="output")),
        "swapped_names": both(
            lambda rows: renamed(rows, prompt="Prompt", chosen="Chosen", rejected="Rejected")
        ),
        "prompts_only": both(lambda rows: renamed(rows, prompt="prompt")),
        "trl_pairs": both(as_messages),
        "messages": both(conversation),
        "messages_user_last": both(
            lambda rows: [{"messages": row["messages"][:1]} for row in conversation(rows)]
        ),
        "messages_empty": whole(
            lines(changed(conversation(train), 300, messages=[])), lines(conversation(held))
        ),
        "messages_role": whole(
            lines(changed(conversation(train), 300, messages=[{"role": "wizard", "content": "hm"}] * 2)),
            lines(conversation(held)),
        ),
        "messages_no_content": whole(
            lines(changed(conversation(train), 300, messages=[{"role": "user"}, {"role": "assistant"}])),
            lines(conversation(held)),
        ),
        "messages_text": whole(
            lines(changed(conversation(train), 300, messages="hi")), lines(conversation(held))
        ),
        "only_validation": {"validation.jsonl": valid},
        "nested": whole(lines(changed(train, 300, prompt={"text": "How"})), valid),
        "booleans": both(lambda rows: [{**row, "rejected": True} for row in rows]),
        "no_rejected": both(lambda rows: renamed(rows, prompt="prompt", chosen="chosen")),
        "three_rows": whole(lines(train[:3]), lines(held[:3])),
    }
    for name, files in folders.items():
        (folder / name).mkdir(parents=True)
        for file, content in files.items():
            (folder / name / file).parent.mkdir(exist_ok=True)
            (folder / name / file).write_bytes(content)
    (folder / "broken_link").mkdir()
    (folder / "broken_link" / "train.jsonl").symlink_to(folder / "nowhere.jsonl")
    (folder / "broken_link" / "validation.jsonl").write_bytes(valid)
    spaced = folder / "my dätä"
    spaced.mkdir()
    for file, content in whole(good).items():
        (spaced / file).write_bytes(content)
    single = {
        "all.jsonl": good,
        "all.csv": csv(train),
        "all.parquet": parquet(train),
        "all.jsonl.gz": gzip.compress(good),
        "answers.jsonl": lines(renamed(train, prompt="prompt", chosen="completion")),
        "ambiguous.jsonl": lines([{**row, "question": "another"} for row in train]),
        "broken500.jsonl": cut + rest,
        "one_row.jsonl": lines(train[:1]),
        "empty.jsonl": b"",
        "blank.jsonl": b"\n\n\n",
        "notes.txt": b"some notes\n",
        "no_suffix": good,
        "csv_in.jsonl": csv(train),
        "array_in.jsonl": json.dumps(train).encode(),
        "object.json": json.dumps({"data": train}).encode(),
        "messages.jsonl": lines(conversation(train)),
        "foreign_columns.jsonl": lines(renamed(train, prompt="frage", chosen="antwort")),
        "lines.json": b"".join(json.dumps(row, indent=2).encode() + b"\n" for row in train),
        "indented.json": json.dumps(train, indent=2).encode(),
        "all.tsv": csv(train, "\t"),
        "all.jsonl.zip": b"PK\x03\x04" + bytes(100),
        "all.xlsx": b"PK\x03\x04" + bytes(100),
        "bom.csv": b"\xef\xbb\xbf" + csv(train),
        "one_column.csv": csv(renamed(train, prompt="prompt")),
        "all.csv.gz": gzip.compress(csv(train)),
        "semicolons.csv": csv(train, ";"),
        "utf16.jsonl": good.decode().encode("utf-16"),
        "capitals.jsonl": lines(renamed(train, prompt="Prompt", chosen="Chosen", rejected="Rejected")),
        "no_answers.jsonl": lines([{"prompt": row["prompt"], "completion": ""} for row in train]),
        "one_null_answer.jsonl": lines(
            changed(renamed(train, prompt="prompt", chosen="completion"), 300, completion=None)
        ),
        "long_answer.jsonl": lines(
            changed(renamed(train, prompt="prompt", chosen="completion"), 300, completion="tea " * 5000)
        ),
        "one_prompt.jsonl": lines([{**row, "prompt": "How?"} for row in train]),
        "sharegpt.jsonl": lines(
            [
                {
                    "conversations": [
                        {"from": "human", "value": row["prompt"]},
                        {"from": "gpt", "value": row["chosen"]},
                    ]
                }
                for row in train
            ]
        ),
        "parts.jsonl": lines(
            [
                {
                    "messages": [
                        {"role": "user", "content": [{"type": "text", "text": row["prompt"]}]},
                        {"role": "assistant", "content": row["chosen"]},
                    ]
                }
                for row in train
            ]
        ),
        "labels.jsonl": lines(
            [{"prompt": r["prompt"], "completion": r["chosen"], "label": True} for r in train]
        ),
        "trl_pairs.jsonl": lines(as_messages(train)),
        "picture.parquet": b"\x89PNG\r\n" * 100,
    }
    for name, content in single.items():
        (folder / name).write_bytes(content)
