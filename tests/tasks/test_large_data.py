"""Tests of data above the limit of memory: rows in a file give the same prompts in the same order."""

import json
import tracemalloc

import datasets
import numpy as np
import pyarrow
import pytest
import xxhash

from rlhf.config.algorithms import Data
from rlhf.config.tasks import LocalConfig
from rlhf.core.errors import UserError
from rlhf.tasks import source
from rlhf.tasks.kinds import LocalSource, held_out_rows
from rlhf.tasks.task import Task
from tests.tiny_models import tiny_tokenizer


@pytest.fixture
def config(tmp_path, monkeypatch) -> LocalConfig:
    """Return a section with 300 rows, of which some have no response or equal responses."""
    monkeypatch.setattr(source, "CHUNK", 40)
    rows = [
        {"prompt": f"w {i % 250}", "chosen": f"a {i % 9}" if i % 50 else " ", "rejected": f"a {i % 7}"}
        for i in range(300)
    ]
    file = tmp_path / "data.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return LocalConfig(path=str(file))


def task_of(config: LocalConfig, data: Data) -> Task:
    return Task(
        LocalSource(config), tiny_tokenizer(), data=data, prompts_per_update=8, max_prompt_tokens=9, seed=5
    )


@pytest.mark.parametrize("data", [Data.prompts, Data.references, Data.preferences])
def test_rows_in_a_file_give_the_same_prompts_in_the_same_order(config, data, monkeypatch):
    datasets.enable_caching()  # `rlhf.inspect` turns it off
    small = task_of(config, data)
    assert not small.examples("train").cache_files
    monkeypatch.setattr(source, "IN_MEMORY", 3000)
    large = task_of(config, data)
    files = large.examples("train").cache_files
    assert files and source.scratch().name in files[0]["filename"], "tokens are in a file, too"
    assert large.fingerprint() == small.fingerprint() and len(large) == len(small)
    assert large.counts("train") == small.counts("train")
    for one, other, _ in zip(small.prompts(), large.prompts(), range(80), strict=False):
        assert one.texts == other.texts and one.index.equal(other.index)
        assert one.prompt_ids.equal(other.prompt_ids) and one.completions == other.completions
    assert small.held_out(9).texts == large.held_out(9).texts


def test_rows_in_a_file_do_not_need_memory_for_their_texts(monkeypatch):
    rows = (("", {"query": f"{i}" * 200, "reference_response": "x" * 500}) for i in range(30_000))
    monkeypatch.setattr(source, "IN_MEMORY", 5_000_000)
    before = pyarrow.total_allocated_bytes()
    tracemalloc.start()
    found = source.from_rows(rows)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.data.nbytes > 30e6 and len(found) == 30_000
    assert pyarrow.total_allocated_bytes() - before < 1e6
    assert peak < 40e6, "one chunk of rows at a time"


def test_a_folder_without_room_is_reported(config, monkeypatch):
    monkeypatch.setattr(source, "IN_MEMORY", 3000)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(source.pyarrow, "OSFile", full)
    with pytest.raises(UserError, match=r"TMPDIR must be .*No space left.*export TMPDIR=<folder on a disk>"):
        LocalSource(config).prompts("train")


@pytest.mark.parametrize("fraction", [0.001, 0.1, 0.5, 0.999])
def test_the_validation_rows_are_the_prompts_with_the_smallest_hashes(fraction):
    draw = np.random.default_rng(0)
    for count in (1, 2, 7, 100):
        prompts = [f"p {draw.integers(max(1, count // 2))}" for _ in range(count)]
        order = sorted(set(prompts), key=lambda prompt: xxhash.xxh3_64_intdigest(prompt.encode()))
        chosen: list[str] = []
        while len(chosen) < max(1, len(order) - 1) and (
            sum(prompt in chosen for prompt in prompts) < max(1, round(fraction * count))
        ):
            chosen.append(order[len(chosen)])
        assert held_out_rows(prompts, fraction).tolist() == [prompt in chosen for prompt in prompts]
