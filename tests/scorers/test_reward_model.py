"""The reward model scorer: reward models with another tokenizer or another chat template than the policy."""

import logging
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from rlhf.assembly.parts import make
from rlhf.config.scorer import RewardModelScorerConfig
from rlhf.core.batch import Rollouts
from rlhf.core.chat_format import render, set_format
from rlhf.core.encoding import encode_completions, encode_prompts
from rlhf.core.errors import UserError
from rlhf.models.loading import save
from rlhf.scorers.reward_model import RewardModelScorer
from tests.chat_tokenizers import gemma, llama_2, llama_3, neox, qwen
from tests.tiny_models import scorer_context, tiny_classifier

QUESTION = [{"role": "user", "content": "Why?"}]


def folder(path: Path, tokenizer: PreTrainedTokenizerFast) -> str:
    """Return a folder with a reward model and the tokenizer."""
    save(tiny_classifier("llama", vocab_size=512), tokenizer, path)
    return str(path)


def build(tokenizer: PreTrainedTokenizerFast, conversational: bool = False, **settings) -> RewardModelScorer:
    """Return the scorer of a run with the policy's tokenizer `tokenizer`."""
    context = scorer_context(tokenizer, conversational=conversational)
    scorer: RewardModelScorer = make(RewardModelScorerConfig(**settings), context)
    return scorer


def answers(tokenizer: PreTrainedTokenizerFast, dialogue: bool) -> Rollouts:
    """Return a question with two responses, of which only the first has ended."""
    prompts = encode_prompts(
        torch.arange(1), [render(tokenizer, QUESTION) if dialogue else "Why?"], [""], tokenizer, dialogue
    )
    prompts.dialogues = [QUESTION] if dialogue else None
    ended = torch.tensor([[True, False]])
    return encode_completions(prompts, [["So.", "It is"]], tokenizer, response_length=None, ended=ended)


def test_a_reward_model_with_the_tokenizer_of_the_policy_reads_its_tokens(tmp_path):
    assert build(llama_3(), path=folder(tmp_path, llama_3())).own_tokenizer is None


def test_a_reward_model_with_another_tokenizer_reads_the_texts_in_its_own_tokens(tmp_path):
    policy, own = qwen("<|im_end|>"), llama_2()
    scorer = build(policy, path=folder(tmp_path, own))
    read = scorer.retokenize(answers(policy, dialogue=False), scorer.own_tokenizer)
    assert own.decode(read.prompt_ids[0]) == "<s> Why?"
    texts = [
        own.decode(ids[mask]) for ids, mask in zip(read.response_ids[0], read.response_mask[0], strict=True)
    ]
    assert texts == ["So.</s>", "It is"]
    assert scorer.score(answers(policy, dialogue=False)).shape == (1, 2)


@pytest.mark.parametrize("pad_token", [None, "<|padding|>"])
def test_the_pad_token_of_a_reward_model_does_not_change_its_scores(tmp_path, pad_token):
    own = neox()
    assert own.pad_token is None
    path, rollouts = folder(tmp_path, own), answers(qwen(), dialogue=False)
    expected = build(qwen(), path=path).score(rollouts)
    scorer = build(qwen(), path=path, pad_token=pad_token)
    assert scorer.own_tokenizer.pad_token == (pad_token or "<|endoftext|>")
    assert torch.equal(scorer.score(rollouts), expected)


def test_a_pad_token_that_is_not_in_the_vocabulary_is_refused_with_the_key_of_the_scorer(tmp_path):
    with pytest.raises(UserError, match=r"scorer\.pad_token must be in the vocabulary .*got '<none>'"):
        build(qwen(), path=folder(tmp_path, neox()), pad_token="<none>")


def test_a_reward_model_reads_dialogues_in_the_format_of_its_own_template(tmp_path):
    policy, own = qwen(), gemma()
    set_format(policy, None, conversational=True)
    scorer = build(policy, conversational=True, path=folder(tmp_path, own))
    read = scorer.retokenize(answers(policy, dialogue=True), scorer.own_tokenizer)
    assert own.decode(read.prompt_ids[0]) == render(own, QUESTION)
    assert own.decode(read.response_ids[0, 0][read.response_mask[0, 0]]) == "So.<end_of_turn>"


def test_a_base_tokenizer_that_ends_turns_as_the_policy_reads_the_tokens_of_the_policy(tmp_path):
    policy = qwen()
    set_format(policy, None, conversational=True)
    assert build(policy, conversational=True, path=folder(tmp_path, qwen())).own_tokenizer is None


def test_a_reward_model_without_template_reads_the_format_of_the_policy_with_a_warning(tmp_path, caplog):
    policy, own = qwen(), neox()
    set_format(policy, None, conversational=True)
    with caplog.at_level(logging.WARNING):
        scorer = build(policy, conversational=True, path=folder(tmp_path, own))
    assert "has no chat template" in caplog.text
    read = scorer.retokenize(answers(policy, dialogue=True), scorer.own_tokenizer)
    assert own.decode(read.prompt_ids[0]) == render(policy, QUESTION)


def test_a_tokenizer_with_more_tokens_than_the_reward_model_is_refused(tmp_path):
    save(tiny_classifier("llama", vocab_size=100), neox(), tmp_path)
    with pytest.raises(UserError, match=r"scorer\.path must fit the model"):
        build(qwen(), path=str(tmp_path))
