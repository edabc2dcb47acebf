"""Construction of the models of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from rlhf.assembly.parts import part
from rlhf.config.algo import Trains
from rlhf.config.policy_gradient import ValueFrom
from rlhf.core.errors import UserError
from rlhf.core.seeding import derive
from rlhf.engines.engine import trained
from rlhf.models.forward import checkpoint_blocks
from rlhf.models.loading import load_causal_lm, load_reward_model, new_nano, new_reward_model
from rlhf.models.modules import ActorCritic, Policy, RewardModel, RolloutModule, ValueModel, adapt, score_head
from rlhf.models.placement import build_on_first
from rlhf.models.tokenizer import check_vocabulary, read_tokenizer
from rlhf.trials.agreement import compared

if TYPE_CHECKING:
    from rlhf.config.root import Config
    from rlhf.processes.ranks import Ranks

M = TypeVar("M", bound=RolloutModule)
N = TypeVar("N", bound=torch.nn.Module)


def loaded(build: Callable[[], N], cfg: Config, ranks: Ranks) -> N:
    """Return the module that `build` returns.

    If the backend divides the weights over the ranks, only the first rank calls `build`, and the other ranks
    get placeholders. A model with code of its own is built on every rank, because other ranks cannot receive
    its classes.
    """
    divides = cfg.backend.footprint().gathered and ranks.size > 1
    return build_on_first(build, ranks) if divides and not cfg.model.trust_remote_code else build()


def build_module(cfg: Config, tokenizer: PreTrainedTokenizerFast) -> Policy | RewardModel | ActorCritic:
    """Return the module that the run trains, with its initial weights; trained weights are float32."""
    module = build_model(cfg, tokenizer)
    if cfg.value_starts_as is None:
        return module
    assert isinstance(module, Policy)
    return ActorCritic(module, _for_training(_build_value_model(cfg, tokenizer), cfg, "value"))


def loading(cfg: Config) -> dict[str, Any]:
    """Return the keyword arguments for loading a trained model."""
    model = cfg.model
    return {
        "dtype": getattr(torch, model.dtype.value) if model.lora.rank else torch.float32,
        "attention": model.loaded_attention,
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
        return _for_training(RewardModel(made, model.shared_prefix), cfg, "reward")
    if cfg.algo.trains is Trains.base and model.base is None:
        return _for_training(_policy_of(new_nano(model, tokenizer), tokenizer, cfg), cfg, "policy")
    assert cfg.start is not None
    key = f"model.{cfg.algo.trains.value}"
    made = load_causal_lm(cfg.start, key=key, **options)
    return _for_training(_policy_of(made, tokenizer, cfg), cfg, "policy")


def _policy_of(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, cfg: Config) -> Policy:
    """Return a causal LM as a policy over the tokens of `tokenizer`, at the temperature of the run."""
    tokens = tokenizer.get_vocab().values()
    return Policy(model, cfg.generator.temperature, cfg.model.shared_prefix, cfg.model.float32_head, tokens)


def load_model(cfg: Config, tokenizer: PreTrainedTokenizerFast) -> Policy | RewardModel:
    """Return the trained policy or reward model at the path that the run starts from."""
    if cfg.algo.trains is not Trains.reward:
        return build_model(cfg, tokenizer)
    assert cfg.model.policy is not None
    loaded = load_reward_model(cfg.model.policy, key="models", **loading(cfg))
    return RewardModel(loaded, cfg.model.shared_prefix)


def _for_training(module: M, cfg: Config, name: str) -> M:
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


def _build_value_model(cfg: Config, tokenizer: PreTrainedTokenizerFast) -> ValueModel:
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
    own = read_tokenizer(path, model.trust_remote_code, "model.reward")
    if own.get_vocab() != tokenizer.get_vocab():
        raise UserError(
            "algo.value_from must be policy if the reward model has another tokenizer (the value model "
            f"reads the policy's tokens), got reward with {path!r}; set algo.value_from=policy"
        )
    loaded = load_reward_model(path, **options)
    check_vocabulary(loaded, tokenizer, "model.reward")
    return ValueModel(loaded, model.shared_prefix)


def build_reference(cfg: Config, tokenizer: PreTrainedTokenizerFast, ranks: Ranks) -> Policy:
    """Return the frozen reference on the device, whole or sharded as the backend requires.

    The reference is the model that `model.reference` names, otherwise the initial policy.

    Raises:
        UserError: the reference has no embedding for a token of the policy's tokenizer.
    """
    model = cfg.model
    name = model.reference or model.policy
    assert name is not None, "validated: a policy is named or made"
    dtype = getattr(torch, model.dtype.value)

    def build() -> Policy:
        frozen = load_causal_lm(
            name, dtype, model.loaded_attention, model.trust_remote_code, key="model.reference"
        )
        check_vocabulary(frozen, tokenizer, "model.reference")
        return _policy_of(frozen, tokenizer, cfg)

    placed: Policy = part(cfg.backend).place(cfg.backend, loaded(build, cfg, ranks), ranks)
    return compared(placed, cfg, ranks)
