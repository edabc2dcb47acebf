"""Construction of the generator of a run."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedTokenizerFast

from rlhf.assembly.budgets import inference_budget
from rlhf.assembly.device import build_device
from rlhf.assembly.models import build_reference
from rlhf.assembly.parts import make
from rlhf.assembly.scorer import build_training_scorer
from rlhf.assembly.tokenizer import build_stop_ids, build_tokenizer
from rlhf.config.backend import TorchConfig
from rlhf.config.cores import threads
from rlhf.generators.generator import GeneratorContext, PerRankGenerator, SharedGenerator
from rlhf.generators.hf.generator import HFGenerator, HFSettings
from rlhf.generators.process import Annotator
from rlhf.models.loading import load_causal_lm
from rlhf.models.modules import set_head
from rlhf.processes.ranks import Ranks
from rlhf.trials.agreement import samples_with_cache

if TYPE_CHECKING:
    from rlhf.config.root import Config
    from rlhf.engines.engine import Engine
    from rlhf.generators.generator import Generator
    from rlhf.processes.service import Channel
    from rlhf.runs.folder import RunFolder


@dataclass(frozen=True, slots=True)
class AnnotatorFactory:
    """A factory of the annotator of the run `cfg`, which has the scorer and the reference of the trainer."""

    cfg: Config

    def build(self, channel: Channel) -> Annotator:
        """Return the annotator, with unsharded models.

        The reference is loaded only if the objective needs its log-probs.

        Args:
            channel: the connection to the trainer; the annotator does not use it.
        """
        backend = TorchConfig(micro_batch=self.cfg.backend.micro_batch, tokens=self.cfg.backend.tokens)
        cfg, alone = replace(self.cfg, backend=backend), Ranks(build_device(self.cfg))
        tokenizer = build_tokenizer(cfg)
        scorer = build_training_scorer(cfg, tokenizer, alone)
        wanted = "ref_logprobs" in make(cfg.algo).needs
        reference = build_reference(cfg, tokenizer, alone) if wanted else None
        return Annotator(scorer, reference, inference_budget(cfg), alone, cfg.model.dtype)


def build_sampler(
    cfg: Config, tokenizer: PreTrainedTokenizerFast, device: torch.device, seed: int
) -> HFGenerator:
    """Return a generator that samples from the fixed weights of `model.policy`."""
    assert cfg.model.policy is not None
    model = load_causal_lm(
        cfg.model.policy, torch.float32, cfg.model.loaded_attention, cfg.model.trust_remote_code
    )
    set_head(model, float32=False, tokens=tokenizer.get_vocab().values())
    torch.nn.Module.to(model, device)
    settings = HFSettings(
        stop_ids=build_stop_ids(cfg, tokenizer),
        pad_id=tokenizer.pad_token_id,
        batch_size=256,
        seed=seed,
        cached=samples_with_cache(model, cfg, Ranks(device)),
    )
    return HFGenerator(lambda: nullcontext(model), settings)


def build_generator(
    cfg: Config, engine: Engine, tokenizer: PreTrainedTokenizerFast, folder: RunFolder, ranks: Ranks
) -> Generator:
    """Return the generator of the run: a generator on rank 0 for all ranks, or a generator on each rank."""
    cached = not cfg.generator.decodes or samples_with_cache(
        engine.module.model, cfg, ranks, engine.borrow_policy
    )

    def build() -> Generator:
        context = GeneratorContext(
            policy=engine.module.model,
            borrow=engine.borrow_policy,
            tokenizer=tokenizer,
            ranks=ranks,
            folder=folder.path,
            model=cfg.model,
            prompt_tokens=cfg.task.max_prompt_tokens,
            seed=cfg.seed,
            max_lag=cfg.worker_lag,
            in_flight=cfg.schedule.in_flight,
            threads=threads(cfg)[1],
            annotator=AnnotatorFactory(cfg),
            asks_service=cfg.scorer.asks_service,
            cached=cached,
            stop_ids=build_stop_ids(cfg, tokenizer),
            environment=make(cfg.environment, tokenizer),
            phases=engine.phases,
        )
        generator: Generator = make(cfg.generator, context)
        return generator

    if ranks.size == 1 or not cfg.generator.samples:
        return build()
    if cfg.generator.on_each_rank(cfg.schedule.max_lag):
        return PerRankGenerator(build(), ranks)
    return SharedGenerator(build() if ranks.first else None, ranks)
