"""Rules for GPUs of vLLM and for saved rollouts, which are checked before a run reads files."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

from rlhf.checks import check
from rlhf.core.files import Shared, name
from rlhf.words.compose import compose

SETTINGS = Shared(prompts=64, samples=2, response_length=40, temperature=0.7, vocabulary="0" * 16)
STORED = "algo=grpo algo.samples_per_prompt=2 generator=dataset scorer=labels generator.temperature=0.7"


def write(folder: Path, updates: int, metadata: dict[bytes, bytes]) -> str:
    """Write files that have the metadata of rollouts, but no rows."""
    folder.mkdir()
    for update in range(1, updates + 1):
        table = pa.table({"update": pa.array([], pa.int64())}).replace_schema_metadata(metadata)
        pyarrow.parquet.write_table(table, folder / name(update))
    return f"generator.path={folder}"


@pytest.fixture
def path(tmp_path) -> str:
    return write(tmp_path / "generations", 3, SETTINGS.metadata())


def problems(*overrides: str) -> list[str]:
    shape = ["schedule.prompts_per_update=64", "schedule.total_episodes=384"]
    return check.problems(compose([*STORED.split(), *shape, *overrides]))


@pytest.mark.parametrize(
    ("override", "remedy"),
    [
        ("generator.temperature=1", "generator.temperature=0.7"),
        ("schedule.prompts_per_update=32", "schedule.prompts_per_update=64"),
        ("algo.samples_per_prompt=4", "algo.samples_per_prompt=2"),
        ("schedule.total_episodes=512", "schedule.total_episodes=384"),
    ],
)
def test_rollouts_of_another_shape_or_number_are_refused_with_a_remedy(path, override, remedy):
    assert problems(path) == problems(path, override, remedy) == []
    key, _, value = override.partition("=")
    (problem,) = [text for text in problems(path, override) if text.endswith(f"; set {remedy}")]
    assert problem.startswith(f"{key} must be ") and f"got {value}" in problem


def test_a_folder_without_rollouts_is_refused(tmp_path):
    (problem,) = problems(f"generator.path={tmp_path}")
    assert problem.startswith("generator.path must be a folder") and "(no such files)" in problem
    (problem,) = problems(write(tmp_path / "foreign", 1, {}))
    assert "(000001.parquet was not written by save_generations)" in problem


def test_supervised_algorithms_read_no_rollouts(path):
    found = check.problems(compose(["algo=sft", path, "generator.temperature=0.7"]))
    assert any(text.startswith("generator.path must be null with algo=sft") for text in found)


@pytest.mark.parametrize(
    ("words", "key", "remedy", "allowed"),
    [
        ("generator=vllm generator.devices=[2]", "generator.devices", "null", []),
        (
            "generator=vllm_colocated generator.tensor_parallel_size=2",
            "generator.tensor_parallel_size",
            "1",
            ["backend.device=cpu"],
        ),
    ],
)
def test_vllm_does_not_share_the_gpu_of_another_rank(monkeypatch, words, key, remedy, allowed):
    def refusals(*more: str) -> list[str]:
        found = check.problems(compose([*words.split(), "generator.per_rank=true", *more]))
        return [text for text in found if text.startswith(f"{key} must be {remedy}")]

    assert refusals() == []
    monkeypatch.setenv("WORLD_SIZE", "2")
    (problem,) = refusals()
    assert problem.endswith(f"set {key}={remedy}") and refusals(f"{key}={remedy}") == []
    assert all(refusals(word) == [] for word in allowed)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")  # two hosts: the second GPU of a host has no rank
    assert bool(refusals()) == (key == "generator.devices")
