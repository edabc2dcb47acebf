"""Construction of a training run: engine, generator, scorers, evaluator, data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

from rlhf.assembly import models
from rlhf.assembly.parts import build_source, make, part
from rlhf.config.algorithms import Data, DistillConfig, Trains
from rlhf.config.models import Dtype, TorchConfig
from rlhf.config.root import Config, threads
from rlhf.config.scorers import FunctionScorerConfig, ScorerConfig, scorers
from rlhf.core.batch import Batch, Sampling
from rlhf.core.errors import UserError
from rlhf.core.metrics import of_scorer
from rlhf.core.state import SupervisedState, TrainState
from rlhf.engines.engine import Engine, EngineSettings, FrozenEngine, trained
from rlhf.environments.environment import EnvironmentFactory
from rlhf.environments.library import schemas
from rlhf.generators.generator import Generator, GeneratorContext, PerRankGenerator, SharedGenerator
from rlhf.generators.hf.generator import HFGenerator, HFSettings
from rlhf.generators.process import Annotator
from rlhf.models.loading import check_vocabulary, load_causal_lm
from rlhf.models.modules import Policy, RewardModel, RolloutModule, ServedCandidates, Teacher, set_head
from rlhf.processes.ranks import Ranks
from rlhf.processes.worker import Channel
from rlhf.runs.folder import RunFolder
from rlhf.scorers.scorer import SavingScorer, Scorer, ScorerContext, read_own, reads_tokens_of
from rlhf.scorers.teacher import Reference
from rlhf.tasks.columns import TOOLS, Wanted
from rlhf.tasks.kinds import FirstMessages
from rlhf.tasks.task import Task
from rlhf.terminal.console import say
from rlhf.text.chat import Dialogues, unquoted
from rlhf.text.encoding import encode_completions
from rlhf.training.checkpoint import Checkpoints
from rlhf.training.evaluators import Evaluator, HeldOutPairs, PolicyEvaluator, RewardEvaluator
from rlhf.training.recorder import LIMITS, CollapseRule, Limits, Recorder, RepetitionRule, expected
from rlhf.training.session import Parts
from rlhf.training.stream import Refill, Replay
from rlhf.trials.trials import choose_head, compared, compile_blocks, samples_with_cache
from rlhf.usercode.address import load_function, parameters_of, signature_of

# Construction of the parts of a training run.


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
    cfg: Config, task: Task, data: str, state: TrainState, folder: RunFolder, ranks: Ranks, ends: ExitStack
) -> Parts:
    """Return the parts of a training run.

    Args:
        cfg: the config of the run.
        task: the data of the run.
        data: the fingerprint of the training examples.
        state: the counters of the run.
        folder: the run folder.
        ranks: the ranks of the run.
        ends: exit stack that closes the generator if building a later part fails, or at the end.
    """
    tokenizer = task.tokenizer
    engine = build_engine(cfg, tokenizer, ranks, state)
    choose_head(engine, cfg)
    compile_blocks(engine, cfg, state.num_updates)
    generator = build_generator(cfg, engine, folder, ranks)
    ends.callback(generator.close)
    scorer = build_scorer(cfg, "scorer", tokenizer, ranks, judgements=folder.judgements)
    assert scorer is not None, "validated: training needs a scorer"
    evaluator = build_evaluator(cfg, task, engine, generator, scorer, "validation", folder)
    if isinstance(evaluator, PolicyEvaluator) and cfg.eval.best_of:
        evaluator.best_of = folder.best_of
    objective = make(cfg.algo)
    taught_by_start = cfg.model.starts_as_reference and task.teacher_column is None
    prompts = task.prompts(solved_at=cfg.schedule.solved_at, pass_rate=cfg.schedule.pass_rate)
    replay = Replay(cfg.schedule.replay, cfg.seed, tokenizer.pad_token_id)
    recorder = Recorder(
        cfg.schedule.log_every,
        cfg.metric,
        _TOLERANCE[cfg.model.dtype],
        set() if cfg.generator.noisy else expected(taught_by_start),
        cfg.minimised,
        cfg.tie_tolerance(cfg.scorer),
        build_collapse_rule(cfg),
        RepetitionRule(given=not cfg.generator.samples),
    )

    def note(batch: Batch) -> None:
        prompts.scored(batch)
        recorder.add(of_scorer(batch.figures))

    refill = None
    if most := cfg.schedule.refill * cfg.schedule.prompts_per_update:  # before rollouts are saved
        refill = Refill(most=most, scorer=scorer, note=note)
    if cfg.save_generations and ranks.first:
        scorer = SavingScorer(scorer, folder.generations, tokenizer, training_sampling(cfg), state)
    return Parts(
        prompts=prompts,
        generator=generator,
        scorer=scorer,
        replay=replay,
        engine=engine,
        objective=objective,
        recorder=recorder,
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


# Construction of the engine of a run: module, frozen reference, optimizer settings.


_E = TypeVar("_E", bound=Engine)


def build_engine(cfg: Config, tokenizer: PreTrainedTokenizerFast, ranks: Ranks, state: TrainState) -> Engine:
    """Return the engine of a run that trains, and print the number of trained parameters if some are frozen.

    Raises:
        UserError: the vocabulary or the context of the model is too small, or the model cannot be used.
    """
    module = models.loaded(lambda: models.build_module(cfg, tokenizer), cfg, ranks)
    check_vocabulary(module.model, tokenizer)
    every = sum(parameter.numel() for parameter in module.parameters())
    ours = sum(parameter.numel() for parameter in trained(module))
    if ours < every:
        say(f"  {'trained parameters:':24}{ours:,} of {every:,}, in adapters and in modules trained whole")
    steps = cfg.schedule.minibatches * cfg.schedule.epochs
    exact = cfg.generator.exact and not cfg.generator.noisy and cfg.model.dtype is Dtype.float32
    engine = part(cfg.backend).build(
        cfg.backend,
        module=module,
        reference=_second_model(cfg, tokenizer, ranks),
        tokenizer=tokenizer,
        ranks=ranks,
        settings=EngineSettings(
            optim=cfg.optim,
            total_steps=state.num_updates * steps,
            steps_per_batch=steps,
            budget=models.training_budget(cfg),
            inference=models.inference_budget(cfg),
            stale=cfg.schedule.max_lag > 0 or cfg.schedule.replay > 1 or not cfg.generator.samples,
            exact_sampler=exact,
            dtype=cfg.model.dtype,
            value_lr=cfg.algo.value_lr,
            moving=cfg.model.moving if cfg.model.moving.every else None,
        ),
    )
    engine = _completed(engine, cfg)
    if isinstance(cfg.algo, DistillConfig):
        beta, top, reference = cfg.algo.beta, cfg.algo.top, engine.reference
        here = isinstance(reference, Policy)
        engine.policy.teacher = Teacher(reference, beta, top) if here else ServedCandidates(beta)
    return engine


def build_frozen(cfg: Config, tokenizer: PreTrainedTokenizerFast, ranks: Ranks, named: bool) -> FrozenEngine:
    """Return the engine of a run that is only evaluated.

    The engine has the module and the reference, but no optimizer and no value model.

    Args:
        cfg: the config of the run.
        tokenizer: the policy's tokenizer.
        ranks: the ranks of the run.
        named: whether the model that `cfg` starts from is evaluated itself: a reward model keeps its head.
    """
    module = models.build_model(cfg, tokenizer, named)
    check_vocabulary(module.model, tokenizer, "models" if named else "model.tokenizer")
    reference, limit = _second_model(cfg, tokenizer, ranks), models.inference_budget(cfg)
    engine = FrozenEngine(module, reference, tokenizer, inference=limit, ranks=ranks, dtype=cfg.model.dtype)
    return _completed(engine, cfg)


def _second_model(cfg: Config, tokenizer: PreTrainedTokenizerFast, ranks: Ranks) -> Reference | None:
    """Return the reference; None: the run has none, or it is the policy without its adapters."""
    in_policy = bool(cfg.model.lora.rank) and cfg.model.starts_as_reference  # the initial policy
    compares = cfg.algo.trains is Trains.policy and not in_policy
    return models.build_reference(cfg, tokenizer, ranks) if compares else None


def _completed(engine: _E, cfg: Config) -> _E:
    """Return `engine`, whose modules share the encoding of prompts only if their models allow this.

    If the reference is the policy without its adapters, the engine gets this reference.

    Raises:
        UserError: a model cannot be used.
    """
    for module in engine.module.modules():
        if isinstance(module, RolloutModule):
            compared(module, cfg, engine.ranks)
    if engine.reference is None and cfg.algo.trains is Trains.policy:
        engine.reference = engine.policy.before_adapters()
    return engine


# Construction of the generator of a run.


@dataclass(frozen=True, slots=True)
class AnnotatorFactory:
    """A factory of the annotator of the run `cfg`, which has the scorer and the reference of the trainer.

    Attributes:
        cfg: the config of the run.
        judgements: see `ScorerContext`.
    """

    cfg: Config
    judgements: Path | None = None

    def build(self, channel: Channel) -> Annotator:
        """Return the annotator, with unsharded models.

        The reference is loaded only if the objective needs its log-probs.

        Args:
            channel: the connection to the trainer; the annotator does not use it.
        """
        backend = TorchConfig(micro_batch=self.cfg.backend.micro_batch, tokens=self.cfg.backend.tokens)
        cfg, alone = replace(self.cfg, backend=backend), Ranks(models.build_device(self.cfg))
        tokenizer = models.build_tokenizer(cfg)
        scorer = build_scorer(cfg, "scorer", tokenizer, alone, judgements=self.judgements)
        assert scorer is not None, "validated: training needs a scorer"
        wanted = "ref_logprobs" in make(cfg.algo).needs
        reference = models.build_reference(cfg, tokenizer, alone) if wanted else None
        return Annotator(scorer, reference, models.inference_budget(cfg), alone, cfg.model.dtype)


def build_sampler(cfg: Config, tokenizer: PreTrainedTokenizerFast, seed: int) -> HFGenerator:
    """Return a generator that samples from the fixed weights of `model.policy`."""
    assert cfg.model.policy is not None
    device = models.build_device(cfg)
    model = load_causal_lm(
        cfg.model.policy, torch.float32, cfg.model.loaded_attention, cfg.model.trust_remote_code
    )
    set_head(model, float32=False, tokens=tokenizer.get_vocab().values())
    torch.nn.Module.to(model, device)
    cached = samples_with_cache(model, cfg, Ranks(device))
    settings = _settings(cfg, tokenizer, batch_size=256, seed=seed, cached=cached)
    return HFGenerator(lambda: nullcontext(model), settings)


def _settings(cfg: Config, tokenizer: PreTrainedTokenizerFast, **own: Any) -> HFSettings:
    """Return settings of sampling whose responses end with the tokens of the run, and others as given."""
    return HFSettings(stop_ids=models.build_stop_ids(cfg, tokenizer), pad_id=tokenizer.pad_token_id, **own)


def build_generator(cfg: Config, engine: Engine, folder: RunFolder, ranks: Ranks) -> Generator:
    """Return the generator of the run: a generator on rank 0 for all ranks, or a generator on each rank."""
    tokenizer, model = engine.tokenizer, engine.module.model
    cached = not cfg.generator.decodes or samples_with_cache(model, cfg, ranks, engine.borrow_policy)

    def build() -> Generator:
        own = f"-{ranks.rank}" if ranks.rank else ""
        context = GeneratorContext(
            policy=model,
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
            annotator=AnnotatorFactory(cfg, folder.judgements.with_name(f"*-annotator{own}.jsonl")).build,
            asks_service=cfg.scorer.asks_service or cfg.algo.teacher_url is not None,
            cached=cached,
            stop_ids=models.build_stop_ids(cfg, tokenizer),
            environment=make(cfg.environment, tokenizer),
            phases=engine.phases,
        )
        return make(cfg.generator, context)

    if ranks.size == 1 or not cfg.generator.samples:
        return build()
    if cfg.generator.on_each_rank(cfg.schedule.max_lag):
        return PerRankGenerator(build(), ranks)
    return SharedGenerator(build() if ranks.first else None, ranks)


# Construction of the scorers of a run: the training scorer and the judge.


_CHECKED = 200  # largest number of dialogues that are written in the format of a reward model before a run
TEXT = "This is an example of a response."  # for data without reference responses


def build_scorer(
    cfg: Config, at: str, tokenizer: PreTrainedTokenizerFast, ranks: Ranks, **answers: Any
) -> Scorer | None:
    """Return the scorer of the section `at` ("scorer" or "gold"); None with `scorer@gold=none`.

    Args:
        cfg: the config of the run.
        at: the key of the section.
        tokenizer: the policy's tokenizer.
        ranks: the ranks of the run.
        answers: `judgements` and `used` of `ScorerContext`.
    """
    conversational = build_source(cfg).conversational
    environment: EnvironmentFactory | None = make(cfg.environment, tokenizer)

    def place(load: Callable[[], RewardModel]) -> RewardModel:
        placed: RewardModel = part(cfg.backend).place(cfg.backend, models.loaded(load, cfg, ranks), ranks)
        return compared(placed, cfg, ranks)

    def build(section: ScorerConfig, key: str) -> Scorer | None:
        context = ScorerContext(
            at=key,
            tokenizer=tokenizer,
            ranks=ranks,
            model=cfg.model,
            place=place,
            build=build,
            conversational=conversational,
            turns=environment.turns if environment else None,
            parts=tuple(cfg.task.shares),
            tie_tolerance=cfg.tie_tolerance(section),
            response_length=cfg.generator.response_length,
            **answers,
        )
        return make(section, context)

    return build(cfg.scorer if at == "scorer" else cfg.gold, at)


def check_formats(cfg: Config, task: Task, split: str = "train", judge: bool = False) -> Iterator[str]:
    """Yield a sentence for each kind of content of the dialogues that a reward model does not read.

    A reward model with a chat template of its own reads the dialogues in its format. No model is loaded.

    Args:
        cfg: the config of the run.
        task: the data of the run.
        split: the split with the dialogues. Their answers are the reference responses, or else a short text.
        judge: whether the judge scores, although the config trains a reward model.

    Raises:
        UserError: the chat template of a reward model does not format a dialogue.
    """
    rows = task.examples(split)
    if "messages" not in rows.column_names:
        return
    some = rows[np.linspace(0, len(rows) - 1, min(len(rows), _CHECKED)).astype(int)]
    some.setdefault(TOOLS, [None] * len(some["messages"]))
    reward = cfg.model.reward
    used = [(at, each) for at, own in _used_scorers(cfg, judge) for each in own.reward_models(at, reward)]
    for at, named in used:
        try:
            own = read_own(*named, cfg.model, conversational=True)
            if not own.chat_template or reads_tokens_of(own, task.tokenizer, dialogues=True):
                continue
            format = Dialogues(own)
            for messages, reference, place, tools in zip(
                some["messages"], some["reference"], some["place"], some[TOOLS], strict=True
            ):
                answer = [{"role": "assistant", "content": unquoted(reference) or TEXT}]
                format.write(messages, [answer], place, tools, prompt_only=True)
        except UserError as error:
            problem = error.problems[0].rpartition("; ")[0]  # its remedy concerns the template of the policy
            raise UserError(
                f"the chat template of the reward model at {at} must format the dialogues ({problem}); name "
                "another reward model, or correct its chat template"
            ) from None
        yield from (f"{'='.join(named)}: {warning}" for warning in format.warnings())


# Construction of the evaluator of a run.


def build_evaluator(
    cfg: Config,
    task: Task,
    engine: Engine,
    generator: Generator,
    scorer: Scorer | None,
    split: str,
    folder: RunFolder,
) -> Evaluator:
    """Return the evaluator of a run on held-out examples.

    Args:
        cfg: the config of the run.
        task: the data of the run.
        engine: the engine that has the trained model.
        generator: the generator of the run. If it returns stored completions, the evaluator gets a
            new generator that samples.
        scorer: the training scorer; None: it is not known.
        split: the split of the held-out examples.
        folder: the run folder.
    """
    held_out_pairs, tokenizer, ranks = None, engine.tokenizer, engine.ranks
    if cfg.algo.trains is Trains.reward or (cfg.algo.pairwise and cfg.reads_pairs):
        pairs = task.held_out(cfg.eval.prompts, split, warn=cfg.eval.asked)
        assert pairs.completions is not None
        encoded = encode_completions(pairs, pairs.completions, tokenizer, cfg.generator.response_length)
        if cfg.algo.trains is Trains.reward:
            return RewardEvaluator(encoded, engine)
        held_out_pairs = HeldOutPairs(encoded, make(cfg.algo), engine)
    environment: EnvironmentFactory | None = make(cfg.environment, tokenizer)
    if not cfg.generator.samples:  # the generator has no completions of held-out prompts
        own = {"batch_size": cfg.eval.batch_size, "seed": cfg.seed, "environment": environment}
        cached = samples_with_cache(engine.module.model, cfg, ranks, engine.borrow_policy)
        settings = _settings(cfg, tokenizer, cached=cached, **own)
        sampler = HFGenerator(engine.borrow_policy, settings, engine.phases)
        generator = PerRankGenerator(sampler, ranks) if ranks.size > 1 else sampler
    return PolicyEvaluator(
        task.held_out(cfg.eval.prompts, split, Data.prompts, warn=cfg.eval.asked),
        generator,
        build_scorer(cfg, "gold", tokenizer, ranks, judgements=folder.judgements),
        scorer if cfg.scores_completions else None,
        engine,
        tokenizer,
        replace(training_sampling(cfg), samples=1, temperature=cfg.eval.temperature, purpose="eval"),
        cfg.generator.temperature,
        held_out_pairs,
        tuple(cfg.task.shares),
        engine.phases,
        environment,
        cfg.eval,
        folder.initial_responses,
    )


# Construction of the data and the counters of a run.


def build_task(
    cfg: Config, tokenizer: PreTrainedTokenizerFast, data: Data, prompts_per_update: int, judge: bool = False
) -> Task:
    """Return the tokenized data of the run.

    Args:
        cfg: the config of the run.
        tokenizer: the policy's tokenizer.
        data: the content of a training example.
        prompts_per_update: prompts of one batch over all ranks.
        judge: whether the judge scores the examples, although the config trains a reward model.

    Raises:
        UserError: a reward function or a tool cannot be imported, or a tool lacks type hints or a docstring.
    """
    source = build_source(cfg)
    if isinstance(source, FirstMessages):
        source.factory = make(cfg.environment, tokenizer)
    return Task(
        source,
        tokenizer,
        data=data,
        prompts_per_update=prompts_per_update,
        max_prompt_tokens=cfg.task.max_prompt_tokens,
        seed=cfg.seed,
        shares=cfg.task.shares,
        wanted=_wanted_columns(cfg, judge),
        ends=models.declared_tokens(cfg, tokenizer),
        tools=schemas(cfg.environment.tools) or None,
        teacher_column=cfg.task.teacher_column,
    )


def build_state(cfg: Config, task: Task) -> TrainState:
    """Return the counters of a new run: epochs for supervised algorithms, otherwise episodes and lag."""
    num_updates = cfg.num_updates(len(task))
    if cfg.algo.supervised:
        return SupervisedState(num_updates=num_updates, data_size=len(task))
    return TrainState(num_updates=num_updates)


def reward_functions(cfg: Config, judge: bool = False) -> Iterator[tuple[str, FunctionScorerConfig]]:
    """Yield the key and the section of each reward function that the run calls, of lists one by one.

    Args:
        cfg: the config of the run.
        judge: whether the judge scores, although the config trains a reward model.
    """
    for at, section in _used_scorers(cfg, judge):
        yield from ((at, each) for each in section.functions().values())


def _used_scorers(cfg: Config, judge: bool) -> Iterator[tuple[str, ScorerConfig]]:
    """Yield the key and the section of each scorer whose scores the run reads; see `reward_functions`."""
    judge = judge or cfg.algo.trains is not Trains.reward
    for at, section in scorers(cfg):
        if judge if at.startswith("gold") else cfg.scores_completions:
            yield at, section


def part_of(cfg: Config, at: str) -> str | None:
    """Return the part of a mixture of tasks whose responses the scorer at the key `at` scores; None: all."""
    whole, _, name = at.partition(".parts.")
    return name.partition(".")[0] if getattr(cfg, whole).of_mixture else None


def _wanted_columns(cfg: Config, judge: bool = False) -> Wanted:
    """Return the columns of the data that the scorers of a run ask for; see `reward_functions`.

    Raises:
        UserError: a function cannot be imported.
    """
    parts = list(cfg.task.shares)
    read = {each: ("task.teacher_column", "") for each in [cfg.task.teacher_column] if each is not None}
    found = {each: Wanted(columns=read, rest=cfg.environment.answers) for each in parts or [""]}
    for at, section in _used_scorers(cfg, judge):
        asked = [Wanted(optional=section.columns)] if section.columns else []
        for function in section.functions().values():
            key, path = f"{at}.path", function.path
            takes = parameters_of(signature_of(load_function(key, path, function.arguments)))
            pairs = zip(takes.taken, takes.position, strict=False)
            own = Wanted(
                columns=dict.fromkeys(takes.columns, (key, path)),
                optional=frozenset(takes.optional),
                rest=takes.rest,
                positions={name: (key, path, value) for name, value in pairs if name != value},
            )
            asked.append(own)
        scored = part_of(cfg, at)
        for each, new in product(found if scored is None else [scored], asked):
            before = found[each]
            found[each] = Wanted(
                columns={**new.columns, **before.columns},
                optional=before.optional | new.optional,
                rest=before.rest or new.rest,
                positions={**new.positions, **before.positions},
            )
    return Wanted(parts=found) if parts else found[""]
