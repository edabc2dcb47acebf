"""A scorer that computes scores with a reward model."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from rlhf.config.scorers import RewardModelScorerConfig
from rlhf.core.batch import Budget, Rollouts
from rlhf.core.errors import UserError
from rlhf.models.loading import load_reward_model
from rlhf.models.modules import RewardModel
from rlhf.models.placement import infer
from rlhf.models.tokenizer import check_vocabulary, fill_pad_token, read_tokenizer, same_tokens
from rlhf.scorers.scorer import Scorer, ScorerContext, response_texts
from rlhf.text.chat import Dialogues, control_tokens, end_responses_with_turns, quoted, set_clock
from rlhf.text.encoding import encode_completions, encode_prompts

if TYPE_CHECKING:
    from rlhf.config.models import ModelConfig

log = logging.getLogger(__name__)


class RewardModelScorer(Scorer):
    """A scorer that returns the output of a reward model at the last response token.

    Args:
        config: config section of the scorer.
        context: the objects of the run that a scorer needs.
        model: the reward model, on the device or divided over the ranks.
        own_tokenizer: tokenizer of the reward model, if its tokens, or its format of dialogues, differ from
            those of the policy. Prompts and responses are then decoded and tokenized again; dialogues get the
            format of the reward model's chat template, if it has one. None: the reward model gets the
            policy's ids.
    """

    config: RewardModelScorerConfig

    def __init__(
        self,
        config: RewardModelScorerConfig,
        context: ScorerContext,
        model: RewardModel,
        own_tokenizer: PreTrainedTokenizerBase | None,
    ) -> None:
        super().__init__(config, context)
        self.model = model
        self.own_tokenizer = own_tokenizer
        self.dtype = context.model.dtype

    def score(self, rollouts: Rollouts) -> Tensor:
        """Return the scores [N, K] that the reward model computes."""
        if self.own_tokenizer is not None:
            rollouts = self.retokenize(rollouts, self.own_tokenizer)
        return infer(self.model, rollouts, "rewards", Budget(self.config.batch_size), self.ranks, self.dtype)

    def retokenize(self, rollouts: Rollouts, own: PreTrainedTokenizerBase) -> Rollouts:
        """Return `rollouts` in tokens of the tokenizer `own`; only responses that had ended get an EOS.

        The chat template of `own`, if it has one, writes the whole dialogue with the response. A response
        contributes no control token of `own`, and a prompt only those that are control tokens of the policy.
        """
        responses = response_texts(rollouts, self.tokenizer)
        texts, dialogues = rollouts.texts, rollouts.dialogues if own.chat_template else None
        if dialogues is not None:
            format, tools = Dialogues(own), rollouts.tools or [None] * len(rollouts)
            answers = [[[{"role": "assistant", "content": each}] for each in row] for row in responses]
            written = [
                format.continued(messages, row, rollouts.place(i), each)
                for i, (messages, row, each) in enumerate(zip(dialogues, answers, tools, strict=True))
            ]
            texts, responses = [prompt for prompt, _ in written], [row for _, row in written]
        else:
            texts = quoted(texts, control_tokens(own, besides=self.tokenizer))
            responses = quoted(responses, control_tokens(own))
        prompts = encode_prompts(rollouts.index, texts, rollouts.references, own, dialogues is not None)
        return encode_completions(prompts, responses, own, response_length=None, ended=rollouts.ended)


def read_own(key: str, path: str, model: ModelConfig, conversational: bool) -> PreTrainedTokenizerFast:
    """Return the tokenizer of the reward model that `key=path` names.

    Raises:
        UserError: the tokenizer cannot be read, or its chat template formats no dialogue.
    """
    own = read_tokenizer(path, model.trust_remote_code, key)
    set_clock(own, model.clock)
    if conversational and own.chat_template:
        end_responses_with_turns(own)
    return own


def reads_tokens_of(own: PreTrainedTokenizerFast, policy: PreTrainedTokenizerFast, dialogues: bool) -> bool:
    """Return whether a reward model with the tokenizer `own` reads the tokens of the policy as they are."""
    other_format = dialogues and own.chat_template and own.chat_template != policy.chat_template
    return same_tokens(own, policy) and not other_format


def build(config: RewardModelScorerConfig, context: ScorerContext) -> RewardModelScorer:
    """Return a scorer with the reward model and tokenizer at `config.path`, or else at `model.reward`.

    Raises:
        UserError: the model or its tokenizer cannot be loaded, or do not fit each other or the policy.
    """
    model = context.model
    named = config.reward_model(context.at, model.reward)
    assert named is not None, "validated: a reward model is named or made"
    key, path = named
    own = read_own(key, path, model, context.conversational)

    def load() -> RewardModel:
        loaded = load_reward_model(
            path,
            getattr(torch, model.dtype.value),
            attention=model.loaded_attention,
            trust_remote_code=model.trust_remote_code,
            key=key,
        )
        check_vocabulary(loaded, own, key)
        return RewardModel(loaded, model.shared_prefix)

    placed = context.place(load)
    fill_pad_token(own, config.pad_token, f"{context.at}.pad_token")
    if context.conversational and context.tokenizer.chat_template and not own.chat_template:
        log.warning("%s=%s has no chat template: it reads the prompts in the format of the policy", key, path)
    as_it_is = reads_tokens_of(own, context.tokenizer, context.conversational)
    if context.turns is not None and not as_it_is:
        rule = f"{key} must have the tokenizer and the chat template of the policy"
        chosen = context.at if context.at == "scorer" else f"scorer@{context.at}"
        remedy = f"set {chosen}=environment or answer"
        raise UserError(f"{rule} (episodes are never tokenized again), got {path}; {remedy}")
    return RewardModelScorer(config, context, placed, None if as_it_is else own)
