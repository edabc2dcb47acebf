"""Prompt texts as token ids: BOS once, no EOS, with the tokenizers of published model families."""

import pytest
import torch

from rlhf.text.encoding import encode_completions, encode_prompts, prompt_tokens
from tests.chat_tokenizers import FAMILIES, gemma, llama_2, llama_3, neox, qwen

ADDS_BOS = ("llama_2", "llama_2_with_end", "zephyr", "llama_3", "llama_3_base", "gemma")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("written", [False, True])
def test_a_prompt_has_bos_once_if_the_tokenizer_adds_bos(family, written):
    tokenizer = FAMILIES[family]()
    begins = family in ADDS_BOS
    text = f"{tokenizer.bos_token}Why?" if written and begins else "Why?"
    (ids,) = prompt_tokens([text], tokenizer)
    assert ids.count(tokenizer.bos_token_id) == begins
    assert (ids[0] == tokenizer.bos_token_id) == begins
    assert tokenizer.decode(ids, skip_special_tokens=True) == "Why?"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_does_not_end_with_eos(family):
    tokenizer = FAMILIES[family]()
    for ids in prompt_tokens(["Why?", "", "Why?\n"], tokenizer):
        assert tokenizer.eos_token_id not in ids


def test_an_eos_that_the_text_contains_stays_in_the_prompt():
    for tokenizer in (llama_2(end=True), qwen()):
        (ids,) = prompt_tokens([f"A{tokenizer.eos_token}B"], tokenizer)
        assert ids.count(tokenizer.eos_token_id) == 1


@pytest.mark.parametrize("make", [neox, qwen])
def test_nothing_changes_with_a_tokenizer_that_adds_nothing(make):
    tokenizer, texts = make(), ["Why?", "a b\n", "<|endoftext|>c"]
    assert prompt_tokens(texts, tokenizer) == tokenizer(texts)["input_ids"]


def test_a_formatted_prompt_gets_no_special_tokens():
    tokenizer = llama_3()
    begin = tokenizer.bos_token
    assert prompt_tokens([begin + "A"], tokenizer, formatted=True) == prompt_tokens(["A"], tokenizer)
    assert tokenizer.bos_token_id not in prompt_tokens(["A"], tokenizer, formatted=True)[0]


@pytest.mark.parametrize("make", [lambda: llama_2(end=True), llama_3, gemma])
def test_a_response_has_no_bos_and_eos_once(make):
    tokenizer = make()
    prompts = encode_prompts(torch.arange(2), ["A", "Bc"], ["", ""], tokenizer)
    rollouts = encode_completions(prompts, [["So."], ["It is."]], tokenizer, response_length=None)
    for row, mask in zip(rollouts.response_ids[:, 0], rollouts.response_mask[:, 0], strict=True):
        ids = row[mask].tolist()
        assert tokenizer.bos_token_id not in ids
        assert ids.index(tokenizer.eos_token_id) == len(ids) - 1
