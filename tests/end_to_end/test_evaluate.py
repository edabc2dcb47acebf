"""`python -m rlhf.evaluate`: what is measured of a run afterwards is what was measured while it trained."""

import json
import shutil

import pytest

from rlhf.core.confidence import wilson
from rlhf.core.errors import UserError
from rlhf.core.files import read_lines
from rlhf.runs.folder import RunFolder
from rlhf.stages import evaluation as evaluate
from tests import needs

pytestmark = pytest.mark.forks

EVERY = ("schedule.eval_every=1", "schedule.save_every=1")  # of two updates
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
    """`copy_of(name)` is a copy of a finished run of `RUNS`, for the evaluations of one test."""

    def get(name: str) -> RunFolder:
        pytest.importorskip(NEEDS.get(name, "rlhf"))
        return RunFolder(shutil.copytree(finished(*EVERY, *RUNS[name]).path, tmp_path / name))

    return get


@pytest.fixture
def copied(copy_of):
    """A copy of the finished run of dpo."""
    return copy_of("dpo")


def measured(folder: RunFolder, *words: str, **more) -> list[dict]:
    return evaluate.evaluate(evaluate.changed(folder, words), folder, **more)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.smoke if name == "sft" else ()) for name in RUNS]
)
def test_figures_are_those_that_training_measured(copy_of, name):
    folder = copy_of(name)
    trained = {
        row["update"]: row for row in read_lines(folder.metrics) if "eval/loss" in row or "eval/kl" in row
    }

    rows = measured(folder)

    assert [(row["model"], row["update"]) for row in rows] == [("checkpoint-1", 1), ("model", 2)]
    for row in rows:
        figures = {key: value for key, value in trained[row["update"]].items() if key.startswith("eval/")}
        if name == "reward" and row["model"] == "model":
            # The reward model is centred after training.
            figures["eval/reward"] -= json.loads((folder.model / "config.json").read_text())["reward_offset"]
        measured_again = {key: row[key] for key in figures}
        assert measured_again == (pytest.approx(figures, abs=1e-5) if name == "reward" else figures)
    assert trained[1] != trained[2]


def test_a_row_tells_its_settings_and_how_sure_its_win_rate_is(copy_of):
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
    assert f"{row['eval/win_rate']:.3f} [{low:.3f}, {high:.3f}]" == evaluate.figure(row, "eval/win_rate")


def test_what_was_evaluated_is_not_evaluated_again(copied, capsys, monkeypatch):
    first = measured(copied)
    told = copied.evaluations.read_text()
    capsys.readouterr()
    monkeypatch.setattr(evaluate, "measure", lambda *_: pytest.fail("evaluated again"))
    assert measured(copied) == first and copied.evaluations.read_text() == told
    assert capsys.readouterr().out.count("evaluated already with these settings: ") == 2


def test_another_split_or_other_settings_are_rows_of_their_own(copied):
    validation = measured(copied, only=("model",))
    test = measured(copied, only=("model",), split="test")
    fewer = measured(copied, "eval.prompts=4", only=("model",))
    rows = read_lines(copied.evaluations)
    assert rows == [*validation, *test, *fewer]
    assert [row["examples"] for row in rows] == [16, 8, 4]
    assert [row["settings"]["split"] for row in rows] == ["validation", "test", "validation"]


def test_an_evaluation_that_was_ended_goes_on_with_what_is_missing(copied):
    whole = measured(copied)
    one, other = copied.evaluations.read_text().splitlines(keepends=True)
    copied.evaluations.write_text(one + other[:50])  # a crash cut it off
    assert measured(copied) == whole
    assert copied.evaluations.read_text() == one + other


def test_a_damaged_checkpoint_is_told_of_and_left_out(copied, capsys):
    file = copied.path / "checkpoint-1" / "optimizer.pt"
    file.write_bytes(file.read_bytes()[:100])
    assert [row["model"] for row in measured(copied)] == ["model"]
    told = " ".join(capsys.readouterr().out.split())
    assert "checkpoint-1 is damaged and is not evaluated: optimizer.pt has 100 bytes" in told
    assert (copied.path / "checkpoint-1" / "COMPLETE").is_file(), "it is the run's to set aside"


def test_a_run_without_anything_to_evaluate_is_refused(copied):
    shutil.rmtree(copied.path / "checkpoint-1")
    copied.write_state({"update": 1, "episode": 16, "finished": False})
    with pytest.raises(UserError, match="run= must have a checkpoint or a final model to evaluate"):
        measured(copied)


def test_another_judge_judges(copied, tmp_path):
    judge = tmp_path / "judge.py"
    judge.write_text("def brief(prompt, response, reference):\n    return -float(len(response))\n")
    (row,) = measured(copied, "scorer@gold=function", f"gold.path={judge}:brief", only=("model",))
    (file,) = (copied.path / "evaluations").iterdir()
    scores = [-len(sample["response"]) for sample in read_lines(file)]
    assert row["eval/gold_score"] == sum(scores) / len(scores) and row["settings"]["gold"] == f"{judge}:brief"


def test_a_large_request_is_answered_in_parts_with_the_same_samples(copied, monkeypatch):
    whole = measured(copied, only=("model",))
    copied.evaluations.unlink()
    monkeypatch.setattr(evaluate, "CHUNK", 5)
    (row,) = measured(copied, only=("model",))
    assert row == {key: pytest.approx(value, abs=1e-5) if isinstance(value, float) else value
                   for key, value in whole[0].items()}  # fmt: skip


def test_vllm_answers_for_each_checkpoint_with_its_weights(copy_of):
    pytest.importorskip("vllm", reason=needs.VLLM)
    folder = copy_of("sft")
    by_hf, by_vllm = measured(folder), measured(folder, "generator=vllm")
    assert [row["settings"]["generator"] for row in by_vllm] == ["vllm", "vllm"]
    for one, other in zip(by_hf, by_vllm, strict=True):  # near-greedy, so nearly the same responses
        assert other["eval/gold_score"] == pytest.approx(one["eval/gold_score"], abs=0.4)
    assert abs(by_hf[0]["eval/gold_score"] - by_hf[1]["eval/gold_score"]) > 1.0, "the two models differ"
