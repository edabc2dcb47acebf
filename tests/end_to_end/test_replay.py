"""Tests of saved rollouts: their files, and runs that train on the files without a generator."""

import shutil
from dataclasses import replace

import datasets
import pytest
import torch
from transformers import AutoTokenizer

from rlhf.checks.check import problems
from rlhf.core.batch import Batch, Sampling
from rlhf.core.errors import UserError
from rlhf.core.files import files
from rlhf.generators.generator import ReplayGenerator, read
from rlhf.runs.folder import RunFolder
from rlhf.scorers.scorer import write
from rlhf.stages.run import run
from tests.end_to_end.conftest import UPDATES_ONLY, rows
from tests.tiny_models import tiny_tokenizer

SCORED = ("scorer=facts", "scorer.missing_eos_score=null")
WORDS = ("algo=grpo", "algo.samples_per_prompt=2", "schedule.total_episodes=48", *SCORED)


@pytest.fixture
def saved(finished) -> RunFolder:
    """Return the folder of a finished run that saved its rollouts. Tests must not change the folder."""
    return finished(*WORDS, "save_generations=true")


def replayed(tiny, saved, *words):
    stored = [f"generator.path={saved.generations}", "generator.temperature=0.7"]
    return tiny(*WORDS, "generator=dataset", "generator.response_length=16", "scorer=labels", *stored, *words)


def updates(folder):
    return [row for row in rows(folder) if "lr" in row]


def test_saving_rollouts_changes_no_metric_and_the_folder_loads_as_a_dataset(tiny, tmp_path, saved):
    plain = RunFolder(tmp_path / "plain")
    run(tiny(*WORDS), plain)
    assert rows(plain) == rows(saved)
    found = datasets.load_dataset(str(saved.generations), split="train")
    assert len(found) == 48
    assert set(found["update"]) == {1, 2, 3} and set(found["version"]) == {0, 1, 2}
    assert found["sample"][:4] == [0, 1, 0, 1] and found["example"][0] == found["example"][1]
    scores = [row["objective/scores"] for row in updates(saved)]
    assert sum(found["score"]) / 48 == pytest.approx(sum(scores) / 3)
    for row in found:
        assert len(row["response_ids"]) == len(row["behaviour_logprobs"]) <= 16


@pytest.mark.smoke
def test_replayed_run_has_the_metrics_of_the_run_that_sampled(tiny, tmp_path, saved):
    folder = RunFolder(tmp_path / "replayed")
    run(replayed(tiny, saved), folder)
    same = [row.keys() for row in updates(saved)]
    assert [row.keys() for row in updates(folder)] == same
    for again, first in zip(updates(folder), updates(saved), strict=True):
        assert again == pytest.approx(first, rel=1e-4, abs=1e-6)


def test_another_algorithm_can_be_trained_on_the_same_rollouts(tiny, tmp_path, saved):
    for algo in ("dpo", "rloo", "bok"):
        folder = RunFolder(tmp_path / algo)
        words = [f"algo={algo}", "generator=dataset", "scorer=facts", *UPDATES_ONLY]
        run(replayed(tiny, saved, *words), folder)
        first, *_, last = updates(folder)
        assert first["objective/scores"] == pytest.approx(updates(saved)[0]["objective/scores"])
        assert last["mismatch/max_ratio"] > 1, "the rollouts are from another policy"


def test_a_file_reads_back_as_the_rollouts_that_were_written(tiny, saved):
    file = files(saved.generations)[0]
    rollouts = read(file, pad_id=0)
    assert rollouts.response_ids.shape == (8, 2, 16) and rollouts.labels.shape == (8, 2)
    assert (rollouts.behaviour_logprobs[rollouts.response_mask] < 0).all()
    assert not rollouts.behaviour_logprobs[~rollouts.response_mask].any()
    assert rollouts.prompt_mask[:, -1].all(), "prompts are padded on the left"


def test_token_versions_are_saved_and_read_back(tiny, saved, tmp_path):
    first = read(files(saved.generations)[0], pad_id=0)
    mixed = torch.arange(16).expand(8, 2, 16) % 3 * first.response_mask
    batch = first.extend(Batch, scores=first.labels)
    tokenizer = AutoTokenizer.from_pretrained(saved.model)
    sampling = Sampling(samples=2, temperature=0.7, response_length=16, purpose="train")
    write(replace(batch, token_versions=mixed), 1, tmp_path, tokenizer, sampling, "")
    again = read(tmp_path / "000001.parquet", pad_id=0)
    assert torch.equal(again.token_versions, mixed)
    assert first.token_versions is None


@pytest.mark.parametrize(
    "word, remedy",
    [
        ("generator.temperature=1", "set generator.temperature=0.7"),
        ("schedule.prompts_per_update=4", "set schedule.prompts_per_update=8"),
        ("algo.samples_per_prompt=4", "set algo.samples_per_prompt=2"),
    ],
)
def test_settings_that_differ_from_the_rollouts_are_reported(tiny, saved, word, remedy):
    (found,) = [text for text in problems(replayed(tiny, saved, word)) if "of the rollouts" in text]
    assert found.endswith(remedy)


def test_rollouts_in_the_tokens_of_another_tokenizer_are_refused(saved):
    with pytest.raises(UserError, match=r"generator\.path must name rollouts in the tokens of"):
        ReplayGenerator(saved.generations, tiny_tokenizer())


def test_foreign_or_broken_rollout_file_is_reported(tiny, saved, tmp_path):
    saved = RunFolder(shutil.copytree(saved.path, tmp_path / "saved"))
    first = files(saved.generations)[0]
    datasets.Dataset.from_dict({"a": [1]}).to_parquet(first)
    foreign = problems(replayed(tiny, saved))
    assert any("000001.parquet was not written by save_generations" in text for text in foreign)
    first.write_text("no parquet")
    broken = problems(replayed(tiny, saved))
    assert any("generator.path must be a folder of saved rollouts" in text for text in broken)


def test_missing_or_too_few_rollouts_are_reported(tiny, tmp_path, saved):
    assert any("schedule.total_episodes must be <= 48" in text for text in problems(
        replayed(tiny, saved, "schedule.total_episodes=64")
    ))  # fmt: skip
    nowhere = replayed(tiny, saved, f"generator.path={tmp_path / 'nowhere'}")
    assert any("generator.path must be a folder of saved rollouts" in text for text in problems(nowhere))


def test_resumed_run_rewrites_the_rollouts_after_its_checkpoint(tiny, tmp_path, saved, monkeypatch):
    from rlhf.training.checkpoint import Checkpoints

    class Stopped(Exception):
        pass

    save = Checkpoints.save

    def stop(self, state, *parts):
        save(self, state, *parts)
        raise Stopped

    folder = RunFolder(tmp_path / "interrupted")
    words = (*WORDS, "save_generations=true", "schedule.save_every=1")
    monkeypatch.setattr(Checkpoints, "save", stop)
    with pytest.raises(Stopped):
        run(tiny(*words), folder)
    monkeypatch.undo()
    run(tiny(*words), folder)
    for mine, other in zip(files(folder.generations), files(saved.generations), strict=True):
        assert read(mine, 0).response_ids.tolist() == read(other, 0).response_ids.tolist()
