"""Tests of complete runs in this process: files, metrics, resume, and errors."""

import json
import math

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from rlhf.core.errors import RunError, UserError
from rlhf.core.files import read_lines
from rlhf.generators.hf.generator import HFGenerator
from rlhf.runs.folder import RunFolder
from rlhf.stages.run import run
from rlhf.terminal.console import Phases
from rlhf.words.compose import load_config
from tests.end_to_end.conftest import assert_same_end, interrupted, nightly, rows

EVERY = ("schedule.eval_every=1", "schedule.save_every=1")  # at each of the two updates


@pytest.fixture
def done(tiny, finished):
    """Return the config, folder and win rate of a finished run. Tests must not change the folder."""
    folder = finished(*EVERY)
    return tiny(*EVERY), folder, folder.finished()["result"]["eval/win_rate"]


@pytest.mark.smoke
def test_finished_run_has_the_documented_files(done):
    cfg, folder, result = done
    assert load_config(folder.config) == cfg
    environment = json.loads(folder.environment.read_text())
    assert {"packages", "git", "command"} <= environment.keys()
    state = json.loads(folder.state.read_text())
    assert state["finished"] and state["update"] == state["version"] == 2 and state["episode"] == 32
    assert state["result"]["eval/win_rate"] == result
    assert [p.name for p in folder.path.glob("checkpoint-*")] == ["checkpoint-1"]
    assert not list(folder.path.glob(".tmp*"))


def test_the_final_model_loads_with_transformers(done):
    _, folder, _ = done
    model = AutoModelForCausalLM.from_pretrained(folder.model)
    tokenizer = AutoTokenizer.from_pretrained(folder.model)
    ids = tokenizer("SUBREDDIT:", return_tensors="pt").input_ids
    assert model(ids).logits.isfinite().all()
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    assert all(p.dtype == torch.float32 for p in model.parameters())


@pytest.mark.smoke
def test_metrics_rows_have_the_documented_keys(done):
    _, folder, _ = done
    found = read_lines(folder.metrics)
    updates = [row for row in found if "lr" in row]
    evaluations = [row for row in found if "eval/win_rate" in row]
    assert [row["update"] for row in updates] == [1, 2]
    assert [row["update"] for row in evaluations] == [0, 1, 2]
    assert abs(evaluations[0]["eval/kl"]) < 1e-4 and abs(updates[0]["objective/kl"]) < 1e-4
    assert updates[-1].keys() >= {
        *("update", "version", "episode", "lag", "lr", "memory/peak_gib"),
        *("objective/scores", "objective/kl", "objective/entropy", "objective/rlhf_reward"),
        *("objective/non_score_reward", "objective/scores_margin", "objective/eos_rate"),
        *("time/generate_s", "time/wait_s", "time/score_s", "time/annotate_s", "time/train_s", "time/sync_s"),
        *("time/update_s", "throughput/episodes_per_s", "throughput/tokens_per_s"),
    }
    assert evaluations[-1].keys() >= {
        *("update", "episode", "eval/win_rate", "eval/gold_score", "eval/norm_reward", "eval/kl", "eval/ppl"),
        "eval/response_tokens",
    }


def test_completions_are_kept_with_both_scores(done):
    cfg, folder, _ = done
    kept = read_lines(folder.completions)
    assert len(kept) == 3 * cfg.eval.prompts
    assert kept[0].keys() >= {"update", "prompt", "response", "reference", "score", "gold_score"}
    last = [row for row in kept if row["update"] == 2]
    wins = sum(row["gold_score"] > row["reference_gold_score"] for row in last) / len(last)
    assert wins == rows(folder)[-1]["eval/win_rate"]


def test_run_refuses_an_invalid_config_and_makes_no_folder(tiny, tmp_path):
    with pytest.raises(UserError, match="schedule.total_episodes must be divisible"):
        run(tiny("schedule.total_episodes=7"), RunFolder(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_a_finished_run_is_not_run_again(done):
    cfg, folder, result = done
    before = folder.metrics.read_bytes()
    assert run(cfg, folder) == result
    assert folder.metrics.read_bytes() == before


SCORED = (
    "scorer=facts",
    "scorer.missing_eos_score=null",
)  # scores that differ more than an untrained model's
LONGER = ("schedule.total_episodes=64", "schedule.save_every=1", "schedule.eval_every=2", "algo.ties=keep")


REPLAY = ("schedule.replay=3", "schedule.minibatches=2", "schedule.max_lag=1", "generator.worker=false")
RESUMED = {  # runs whose checkpoints have parts of their own
    "lag": (*LONGER, "schedule.max_lag=2"),
    "minibatches": (*LONGER, "schedule.minibatches=2", "schedule.epochs=2", "schedule.log_every=2"),
    "sft": ("algo=sft", "schedule.save_every=1", "schedule.total_episodes=32"),
    "lora": (*LONGER, "model.lora.rank=4", "schedule.max_lag=1"),
    "ppo": ("algo=ppo", *LONGER[:3]),
    "ppo, adaptive": ("algo=ppo", *LONGER[:3], "algo.kl_target=0.5", *SCORED),
    "replay": (*LONGER, *REPLAY),
    "replay ppo": ("algo=ppo", *LONGER[:3], *REPLAY),
    "muon": (*LONGER, "optim.optimizer=muon"),
    "adamw_8bit": (*LONGER, "optim.optimizer=adamw_8bit"),
}
FURTHER = ("lag", "minibatches", "sft", "ppo", "replay")


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(LONGER, marks=pytest.mark.smoke, id="dpo"),
        *(
            nightly(words, id=name) if name in FURTHER else pytest.param(words, id=name)
            for name, words in RESUMED.items()
        ),
    ],
)
def test_interrupted_and_resumed_equals_uninterrupted(tiny, tmp_path, finished, overrides):
    if "optim.optimizer=adamw_8bit" in overrides:
        pytest.importorskip("bitsandbytes")
    cfg, whole, parts = tiny(*overrides), finished(*overrides), RunFolder(tmp_path / "parts")
    with interrupted(update=3):
        run(cfg, parts)
    assert rows(parts)[-1]["update"] >= 2, "rows must exist beyond the checkpoint that the run resumes from"
    assert not parts.finished()
    run(cfg, parts)
    assert_same_end(parts, whole)
    coefficients = {row["objective/kl_coef"] for row in rows(whole) if "objective/kl_coef" in row}
    assert (len(coefficients) > 1) == ("algo.kl_target=0.5" in overrides)


@pytest.mark.parametrize("name", ["muon", "adamw_8bit"])
def test_a_run_with_another_optimizer_has_the_metrics_of_adamw(finished, name):
    if name == "adamw_8bit":
        pytest.importorskip("bitsandbytes")
    plain, other = rows(finished(*RESUMED[name][:-1])), rows(finished(*RESUMED[name]))
    assert [row.keys() for row in plain] == [row.keys() for row in other] and plain != other


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), {"evaluating, sampling, token", "evaluating, judging", "sampling, token", "scoring"}),
        (("schedule.max_lag=1",), {"evaluating, waiting for rollouts", "waiting for rollouts", "scoring"}),
        (("algo=sft",), {"evaluating, sampling, token", "training, micro-batch", "saving a checkpoint"}),
    ],
    ids=["dpo", "lag", "sft"],
)
def test_a_run_names_its_phases_for_the_progress_display(tiny, tmp_path, monkeypatch, overrides, expected):
    enter, entered = Phases.__call__, set()

    def noted(self, name, *arguments, **more):
        entered.add(", ".join([*(phase.name for phase in self.open), name]))
        return enter(self, name, *arguments, **more)

    monkeypatch.setattr(Phases, "__call__", noted)
    run(tiny(*overrides, "schedule.save_every=1"), RunFolder(tmp_path / "run"))
    assert entered >= expected | {"training, micro-batch", "sending weights", "evaluating, log-probs"}
    assert not any(name.startswith("evaluating") and "training" in name for name in entered)


def test_a_run_interrupted_before_its_first_checkpoint_starts_again(tiny, tmp_path):
    cfg = tiny("schedule.save_every=0")
    folder = RunFolder(tmp_path / "run")
    with interrupted(update=1):
        run(cfg, folder)
    run(cfg, folder)
    assert [row["update"] for row in rows(folder) if "lr" in row] == [1, 2]


def test_the_newest_checkpoints_are_kept(tiny, tmp_path):
    folder = RunFolder(tmp_path / "run")
    run(tiny("schedule.total_episodes=80", "schedule.save_every=1", "save_total_limit=2"), folder)
    assert sorted(p.name for p in folder.path.glob("checkpoint-*")) == ["checkpoint-3", "checkpoint-4"]


def test_train_log_ends_with_the_error_and_the_traceback_of_the_reward_function(tiny, tmp_path):
    source = "calls = []\n\n\ndef score(response, reference):\n    calls.append(response)\n"
    source += (
        "    return 1.0 if len(calls) < 30 else {}[response]\n"  # the trial before a run makes fewer calls
    )
    (tmp_path / "own.py").write_text(source)
    own = ("algo=rloo", "scorer=function", f"scorer.path={tmp_path}/own.py:score")
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(RunError, match=rf"raised KeyError.*{tmp_path}/own.py, line 6.*row ") as stopped:
        run(tiny(*own), folder)
    text = folder.log.read_text()
    assert f"ERROR {stopped.value}\nTraceback" in text
    assert f'File "{tmp_path}/own.py", line 6, in score' in text and "KeyError: " in text.splitlines()[-1]


def test_stages_before_a_run_are_numbered_and_finished_stages_are_listed(tiny, tmp_path, done):
    folder = RunFolder(tmp_path / "run")
    run(tiny(*EVERY, "progress=plain"), folder)
    text = folder.log.read_text()
    names = ("[1/4] SFT model", "[2/4] preference pairs", "[3/4] reward model")
    assert all(f"{name}: finished, in " in text for name in names)
    assert "[4/4] dpo tldr_mini  update 2/2  0:00 left  reward " in text
    assert "[4/4] dpo tldr_mini  evaluated at update 2:  win rate " in text and " lag " not in text


def test_non_finite_loss_stops_the_run_and_names_the_last_checkpoint(tiny, tmp_path):
    folder = RunFolder(tmp_path / "run")
    cfg = tiny(*LONGER, "optim.lr=1e30", "optim.max_grad_norm=null", "optim.schedule=constant")
    with pytest.raises(RunError) as stopped:
        run(cfg, folder)
    failed = json.loads((folder.path / "failed_batch.json").read_text())
    assert len(failed["index"]) == cfg.schedule.prompts_per_update
    assert failed["places"] == [f"row {row + 1} of the split train" for row in failed["index"]]
    assert f"update {failed['update']}" in str(stopped.value)
    last = folder.last_checkpoint()
    assert last is not None and str(last) in str(stopped.value)
    assert not folder.finished() and not folder.model.exists()


def test_the_same_run_twice_gives_the_same_metrics_and_returns_the_last_win_rate(tiny, tmp_path, done):
    _, first, result = done
    second = RunFolder(tmp_path / "b")
    assert run(tiny(*EVERY), second) == result
    assert rows(first) == rows(second)
    other = RunFolder(tmp_path / "c")
    run(tiny(*EVERY, "seed=2"), other)
    assert rows(other) != rows(first)


def test_reward_run_returns_its_accuracy_and_saves_a_reward_offset(tiny, tmp_path):
    folder = RunFolder(tmp_path / "run")
    accuracy = run(tiny("algo=reward"), folder)
    assert 0 <= accuracy <= 1 and accuracy == rows(folder)[-1]["eval/accuracy"]
    model = AutoModelForSequenceClassification.from_pretrained(folder.model)
    assert model.config.num_labels == 1
    assert math.isfinite(model.config.reward_offset) and model.config.reward_offset != 0


def test_sft_run_evaluates_in_batches_of_eval_batch_size(tiny, tmp_path, monkeypatch):
    asked = []

    def sampler(borrow, settings, phases):
        asked.append(settings.batch_size)
        return HFGenerator(borrow, settings, phases)

    monkeypatch.setattr("rlhf.assembly.training.HFGenerator", sampler)
    ends = []
    for size in (3, 256):
        folder = RunFolder(tmp_path / str(size))
        run(tiny("algo=sft", f"eval.batch_size={size}"), folder)
        ends.append(folder.completions.read_text())
    assert asked == [3, 256] and ends[0] == ends[1]
