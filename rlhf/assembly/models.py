"""Construction of the models and the tokenizer of a run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from transformers import PreTrainedTokenizerFast

from rlhf.assembly.parts import make, part
from rlhf.config.algo import PPOConfig, Trains, ValueFrom
from rlhf.config.model import NanoConfig
from rlhf.config.task import EmbeddedTaskConfig
from rlhf.core.errors import UserError
from rlhf.core.seeding import derive
from rlhf.engines.engine import trained
from rlhf.models.loading import (
    load_causal_lm,
    load_reward_model,
    load_tokenizer,
    new_nano,
    new_reward_model,
    same_tokens,
)
from rlhf.models.lora import adapt
from rlhf.models.modules import ActorCritic, Policy, RewardModel, RolloutModule, ValueModel, score_head
from rlhf.models.shared_prefix import checkpoint_blocks

if TYPE_CHECKING:
    from rlhf.config.root import Config
    from rlhf.processes.ranks import Ranks

M = TypeVar("M", bound=RolloutModule)


def build_module(cfg: Config, tokenizer: PreTrainedTokenizerFast) -> Policy | RewardModel | ActorCritic:
    """Return the module that the run trains, with its initial weights; trained weights are float32."""
    module = build_model(cfg, tokenizer)
    if not isinstance(cfg.algo, PPOConfig):
        return module
    assert isinstance(module, Policy)
    return ActorCritic(module, for_training(build_value_model(cfg, tokenizer), cfg, "value"))


def loading(cfg: Config) -> dict[str, Any]:
    """Return the keyword arguments for loading a trained model."""
    model = cfg.model
    return {
        "dtype": getattr(torch, model.dtype.value) if model.lora.rank else torch.float32,
        "attention": model.attention,
        "trust_remote_code": model.trust_remote_code,
    }


def build_model(cfg: Config, tokenizer: PreTrainedTokenizerFast) -> Policy | RewardModel:
    """Return the policy or reward model that the run trains and saves, with its initial weights."""
    model = cfg.model
    options = loading(cfg)
    if cfg.algo.trains is Trains.reward:
        assert model.policy is not None
        rng = torch.Generator().manual_seed(derive(cfg.seed, "reward head"))
        made = new_reward_model(model.policy, tokenizer.pad_token_id, rng, **options)
        return for_training(RewardModel(made, model.shared_prefix), cfg, "reward")
    if cfg.algo.trains is Trains.base and model.base is None:
        assert isinstance(model, NanoConfig), "validated: only the embedded model starts from nothing"
        nano = Policy(new_nano(model, tokenizer), cfg.generator.temperature, model.shared_prefix)
        return for_training(nano, cfg, "policy")
    assert cfg.start is not None
    key = f"model.{cfg.algo.trains.value}"
    policy = Policy(
        load_causal_lm(cfg.start, key=key, **options), cfg.generator.temperature, model.shared_prefix
    )
    return for_training(policy, cfg, "policy")


def for_training(module: M, cfg: Config, name: str) -> M:
    """Return `module` with the adapters and the gradient checkpointing that the config sets."""
    if cfg.model.lora.rank:
        adapt(module.model, cfg.model.lora, derive(cfg.seed, "adapters", name))
    if cfg.model.gradient_checkpointing:
        checkpoint_blocks(module.model)
    return module


def trained_parts(module: torch.nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the (name, value) row of trained parameters for the summary, if some parameters are frozen."""
    every = sum(parameter.numel() for parameter in module.parameters())
    ours = sum(parameter.numel() for parameter in trained(module))
    if ours < every:
        yield "trained parameters", f"{ours:,} of {every:,}, in adapters and in modules trained whole"


def build_value_model(cfg: Config, tokenizer: PreTrainedTokenizerFast) -> ValueModel:
    """Return the initial value model: the reward model, or the policy with a zero value head.

    Raises:
        UserError: the reward model has another tokenizer than the policy.
    """
    model = cfg.model
    options = loading(cfg)
    if cfg.value_starts_as is ValueFrom.policy:
        assert model.policy is not None
        made = new_reward_model(model.policy, tokenizer.pad_token_id, None, **options)
        torch.nn.init.zeros_(score_head(made).weight)
        return ValueModel(made, model.shared_prefix)
    path = cfg.value_reward
    assert path is not None, "validated: a reward model is named or made"
    own = load_tokenizer(path, model.pad_token, model.trust_remote_code, "model.reward")
    if not same_tokens(own, tokenizer):
        raise UserError(
            "algo.value_from must be policy if the reward model has another tokenizer (the value model "
            f"reads the policy's tokens), got reward with {path!r}; set algo.value_from=policy"
        )
    return ValueModel(load_reward_model(path, **options), model.shared_prefix)


def build_tokenizer(cfg: Config) -> PreTrainedTokenizerFast:
    """Return the policy's tokenizer; for a model with random weights, the tokenizer of the embedded task."""
    name = cfg.model.tokenizer or cfg.start
    if name is None:
        assert isinstance(cfg.task, EmbeddedTaskConfig), "validated: only embedded tasks start from nothing"
        tokenizer: PreTrainedTokenizerFast = make(cfg.task).tokenizer()
        return tokenizer
    key = "model.tokenizer" if cfg.model.tokenizer else "model.policy"
    return load_tokenizer(name, cfg.model.pad_token, cfg.model.trust_remote_code, key)


def build_reference(cfg: Config, ranks: Ranks) -> Policy:
    """Return the frozen reference on the device, whole or sharded as the backend requires.

    The reference is the model that `model.reference` names, otherwise the initial policy.
    """
    model = cfg.model
    name = model.reference or model.policy
    assert name is not None, "validated: a policy is named or made"
    dtype = getattr(torch, model.dtype.value)
    frozen = load_causal_lm(name, dtype, model.attention, model.trust_remote_code, key="model.reference")
    policy = Policy(frozen, cfg.generator.temperature, model.shared_prefix)
    placed: Policy = part(cfg.backend).place(cfg.backend, policy, ranks)
    return placed
