"""The models of a run: what they compute for rollouts, and how they are loaded, made and saved.

A `Policy` gives log-probs, a `RewardModel` scores, a `ValueModel` values; each wraps a Hugging Face model
that stays what it was (attribute `model`), so it is saved, sharded and generated from as such. An
`ActorCritic` is a policy and a value model that are trained together.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf.core.batch import Outputs
from rlhf.core.errors import UserError
from rlhf.models.logprobs import token_logprobs
from rlhf.models.lora import without_adapters
from rlhf.models.shared_prefix import encode, shared_prefix_problem

if TYPE_CHECKING:
    from rlhf.core.batch import Rollouts


LOGIT_SCALES = ("logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier")


class LogprobHead(nn.Linear):
    """The output embeddings of a causal LM; called with `targets`, it returns their log-probs, not logits.

    It replaces the model's own `nn.Linear` and takes over its parameters, so names in a state dict stay.
    Being called as a module matters: ZeRO-3 gathers a module's weights when it is called.
    """

    def forward(self, input: Tensor, targets: Tensor | None = None, temperature: float = 1.0) -> Tensor:
        """Logits [..., V] of input [..., H]; with targets [R], log-probs [R] float32 of input [R, H]."""
        if targets is None:
            return super().forward(input)
        return token_logprobs(input, self.weight, self.bias, targets, temperature)

    @staticmethod
    def of(linear: nn.Linear) -> LogprobHead:
        """A head with the parameters of `linear`, the same objects."""
        head = LogprobHead(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        head.weight, head.bias = linear.weight, linear.bias
        return head.train(linear.training)


class OverRollouts(nn.Module):
    """A Hugging Face model (`model`) that is run over rollouts.

    Raises UserError where `shared_prefix` is asked for but the model's cache cannot be repeated.
    """

    def __init__(self, model: PreTrainedModel, shared_prefix: bool) -> None:
        super().__init__()
        problem = shared_prefix_problem(model.config) if shared_prefix else None
        if problem is not None:
            raise UserError(problem)
        self.model = model
        self.shared_prefix = shared_prefix
        self.whole = False  # whether each forward runs to its end, as hooks of ZeRO-3 need it

    def states(self, batch: Rollouts, last: bool) -> Tensor:
        """Hidden states around the responses, as `rlhf.forward.encode` gives them."""
        return encode(
            backbone(self.model),
            batch.prompt_ids,
            batch.prompt_mask,
            batch.response_ids,
            batch.response_mask,
            self.shared_prefix,
            last,
            self.whole,
        )


class Policy(OverRollouts):
    """A causal LM (`model`) that gives the log-probs of rollouts at `temperature`.

    Raises UserError also where its logits are more than the output embeddings of its hidden states.
    """

    def __init__(self, model: PreTrainedModel, temperature: float, shared_prefix: bool) -> None:
        super().__init__(model, shared_prefix)
        head = model.get_output_embeddings()
        if not isinstance(head, LogprobHead):
            if type(head) is not nn.Linear:
                raise UserError(
                    "model.policy must name a model with a linear output head (log-probs are computed from "
                    f"its weight), got {model.config.model_type} with {type(head).__name__}; choose another "
                    "model"
                )
            model.set_output_embeddings(LogprobHead.of(head))
        self.temperature = temperature
        self.logit_scale = logit_scale(model)
        self.adapters = True  # where the model has some

    def before_adapters(self) -> Policy:
        """The same model, not a copy of it, run without its adapters."""
        other = copy.copy(self)
        other.adapters = False
        return other

    def at(self, temperature: float) -> Policy:
        """The same policy, the same modules where they are, at another temperature."""
        other = copy.copy(self)
        other.temperature = temperature
        return other

    def forward(self, batch: Rollouts) -> Outputs:
        """Log-probs [N, K, T] of the responses, 0 at padding; the head sees real response positions only."""
        mask = batch.response_mask
        with nullcontext() if self.adapters else without_adapters(self.model):
            hidden = self.states(batch, last=False)
            head = self.model.get_output_embeddings()
            found = head(
                hidden[mask],
                targets=batch.response_ids[mask],
                temperature=self.temperature / self.logit_scale,
            )
        zeros = torch.zeros(mask.shape, dtype=found.dtype, device=found.device)
        return Outputs(logprobs=zeros.masked_scatter(mask, found))


def backbone(model: PreTrainedModel) -> PreTrainedModel:
    """The model without its head."""
    base = model.base_model
    assert isinstance(base, PreTrainedModel)
    return base


def score_head(model: PreTrainedModel) -> nn.Linear:
    """The head of a sequence classifier; with adapters, what stands in its place."""
    return cast(nn.Linear, model.get_submodule("score"))


def read(model: PreTrainedModel, states: Tensor) -> Tensor:
    """What a reward or value model says of hidden states [..., H]: [...] float32, centred where it is."""
    head = score_head(model)
    with torch.autocast(states.device.type, enabled=False):  # one number a state: worth float32
        said = head(states.to(head.weight.dtype))[..., 0].float()
    return said - getattr(model.config, "reward_offset", 0.0)


@torch.no_grad()
def logit_scale(model: PreTrainedModel) -> float:
    """The factor between the model's logits and its output embeddings of its hidden states, 1 for most.

    Models differ in what they do to logits (a scale, a soft cap) and how their configs call it, so it is
    measured on two tokens. Raises UserError where it is no factor that the config names.
    """
    ids = torch.tensor([[0, 1]], device=model.device)
    training = model.training
    model.eval()
    logits = model(input_ids=ids, use_cache=False).logits.float()
    raw = model.get_output_embeddings()(
        backbone(model)(input_ids=ids, use_cache=False).last_hidden_state
    ).float()
    model.train(training)
    named = [float(v) for v in (getattr(model.config, name, None) for name in LOGIT_SCALES) if v]
    tolerance = 1e-4 if model.dtype == torch.float32 else 0.05
    for scale in (1.0, *named, *(1 / v for v in named)):
        if torch.allclose(logits, raw * scale, rtol=tolerance, atol=tolerance * float(logits.abs().max())):
            return scale
    raise UserError(
        "model.policy must name a model whose logits are a linear function of its last hidden state "
        f"(log-probs are computed from the head's weight), got {model.config.model_type}, which changes "
        "them afterwards, for example by a soft cap; choose another model"
    )


class RewardModel(OverRollouts):
    """A sequence classifier with one label (`model`) that scores rollouts.

    It reads the state of the last real response token. Rewards are centred by `config.reward_offset`, where
    the config has one.
    """

    def forward(self, batch: Rollouts) -> Outputs:
        """Rewards [N, K] float32. An empty response is read at the last prompt token."""
        hidden = self.states(batch, last=True)
        place = batch.response_mask.sum(-1)  # position t is the state after t tokens
        state = hidden.gather(2, place[:, :, None, None].expand(-1, -1, 1, hidden.shape[-1]))[:, :, 0]
        return Outputs(rewards=read(self.model, state))


class ValueModel(OverRollouts):
    """A sequence classifier with one label (`model`) that gives the value of every state of a response.

    Where it was a reward model, its values start as what that would say of the text so far.
    """

    def forward(self, batch: Rollouts) -> Outputs:
        """Values [N, K, T+1] float32; beyond the state after the last response token they mean nothing."""
        return Outputs(values=read(self.model, self.states(batch, last=True)))


class ActorCritic(nn.Module):
    """A policy and its value model as one module: what one optimizer, or one ZeRO engine, trains."""

    def __init__(self, actor: Policy, critic: ValueModel) -> None:
        super().__init__()
        self.actor = actor
        self.critic = critic

    @property
    def model(self) -> PreTrainedModel:
        """The Hugging Face model of the policy: what is generated from and left behind."""
        return self.actor.model

    def forward(self, batch: Rollouts) -> Outputs:
        """Log-probs [N, K, T] and values [N, K, T+1]."""
        return Outputs(logprobs=self.actor(batch).logprobs, values=self.critic(batch).values)
