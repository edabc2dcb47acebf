"""Tests of `python -m rlhf.evaluate`: the metrics equal those of the evaluations during training."""

import io
import json
import shutil
import sys

import pytest
from rich.console import Console

from rlhf import evaluate as command
from rlhf.core.errors import UserError
from rlhf.core.files import read_lines
from rlhf.core.formatting import text, wilson
from rlhf.loggers.logger import EVALUATION_METRICS
from rlhf.runs.folder import RunFolder
from rlhf.stages import evaluation as evaluate
from rlhf.stages.evaluation import changed, table
from rlhf.stages.prerequisites import model_folder, stage
from rlhf.words.compose import load_config
from tests import needs
from tests.end_to_end.conftest import nightly

# Runs have two updates, each with an evaluation and a checkpoint.
EVERY = ("schedule.eval_every=1", "schedule.save_every=1")
RUNS = {
    "dpo": [],
    "lora": ["model.lora.rank=4", "optim.lr=1e-2"],
    "ppo": ["algo=ppo", "schedule.max_lag=1"],
    "sft": ["algo=sft", "schedule.total_episodes=16"],
    "reward": ["algo=reward"],
    "zero2": ["backend=zero2"],
}
NEEDS = {"lora": "peft", "zero2": "deepspeed"}


@pytest.fixture
def copy_of(finished, tmp_path):
    """`copy_of(name)` returns a copy of a finished run of `RUNS` that the test may change."""

    def get(name: str) -> RunFolder:
        pytest.importorskip(NEEDS.get(name, "rlhf"))
        return RunFolder(shutil.copytree(finished(*EVERY, *RUNS[name]).path, tmp_path / name))

    return get


@pytest.fixture
def copied(copy_of):
    """Return a copy of the finished DPO run."""
    return copy_of("dpo")


def measured(folder: RunFolder, *words: str, **more) -> list[dict]:
    return evaluate.evaluate(changed(folder, words), folder, **more)


@pytest.mark.parametrize(
    "name", ["dpo", "lora", "ppo", pytest.param("sft", marks=pytest.mark.smoke), "reward", nightly("zero2")]
)
def test_metrics_equal_those_measured_during_training(copy_of, name):
    folder = copy_of(name)
    trained = {
        row["update"]: row for row in read_lines(folder.metrics) if "eval/loss" in row or "eval/kl" in row
    }

    rows = measured(folder)

    assert [(row["model"], row["update"]) for row in rows] == [("checkpoint-1", 1), ("model", 2)]
    for row in rows:
        figures = {key: value for key, value in trained[row["update"]].items() if key.startswith("eval/")}
        if name == "reward" and row["model"] == "model":
            # The reward model is centred after training, so the saved model has an offset.
            figures["eval/reward"] -= json.loads((folder.model / "config.json").read_text())["reward_offset"]
        measured_again = {key: row[key] for key in figures}
        assert measured_again == (pytest.approx(figures, abs=1e-5) if name == "reward" else figures)
    assert trained[1] != trained[2]


def test_a_row_has_its_settings_and_the_confidence_interval_of_its_win_rate(copy_of):
    folder = copy_of("sft")
    *_, row = measured(folder, "eval.prompts=24")
    low, high = wilson(row["eval/win_rate"], 24)
    assert (row["eval/win_rate_low"], row["eval/win_rate_high"], row["examples"]) == (low, high, 24)
    assert row["settings"] | {"digest": ""} == {
        "split": "validation", "prompts": 24, "generator": "hf", "temperature": 0.01, "kl_temperature": 1.0,
        "response_length": 16, "gold": "facts", "dtype": "float32", "digest": "",
    }  # fmt: skip
    assert row["episode"] == 16
    samples = read_lines(folder.path / "evaluations" / f"model-{row['settings']['digest']}.jsonl")
    wins = [sample["gold_score"] > sample["reference_gold_score"] for sample in samples]
    assert sum(wins) / len(wins) == row["eval/win_rate"] and len(wins) == 24
    assert f"{row['eval/win_rate']:.3f} [{low:.3f}, {high:.3f}]" == text(row, "eval/win_rate")


def test_evaluated_models_are_not_evaluated_again(copied, capsys, monkeypatch):
    first = measured(copied)
    told = copied.evaluations.read_text()
    capsys.readouterr()
    monkeypatch.setattr(evaluate, "measure", lambda *_: pytest.fail("evaluated again"))
    assert measured(copied) == first and copied.evaluations.read_text() == told
    assert capsys.readouterr().out.count("evaluated already with these settings: ") == 2


def test_each_split_and_each_change_of_settings_adds_a_row(copied):
    validation = measured(copied, only=("model",))
    test = measured(copied, only=("model",), split="test")
    fewer = measured(copied, "eval.prompts=4", only=("model",))
    rows = read_lines(copied.evaluations)
    assert rows == [*validation, *test, *fewer]
    assert [row["examples"] for row in rows] == [16, 8, 4]
    assert [row["settings"]["split"] for row in rows] == ["validation", "test", "validation"]


def test_an_interrupted_evaluation_resumes_with_the_missing_models(copied):
    whole = measured(copied)
    one, other = copied.evaluations.read_text().splitlines(keepends=True)
    copied.evaluations.write_text(one + other[:50])  # as if a crash cut off the last line
    assert measured(copied) == whole
    assert copied.evaluations.read_text() == one + other


def test_a_damaged_checkpoint_is_reported_and_skipped(copied, capsys):
    file = copied.path / "checkpoint-1" / "optimizer.pt"
    file.write_bytes(file.read_bytes()[:100])
    assert [row["model"] for row in measured(copied)] == ["model"]
    told = " ".join(capsys.readouterr().out.split())
    assert "checkpoint-1 is damaged and is not evaluated: optimizer.pt has 100 bytes" in told
    assert (copied.path / "checkpoint-1" / "COMPLETE").is_file(), (
        "only the run may mark a checkpoint as damaged"
    )


def test_a_run_without_checkpoint_or_final_model_is_rejected(copied):
    shutil.rmtree(copied.path / "checkpoint-1")
    copied.write_state({"update": 1, "episode": 16, "finished": False})
    with pytest.raises(UserError, match="run= must have a checkpoint or a final model to evaluate"):
        measured(copied)


def test_the_gold_scorer_can_be_replaced(copied, tmp_path):
    judge = tmp_path / "judge.py"
    judge.write_text("def brief(prompt, response, reference):\n    return -float(len(response))\n")
    (row,) = measured(copied, "scorer@gold=function", f"gold.path={judge}:brief", only=("model",))
    (file,) = (copied.path / "evaluations").iterdir()
    scores = [-len(sample["response"]) for sample in read_lines(file)]
    assert row["eval/gold_score"] == sum(scores) / len(scores) and row["settings"]["gold"] == f"{judge}:brief"


def test_generation_in_chunks_gives_the_same_samples(copied, monkeypatch):
    whole = measured(copied, only=("model",))
    copied.evaluations.unlink()
    monkeypatch.setattr(evaluate, "CHUNK", 5)
    (row,) = measured(copied, only=("model",))
    assert row == {key: pytest.approx(value, abs=1e-5) if isinstance(value, float) else value
                   for key, value in whole[0].items()}  # fmt: skip


def test_a_named_model_is_evaluated_beside_the_run_and_is_its_initial_policy(copied):
    start = str(model_folder(stage(load_config(copied.config), "sft")).model)
    without = measured(copied, "eval.prompts=8", only=("model",))
    base, model = measured(copied, "eval.prompts=8", only=("model",), models=[start])
    assert "eval/win_rate_vs_initial" not in without[0], "nothing to compare with, at other settings"
    assert base["model"] == start and base["initial"] and base["eval/kl"] == pytest.approx(0, abs=1e-4)
    assert "update" not in base and "eval/win_rate_vs_initial" not in base
    assert 0 <= model["eval/win_rate_vs_initial_low"] <= model["eval/win_rate_vs_initial"]
    whole = Console(width=80, file=io.StringIO())
    whole.print(table([base, model]))
    assert "win rate vs initial" in whole.file.getvalue()


@pytest.mark.parametrize("count", [1, 2, 3, 4, 9])
def test_the_table_of_any_number_of_models_fits_in_80_columns(count):
    names = [name for name in EVALUATION_METRICS if name != "eval/accuracy"]
    row = {name: 0.123 for name in names} | {"update": 1200, "episode": 153600, "examples": 256}
    row |= {f"{name}_{end}": 0.123 for name in names[:2] for end in ("low", "high")}
    row |= {f"{name}_ci95": 0.023 for name in names[2:4]} | {"settings": {"split": "test"}}
    rows = [{**row, "model": f"outputs/tldr_mini-pythia-dpo-hf/checkpoint-{i}"} for i in range(count)]
    printed = Console(width=80, file=io.StringIO())
    printed.print(table(rows, 80))
    text = printed.file.getvalue()
    assert all(len(line) <= 80 for line in text.splitlines()) and "…" not in text
    assert text.count("0.123 [0.123, 0.123]") == text.count("0.123 [0.100, 0.146]") == 2 * count
    assert text.count("perplexity") >= 1 and "accuracy" not in text


def test_a_named_model_is_evaluated_again_after_its_files_changed(copied, tmp_path):
    base = tmp_path / "base"
    shutil.copytree(copied.model, base)
    row, model = measured(copied, models=[str(base)], only=("model",))
    assert measured(copied, models=[str(base)], only=("model",)) == [row, model]
    assert len(read_lines(copied.evaluations)) == 2
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config, indent=8))
    again, _ = measured(copied, models=[str(base)], only=("model",))
    assert len(read_lines(copied.evaluations)) == 3
    assert again["files"] != row["files"] and again["eval/win_rate"] == row["eval/win_rate"]


def test_models_are_evaluated_without_a_run(copied, tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    other = shutil.copytree(copied.model, tmp_path / "other")
    judge = tmp_path / "judge.py"
    judge.write_text("def brief(prompt, response, reference):\n    return -float(len(response))\n")
    words = ["task=tldr_mini", "task.train_size=128", "task.validation_size=32", "eval.prompts=8",
             "scorer=function", f"scorer.path={judge}:brief", "scorer@gold=none",
             "generator.response_length=16"]  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["evaluate", f"models={copied.model},{other}", *words])
    command.main()
    (folder,) = (tmp_path / "outputs" / "evaluations").iterdir()
    base, trained = read_lines(folder / "evaluations.jsonl")
    assert base["initial"] and trained["eval/win_rate_vs_initial"] == 0.5, "the same model twice"
    assert base["eval/score"] == trained["eval/score"] < 0
    assert "reward" in capsys.readouterr().out


def test_a_reward_model_that_is_named_keeps_its_head(copy_of):
    folder = copy_of("reward")
    named, *_, own = measured(folder, models=[str(folder.model)])
    assert named["eval/accuracy"] == own["eval/accuracy"]
    assert named["eval/reward"] == pytest.approx(own["eval/reward"], abs=1e-5)


def test_a_final_model_without_its_config_is_refused(copied):
    (copied.model / "config.json").unlink()
    with pytest.raises(UserError, match=r"run= must have a complete final model .*set only=checkpoint-1"):
        measured(copied)
    with pytest.raises(UserError, match=r"models must name a model on the hub or a folder with config.json"):
        measured(copied, models=[str(copied.model)])


def test_a_model_with_another_vocabulary_is_refused_beside_the_run(copied, finished):
    other = finished("task=arithmetic", "scorer@gold=answer", "scorer=answer").model
    with pytest.raises(UserError, match=r"models= must name models with the tokenizer of"):
        measured(copied, models=[str(other)])


@pytest.mark.nightly
def test_vllm_evaluates_each_checkpoint_with_the_weights_of_the_checkpoint(copy_of):
    pytest.importorskip("vllm", reason=needs.VLLM)
    folder = copy_of("sft")
    by_hf, by_vllm = measured(folder), measured(folder, "generator=vllm")
    assert [row["settings"]["generator"] for row in by_vllm] == ["vllm", "vllm"]
    # near-greedy sampling gives nearly the same responses
    for one, other in zip(by_hf, by_vllm, strict=True):
        assert other["eval/gold_score"] == pytest.approx(one["eval/gold_score"], abs=0.4)
    assert abs(by_hf[0]["eval/gold_score"] - by_hf[1]["eval/gold_score"]) > 1.0, (
        "the checkpoint and the final model must differ"
    )
