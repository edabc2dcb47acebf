"""What engines share that divide the weights over the ranks: whole copies, and the saved model.

No rank of such an engine has the whole model. To generate, a rank fills a copy of an empty model.
"""

from __future__ import annotations

import copy
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from rlhf.config.models import Dtype
from rlhf.engines.engine import Engine
from rlhf.models.loading import save
from rlhf.models.modules import LogprobHead, RewardModel, ValueModel, score_head


class Divided(Engine):
    """An engine that may divide the weights over the ranks; its `weights` gathers one tensor at a time."""

    def whole(self, plan: PreTrainedModel) -> PreTrainedModel:
        """Return a copy of `plan`, a model without weights, with the current weights of the trained model.

        With bfloat16, weights that autocast would round are stored in bfloat16.
        """
        model = copy.deepcopy(plan)
        narrow = rounded_weights(model) if self.settings.dtype is Dtype.bfloat16 else {}
        state = {
            name: tensor.to(torch.bfloat16 if name in narrow else tensor.dtype, copy=True)
            for name, tensor in self.weights()
        }
        model.load_state_dict(state, assign=True)
        model.tie_weights()
        torch.nn.Module.to(model, self.ranks.device)  # buffers
        return model

    def save_model(self, folder: Path) -> None:
        """Write the trained model in Hugging Face format."""
        first = self.ranks.first
        state = {name: tensor.to("cpu", copy=True) for name, tensor in self.weights() if first}
        if first:
            save(self.module.model, self.tokenizer, folder, state)


def hollow(model: PreTrainedModel) -> PreTrainedModel:
    """Return a model of the same class and config, without adapters and weights; only buffers use memory."""
    with torch.device("meta"):
        made = type(model)(model.config).eval().requires_grad_(False)
    for name, buffer in model.named_buffers():
        owner, _, own = name.rpartition(".")
        made.get_submodule(owner).register_buffer(own, buffer.clone(), persistent=name in made.state_dict())
    head = model.get_output_embeddings()
    if isinstance(head, LogprobHead):
        made.set_output_embeddings(LogprobHead.of(made.get_output_embeddings(), head.float32, head.absent))
    return made


def rounded_weights(module: nn.Module) -> dict[str, Any]:
    """Return the weights that autocast rounds to 16 bits before every use, by name.

    These are the weights of linear layers, except weights that another layer uses as well and the weights of
    heads that compute in float32.
    """
    users = Counter(id(own) for part in module.modules() for own in part.parameters(recurse=False))
    exact = {
        id(own)
        for part in module.modules()
        if isinstance(part, RewardModel | ValueModel)
        for own in score_head(part.model).parameters()
    }
    return {
        f"{name}.weight": part.weight
        for name, part in module.named_modules()
        if (type(part) is nn.Linear or (isinstance(part, LogprobHead) and not part.float32))
        and users[id(part.weight)] == 1
        and id(part.weight) not in exact
    }
