"""What a run says at its end: the table of metrics, and the stage that follows a supervised run."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlhf.checks.check import problems
from rlhf.core.errors import override
from rlhf.core.state import TrainState
from rlhf.runs.folder import RunFolder
from rlhf.stages.words import next_stage, print_closing
from rlhf.words.compose import compose
from tests.tiny_models import tiny_classifier, tiny_lm, tiny_tokenizer

ANSWERS = {
    "eval/win_rate": 0.0,
    "eval/win_rate_vs_initial": 0.6,
    "eval/accuracy": 0.5,
    "eval/gold_score": 0.5,
    "eval/margin": 1.0,
}
LOCAL = "task=local task.path=x.jsonl model.policy=x scorer=answer"


@pytest.mark.parametrize(
    ("words", "title"),
    [
        ("algo=grpo task=arithmetic", "accuracy of answers"),
        ("algo=grpo task=reasoning_gym", "accuracy of answers"),
        (f"algo=grpo {LOCAL}", "accuracy of answers"),
        (f"algo=grpo {LOCAL} scorer@gold=answer", "accuracy of answers"),
        ("algo=reward task=arithmetic", "accuracy on held-out pairs"),
    ],
)
def test_the_first_result_of_a_run_with_answers_is_their_accuracy(words, title, tmp_path, capsys):
    cfg = compose(words.split())
    recorder = SimpleNamespace(first=ANSWERS, evaluated=ANSWERS, evaluated_on=16)
    print_closing(cfg, cfg, RunFolder(tmp_path), recorder, TrainState(num_updates=1), 1.0, False)
    table = capsys.readouterr().out.splitlines()[1:]
    assert table[1].startswith(f"  {title}") and "0.500" in table[1]
    assert not [line for line in table if "win rate" in line], "no reference is compared"


PAIRS, ROWS = {"chosen": " b", "rejected": " c"}, {"response": " b"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """Return a folder with the final models of two runs: `sft/model` and `reward/model`."""
    folder, tokenizer = tmp_path_factory.mktemp("runs"), tiny_tokenizer()
    for name, make in (("sft", tiny_lm), ("reward", tiny_classifier)):
        make(vocab_size=len(tokenizer), max_position_embeddings=1024).save_pretrained(folder / name / "model")
        tokenizer.save_pretrained(folder / name / "model")
    return folder


FUNCTION = {"scorer": "function", "scorer.path": "<file>.py:<function>"}
SFT, REWARD = {"model.policy": "sft/model"}, {"model.reward": "reward/model"}


@pytest.mark.parametrize(
    ("words", "row", "follows"),
    [
        ("sft optim.lr=1e-3 task.train_size=512", None, {"algo": "dpo", "task.train_size": 512, **SFT}),
        ("sft task=arithmetic", None, {"algo": "grpo", "task": "arithmetic", **SFT}),
        ("sft model.base=x generator.response_length=8", PAIRS,
         {"algo": "reward", "generator.response_length": 8, **SFT}),
        ("sft model.base=x", ROWS, {"algo": "rloo", **FUNCTION, **SFT}),
        ("reward model.policy=x", PAIRS, {"algo": "dpo", "task.path": "mine.jsonl", **SFT, **REWARD}),
        ("reward model.policy=x task.preferences_path=pairs", None, {"algo": "dpo", **SFT, **REWARD}),
        ("dpo", None, None),
    ],
)  # fmt: skip
def test_after_a_supervised_run_a_stage_is_offered_that_passes_all_checks(
    runs, monkeypatch, words, row, follows
):
    monkeypatch.chdir(runs)
    algo, *words = words.split()
    if row is not None:
        rows = [{**row, "prompt": str(i)} for i in range(20)]
        Path("mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        words = ["task=local", "task.path=mine.jsonl", *words]
    found = next_stage(compose([f"algo={algo}", *words]), RunFolder(Path(algo)), "sft/model")
    if follows is None:
        assert found is None
        return
    assert found.items() >= follows.items()
    assert not {"optim.lr", "model.base", "task.preferences_path", "schedule.total_episodes"} & found.keys()
    if "scorer.path" not in found:
        assert not problems(compose([override(key, value) for key, value in found.items()]))
