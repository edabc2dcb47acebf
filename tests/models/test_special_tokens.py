"""The pad token of tokenizers that have none of their own, and the errors about pad tokens."""

import json
import random

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from rlhf.models.headers import UNUSED, choose_pad_token, pad_problem
from rlhf.models.loading import read_tokenizer, set_pad_token
from tests.chat_tokenizers import LLAMA_3, QWEN, ZEPHYR, byte_level, sentencepiece

IM = (
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
)
CODE = (
    "<repo_name>",
    "<reponame>",
    "<file_sep>",
    "<filename>",
    "<gh_stars>",
    "<issue_start>",
    "<jupyter_code>",
)
LLAMA_2_SPECIAL = ("<unk>", "<s>", "</s>")
RESERVED = tuple(f"<|reserved_special_token_{i}|>" for i in range(12))
# Tokens, end, begin, own pad token, chat template, ends in generation_config.json; the pad token.
FAMILIES = {
    "smollm2_instruct": (
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *CODE, "<empty_output>"),
        "<|im_end|>", "<|im_start|>", "<|im_end|>", IM, ["<|im_end|>"], "<empty_output>",
    ),
    "llama_3": (
        ("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", *RESERVED),
        "<|eot_id|>", "<|begin_of_text|>", None, LLAMA_3, ["<|end_of_text|>", "<|eot_id|>"],
        "<|reserved_special_token_11|>",
    ),
    "llama_2": (LLAMA_2_SPECIAL, "</s>", "<s>", None, ZEPHYR, ["</s>"], "<unk>"),
    "mistral": (
        (*LLAMA_2_SPECIAL, "[INST]", "[/INST]", *(f"[control_{i}]" for i in range(8, 13))),
        "</s>", "<s>", "</s>", None, ["</s>"], "[control_12]",
    ),
    "nemo": (
        (*LLAMA_2_SPECIAL, "[INST]", *(f"<SPECIAL_{i}>" for i in range(20, 24))),
        "</s>", "<s>", None, None, [], "<SPECIAL_23>",
    ),
    "qwen_base": (
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_pad|>", "<|fim_pad|>"),
        "<|endoftext|>", None, "<|endoftext|>", QWEN, ["<|endoftext|>"], "<|fim_pad|>",
    ),
    "chat_model_with_three_tokens": (
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        "<|im_end|>", "<|endoftext|>", "<|im_end|>", IM, ["<|im_end|>"], "<|endoftext|>",
    ),
    "gemma_without_pad": (
        ("<eos>", "<bos>", "<unk>", "<start_of_turn>", "<unused8>", "<unused9>"),
        "<eos>", "<bos>", None, None, [], "<unused9>",
    ),
    "pythia": (
        ("<|endoftext|>", "<|padding|>"), "<|endoftext|>", "<|endoftext|>", None, None, [], "<|padding|>"
    ),
    "own_pad_token": (("<|endoftext|>", "<mine>"), "<|endoftext|>", None, "<mine>", None, [], "<mine>"),
}  # fmt: skip
# The same for tokenizers without a token that is certainly unused.
NONE = {
    "gpt2": (("<|endoftext|>",), "<|endoftext|>", "<|endoftext|>", None, None, []),
    "turns_only": (
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>"), "<|endoftext|>", None, "<|endoftext|>", None, []
    ),
    "end_of_text_is_declared": (
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        "<|im_end|>", None, "<|im_end|>", IM, ["<|im_end|>", "<|endoftext|>"],
    ),
    "pad_in_template": (("<|endoftext|>", "<|pad|>"), "<|endoftext|>", None, None, "<|pad|>" + IM, []),
}  # fmt: skip


def write(folder, tokens, end, begin, own, template, declared) -> PreTrainedTokenizerFast:
    """Write a tokenizer, and a generation_config.json that declares end tokens; return the tokenizer."""
    core = sentencepiece(tokens, prefix=True) if "<unk>" in tokens else byte_level(tokens)
    named = {"eos_token": end, "bos_token": begin, "pad_token": own, "chat_template": template}
    PreTrainedTokenizerFast(tokenizer_object=core, **named).save_pretrained(folder)
    ids = [core.token_to_id(token) for token in declared]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids} if ids else {}))
    return read_tokenizer(str(folder))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_token_that_stands_for_nothing_becomes_the_pad_token(family, tmp_path):
    *files, expected = FAMILIES[family]
    tokenizer = write(tmp_path, *files)
    size, end, own = len(tokenizer), tokenizer.eos_token, files[3]
    text = f"Keep <this>.{end}"
    before = tokenizer(text)["input_ids"]
    note = set_pad_token(tokenizer, None, models=[str(tmp_path)])
    assert tokenizer.pad_token == expected
    assert (note is None) == (expected == own) and (note is None or expected in note)
    assert (len(tokenizer), tokenizer.eos_token) == (size, end) and tokenizer(text)["input_ids"] == before
    ids = [tokenizer.pad_token_id, *tokenizer("a", add_special_tokens=False)["input_ids"]]
    assert tokenizer.decode(ids, skip_special_tokens=True).strip() == "a", "decoding skips the pad token"
    tokenizer.save_pretrained(tmp_path / "model")
    assert AutoTokenizer.from_pretrained(tmp_path / "model").pad_token == expected, "as in the next stage"


@pytest.mark.parametrize("family", NONE)
def test_a_tokenizer_without_a_certainly_unused_token_gets_no_pad_token(family, tmp_path):
    tokenizer = write(tmp_path, *NONE[family])
    with pytest.raises(Exception, match="model.pad_token must be set"):
        set_pad_token(tokenizer, None, models=[str(tmp_path)])


def test_the_choice_does_not_depend_on_the_order_of_the_vocabulary():
    ids = {token: i for i, token in enumerate([*RESERVED, "a", "b"])}
    shuffled = random.Random(1).sample(sorted(ids.items()), len(ids))
    assert choose_pad_token(dict(shuffled), {"a"}) == choose_pad_token(ids, {"a"}) == RESERVED[-1]
    assert choose_pad_token(ids, {ids[RESERVED[-1]]}, template=RESERVED[-2]) == RESERVED[-3]


def test_unk_is_chosen_only_if_no_text_contains_it():
    assert choose_pad_token({"a": 0, "<unk>": 1}, ["a"]) is None
    assert choose_pad_token(byte_level(["<unk>"]).get_vocab(), []) == "<unk>"


@pytest.mark.parametrize(
    "token",
    ["<|image_pad|>", "<fim_pad>", "[PAD]", "<PAD>", "<unused99>", "[unused0]", "<|extra_0|>", "<extra_id_7>",
     "[control_8]", "<SPECIAL_999>", "<|dummy_87|>", "<|placeholder6|>", "<｜place▁holder▁no▁798｜>",
     ">>UNUSED_109<<", "[UNUSED_TOKEN_141]", "<|reserved_200017|>", "<|unused007|>", "<reserved_106>"],
)  # fmt: skip
def test_names_of_unused_tokens_are_recognized(token):
    assert any(kind.fullmatch(token) for kind in UNUSED)


@pytest.mark.parametrize(
    "token", ["<|user|>", "<tool_call>", "<think>", "[INST]", "<0x0A>", "<h1>", "<|end|>", "<paddle>", "[0]"]
)
def test_tokens_with_a_meaning_are_not_chosen(token):
    assert not any(kind.fullmatch(token) for kind in UNUSED)


def test_special_tokens_are_listed_if_none_is_certainly_unused():
    ids = {"a": 0, "<end>": 1, "<|im_start|>": 2, "<0x0A>": 3}
    found = pad_problem("model.pad_token", None, "m", ids, None, "<end>")
    assert found is not None and found.endswith("contain, for example 'model.pad_token=\"<|im_start|>\"'")


def test_the_remedy_for_a_wrong_pad_token_can_be_pasted_in_a_shell():
    ids = {"a": 0, "<|padding|>": 1}
    found = pad_problem("model.pad_token", "a", "m", ids, None, "a")
    assert found is not None and found.endswith("set 'model.pad_token=\"<|padding|>\"'")
    assert pad_problem("model.pad_token", "<|padding|>", "m", ids, None, "a") is None
