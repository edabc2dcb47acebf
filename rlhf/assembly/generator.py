"""Build the generator of a run."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedTokenizerFast

from rlhf.generators.across_ranks import OneForAll, OneForEach
from rlhf.generators.hf.generator import HFGenerator
from rlhf.models.loading import load_causal_lm

if TYPE_CHECKING:
    from rlhf.config.root import Config
    from rlhf.engines.engine import Engine
    from rlhf.generators.generator import Generator
    from rlhf.processes.ranks import Ranks
    from rlhf.runs.folder import RunFolder


def build_sampler(
    cfg: Config, tokenizer: PreTrainedTokenizerFast, device: torch.device, seed: int
) -> HFGenerator:
    """A generator that samples from `model.policy` without anything being trained."""
    assert cfg.model.policy is not None
    model = load_causal_lm(cfg.model.policy, torch.float32, cfg.model.attention, cfg.model.trust_remote_code)
    torch.nn.Module.to(model, device)
    return HFGenerator(lambda: nullcontext(model), tokenizer, batch_size=256, seed=seed)


def build_generator(
    cfg: Config, engine: Engine, tokenizer: PreTrainedTokenizerFast, folder: RunFolder, ranks: Ranks
) -> Generator:
    """The generator: of the first rank for all, or one on each rank."""

    def build() -> Generator:
        return cfg.generator.build(cfg, engine, tokenizer, folder.path)

    if ranks.size == 1 or not cfg.generator.samples:
        return build()
    if cfg.generator.on_each_rank(cfg):
        return OneForEach(build(), ranks)
    return OneForAll(build() if ranks.first else None, ranks)
