"""Loading of tokenizers, errors for damaged or incomplete tokenizers, and the end token of saved models."""

import json

import pytest
from transformers import AutoTokenizer, GenerationConfig

from rlhf.core.errors import UserError
from rlhf.models.loading import check_vocabulary, fill_pad_token, read_tokenizer, save, set_pad_token
from tests.chat_tokenizers import gemma, neox
from tests.tiny_models import VOCABULARY, tiny_classifier, tiny_lm, tiny_tokenizer


@pytest.mark.parametrize("special", [{"eos_token": "<eos>"}, {"eos_token": "<eos>", "pad_token": "<eos>"}])
def test_a_pad_token_that_is_set_must_be_in_the_vocabulary_and_differ_from_eos(special, tmp_path):
    tiny_tokenizer(**special).save_pretrained(tmp_path)
    tokenizer = read_tokenizer(str(tmp_path))
    with pytest.raises(UserError, match="model.pad_token must be set"):
        set_pad_token(tokenizer, "<eos>")
    with pytest.raises(UserError, match=r"model.pad_token must be in the vocabulary .*got '<new>'"):
        set_pad_token(tokenizer, "<new>")
    set_pad_token(tokenizer, "<pad>")
    assert tokenizer.pad_token_id == 0


def test_a_model_that_is_only_evaluated_pads_with_its_end_token_if_it_has_no_pad_token():
    tokenizer = neox()
    fill_pad_token(tokenizer, None, "scorer.pad_token")
    assert tokenizer.pad_token == "<|endoftext|>"
    fill_pad_token(tokenizer, "<|padding|>", "scorer.pad_token")
    assert tokenizer.pad_token == "<|padding|>"


def test_a_model_folder_without_a_tokenizer_is_refused(tmp_path):
    tiny_lm().save_pretrained(tmp_path)
    with pytest.raises(UserError, match="must come with its tokenizer .*; set model.tokenizer="):
        read_tokenizer(str(tmp_path))


@pytest.mark.parametrize("content", ["{}", "", "[1]", '{"added_tokens": [], "model": {"type": "x"}}'])
def test_a_damaged_tokenizer_is_refused(tmp_path, content):
    tiny_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(UserError, match=r"model\.tokenizer must .*set model\.tokenizer="):
        read_tokenizer(str(tmp_path), key="model.tokenizer")


def test_a_tokenizer_without_an_end_token_is_refused(tmp_path):
    tiny_tokenizer(pad_token="<pad>").save_pretrained(tmp_path)
    with pytest.raises(UserError, match="model.base must come with a tokenizer that has an end token"):
        read_tokenizer(str(tmp_path), key="model.base")


def test_a_tokenizer_may_be_smaller_than_the_model_but_not_larger():
    check_vocabulary(tiny_lm(), tiny_tokenizer())
    check_vocabulary(tiny_lm(), tiny_tokenizer(words=10))
    with pytest.raises(UserError, match=f"model.tokenizer must fit the model .*{VOCABULARY} embeddings"):
        check_vocabulary(tiny_lm(), tiny_tokenizer(words=VOCABULARY - 2))


# End tokens of saved models


@pytest.mark.parametrize("make", [tiny_lm, tiny_classifier])
@pytest.mark.parametrize("stops", [False, True])
def test_a_saved_model_stops_at_the_end_token_of_the_tokenizer(tmp_path, make, stops):
    tokenizer = gemma()
    tokenizer.eos_token = "<end_of_turn>"
    end = tokenizer.eos_token_id
    save(make("llama", vocab_size=512, eos_token_id=[300, end] if stops else 1), tokenizer, tmp_path)
    expected = [300, end] if stops else [end, 1]
    assert AutoTokenizer.from_pretrained(tmp_path).eos_token_id == end
    assert json.loads((tmp_path / "config.json").read_text())["eos_token_id"] == expected
    if make is tiny_lm:
        assert GenerationConfig.from_pretrained(tmp_path).eos_token_id == expected
