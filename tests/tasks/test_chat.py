"""The chat task: dialogues as prompts and references, and errors for invalid dialogues."""

import json
from pathlib import Path

import pytest

from rlhf.assembly.parts import make
from rlhf.checks.check import problems
from rlhf.config.compose import compose
from rlhf.config.task import ChatConfig

SYSTEM = {"role": "system", "content": "Be brief."}
FIRST, REPLY = {"role": "user", "content": "Hi {role}"}, {"role": "assistant", "content": "Hello."}
SECOND, LAST = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So it is."}


def write(folder: Path, *dialogues: object, splits: tuple[str, ...] = ("train", "test")) -> str:
    for split in splits:
        lines = (json.dumps({"prompt_id": "x", "messages": messages}) for messages in dialogues)
        (folder / f"{split}.jsonl").write_text("\n".join(lines))
    return str(folder)


def test_the_last_turn_is_the_reference_and_the_turns_before_are_the_prompt(tmp_path):
    path = write(tmp_path, [FIRST, REPLY], [SYSTEM, FIRST, REPLY, SECOND, LAST])
    short, long = make(ChatConfig(path=path)).prompts("train")
    assert short == {
        "query": "<|user|>\nHi {role}\n<|assistant|>\n",
        "reference_response": "Hello.",
    }
    assert long["query"] == (
        "<|system|>\nBe brief.\n<|user|>\nHi {role}\n<|assistant|>\nHello.\n<|user|>\nWhy?\n<|assistant|>\n"
    )
    assert long["reference_response"] == "So it is."


def test_turns_use_the_configured_template(tmp_path):
    config = ChatConfig(path=write(tmp_path, [FIRST, REPLY]), turn="{role}: {content}\n", reply="assistant:")
    assert make(config).prompts("train")[0]["query"] == "user: Hi {role}\nassistant:"


def test_validation_uses_the_configured_split_of_the_dialogues(tmp_path):
    path = write(tmp_path, [FIRST, REPLY])
    assert len(make(ChatConfig(path=path)).prompts("validation")) == 1
    found = problems(compose(["task=chat", "model=llama_8b", "algo=sft", f"task.path={path}"]))
    assert found == []
    (tmp_path / "test.jsonl").rename(tmp_path / "held_out.jsonl")
    (found,) = problems(compose(["task=chat", "model=llama_8b", "algo=sft", f"task.path={path}"]))
    assert "task.path must contain the split test" in found
    more = f"task.path={path}", "task.validation_split=held_out"
    assert problems(compose(["task=chat", "model=llama_8b", "algo=sft", *more])) == []


@pytest.mark.parametrize(
    "messages",
    [[REPLY], [FIRST], [FIRST, REPLY, SECOND], [], [{"from": "user", "value": "Hi"}, REPLY], ["Hi", "Hello"]],
)
def test_an_invalid_dialogue_is_refused_with_its_row_number(tmp_path, messages):
    path = write(tmp_path, messages)
    with pytest.raises(ValueError, match=r"task\.path must have dialogues .* in row 0; correct or remove"):
        make(ChatConfig(path=path)).prompts("train")


def test_the_error_names_an_invalid_row_after_valid_rows(tmp_path):
    path = write(tmp_path, [FIRST, REPLY], [FIRST])
    with pytest.raises(ValueError, match="in row 1"):
        make(ChatConfig(path=path)).prompts("train")


def test_the_user_must_provide_the_pairs_of_the_chat_task(tmp_path):
    words = ["task=chat", "model=llama_8b", "algo=reward", "model.policy=some/sft"]
    (found,) = problems(compose(words))
    assert found.startswith("task.preferences_path must name a folder of preference pairs for task=chat")
    assert problems(compose([*words, "task.preferences_name=some/pairs"])) == []
    rows = '{"prompt": "a", "chosen": "b", "rejected": "c"}'
    for split in ("train", "validation"):
        (tmp_path / f"{split}.jsonl").write_text(rows)
    chosen = compose([*words, f"task.preferences_path={tmp_path}"])
    assert problems(chosen) == []
    assert list(make(chosen.task).preferences("train")) == [json.loads(rows)]
    with pytest.raises(ValueError, match="No Robots has none"):
        make(ChatConfig()).preferences("train")


def test_dialogues_need_no_columns_of_preference_pairs(tmp_path):
    words = ["task=chat", "model=llama_8b", "algo=reward", "model.policy=some/sft"]
    path = write(tmp_path, [FIRST, REPLY])
    assert problems(compose([*words, f"task.path={path}", "task.preferences_name=some/pairs"])) == []


@pytest.mark.parametrize("turn", ["{content}", "{role}"])
def test_the_turn_template_must_contain_role_and_content(turn):
    words = ["task=chat", "model=llama_8b", "algo=sft", f"task.turn='{turn}'"]
    (found,) = problems(compose(words))
    assert found.startswith("task.turn must contain {")
