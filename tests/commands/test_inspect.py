"""The command rlhf.inspect: what it prints about a run, and that it leaves nothing behind."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rlhf import inspect as inspect_command
from tests.fake_judge import FakeJudge, served
from tests.model_folders import REWARD, TOKENS, write_model, write_tokenizer

ROWS = [{"prompt": "a b", "response": "c"}, {"prompt": "a b c a b", "response": "b b b b b"}] * 8
PAIRS = [{"prompt": "a b", "chosen": "c", "rejected": "c b"}] * 16
LOCAL = ["task=local", "schedule.prompts_per_update=4", "generator.response_length=4",
         "task.max_prompt_tokens=4", "scorer@gold=none"]  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """Return the working directory, with the folders `policy` and `reward`, and two files of data."""
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "policy")
    write_model(tmp_path / "reward", REWARD)
    for name, rows in (("rows", ROWS), ("pairs", PAIRS)):
        (tmp_path / name).mkdir()
        for split in ("train", "validation"):
            (tmp_path / name / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


@pytest.fixture
def inspect(folder, called):
    """`inspect(*words)` runs the command, and checks its exit code and that nothing was written.

    Returns stdout; with `code=2` stderr.
    """

    def call(*words: str, code: int = 0) -> str:
        before = sorted(folder.rglob("*"))
        found, out, err = called(inspect_command.main, *words)
        assert sorted(folder.rglob("*")) == before, "the command leaves nothing behind"
        assert found == code, err
        return err if code else out

    return call


SFT = ["algo=sft", "model.base=policy", "task.path=rows", *LOCAL]
RL = ["algo=rloo", "model.policy=policy", "scorer=reward_model", "scorer.path=reward", "task.path=rows",
      "schedule.total_episodes=16", *LOCAL]  # fmt: skip


def test_sft_rows_are_shown_with_the_tokens_that_are_trained(inspect):
    out = inspect(*SFT)
    assert "LlamaForCausalLM" in out and "context 512 tokens" in out
    assert "end (EOS)         <eos>  (id 1)" in out and "padding (PAD)     <pad>  (id 0)" in out
    assert "begin (BOS)       none" in out
    assert "prompt     2 tokens, not in the loss\n    a|b" in out.replace("| ", "|")
    assert "response   2 tokens, in the loss\n     c|[EOS <eos>]" in out, "this tokenizer writes a space"
    assert max(map(len, out.splitlines())) <= 80
    assert out.endswith("task.max_prompt_tokens=4 scorer@gold=none\n")
    assert "\n  python -m rlhf.train algo=sft model.base=policy" in out
    out = inspect(*SFT, "task.max_prompt_tokens=8")
    assert "4 tokens, in the loss; cut at 4 tokens, without EOS" in out
    assert " PAD on the left of the prompt, " in out


def test_pairs_are_shown_with_both_responses(inspect):
    out = inspect("algo=reward", "model.policy=policy", "task.path=pairs", *LOCAL)
    assert "chosen     2 tokens, scored at its last token" in out
    assert "rejected   3 tokens, scored at its last token" in out


def test_messages_between_the_replies_of_a_dialogue_are_shown_as_not_trained(inspect):
    out = inspect("task=calculator", "algo=sft", "task.train_size=64")
    assert "  message    7 tokens, not in the loss\n    \\n|<|user|>|\\n| " in out
    shown = out[out.index("Example 1") :].replace("  message", "  response").split("  response   ")
    calls = [each.splitlines()[1].strip() for each in shown[1:] if "calc" in each]
    assert calls and all(each.endswith("|[EOS <|endoftext|>]") for each in calls)


def test_the_responses_of_reinforcement_learning_are_sampled_until_an_end_that_the_model_declares(
    inspect, folder
):
    out = inspect(*RL)
    assert "sampled until <eos>, at most 4 tokens; in the loss" in out
    assert "LlamaForSequenceClassification" in out
    ends = {"eos_token_id": [1, 4, 99]}  # <eos>, b, and an id that no token has
    (folder / "policy" / "generation_config.json").write_text(json.dumps(ends))
    out = inspect(*RL)
    assert "sampled until <eos>, b, at most 4 tokens" in out and "also an end       b  (id 4)" in out


def reward(folder, body: str) -> list[str]:
    (folder / "own.py").write_text(f"def score(response, tests):\n    {body}\n")
    rows = [{"prompt": "a b", "response": "c", "tests": [i]} for i in range(16)]
    for split in ("train", "validation"):
        (folder / "rows" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [*LOCAL, "algo=rloo", "task.path=rows", "model.policy=policy", "scorer=function",
            "scorer.path=own.py:score"]  # fmt: skip


def test_reward_functions_score_stored_responses(inspect, folder):
    out = inspect(*reward(folder, "return tests[0] + 1 / len(response)"))
    assert "\nRewards\n  own.py:score\n         0.5 for 'c'\n         1.5 for 'c'\n" in out
    assert "warning: a policy may sample an empty response: scorer.path=own.py:score" in out


def test_a_reward_function_that_returns_none_ends_with_exit_code_2(inspect, folder):
    err = inspect(*reward(folder, "print('scored')"), code=2)
    assert "error: scorer.path=own.py:score returned None for line 1 of rows/train.jsonl, respon" in err


def test_a_begin_token_and_unknown_words_are_marked(inspect, folder):
    write_tokenizer(folder / "policy", bos_token="<unk>")
    tokenizer = json.loads((folder / "policy" / "tokenizer.json").read_text())
    begin = {"SpecialToken": {"id": "<unk>", "type_id": 0}}
    a, b = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [begin, a],
        "pair": [begin, a, b],
        "special_tokens": {"<unk>": {"id": "<unk>", "ids": [2], "tokens": ["<unk>"]}},
    }
    (folder / "policy" / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert "prompt     3 tokens, not in the loss\n    [BOS <unk>]|" in inspect(*SFT)


def test_planted_responses_are_scored_and_a_fault_of_the_reward_is_a_warning(inspect, folder):
    words = reward(folder, "return float(str(tests[0]) in response)")
    rows = [
        {"prompt": "a b c" if i % 2 else "a b", "response": "abc"[i % 3], "tests": "abc"[i % 3]}
        for i in range(16)
    ]
    (folder / "rows" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = inspect(*words)
    assert "planted responses to 16 examples" in out and "  1  the reference, as '{}'\n" in out
    assert "warning: several answers" in out and "on 16 of 16 examples" in " ".join(out.split())
    (folder / "exact.py").write_text("def score(response, tests):\n    return response.strip() == tests\n")
    assert "too high" not in inspect(*words[:-1], "scorer.path=exact.py:score")


def test_reward_models_are_probed_and_judges_are_tried(inspect, called):
    assert "planted responses to 8 examples" in inspect(*RL), "the other prompts are too long"
    with served(FakeJudge(position=1.0)) as judge:
        url = [f"scorer.url={judge.url}", f"scorer.model={judge.model}"]
        words = [*RL[:2], "scorer=judge", *url, "task.path=rows", "schedule.total_episodes=16", *LOCAL]
        code, out, err = called(inspect_command.main, *words)
    assert code == 1 and "is refused" in err and "Trial of the judge" in out and "planted responses to" in out


MORE_TOKENS = (*TOKENS, *"defg")  # more than the embedding has rows
DAMAGE = {
    "must come with its tokenizer": lambda at: (at / "policy" / "tokenizer.json").write_text("{}"),
    "every token id needs an embedd": lambda at: write_tokenizer(at / "policy", MORE_TOKENS),
    "must name a causal language model": lambda at: write_model(at / "policy", REWARD),
    "must be <= 4 (the context": lambda at: write_model(at / "policy", max_position_embeddings=4),
}


@pytest.mark.parametrize("message", DAMAGE)
def test_problems_of_a_model_folder_end_with_exit_code_2(inspect, folder, message):
    DAMAGE[message](folder)
    assert message in inspect(*SFT, code=2)


def test_a_reward_model_with_fewer_rows_than_its_tokenizer_has_ids_is_an_error(inspect, folder):
    write_tokenizer(folder / "reward", MORE_TOKENS)
    assert "scorer.path must have an embedding for every token of its tok" in inspect(*RL, code=2)


def test_an_embedded_task_is_shown_without_its_models(inspect):
    out = inspect("algo=dpo", "generator=dataset", "task.train_size=64", "schedule.prompts_per_update=16")
    assert "made by the run first" in out and "The run first samples its preference pairs" in out


def test_a_model_that_cannot_be_downloaded_is_reported(inspect):
    words = ["algo=sft", "model.base=nobody/nothing", "task.path=rows", *LOCAL]
    assert "HF_HUB_OFFLINE=1 is set" in inspect(*words, code=2)


GAME = """
class Game:
    def __init__(self, scale=1):
        self.scale = scale
    def reset(self, example):
        self.answer = example.record["key"]
    def step(self, reply):
        return " no", 0.0, False

class Fine(Game):
    def reset(self, example):
        pass

class Hook:
    pass
"""
WRONG_CODE = {
    "environment.path=game.py:Game": "KeyError: 'key'",
    "environment.path=game.py:Fine +environment.arguments={scala: 3}": "environment.arguments must be",
    "environment.path=game.py:Fine hooks=[game.py:Hook]": "hooks must name subclasses",
    "environment.path=game.py:Fine": None,
}


@pytest.mark.parametrize("words", WRONG_CODE)
def test_an_environment_and_hooks_that_would_fail_in_the_run_are_problems(inspect, folder, words):
    (folder / "game.py").write_text(GAME)
    own = ["algo=grpo", "model.policy=policy", "task.path=rows", "environment=python", *LOCAL]
    own += ["model.chat_template=plain", "task.max_prompt_tokens=64", *re.split(r" (?=\S+=)", words)]
    if said := WRONG_CODE[words]:
        assert said in inspect(*own, code=2)
    else:
        assert "Environment\n  python, at most 8 replies" in inspect(*own)
