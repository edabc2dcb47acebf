"""Tests of the tokens that end a response: all that the files of model and tokenizer declare."""

import json
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from rlhf.core.batch import Rollouts, Sampling
from rlhf.generators.hf.generator import HFGenerator, HFSettings
from rlhf.models.loading import read_tokenizer, stop_ids
from rlhf.models.modules import Policy
from rlhf.scorers.scorer import first_of_identical, response_texts
from rlhf.text.chat import set_format
from tests.model_folders import write_tokenizer
from tests.models.test_absent_ids import prompts
from tests.tiny_models import tiny_lm, tiny_tokenizer

TOKENS = ("<pad>", "<eos>", "<unk>", "a", "b", "<turn>")


def model_folder(folder, config=None, generation=None):
    folder.mkdir(exist_ok=True)
    write_tokenizer(folder, TOKENS)
    for name, content in (("config.json", config), ("generation_config.json", generation)):
        if content is not None:
            (folder / name).write_text(json.dumps(content))
    return str(folder)


@pytest.mark.parametrize(
    ("config", "generation", "ends"),
    [
        ({}, None, [1]),
        ({"eos_token_id": None}, {"eos_token_id": None}, [1]),
        ({"eos_token_id": 5}, None, [1, 5]),
        ({"eos_token_id": [5, 4]}, None, [1, 4, 5]),
        ({}, {"eos_token_id": 5}, [1, 5]),
        ({"eos_token_id": 1}, {"eos_token_id": [5, 1]}, [1, 5]),
        ({"text_config": {"eos_token_id": [4]}, "eos_token_id": 5}, None, [1, 4, 5]),
        ({"eos_token_id": [99, 5]}, {"eos_token_id": 98}, [1, 5]),  # no token has these ids
    ],
)
def test_every_declared_end_token_ends_a_response(tmp_path, config, generation, ends):
    path = model_folder(tmp_path / "model", config, generation)
    assert stop_ids(read_tokenizer(path), [path]) == ends


def test_the_end_token_of_a_document_still_ends_a_response_of_a_dialogue(tmp_path):
    path = model_folder(tmp_path / "model", {"eos_token_id": 1})
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}{{ m['content'] }}<turn>{% endfor %}")
    tokenizer = read_tokenizer(path)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<turn>"]})
    set_format(tokenizer, str(template), conversational=True)
    assert tokenizer.eos_token == "<turn>"
    assert stop_ids(tokenizer, [path]) == stop_ids(tokenizer, []) == [5, 1]


def test_a_response_ends_at_the_first_of_the_end_tokens_and_its_text_has_none_of_them(tmp_path):
    tokenizer = read_tokenizer(model_folder(tmp_path / "model"))
    model = Policy(tiny_lm(), 0.7, True, tokens=range(6)).model
    settings = HFSettings(stop_ids=[1, 4, 5], pad_id=tokenizer.pad_token_id, batch_size=64, seed=3)
    generator = HFGenerator(lambda: nullcontext(model), settings)
    sampling = Sampling(samples=32, temperature=0.7, response_length=6, purpose="train")
    found = generator.submit(prompts(), sampling).result()
    ids, mask = found.response_ids, found.response_mask
    ends = torch.isin(ids, torch.tensor([1, 4, 5])) & mask
    last = torch.arange(ids.shape[-1]) == mask.sum(-1, keepdim=True) - 1
    assert torch.equal(ends, last & found.ended[..., None]) and {*ids[ends].tolist()} == {1, 4, 5}
    texts = [text for row in response_texts(found, tokenizer) for text in row]
    assert not any("b" in text or "<" in text for text in texts), "b is an end that is not special"
    assert any("a" in text for text in texts)


def test_the_text_of_an_episode_is_its_last_reply_without_its_end_token():
    tokenizer = tiny_tokenizer()
    end = tokenizer.eos_token_id
    ids = torch.tensor([[[3, end, 4, 5, 6, end, 0], [3, end, 4, 5, 7, 8, end]]])
    messages = torch.tensor([[[0, 0, 1, 1, 0, 0, 0], [0, 0, 1, 1, 0, 0, 0]]], dtype=torch.bool)
    rollouts = Rollouts(
        index=torch.arange(1),
        texts=["w0"],
        references=[""],
        prompt_ids=torch.tensor([[3]]),
        prompt_mask=torch.ones(1, 1, dtype=torch.bool),
        response_ids=ids,
        response_mask=(ids > 0) & ~messages,
        environment_mask=messages,
        ended=torch.ones(1, 2, dtype=torch.bool),
    )
    assert response_texts(rollouts, tokenizer) == [["w3", "w4 w5"]]
    twice = {name: getattr(rollouts, name)[:, [0, 0]].clone() for name in ("response_ids", "response_mask")}
    same = replace(rollouts, **twice)
    assert first_of_identical(same).tolist() == [[0, 0]]
    same.response_ids[0, 1, 2] = 9  # another message
    assert first_of_identical(same).tolist() == [[0, 1]]
