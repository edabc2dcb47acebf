"""Stored answers of dialogues are what the chat template writes for the whole dialogue."""

from dataclasses import replace

import pytest
import torch

from rlhf.core.errors import UserError
from rlhf.text.chat import Dialogues, render, set_format, written
from rlhf.text.encoding import encode_completions, encode_prompts, pieces
from tests.chat_templates import START, TEMPLATES, with_template

SYSTEM, USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "How are you? "}
REPLY = {"role": "assistant", "content": " Wait. "}
CALL = {"function": {"name": "add", "arguments": {"a": 1, "b": None}}}
THOUGHT = {"role": "assistant", "content": "<think>\nI am fine\n</think>\n\nWait."}
DIALOGUES = {
    "short": [USER],
    "long": [USER, {"role": "assistant", "content": "Well."}, {"role": "user", "content": "And now?"}],
    "system": [SYSTEM, USER],
}
ENDS = {"no_start": "</s>", "no_newline": "</s>", "no_end": "</s>", "paragraphs": "</s>"}
WITHOUT_END = ("no_end", "paragraphs")
CUT = ("starts_thinking", "starts_thinking_closed")  # prompts end before the block of reasoning


def format_of(name: str) -> Dialogues:
    tokenizer = with_template(name)
    set_format(tokenizer, None, conversational=True, clock="2026-01-31T09:00")
    return Dialogues(tokenizer)


def whole(dialogues: Dialogues, messages: list, **options: object) -> str:
    now = dialogues.tokenizer.clock.strftime
    return written(dialogues.tokenizer, messages, strftime_now=now, **options)


@pytest.mark.parametrize("before", DIALOGUES)
@pytest.mark.parametrize("name", [name for name in TEMPLATES if name not in CUT])
def test_prompt_and_answer_are_the_text_of_the_template_up_to_the_end_of_the_turn(name, before):
    dialogues = format_of(name)
    messages = DIALOGUES[before]
    for answer in (REPLY, THOUGHT):
        prompt, (text,) = dialogues.write(messages, [[answer]])
        assert prompt == render(dialogues.tokenizer, messages)
        written = whole(dialogues, [*messages, answer])
        end = dialogues.tokenizer.eos_token
        assert end == ENDS.get(name, "<|end|>")
        together = prompt + text + ("" if name in WITHOUT_END else end)
        assert written.startswith(together)
        assert written.removeprefix(together).removeprefix("</s>").strip() in ("", "[closed]")
        assert text.rstrip() or name == "trimmed"
    changing = ("thinking", "thinking_optional", "shouted")
    assert not list(dialogues.warnings()) or before == "system" or name in changing


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_tokens_of_prompt_and_answer_read_as_the_text_of_the_template(name):
    dialogues = format_of(name)
    tokenizer = dialogues.tokenizer
    prompt, (text,) = dialogues.write([USER], [[REPLY]])
    first = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    (ids,) = pieces(tokenizer).encode([text], [prompt])
    assert whole(dialogues, [USER, REPLY]).startswith(tokenizer.decode(first + ids))


def test_a_block_of_reasoning_that_the_prompt_begins_is_continued_and_closed():
    dialogues = format_of("thinking")
    prompt, (plain, thought) = dialogues.write([USER], [[{**REPLY, "content": "Wait."}], [THOUGHT]])
    assert prompt.endswith("<|assistant|>\n<think>\n")
    assert plain == "\n</think>\n\nWait."
    assert thought == "I am fine\n</think>\n\nWait."
    reasons = {"role": "assistant", "content": "Wait.", "reasoning_content": "I am fine"}
    assert dialogues.write([USER], [[reasons]])[1] == [thought]


@pytest.mark.parametrize("name", CUT)
def test_a_prompt_is_cut_back_to_what_the_template_writes_before_the_answer(name):
    dialogues = format_of(name)
    prompt, (text,) = dialogues.write([USER], [[REPLY]])
    assert prompt == "<|user|>\nHow are you? <|end|>\n<|assistant|>\n"
    assert text == " Wait. "
    (warning,) = dialogues.warnings()
    assert "begins a reply in another way than the stored answers in 1 of 1 dialogues" in warning
    assert warning.endswith("their prompts end where both are equal")
    sampled, _ = dialogues.write([USER], [[REPLY]], prompt_only=True)
    assert sampled.endswith("<think>\n"), "the policy continues the start of a reply"


def test_a_template_that_writes_the_prompt_differently_with_an_answer_is_refused():
    tokenizer = with_template("chatml")
    tokenizer.chat_template = (
        "{{ messages | length }}{% for m in messages %}{{ m['role'] + m['content'] + '<|end|>' }}{% endfor %}"
    )
    with pytest.raises(UserError, match="before an answer in the same way .* of line 3 of x on; leave"):
        Dialogues(tokenizer).write([USER], [[REPLY]], "line 3 of x")


def test_calls_of_tools_and_the_tools_reach_the_template():
    dialogues = format_of("tools")
    asked = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    tool = {"role": "tool", "content": "3", "name": "add"}
    prompt, (text,) = dialogues.write([USER], [[asked]], tools=[{"name": "add"}])
    assert prompt == 'Tools: [{"name": "add"}]\n<|user|>How are you? <|end|><|assistant|>'
    assert text == '<tool_call>{"name": "add", "arguments": {"a": 1, "b": null}}</tool_call><|call_end|>'
    assert not list(dialogues.warnings())
    prompt, (text,) = dialogues.write([USER, asked, tool], [[REPLY]])
    assert '{"a": 1, "b": null}}</tool_call><|call_end|><|tool|>3<|end|><|assistant|>' in prompt
    assert text == REPLY["content"]
    (warning,) = dialogues.warnings()
    assert warning.startswith("the chat template leaves out or changes the name of a message in 1 of 2")


@pytest.mark.parametrize("content", ["m.content is none", "not m.content"])
def test_calls_reach_templates_that_write_them_for_messages_without_content_only(content):
    tokenizer = with_template("chatml")
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.tool_calls and " + content + " %}"
        "{% for call in m.tool_calls %}<call>{{ call.function.name }}</call>{% endfor %}"
        "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    set_format(tokenizer, None, conversational=True)
    asked = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    dialogues = Dialogues(tokenizer)
    _, (text,) = dialogues.write([USER], [[asked]])
    assert text == "<call>add</call><|im_end|>"
    prompt, _ = dialogues.write([USER, asked, {"role": "tool", "content": "3"}], [[REPLY]])
    assert "<call>add</call><|im_end|>" in prompt and "None" not in prompt
    assert not list(dialogues.warnings())


def test_content_that_the_template_leaves_out_is_reported_with_its_first_place():
    dialogues = format_of("chatml")
    asked = {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL]}
    dialogues.write([USER], [[REPLY]], "line 1")
    dialogues.write([USER, asked, {"role": "tool", "content": "3"}], [[REPLY]], "line 2", [{"name": "add"}])
    dialogues.write([USER], [[{**REPLY, "reasoning_content": "Hm."}]], "line 3")
    names = [warning.partition(" changes the ")[2] for warning in dialogues.warnings()]
    assert names == [
        "reasoning_content of the answer in 1 of 3 dialogues (first: line 3)",
        "tool_calls of a message in 1 of 3 dialogues (first: line 2)",
        "tools in 1 of 3 dialogues (first: line 2)",
    ]
    silent = format_of("no_start")
    silent.write([SYSTEM, USER], [[REPLY]], "line 4")
    assert "content of a message with the role system in 1 of 1" in next(iter(silent.warnings()))


@pytest.mark.parametrize(
    "messages",
    [
        [{**SYSTEM, "content": USER["content"]}, USER],  # the user says the same
        [{**SYSTEM, "content": "INST"}, USER],  # as the template itself
        [USER, {"role": "tool", "content": "you"}],  # a part of another message
    ],
)
def test_content_that_is_left_out_is_reported_although_its_text_is_elsewhere(messages):
    dialogues = format_of("no_start")
    dialogues.write(messages, [[REPLY]], "line 2")
    (warning,) = dialogues.warnings()
    role = next(message["role"] for message in messages if message["role"] != "user")
    assert f"content of a message with the role {role} in 1 of 1 dialogues (first: line 2)" in warning


def test_a_template_that_writes_no_content_of_an_answer_is_refused():
    tokenizer = with_template("chatml")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }}{% for part in m['content'] %}{{ part['text'] }}{% endfor %}"
        "{{ '<|end|>' }}{% endfor %}"
    )
    with pytest.raises(UserError, match="must write the content of an answer, which is a text, .* the same"):
        set_format(tokenizer, None, conversational=True)


def test_an_answer_of_which_only_the_frame_is_written_is_refused():
    dialogues = format_of("thinking")
    dialogues.tokenizer.chat_template = dialogues.tokenizer.chat_template.replace(
        "{{ content + '<|end|>\\n' }}", "{{ (content if content != 'Wait.' else '') + '<|end|>\\n' }}"
    )
    with pytest.raises(UserError, match="does not write the content of the answer in line 7; "):
        dialogues.write([USER], [[{**REPLY, "content": "Wait."}]], "line 7")


@pytest.mark.parametrize("content", ["", "Say <|user|>"])
def test_an_answer_that_ends_with_another_special_token_has_its_end_token(content):
    dialogues = format_of("chatml")
    tokenizer = dialogues.tokenizer
    tokenizer.chat_template = tokenizer.chat_template.replace(START, "").replace("'|>\\n'", "'|>'")
    prompt, (text,) = dialogues.write([USER], [[{**REPLY, "content": content}]])
    prompts = encode_prompts(torch.arange(1), [prompt], [""], tokenizer, formatted=True)
    prompts = replace(prompts, dialogues=[[USER]])
    ids = encode_completions(prompts, [[text]], tokenizer, None).response_ids[0, 0].tolist()
    whole_text = whole(dialogues, [USER, {**REPLY, "content": content}])
    assert prompt + tokenizer.decode(ids) == whole_text.removesuffix("\n")


def test_an_answer_that_the_template_does_not_write_is_refused():
    asked = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    dialogues = format_of("chatml")
    for answer in (asked, {**asked, "content": "Let me see."}):
        with pytest.raises(UserError, match="does not write the content and the tool_calls .* in line 7; "):
            dialogues.write([USER], [[answer]], "line 7")
    assert dialogues.write([USER], [[asked]], prompt_only=True)[1] == [""], "a reference is only reported"


def test_the_clock_of_a_template_is_that_of_the_run():
    dialogues = format_of("clock")
    prompt, _ = dialogues.write([USER], [[REPLY]])
    assert prompt.startswith("Today: 31 Jan 2026 09:00:00\n")
    later = with_template("clock")
    set_format(later, None, conversational=True)
    assert render(later, [USER]) == render(later, [USER]), "one time for each tokenizer"
