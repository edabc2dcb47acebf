"""Rules for tasks with dialogues: the chat template of the tokenizer must exist before the run starts."""

import json
from pathlib import Path

import pytest

from rlhf.checks.check import problems, warnings
from rlhf.runs.folder import RunFolder
from rlhf.words.compose import compose, load_config
from rlhf.words.identity import run_name
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


TEXTS = {"prompt": "a", "response": "b"}
PAIRS = {"prompt": "a", "chosen": "b", "rejected": "c"}


def chat(base: Path, file: Path, *words: str) -> bool:
    algo = ("algo=rloo", f"model.policy={base}")
    return compose(["task=local", f"task.path={file}", *(words or algo)]).task.chat


def test_texts_are_messages_if_the_model_has_a_chat_template(base, tmp_path):
    for row in (TEXTS, PAIRS, {"question": "a"}):
        assert not chat(base, write_rows(tmp_path, row))
    write_tokenizer(base, chat_template="{{ '<a>' }}{{ messages }}")
    for row in (TEXTS, PAIRS, {"question": "a"}):
        file = write_rows(tmp_path, row)
        assert chat(base, file) and not chat(
            base, file, "algo=rloo", f"model.policy={base}", "task.chat=false"
        )
        assert chat(base, file, "algo=sft", f"model.base={base}")
        assert not chat(base, file, "algo=rloo", f"model.base={base}")
        assert chat(base, file, "scorer@gold=reward_model", f"gold.path={base}"), "rlhf.relabel has no policy"


@pytest.mark.parametrize(
    "row",
    [
        {"messages": TURNS},
        {"prompt": TURNS[:1], "response": TURNS[1:]},
        {"prompt": "<a> formatted", "response": "b"},
        {"prompt": "<eos>formatted"},
        {"prompt": "a", "chosen": "a b", "rejected": "a c"},
        {"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: a\n\nAssistant: c"},
    ],
)
def test_rows_with_a_format_of_their_own_stay_as_they_are(base, tmp_path, row):
    write_tokenizer(base, chat_template="{{ '<a>' }}{{ messages }}")
    assert not chat(base, write_rows(tmp_path, row))


def test_a_template_that_the_run_names_makes_messages(base, tmp_path):
    words = ("algo=rloo", f"model.policy={base}", "model.chat_template=plain")
    assert chat(base, write_rows(tmp_path, TEXTS), *words)


def test_the_name_of_a_run_with_texts_for_a_base_model_does_not_depend_on_the_key(base, tmp_path):
    words = ["task=local", f"task.path={write_rows(tmp_path, TEXTS)}", "algo=rloo", f"model.policy={base}"]
    assert run_name(compose(words)) == run_name(compose([*words, "task.chat=false"]))
    write_tokenizer(base, chat_template="{{ messages }}")
    assert run_name(compose(words)) == run_name(compose([*words, "task.chat=true"]))


def test_a_stored_config_without_the_key_keeps_its_texts(base, tmp_path):
    write_tokenizer(base, chat_template="{{ messages }}")
    cfg = compose(
        ["task=local", f"task.path={write_rows(tmp_path, TEXTS)}", "algo=rloo", f"model.policy={base}"]
    )
    folder = RunFolder(tmp_path / "run")
    folder.write_config(cfg)
    assert load_config(folder.config).task.chat
    text = folder.config.read_text()
    folder.config.write_text(text.replace("  chat: true\n", ""))
    assert not load_config(folder.config).task.chat and "chat: true" in text


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
