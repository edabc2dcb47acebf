"""A scorer that computes scores with a reward model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf.core.encoding import encode_completions, encode_prompts
from rlhf.models.inference import infer
from rlhf.models.loading import load_reward_model, load_tokenizer, same_tokens
from rlhf.models.modules import RewardModel
from rlhf.scorers.scorer import Scorer, response_texts

if TYPE_CHECKING:
    from rlhf.config.scorer import RewardModelScorerConfig
    from rlhf.core.batch import Rollouts
    from rlhf.scorers.scorer import ScorerContext


class RewardModelScorer(Scorer):
    """A scorer that returns the output of a reward model at the last response token.

    Args:
        config: config section of the scorer.
        context: the objects of the run that a scorer needs.
        model: the reward model, on the device or divided over the ranks.
        own_tokenizer: tokenizer of the reward model, if it differs from the tokenizer of the policy. Prompts
            and responses are then decoded and tokenized again. None: the reward model gets the policy's ids.
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
        return infer(self.model, rollouts, "rewards", self.config.batch_size, self.ranks, self.dtype)

    def retokenize(self, rollouts: Rollouts, own: PreTrainedTokenizerBase) -> Rollouts:
        """Return `rollouts` in tokens of the tokenizer `own`; only responses that had ended get an EOS."""
        texts = response_texts(rollouts, self.tokenizer)
        prompts = encode_prompts(rollouts.index, rollouts.texts, rollouts.references, own)
        return encode_completions(prompts, texts, own, response_length=None, ended=rollouts.ended)


def build(config: RewardModelScorerConfig, context: ScorerContext) -> RewardModelScorer:
    """Return a scorer with the reward model and tokenizer at `config.path`, or else at `model.reward`.

    Raises:
        UserError: the model or its tokenizer cannot be loaded.
    """
    model = context.model
    path, key = (config.path, f"{context.at}.path") if config.path else (model.reward, "model.reward")
    assert path is not None, "validated: a reward model is named or made"
    loaded = load_reward_model(
        path,
        getattr(torch, model.dtype.value),
        attention=model.attention,
        trust_remote_code=model.trust_remote_code,
        key=key,
    )
    own = load_tokenizer(path, model.pad_token, model.trust_remote_code, key)
    return RewardModelScorer(
        config,
        context,
        context.place(RewardModel(loaded, model.shared_prefix)),
        None if same_tokens(own, context.tokenizer) else own,
    )
