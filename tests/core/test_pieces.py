"""Pieces of texts: tokens of a response read, behind the tokens of its prompt, as the text of both."""

from functools import cache

import pytest

from rlhf.tasks.source import word_tokenizer
from rlhf.text.encoding import Pieces, pieces
from tests.chat_tokenizers import KINDS

LOSSY = ("wordpiece", "wordpiece_uncased", "metaspace_split")  # they write other spaces or letters
PAIRS = [
    ("2+2=", "4"),
    ("2+2=", " 4"),
    ("play", "ing"),
    ("play ", "ing"),
    ("play", " ing"),
    ("A b:", " Heat water and wait."),
    ("why?", "How so!"),
    ("it is", "."),
    ("it is ", "4"),
]
SPACES = [("why?\n", "Heat  water"), ("why?", "\n\nit is"), ("A b: ", "  Heat")]


@cache
def tokenizer(kind: str):
    return KINDS[kind]()


def read(kind: str, ids: list[int]) -> str:
    return tokenizer(kind).decode(ids, clean_up_tokenization_spaces=False)


def plain(kind: str, text: str) -> list[int]:
    return tokenizer(kind)(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("prompt", "response"), [*PAIRS, *SPACES])
def test_prompt_and_response_read_as_the_text_of_both(kind, prompt, response):
    first = plain(kind, prompt)
    (ids,) = pieces(tokenizer(kind)).encode([response], [prompt])
    whole = read(kind, plain(kind, prompt + response))  # of a lossy tokenizer, another text
    assert read(kind, first + ids) == whole
    if kind not in LOSSY:
        assert whole.lstrip() == prompt + response


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("prompt", "response"), [*PAIRS, *SPACES])
def test_the_text_of_a_response_is_what_it_adds_to_its_prompt(kind, prompt, response):
    first = plain(kind, prompt)
    (ids,) = pieces(tokenizer(kind)).encode([response], [prompt])
    (text,) = pieces(tokenizer(kind)).decode([ids])
    assert read(kind, first) + text == read(kind, first + ids)


@pytest.mark.parametrize("kind", ["llama_3", "qwen", "gemma", "neox", "bpe"])
def test_a_tokenizer_that_inserts_nothing_is_used_as_it_is(kind):
    assert Pieces(tokenizer(kind)).simple
    texts = [text for pair in [*PAIRS, *SPACES] for text in pair]
    assert pieces(tokenizer(kind)).encode(texts, [""] * len(texts)) == [plain(kind, text) for text in texts]


def test_special_tokens_are_left_out_of_texts_and_empty_texts_have_no_tokens():
    for kind in ("llama_2", "llama_3", "wordpiece"):
        own = pieces(tokenizer(kind))
        end = tokenizer(kind).eos_token_id
        assert own.encode([""], ["why?"]) == [[]]
        assert own.decode([[end], [*own.encode([" it"], ["why?"])[0], end]]) == ["", " it"]


def test_a_vocabulary_without_usual_characters_is_read_as_it_is():
    words = word_tokenizer([" w0", " w1"], r" ?\w+")
    own = Pieces(words)
    assert own.encode([" w0 w1"], [" w1"]) == [words(" w0 w1")["input_ids"]]
    assert own.decode([words(" w0 w1")["input_ids"]]) == [" w0 w1"]
