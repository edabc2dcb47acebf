"""Construction of the evaluator of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerFast

from rlhf.assembly.parts import make
from rlhf.assembly.scorer import build_scorer
from rlhf.assembly.tokenizer import build_stop_ids
from rlhf.config.algo import Data, Trains
from rlhf.core.batch import Sampling
from rlhf.core.encoding import encode_completions
from rlhf.generators.generator import PerRankGenerator
from rlhf.generators.hf.generator import HFGenerator, HFSettings
from rlhf.training.evaluators import HeldOutPairs, PolicyEvaluator, RewardEvaluator
from rlhf.trials.agreement import samples_with_cache

if TYPE_CHECKING:
    from rlhf.config.root import Config
    from rlhf.engines.engine import Engine
    from rlhf.environments.environment import EnvironmentFactory
    from rlhf.generators.generator import Generator
    from rlhf.processes.ranks import Ranks
    from rlhf.scorers.scorer import Scorer
    from rlhf.tasks.task import Task
    from rlhf.training.evaluators import Evaluator


def build_evaluator(
    cfg: Config,
    task: Task,
    engine: Engine,
    generator: Generator,
    scorer: Scorer | None,
    tokenizer: PreTrainedTokenizerFast,
    ranks: Ranks,
    split: str = "validation",
) -> Evaluator:
    """Return the evaluator of a run on held-out examples.

    Args:
        cfg: the config of the run.
        task: the data of the run.
        engine: the engine that has the trained model.
        generator: the generator of the run. If it returns stored completions, the evaluator gets a
            new generator that samples.
        scorer: the training scorer; None: it is not known.
        tokenizer: the policy's tokenizer.
        ranks: the ranks of the run.
        split: the split of the held-out examples.
    """
    if cfg.algo.trains is Trains.reward:
        pairs = task.held_out(cfg.eval.prompts, split, warn=cfg.eval.asked)
        assert pairs.completions is not None
        length = cfg.generator.response_length
        return RewardEvaluator(encode_completions(pairs, pairs.completions, tokenizer, length), engine)
    held_out_pairs = None
    if cfg.algo.pairwise and cfg.reads_pairs:
        pairs = task.held_out(cfg.eval.prompts, split, warn=cfg.eval.asked)
        assert pairs.completions is not None
        encoded = encode_completions(pairs, pairs.completions, tokenizer, cfg.generator.response_length)
        held_out_pairs = HeldOutPairs(encoded, make(cfg.algo), engine)
    environment: EnvironmentFactory | None = make(cfg.environment, tokenizer)
    if not cfg.generator.samples:  # the generator has no completions of held-out prompts
        settings = HFSettings(
            stop_ids=build_stop_ids(cfg, tokenizer),
            pad_id=tokenizer.pad_token_id,
            batch_size=cfg.eval.batch_size,
            seed=cfg.seed,
            cached=samples_with_cache(engine.module.model, cfg, ranks, engine.borrow_policy),
            environment=environment,
        )
        sampler = HFGenerator(engine.borrow_policy, settings, engine.phases)
        generator = PerRankGenerator(sampler, ranks) if ranks.size > 1 else sampler
    return PolicyEvaluator(
        task.held_out(cfg.eval.prompts, split, Data.prompts, warn=cfg.eval.asked),
        generator,
        build_scorer(cfg, "gold", tokenizer, ranks),
        scorer if cfg.scores_completions else None,
        engine,
        tokenizer,
        Sampling(
            samples=1,
            temperature=cfg.eval.temperature,
            response_length=cfg.generator.response_length,
            purpose="eval",
        ),
        cfg.generator.temperature,
        held_out_pairs,
        tuple(cfg.task.shares),
        engine.phases,
        environment,
    )
