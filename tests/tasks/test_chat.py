"""The chat task: dialogues as prompts and references, and errors for invalid dialogues."""

import json
from pathlib import Path

import pytest
from datasets import Dataset, DatasetDict
from transformers import PreTrainedTokenizerFast

from rlhf.assembly.parts import make
from rlhf.checks.check import problems
from rlhf.config.algorithms import Data
from rlhf.config.tasks import ChatConfig, LocalConfig, PreferencesConfig
from rlhf.core.errors import UserError
from rlhf.tasks.columns import Wanted
from rlhf.tasks.task import Task
from rlhf.text.chat import render, set_format
from rlhf.text.encoding import encode_completions
from rlhf.words.compose import compose
from tests.chat_templates import with_template
from tests.chat_tokenizers import CHAT, gemma, llama_3, qwen

SYSTEM = {"role": "system", "content": "Be brief."}
FIRST, REPLY = {"role": "user", "content": "Hi {role}"}, {"role": "assistant", "content": "Hello."}
SECOND, LAST = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So it is."}


def write(folder: Path, *dialogues: object, splits: tuple[str, ...] = ("train", "test")) -> str:
    for split in splits:
        lines = (json.dumps({"prompt_id": "x", "messages": messages}) for messages in dialogues)
        (folder / f"{split}.jsonl").write_text("\n".join(lines))
    return str(folder)


def test_the_last_turn_is_the_reference_and_the_turns_before_are_the_prompt_also_as_text(tmp_path):
    path = write(tmp_path, [FIRST, REPLY], [SYSTEM, FIRST, REPLY, SECOND, LAST])
    source = make(ChatConfig(path=path))
    short, long = source.prompts("train")
    assert source.conversational
    assert (short["messages"], short["reference_response"]) == ([FIRST], [REPLY])
    assert (long["messages"], long["reference_response"]) == ([SYSTEM, FIRST, REPLY, SECOND], [LAST])
    source = make(ChatConfig(path=path, turn="<|{role}|>\n{content}\n", reply="<|assistant|>\n"))
    short, long = source.prompts("train")
    assert not source.conversational
    assert short["query"] == "<|user|>\nHi {role}\n<|assistant|>\n"
    assert long["query"] == (
        "<|system|>\nBe brief.\n<|user|>\nHi {role}\n<|assistant|>\nHello.\n<|user|>\nWhy?\n<|assistant|>\n"
    )
    assert (short["reference_response"], long["reference_response"]) == ("Hello.", "So it is.")


def task_of(config: ChatConfig, tokenizer: PreTrainedTokenizerFast, data: Data = Data.references) -> Task:
    return Task(make(config), tokenizer, data=data, prompts_per_update=1, max_prompt_tokens=500, seed=1)


@pytest.mark.parametrize("family", CHAT)
def test_prompts_of_a_dialogue_are_the_tokens_of_the_chat_template(tmp_path, family):
    tokenizer = CHAT[family]()
    set_format(tokenizer, None, conversational=True)
    batch = task_of(ChatConfig(path=write(tmp_path, [FIRST, REPLY])), tokenizer).held_out(1)
    ids = tokenizer.apply_chat_template([FIRST], add_generation_prompt=True, return_dict=False)
    assert batch.prompt_ids.tolist() == [ids]
    assert batch.texts == [tokenizer.apply_chat_template([FIRST], add_generation_prompt=True, tokenize=False)]
    answer = {"llama_2": " Hello. ", "zephyr": "\nHello."}.get(family, "Hello.")
    assert (batch.completions, batch.references) == ([[answer]], [answer])
    assert batch.dialogues == [[FIRST]]


@pytest.mark.parametrize("hint", ["Be kind. Hi", [SYSTEM, FIRST]])
def test_prompts_of_a_teacher_are_the_tokens_of_the_chat_template(tmp_path, hint):
    tokenizer = qwen()
    set_format(tokenizer, None, conversational=True)
    row = {"messages": [FIRST, REPLY], "hint": hint}
    for split in ("train", "validation"):
        (tmp_path / f"{split}.jsonl").write_text(2 * (json.dumps(row) + "\n"))
    source, wanted = (
        make(LocalConfig(path=str(tmp_path))),
        Wanted(columns={"hint": ("task.teacher_column", "")}),
    )
    sizes = {"prompts_per_update": 1, "max_prompt_tokens": 500, "seed": 1}
    task = Task(source, tokenizer, data=Data.prompts, wanted=wanted, teacher_column="hint", **sizes)
    batch = task.batch([0, 1])
    turns = [{"role": "user", "content": hint}] if isinstance(hint, str) else hint
    ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
    assert batch.for_teacher().unpadded() == [ids, ids]
    assert batch.unpadded()[0] == tokenizer.apply_chat_template(
        [FIRST], add_generation_prompt=True, return_dict=False
    )


def test_a_dialogue_that_the_template_refuses_is_refused_with_its_line(tmp_path):
    path = write(tmp_path, [FIRST, REPLY], [SYSTEM, FIRST, REPLY])
    with pytest.raises(UserError, match=r"System role not supported.* in line 2 of .*train\.jsonl"):
        len(task_of(ChatConfig(path=path), gemma()))


def test_texts_in_the_configured_format_get_the_special_tokens_of_the_tokenizer(tmp_path):
    config = ChatConfig(path=write(tmp_path, [FIRST, REPLY]), turn="{role}: {content}\n", reply="assistant:")
    tokenizer = llama_3()
    batch = task_of(config, tokenizer).held_out(1)
    assert tokenizer.decode(batch.prompt_ids[0]) == "<|begin_of_text|>user: Hi {role}\nassistant:"
    assert batch.dialogues is None


def test_pairs_may_have_dialogues_as_prompts(tmp_path):
    pairs = {"prompt": [FIRST], "chosen": "Hello.", "rejected": "No."}
    for split in ("train", "validation"):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps(pairs))
    tokenizer = qwen()
    set_format(tokenizer, None, conversational=True)
    task = task_of(ChatConfig(preferences_path=str(tmp_path)), tokenizer, Data.preferences)
    batch = task.held_out(1)
    assert batch.texts == [render(tokenizer, [FIRST])]
    assert batch.completions == [["Hello.", "No."]]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("task.turn='{role}{content}'", "task.reply must be set together with"),
        ("task.reply=x", "task.turn must be set together with"),
        ("task.turn='{role}' task.reply=x", "task.turn must contain {content}"),
        ("task.turn='{content}' task.reply=x", "task.turn must contain {role}"),
    ],
)
def test_a_format_of_turns_must_be_complete(words, said):
    (found,) = problems(compose(["task=chat", "model=llama_8b", "algo=sft", *words.split()]))
    assert found.startswith(said)


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
    with pytest.raises(ValueError, match=r"task\.path must have dialogues .* line 1 of .*; (correct|write)"):
        make(ChatConfig(path=path)).prompts("train")


def test_the_user_must_provide_the_pairs_of_the_chat_task(tmp_path):
    words = ["task=chat", "model=llama_8b", "algo=reward", "model.policy=some/sft"]
    (found,) = problems(compose(words))
    assert found.startswith("task.preferences_path must name a folder of preference pairs for task=chat")
    dialogues = write(tmp_path, [FIRST, REPLY])  # which need no columns of pairs
    for more in ([], [f"task.path={dialogues}"]):
        assert problems(compose([*words, *more, "task.preferences_name=some/pairs"])) == []
    rows = '{"prompt": "a", "chosen": "b", "rejected": "c"}'
    for split in ("train", "validation"):
        (tmp_path / f"{split}.jsonl").write_text(rows)
    chosen = compose([*words, f"task.preferences_path={tmp_path}"])
    assert problems(chosen) == []
    assert make(chosen.task).preferences("train").remove_columns("place").to_list() == [json.loads(rows)]
    with pytest.raises(ValueError, match="No Robots has none"):
        make(ChatConfig()).preferences("train")


@pytest.mark.parametrize("data", [Data.references, Data.preferences])
def test_keys_of_messages_and_tools_reach_the_template_from_files_and_saved_data(tmp_path, data):
    call = {"function": {"name": "add", "arguments": {"a": 1, "b": None}}}
    asked = {"role": "assistant", "content": None, "tool_calls": [call]}
    rows = [
        {"prompt": [FIRST], "chosen": [asked], "rejected": [LAST], "tools": [{"name": "add"}]},
        {"prompt": [FIRST, asked, {"role": "tool", "content": "3"}], "chosen": [LAST], "rejected": [REPLY]},
    ]
    rows[1]["tools"] = None
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    tokenizer = with_template("tools")
    set_format(tokenizer, None, conversational=True)
    made = Task(
        make(LocalConfig(path=str(tmp_path / "train.jsonl"), validation_fraction=0.5)),
        tokenizer, data=data, prompts_per_update=1, max_prompt_tokens=500, seed=1,
    )  # fmt: skip
    batches = [made.held_out(1, split) for split in ("train", "validation")]
    first, second = sorted(batches, key=lambda batch: batch.tools != [[{"name": "add"}]])
    written = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": null}}</tool_call><|call_end|>'
    assert first.texts[0].startswith('Tools: [{"name": "add"}]\n')
    assert first.completions[0][0] == written
    assert first.dialogues == [[FIRST]]
    assert f"{written}<|tool|>3<|end|>" in second.texts[0]
    rollouts = encode_completions(first, first.completions, tokenizer, None)
    ids = rollouts.response_ids[0, 0][rollouts.response_mask[0, 0]]
    assert tokenizer.decode(ids) == written, "the template's own end, once"


def test_the_tools_of_an_environment_are_in_all_prompts_in_place_of_those_in_the_data(tmp_path):
    rows = [
        {"messages": [{"role": "user", "content": text}, REPLY], "tools": tools}
        for text, tools in (("a", [{"name": "other"}]), ("b", None))
    ]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    tokenizer = with_template("tools")
    set_format(tokenizer, None, conversational=True)
    made = Task(
        make(LocalConfig(path=str(tmp_path / "train.jsonl"), validation_fraction=0.5)), tokenizer,
        data=Data.prompts, prompts_per_update=1, max_prompt_tokens=500, seed=1, tools=[{"name": "add"}],
    )  # fmt: skip
    for split in ("train", "validation"):
        assert made.held_out(1, split).texts[0].startswith('Tools: [{"name": "add"}]\n')


@pytest.mark.parametrize("data", [Data.prompts, Data.preferences])
def test_nothing_is_written_beside_saved_data(tmp_path, data):
    rows = {"prompt": ["a b"] * 4, "chosen": ["c"] * 4, "rejected": ["d"] * 4}
    saved = DatasetDict({split: Dataset.from_dict(rows) for split in ("train", "validation")})
    saved.save_to_disk(str(tmp_path / "data"))
    before = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*")}
    tokenizer = llama_3()
    source = make(PreferencesConfig(path=str(tmp_path / "data")))
    task = Task(source, tokenizer, data=data, prompts_per_update=1, max_prompt_tokens=50, seed=1)
    assert len(task.held_out(4, "train")) == len(task.held_out(4)) == 4
    assert {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*")} == before
