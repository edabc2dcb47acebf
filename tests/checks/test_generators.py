"""Tests of the rules for GPUs of vLLM and for saved rollouts, which are checked before a run reads files."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

from rlhf.checks import check
from rlhf.core.files import Shared, name
from rlhf.words.compose import compose

SETTINGS = Shared(prompts=64, samples=2, response_length=40, temperature=0.7, vocabulary="0" * 16)


def write(folder: Path, updates: int, metadata: dict[bytes, bytes]) -> str:
    """Write files that have the metadata of rollouts, but no rows."""
    folder.mkdir()
    for update in range(1, updates + 1):
        table = pa.table({"update": pa.array([], pa.int64())}).replace_schema_metadata(metadata)
        pyarrow.parquet.write_table(table, folder / name(update))
    return f"generator.path={folder}"


def problems(*overrides: str) -> list[str]:
    stored = ["algo=grpo", "algo.samples_per_prompt=2", "generator=dataset", "scorer=labels"]
    shape = ["generator.temperature=0.7", "schedule.prompts_per_update=64", "schedule.total_episodes=384"]
    return check.problems(compose([*stored, *shape, *overrides]))


def test_rollouts_of_the_same_shape_are_accepted(tmp_path):
    path = write(tmp_path / "generations", 3, SETTINGS.metadata())
    assert problems(path) == []


@pytest.mark.parametrize(
    ("override", "remedy"),
    [
        ("generator.temperature=1", "set generator.temperature=0.7"),
        ("schedule.prompts_per_update=32", "set schedule.prompts_per_update=64"),
        ("algo.samples_per_prompt=4", "set algo.samples_per_prompt=2"),
    ],
)
def test_rollouts_of_another_shape_are_refused(tmp_path, override, remedy):
    path = write(tmp_path / "generations", 3, SETTINGS.metadata())
    key, _, value = override.partition("=")
    (problem,) = [text for text in problems(path, override) if "of the rollouts" in text]
    assert problem.startswith(f"{key} must be that of the rollouts in generator.path")
    assert f"got {value}" in problem and problem.endswith(remedy)


def test_a_run_cannot_be_longer_than_its_rollouts(tmp_path):
    path = write(tmp_path / "generations", 3, SETTINGS.metadata())
    (problem,) = problems(path, "schedule.total_episodes=512")
    assert problem.startswith(
        "schedule.total_episodes must be <= 384 (generator.path has rollouts of 3 updates)"
    )
    assert problem.endswith("got 512; set schedule.total_episodes=384")


def test_a_folder_without_rollouts_is_refused(tmp_path):
    (problem,) = problems(f"generator.path={tmp_path}")
    assert problem.startswith("generator.path must be a folder of saved rollouts")
    assert "(no such files)" in problem
    (problem,) = problems(write(tmp_path / "foreign", 1, {}))
    assert "(000001.parquet was not written by save_generations)" in problem


def test_supervised_algorithms_read_no_rollouts(tmp_path):
    path = write(tmp_path / "generations", 3, SETTINGS.metadata())
    found = check.problems(compose(["algo=sft", path, "generator.temperature=0.7"]))
    assert any(text.startswith("generator.path must be null for algo=sft") for text in found)


def test_ranks_with_a_generator_each_do_not_share_named_gpus(monkeypatch):
    words = ["generator=vllm", "generator.devices=[2]", "generator.per_rank=true"]
    named = "generator.devices must be null"
    assert not any(text.startswith(named) for text in check.problems(compose(words)))
    monkeypatch.setenv("WORLD_SIZE", "2")
    (problem,) = [text for text in check.problems(compose(words)) if text.startswith(named)]
    assert problem.endswith("got [2]; set generator.devices=null")


def test_vllm_does_not_share_the_gpu_of_another_rank(monkeypatch):
    words = ["generator=vllm_colocated", "generator.per_rank=true", "generator.tensor_parallel_size=2"]
    named = "generator.tensor_parallel_size must be 1"

    def refusals(*more: str) -> list[str]:
        return [text for text in check.problems(compose([*words, *more])) if text.startswith(named)]

    assert refusals() == []
    monkeypatch.setenv("WORLD_SIZE", "2")
    (problem,) = refusals()
    assert problem.endswith("got 2; set generator.tensor_parallel_size=1")
    assert refusals("generator.tensor_parallel_size=1") == refusals("backend.device=cpu") == []
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")  # two hosts: the second GPU of a host has no rank
    assert refusals() == []
