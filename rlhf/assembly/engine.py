"""Construction of the engine of a run: module, frozen reference, optimizer settings."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from transformers import PreTrainedTokenizerFast

from rlhf.assembly.budgets import inference_budget, training_budget
from rlhf.assembly.models import build_model, build_module, build_reference, load_model, loaded, trained_parts
from rlhf.assembly.parts import part
from rlhf.config.algo import Trains
from rlhf.config.model import Dtype
from rlhf.core.console import say
from rlhf.engines.engine import Engine, EngineSettings
from rlhf.engines.torch_engine import FrozenEngine
from rlhf.models.modules import RolloutModule
from rlhf.models.tokenizer import check_vocabulary
from rlhf.trials.agreement import compared

if TYPE_CHECKING:
    from rlhf.config.root import Config
    from rlhf.core.state import TrainState
    from rlhf.models.modules import Policy
    from rlhf.processes.ranks import Ranks

E = TypeVar("E", bound=Engine)


def build_engine(cfg: Config, tokenizer: PreTrainedTokenizerFast, ranks: Ranks, state: TrainState) -> Engine:
    """Return the engine of a run that trains, and print the number of trained parameters if some are frozen.

    Raises:
        UserError: the vocabulary or the context of the model is too small, or the model cannot be used.
    """
    module = loaded(lambda: build_module(cfg, tokenizer), cfg, ranks)
    check_vocabulary(module.model, tokenizer)
    for name, value in trained_parts(module):
        say(f"  {name + ':':24}{value}")
    steps = cfg.schedule.minibatches * cfg.schedule.epochs
    engine = part(cfg.backend).build(
        cfg.backend,
        module=module,
        reference=build_second_model(cfg, tokenizer, ranks),
        tokenizer=tokenizer,
        ranks=ranks,
        settings=EngineSettings(
            optim=cfg.optim,
            total_steps=state.num_updates * steps,
            steps_per_batch=steps,
            budget=training_budget(cfg),
            inference=inference_budget(cfg),
            stale=cfg.schedule.off_policy or not cfg.generator.samples,
            exact_sampler=cfg.generator.exact
            and not cfg.generator.noisy
            and cfg.model.dtype is Dtype.float32,
            dtype=cfg.model.dtype,
            value_lr=cfg.algo.value_lr,
        ),
    )
    return _with_reference(with_compared_modules(engine, cfg), cfg)


def build_frozen(
    cfg: Config, tokenizer: PreTrainedTokenizerFast, ranks: Ranks, named: bool = False
) -> FrozenEngine:
    """Return the engine of a run that is only evaluated.

    The engine has the module and the reference, but no optimizer and no value model.

    Args:
        cfg: the config of the run.
        tokenizer: the policy's tokenizer.
        ranks: the ranks of the run.
        named: whether the model that `cfg` starts from is evaluated itself: a reward model keeps its head.
    """
    module = load_model(cfg, tokenizer) if named else build_model(cfg, tokenizer)
    check_vocabulary(module.model, tokenizer, "models" if named else "model.tokenizer")
    engine = FrozenEngine(
        module,
        build_second_model(cfg, tokenizer, ranks),
        tokenizer,
        inference=inference_budget(cfg),
        ranks=ranks,
        dtype=cfg.model.dtype,
    )
    return _with_reference(with_compared_modules(engine, cfg), cfg)


def with_compared_modules(engine: E, cfg: Config) -> E:
    """Return `engine`, whose modules share the encoding of prompts only if their models allow this.

    Raises:
        UserError: a model cannot be used.
    """
    for module in engine.module.modules():
        if isinstance(module, RolloutModule):
            compared(module, cfg, engine.ranks)
    return engine


def build_second_model(cfg: Config, tokenizer: PreTrainedTokenizerFast, ranks: Ranks) -> Policy | None:
    """Return the reference model if the reference has weights of its own.

    Returns:
        The reference. None: the run has no reference, or the reference is the policy without its adapters.
    """
    compares = cfg.algo.trains is Trains.policy
    return build_reference(cfg, tokenizer, ranks) if compares and not _reference_is_policy(cfg) else None


def _with_reference(engine: E, cfg: Config) -> E:
    """Return `engine`; if the reference is the policy without its adapters, set it in the engine."""
    if _reference_is_policy(cfg):
        engine.reference = engine.policy.before_adapters()
    return engine


def _reference_is_policy(cfg: Config) -> bool:
    """Return whether the reference is the policy without its adapters, which is the initial policy."""
    return cfg.algo.trains is Trains.policy and bool(cfg.model.lora.rank) and cfg.model.starts_as_reference
