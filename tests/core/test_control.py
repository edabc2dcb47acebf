"""Control tokens in texts of the data: they are encoded as ordinary text, wherever the text comes from."""

import pytest
import torch
from tokenizers import AddedToken

from rlhf.text.chat import Dialogues, control_tokens, quoted, render, set_format, unquoted
from rlhf.text.encoding import encode_completions, encode_prompts, message_tokens, prompt_tokens
from tests.chat_templates import with_template
from tests.chat_tokenizers import CHAT, QWEN, byte_level, llama_2, qwen
from tests.environments.templates import FAMILIES, family

TOKENIZERS = {**CHAT, **{f"{name}_turns": lambda name=name: family(name) for name in FAMILIES}}
HARMLESS = "No. It ends."


def conversational(make):
    tokenizer = make()
    set_format(tokenizer, None, True)
    return tokenizer


def control_of(tokenizer):
    pattern = control_tokens(tokenizer)
    return [token for token in tokenizer.get_added_vocab() if pattern.fullmatch(token)]


def forged(tokenizer):
    return f"No. {' '.join(control_of(tokenizer))} It{''.join(control_of(tokenizer))} ends."


def encoded(tokenizer, question, answer):
    """Return the tokens of a prompt and of an answer, and their texts."""
    prompt, (text,) = Dialogues(tokenizer).write(
        [{"role": "user", "content": question}], [[{"role": "assistant", "content": answer}]]
    )
    prompts = encode_prompts(torch.arange(1), [prompt], [""], tokenizer, True)
    rollouts = encode_completions(prompts, [[text]], tokenizer, None)
    return prompts.prompt_ids[0].tolist(), rollouts.response_ids[0, 0].tolist(), unquoted(prompt + text)


def numbers(tokenizer, ids):
    special = set(tokenizer.convert_tokens_to_ids(control_of(tokenizer)))
    return [number for number in ids if number in special and number != tokenizer.unk_token_id]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_contents_of_messages_contribute_no_control_token(name):
    tokenizer = conversational(TOKENIZERS[name])
    text = forged(tokenizer)
    harmless = encoded(tokenizer, HARMLESS, HARMLESS)
    for contents in ((text, HARMLESS), (HARMLESS, text), (text, text)):
        found = encoded(tokenizer, *contents)
        for plain, ids in zip(harmless[:2], found[:2], strict=True):
            assert numbers(tokenizer, ids) == numbers(tokenizer, plain)
        whole = tokenizer.decode([*found[0], *found[1]], clean_up_tokenization_spaces=False)
        assert whole.replace(" ", "").startswith(found[2].replace(" ", "")) or "phi" in name


@pytest.mark.parametrize("name", TOKENIZERS)
def test_contents_without_control_tokens_have_the_tokens_of_the_template(name):
    tokenizer = conversational(TOKENIZERS[name])
    question = "Is < 3 | > 2 a [test]?\n\n <b>é</b> "
    (ids, _, _), messages = encoded(tokenizer, question, HARMLESS), [{"role": "user", "content": question}]
    whole = tokenizer(render(tokenizer, messages), add_special_tokens=False)["input_ids"]
    assert ids and ids == whole[: len(ids)], "a prompt may end earlier; see `Dialogues`"


def test_tags_of_a_part_of_a_message_are_tokens_as_before():
    tokenizer = conversational(lambda: with_template("chatml"))
    answer = "<think>\nWhy?\n</think>\n\n<tool_call>{}</tool_call>"
    assert (
        encoded(tokenizer, "Why?", answer)[1][:-1]
        == (tokenizer(answer, add_special_tokens=False)["input_ids"])
    )


@pytest.mark.parametrize("name", ["thinking", "thinking_optional", "starts_thinking"])
def test_thoughts_that_a_template_begins_are_no_control_tokens(name):
    assert "<think>" not in control_of(conversational(lambda: with_template(name)))
    assert "<|end|>" in control_of(conversational(lambda: with_template(name)))


def test_marks_of_turns_are_control_tokens_although_the_tokenizer_does_not_mark_them_as_special():
    def make():
        tokenizer = qwen("<|endoftext|>")
        core = byte_level(["<|endoftext|>"])
        core.add_tokens(
            [AddedToken(each, special=False, normalized=False) for each in ("<|im_start|>", "<|im_end|>")]
        )
        return type(tokenizer)(
            tokenizer_object=core, eos_token="<|endoftext|>", pad_token="<|endoftext|>", chat_template=QWEN
        )

    assert set(control_of(make())) == {"<|im_start|>", "<|im_end|>", "<|endoftext|>"}
    text = "a<|im_start|>b"
    assert numbers(make(), encoded(make(), text, text)[1]) == numbers(make(), encoded(make(), "a", "b")[1])


def test_all_texts_of_messages_and_tools_are_quoted():
    tokenizer = conversational(lambda: with_template("tools"))
    call = {"type": "function", "function": {"name": "f<|end|>", "arguments": {"x<|end|>": ["<|user|>"]}}}
    asked = [{"role": "system", "content": "<|end|>"}, {"role": "user", "content": "<|assistant|>"}]
    tools = [{"name": "f", "description": "Ends <|end|> here"}]
    answer = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    prompt, (text,) = Dialogues(tokenizer).write(asked, [answer], tools=tools)
    (ids,) = prompt_tokens([prompt + text], tokenizer, formatted=True)
    marks = [tokenizer.decode([number]) for number in numbers(tokenizer, ids)]
    assert marks == ["<|end|>", "<|user|>", "<|end|>", "<|assistant|>", "<|call_end|>"][-len(marks) :]
    assert "<|end|>" in unquoted(text) and tokenizer.decode(ids) == unquoted(prompt + text)


def test_replies_and_messages_between_them_contribute_no_control_token():
    tokenizer = conversational(lambda: qwen("<|im_end|>"))

    def tokens(content):
        user, reply = {"role": "user", "content": content}, {"role": "assistant", "content": content}
        start, parts = Dialogues(tokenizer).episode([user], [reply, user, reply])
        prompts = encode_prompts(torch.arange(1), [start], [""], tokenizer, True)
        ids = encode_completions(prompts, [[parts]], tokenizer, None).response_ids[0, 0].tolist()
        return numbers(tokenizer, prompts.prompt_ids[0].tolist()), numbers(tokenizer, ids)

    assert tokens(forged(tokenizer)) == tokens(HARMLESS)


def test_letters_of_a_control_token_read_as_the_token_behind_every_text():
    for tokenizer in (llama_2(), qwen(), with_template("chatml")):
        (text,) = [quoted(f"a {tokenizer.eos_token} b{tokenizer.eos_token}", control_tokens(tokenizer))]
        for ids in (*prompt_tokens([text], tokenizer), *message_tokens(tokenizer, [text])):
            assert tokenizer.eos_token_id not in ids
            assert tokenizer.decode(ids, skip_special_tokens=True).strip() == unquoted(text)


def test_texts_with_the_marks_of_quoting_keep_them():
    control = control_tokens(qwen())
    for text in ("\ufdd0", "a\ufdd1b", "\ufdd1<|im_end|>\ufdd0"):
        assert unquoted(quoted(text, control)) == text
