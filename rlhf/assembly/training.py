"""Construction of the parts of a training run."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerFast

from rlhf.assembly.engine import build_engine
from rlhf.assembly.evaluator import build_evaluator
from rlhf.assembly.generator import build_generator
from rlhf.assembly.parts import make
from rlhf.assembly.scorer import build_training_scorer
from rlhf.config.model import Dtype
from rlhf.core.batch import Sampling
from rlhf.scorers.scorer import SavingScorer
from rlhf.training.checkpoint import Checkpoints
from rlhf.training.loop import Parts
from rlhf.training.recorder import LIMITS, CollapseRule, Limits, Recorder, RepetitionRule, expected
from rlhf.training.stream import Refill, Replay
from rlhf.trials.speed import choose_head, compile_blocks

if TYPE_CHECKING:
    from rlhf.config.root import Config
    from rlhf.core.state import TrainState
    from rlhf.processes.ranks import Ranks
    from rlhf.runs.folder import RunFolder
    from rlhf.tasks.task import Task


# Tolerance of the first update's checks, by dtype.
_TOLERANCE = {Dtype.float32: 1e-4, Dtype.bfloat16: 5e-2, Dtype.float16: 1e-2}


def training_sampling(cfg: Config) -> Sampling:
    """Return the sampling settings of the training rollouts."""
    return Sampling(
        samples=cfg.algo.samples_per_prompt,
        temperature=cfg.generator.temperature,
        response_length=cfg.generator.response_length,
        purpose="train",
    )


def assemble(
    cfg: Config,
    task: Task,
    tokenizer: PreTrainedTokenizerFast,
    data: str,
    state: TrainState,
    folder: RunFolder,
    ranks: Ranks,
    ends: ExitStack,
) -> Parts:
    """Return the parts of a training run.

    Args:
        cfg: the config of the run.
        task: the data of the run.
        data: the fingerprint of the training examples.
        tokenizer: the policy's tokenizer.
        state: the counters of the run.
        folder: the run folder.
        ranks: the ranks of the run.
        ends: exit stack that closes the generator if building a later part fails, or at the end.
    """
    engine = build_engine(cfg, tokenizer, ranks, state)
    choose_head(engine, cfg)
    compile_blocks(engine, cfg, state.num_updates)
    generator = build_generator(cfg, engine, tokenizer, folder, ranks)
    ends.callback(generator.close)
    scorer = build_training_scorer(cfg, tokenizer, ranks)
    evaluator = build_evaluator(cfg, task, engine, generator, scorer, tokenizer, ranks)
    objective = make(cfg.algo)
    prompts = task.prompts(solved_at=cfg.schedule.solved_at)
    replay = Replay(cfg.schedule.replay, cfg.seed, tokenizer.pad_token_id)
    refill = None
    if most := cfg.schedule.refill * cfg.schedule.prompts_per_update:  # before rollouts are saved
        refill = Refill(most=most, scorer=scorer, note=prompts.scored)
    if cfg.save_generations and ranks.first:
        scorer = SavingScorer(scorer, folder.generations, tokenizer, training_sampling(cfg), state)
    return Parts(
        prompts=prompts,
        generator=generator,
        scorer=scorer,
        replay=replay,
        engine=engine,
        objective=objective,
        recorder=Recorder(
            cfg.schedule.log_every,
            cfg.metric,
            _TOLERANCE[cfg.model.dtype],
            set() if cfg.generator.noisy else expected(cfg.model.starts_as_reference),
            cfg.minimised,
            cfg.tie_tolerance(cfg.scorer),
            build_collapse_rule(cfg),
            RepetitionRule(given=not cfg.generator.samples),
        ),
        evaluator=evaluator,
        refill=refill,
        phases=engine.phases,
        checkpoints=Checkpoints(folder.path, cfg.save_total_limit, objective, replay, prompts, data, ranks),
    )


def build_collapse_rule(cfg: Config) -> CollapseRule:
    """Return the rule of a run; the rule of a run on stored responses never warns."""
    limits = LIMITS if cfg.generator.samples else Limits()
    return CollapseRule(f"set {' or '.join(remedies(cfg))}", limits)


def remedies(cfg: Config) -> list[str]:
    """Return overrides that make a collapse less likely: a lower learning rate, less lag, a correction."""
    schedule = cfg.schedule
    found = [f"optim.lr={cfg.optim.lr / 3:.1g}"]
    if schedule.max_lag > 1:
        found.append(f"schedule.max_lag={schedule.max_lag // 4 or 1}")
    if schedule.max_lag == 0 and schedule.minibatches * schedule.epochs == 1:
        return found
    return [*found, *cfg.algo.corrections()]
