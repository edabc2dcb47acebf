"""Chat templates: the prompt of a dialogue, the end of a turn, and templates that the user names."""

import json

import pytest
import torch

from rlhf.core.errors import UserError
from rlhf.text.chat import end_of_turn, end_responses_with_turns, render, set_clock, set_format, set_template
from rlhf.text.encoding import encode_completions, encode_prompts, prompt_tokens
from tests.chat_tokenizers import CHAT, LLAMA_3, QWEN, gemma, llama_2, llama_3, neox, qwen

USER, SYSTEM = {"role": "user", "content": "Why?"}, {"role": "system", "content": "Be brief."}
REPLY = {"role": "assistant", "content": "So it is."}

PROMPTS = {
    "llama_2": "<s>[INST] Why? [/INST]",
    "zephyr": "<|user|>\nWhy?</s>\n<|assistant|>",
    "llama_3": "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nWhy?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "qwen": "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n"
    "<|im_start|>assistant\n",
    "gemma": "<bos><start_of_turn>user\nWhy?<end_of_turn>\n<start_of_turn>model\n",
}
ENDS = {
    "llama_2": "</s>",
    "zephyr": "</s>",
    "llama_3": "<|eot_id|>",
    "llama_3_base": "<|eot_id|>",
    "qwen": "<|im_end|>",
    "qwen_instruct": "<|im_end|>",
    "gemma": "<end_of_turn>",
}


@pytest.mark.parametrize("family", PROMPTS)
def test_a_dialogue_is_formatted_by_the_template_of_the_tokenizer(family):
    assert render(CHAT[family](), [USER]) == PROMPTS[family]


@pytest.mark.parametrize("family", CHAT)
def test_tokens_of_a_formatted_dialogue_are_those_of_apply_chat_template(family):
    tokenizer, turns = CHAT[family](), [USER, REPLY, USER]
    expected = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
    (ids,) = prompt_tokens([render(tokenizer, turns)], tokenizer, formatted=True)
    assert ids == expected
    assert ids.count(tokenizer.bos_token_id) <= (2 if family == "llama_2" else 1)  # Llama 2: one per question


CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": None}}]}


def test_a_template_gets_the_messages_as_they_are_with_their_nulls():
    tokenizer = qwen()
    tokenizer.chat_template = "{{ messages | tojson }}"
    assert json.loads(render(tokenizer, [USER, CALL])) == [USER, CALL]


def test_a_template_reads_the_clock_of_the_run():
    tokenizer = qwen()
    tokenizer.chat_template = (
        "{{ strftime_now('%d %b %Y, %H:%M') if strftime_now is callable else 'no clock' }}"
    )
    set_clock(tokenizer, "2001-02-03T04:05")
    assert render(tokenizer, [USER]) == "03 Feb 2001, 04:05"


@pytest.mark.parametrize("tools", [None, [{"type": "function", "function": {"name": "f"}}]])
@pytest.mark.parametrize("family", CHAT)
def test_a_template_gets_the_variables_of_apply_chat_template(family, tools):
    tokenizer = CHAT[family]()
    given = "messages", "tools", "documents", "add_generation_prompt", *tokenizer.special_tokens_map
    tokenizer.chat_template = "{{ [" + ", ".join(given) + "] | tojson }}"
    expected = tokenizer.apply_chat_template(
        [USER, REPLY], tools=tools, add_generation_prompt=True, tokenize=False
    )
    assert render(tokenizer, [USER, REPLY], tools=tools) == expected


@pytest.mark.parametrize("family", CHAT)
def test_the_end_of_a_turn_is_the_first_special_token_after_a_reply(family):
    assert end_of_turn(CHAT[family]()) == ENDS[family]


@pytest.mark.parametrize(
    "template", ["{{ messages[-1]['content'] }}", "{{ messages[-1]['content'] }}\n###\n"]
)
def test_a_template_without_a_token_after_a_reply_has_no_end_of_a_turn(template):
    tokenizer = qwen()
    tokenizer.chat_template = template
    assert end_of_turn(tokenizer) is None
    end_responses_with_turns(tokenizer)
    assert tokenizer.eos_token == "<|endoftext|>"


@pytest.mark.parametrize("family", CHAT)
def test_a_response_ends_with_the_token_that_ends_a_turn_and_without_the_text_after_it(family):
    tokenizer, pad = CHAT[family](), CHAT[family]().pad_token_id
    set_format(tokenizer, None, conversational=True)
    prompts = encode_prompts(torch.arange(1), [render(tokenizer, [USER])], [""], tokenizer, formatted=True)
    encoded = encode_completions(prompts, [["So it is."]], tokenizer, response_length=None)
    ids = encoded.response_ids[0, 0].tolist()
    assert tokenizer.convert_ids_to_tokens(ids[-1]) == ENDS[family]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "So it is."
    assert tokenizer.pad_token_id == pad


@pytest.mark.parametrize("family", CHAT)
def test_prompt_and_response_together_are_the_dialogue_of_the_template(family):
    tokenizer = CHAT[family]()
    set_format(tokenizer, None, conversational=True)
    whole = tokenizer.apply_chat_template([USER, REPLY], tokenize=False)
    together = render(tokenizer, [USER]) + REPLY["content"] + tokenizer.eos_token
    assert "".join(whole.split()).startswith("".join(together.split()))


def test_the_end_token_is_saved_with_the_tokenizer(tmp_path):
    tokenizer = gemma()
    end_responses_with_turns(tokenizer)
    tokenizer.save_pretrained(tmp_path)
    from transformers import AutoTokenizer

    assert AutoTokenizer.from_pretrained(tmp_path).eos_token == "<end_of_turn>"


SHORT = "{% if messages | length > 2 %}{{ raise_exception('short ones only') }}{% endif %}"


@pytest.mark.parametrize(
    ("make", "template", "turns", "said"),
    [
        (gemma, None, [USER, USER], "alternate.*, got the roles user, user in"),
        (llama_2, None, [USER, USER], "alternate.*, got the roles user, user in"),
        (gemma, None, [SYSTEM, USER], "System role not supported.* got the roles system, user in"),
        (llama_3, SHORT, [USER] * 3, r"short ones only\), got the roles user, user, user in"),
    ],
)
def test_messages_that_the_template_refuses_are_an_error_that_names_their_place(make, template, turns, said):
    tokenizer = make()
    tokenizer.chat_template = template or tokenizer.chat_template
    with pytest.raises(UserError, match=f"{said} line 3 of x.jsonl; "):
        render(tokenizer, turns, "line 3 of x.jsonl")


def test_a_tokenizer_without_template_is_an_error_with_a_remedy():
    tokenizer = neox()
    with pytest.raises(
        UserError, match="model.chat_template must be set for dialogues .*chat_template=plain"
    ):
        render(tokenizer, [USER])
    set_template(tokenizer, "plain")
    assert render(tokenizer, [SYSTEM, USER, REPLY, USER]) == (
        "<|system|>\nBe brief.\n<|user|>\nWhy?\n<|assistant|>\nSo it is.<|endoftext|>\n<|user|>\nWhy?\n"
        "<|assistant|>\n"
    )
    assert end_of_turn(tokenizer) == "<|endoftext|>"


def test_the_plain_template_begins_with_bos_if_the_tokenizer_adds_bos():
    tokenizer = llama_3()
    set_template(tokenizer, "plain")
    assert render(tokenizer, [USER]) == "<|begin_of_text|><|user|>\nWhy?\n<|assistant|>\n"


def test_a_template_may_come_from_a_file(tmp_path):
    file = tmp_path / "chatml.jinja"
    file.write_text(QWEN)
    tokenizer = llama_3()
    set_format(tokenizer, str(file), conversational=True)
    assert render(tokenizer, [USER]) == PROMPTS["qwen"]
    assert tokenizer.eos_token == "<|eot_id|>"  # `<|im_end|>` is no token of this vocabulary


@pytest.mark.parametrize(
    "template",
    [
        LLAMA_3[:-5],
        "{{ messages | unknown }}",
        "{{ unknown(1) }}",
        "{{ 1 / 0 }}",
        "{{ messages[0].content + 1 }}",
    ],
)
def test_a_template_that_formats_no_dialogue_is_at_fault_itself(template):
    tokenizer = llama_3()
    tokenizer.chat_template, tokenizer.name_or_path = template, "models/chat"
    with pytest.raises(UserError, match=r"the chat template of models/chat with an error .*; correct that"):
        render(tokenizer, [USER], "line 3 of chats.jsonl")


def test_a_file_without_a_valid_template_is_an_error(tmp_path):
    (tmp_path / "bad.jinja").write_text(LLAMA_3[:-5])
    with pytest.raises(UserError, match=r"got \S+/bad.jinja with an error in line 1 .*; correct the file$"):
        set_format(llama_3(), str(tmp_path / "bad.jinja"), conversational=True)
    with pytest.raises(UserError, match="model.chat_template must be a file with a Jinja template or plain"):
        set_template(llama_3(), str(tmp_path / "none.jinja"))
    json = '{"chat_template": "{{ messages }}"}'
    for text, said in (("Hello", "which writes the same"), ("\n", "an empty file"), (json, "a JSON file")):
        (tmp_path / "other.jinja").write_text(text)
        with pytest.raises(UserError, match=f"other.jinja, {said}"):
            set_template(llama_3(), str(tmp_path / "other.jinja"))
