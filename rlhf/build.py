"""Parts of a run that each of its processes makes for itself, from the config alone."""

from __future__ import annotations

import torch
from transformers import PreTrainedTokenizerFast

from rlhf.config import Config, Dtype, float16_needs_gpu
from rlhf.engines.config import Device
from rlhf.errors import UserError
from rlhf.models import Policy, load_causal_lm, load_tokenizer
from rlhf.ranks import Ranks
from rlhf.tasks.config import EmbeddedTaskConfig


def build_device(cfg: Config) -> torch.device:
    """The kind of device that the models are on."""
    name = cfg.backend.device.value
    if cfg.backend.device is Device.auto:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "backend.device=cuda needs a GPU that torch can use, and there is none; set backend.device=auto"
        )
    if name == "cpu" and cfg.model.dtype is Dtype.float16:
        raise UserError(float16_needs_gpu("torch finds none"))
    return torch.device(name)


def build_tokenizer(cfg: Config) -> PreTrainedTokenizerFast:
    """The policy's tokenizer; that of the task's vocabulary where a model is made from nothing."""
    name = cfg.model.tokenizer or cfg.start
    if name is None:
        assert isinstance(cfg.task, EmbeddedTaskConfig), "validated: only embedded tasks start from nothing"
        return cfg.task.tokenizer()
    key = "model.tokenizer" if cfg.model.tokenizer else "model.policy"
    return load_tokenizer(name, cfg.model.pad_token, cfg.model.trust_remote_code, key)


def build_reference(cfg: Config, ranks: Ranks) -> Policy:
    """The frozen policy that training starts from, or that the config names, where the backend has it."""
    model = cfg.model
    name = model.reference or model.policy
    assert name is not None, "validated: a policy is named or made"
    dtype = getattr(torch, model.dtype.value)
    frozen = load_causal_lm(name, dtype, model.attention, model.trust_remote_code, key="model.reference")
    return cfg.backend.place(Policy(frozen, cfg.generator.temperature, model.shared_prefix), ranks)
