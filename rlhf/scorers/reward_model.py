"""A reward model as scorer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from rlhf.core.encoding import encode_completions, encode_prompts
from rlhf.models.inference import infer
from rlhf.models.loading import load_reward_model, load_tokenizer, same_tokens
from rlhf.models.modules import RewardModel
from rlhf.scorers.scorer import Scorer, response_texts

if TYPE_CHECKING:
    from rlhf.config.model import Dtype
    from rlhf.config.root import Config
    from rlhf.config.scorer import RewardModelScorerConfig
    from rlhf.core.batch import Rollouts
    from rlhf.processes.ranks import Ranks


class RewardModelScorer(Scorer):
    """Reads the reward at the last response token.

    Args:
        config: its settings.
        model: the reward model, where the backend has placed it.
        tokenizer: the policy's.
        own_tokenizer: the reward model's, where it is another: prompts and responses are then tokenized
            anew for it alone; None where token ids can be passed on as they are.
        ranks: which divide the work.
    """

    def __init__(
        self,
        config: RewardModelScorerConfig,
        model: RewardModel,
        tokenizer: PreTrainedTokenizerBase,
        own_tokenizer: PreTrainedTokenizerBase | None,
        ranks: Ranks,
        dtype: Dtype,
    ) -> None:
        super().__init__(config)
        self.model = model
        self.tokenizer = tokenizer
        self.own_tokenizer = own_tokenizer
        self.batch_size = config.batch_size
        self.ranks = ranks
        self.dtype = dtype

    def score(self, rollouts: Rollouts) -> Tensor:
        """The rewards [N, K]."""
        if self.own_tokenizer is not None:
            rollouts = self.retokenize(rollouts, self.own_tokenizer)
        return infer(self.model, rollouts, "rewards", self.batch_size, self.ranks, self.dtype)

    def retokenize(self, rollouts: Rollouts, own: PreTrainedTokenizerBase) -> Rollouts:
        """The same texts in the reward model's tokens; only a response that had ended gets an EOS."""
        texts = response_texts(rollouts, self.tokenizer)
        prompts = encode_prompts(rollouts.index, rollouts.texts, rollouts.references, own)
        return encode_completions(prompts, texts, own, response_length=None, ended=rollouts.ended)


def load_scorer(
    config: RewardModelScorerConfig, cfg: Config, tokenizer: PreTrainedTokenizerFast, ranks: Ranks
) -> RewardModelScorer:
    """The reward model at `config.path`, or at `model.reward`."""
    path, key = (
        (config.path, f"{config.key(cfg)}.path") if config.path else (cfg.model.reward, "model.reward")
    )
    assert path is not None, "validated: a reward model is named or made"
    options: dict[str, Any] = {
        "attention": cfg.model.attention,
        "trust_remote_code": cfg.model.trust_remote_code,
        "key": key,
    }
    model = load_reward_model(path, getattr(torch, cfg.model.dtype.value), **options)
    own = load_tokenizer(path, cfg.model.pad_token, cfg.model.trust_remote_code, key)
    return RewardModelScorer(
        config,
        cfg.backend.place(RewardModel(model, cfg.model.shared_prefix), ranks),
        tokenizer,
        None if same_tokens(own, tokenizer) else own,
        ranks,
        cfg.model.dtype,
    )
