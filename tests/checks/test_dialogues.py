"""Rules for tasks with dialogues: the chat template of the tokenizer must exist before the run starts."""

import json
from pathlib import Path

import pytest

from rlhf.checks.check import problems, warnings
from rlhf.config.compose import compose
from tests.model_folders import write_model, write_tokenizer

TURNS = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
MISSING = "model.chat_template must be set for dialogues"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """Return a folder with a causal language model whose tokenizer has no chat template."""
    folder = tmp_path / "base"
    write_model(folder)
    write_tokenizer(folder)
    return folder


def write_rows(folder: Path, row: dict) -> Path:
    file = folder / "rows.jsonl"
    file.write_text(f"{json.dumps(row)}\n" * 2)
    return file


def found(base: Path, *words: str) -> list[str]:
    """Return the errors about templates of an SFT run."""
    cfg = compose(["algo=sft", f"model.base={base}", "task.max_prompt_tokens=64", *words])
    return [problem for problem in problems(cfg) if "chat_template" in problem]


def test_dialogues_in_a_local_file_need_a_chat_template(base, tmp_path):
    words = ["task=local", f"task.path={write_rows(tmp_path, {'messages': TURNS})}"]
    (problem,) = found(base, *words)
    assert problem.startswith(MISSING) and "set model.chat_template=plain" in problem
    assert found(base, *words, "model.chat_template=plain") == []
    write_tokenizer(base, chat_template="{{ messages }}")
    assert found(base, *words) == []


def test_texts_need_no_chat_template(base, tmp_path):
    file = write_rows(tmp_path, {"prompt": "a", "response": "b"})
    assert found(base, "task=local", f"task.path={file}") == []


def test_task_chat_needs_a_chat_template_unless_turns_have_a_format(base):
    assert found(base, "task=chat")[0].startswith(MISSING)
    assert found(base, "task=chat", "task.turn='{role}{content}'", "task.reply=x") == []


def test_the_file_of_a_chat_template_must_exist(base, tmp_path):
    file = tmp_path / "format.jinja"
    (problem,) = found(base, "task=chat", f"model.chat_template={file}")
    assert problem.startswith("model.chat_template must be a file with a Jinja template or plain")
    file.write_text("{{ messages }}")
    assert found(base, "task=chat", f"model.chat_template={file}") == []


def test_a_chat_template_beside_a_format_of_turns_is_a_warning():
    words = ["task=chat", "algo=sft", "model=llama_8b", "model.chat_template=plain"]
    said = list(warnings(compose([*words, "task.turn='{role}{content}'", "task.reply=x"])))
    assert any("model.chat_template does not format the prompts" in each for each in said)
    assert not any("chat_template" in each for each in warnings(compose(words)))


def test_a_model_with_a_chat_template_that_is_asked_as_a_base_model_gives_a_warning(base):
    def doubts(*words):
        cfg = compose(["task=gsm8k", "algo=rloo", f"model.policy={base}", *words])
        return [warning for warning in warnings(cfg) if "task.chat" in warning]

    assert doubts() == []
    write_tokenizer(base, chat_template="{{ messages }}")
    (warning,) = doubts()
    assert warning.endswith("if it is a chat model, set task.chat=true")
    assert doubts("task.chat=true") == []
