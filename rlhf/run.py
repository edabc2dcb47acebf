"""One run: build the parts that the config names, go on where an earlier session stopped, train, leave the
model.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import datasets
import torch
import transformers
from transformers import PreTrainedTokenizerFast

from rlhf.artefacts import prepare
from rlhf.build import build_device, build_reference, build_tokenizer
from rlhf.checkpoint import SCRATCH, Checkpoints, compare, last_good, no_room_to, sync
from rlhf.config import Config, Dtype, NanoConfig, Resume
from rlhf.console import console, say, transcript
from rlhf.disk import explained, no_room
from rlhf.engines.engine import Engine, NonFinite, trained
from rlhf.engines.frozen import FrozenEngine
from rlhf.errors import Interrupted, RunError, UserError
from rlhf.evaluators import Evaluator, PolicyEvaluator, RewardEvaluator
from rlhf.folder import RunFolder, refuse_another_run, setup_logging
from rlhf.forward import checkpoint_blocks
from rlhf.generators.config import threads
from rlhf.generators.generator import Generator, Sampling
from rlhf.generators.hf import HFGenerator
from rlhf.generators.over_ranks import OneForAll, OneForEach
from rlhf.invariants import expected
from rlhf.loggers.display import Display
from rlhf.loggers.jsonl import JsonlLogger
from rlhf.loggers.logger import Logger, Row
from rlhf.loop import train
from rlhf.lora import adapt, is_adapted
from rlhf.memory.heap import keep_freed
from rlhf.models import (
    ActorCritic,
    OverRollouts,
    Policy,
    RewardModel,
    ValueModel,
    check_context,
    check_vocabulary,
    load_causal_lm,
    load_reward_model,
    load_tokenizer,
    new_nano,
    new_reward_model,
    same_tokens,
    score_head,
)
from rlhf.objectives.config import Data, PPOConfig, Trains, ValueFrom
from rlhf.ranks import Ranks
from rlhf.recorder import Recorder
from rlhf.scorers.saved import Saved
from rlhf.scorers.scorer import Scorer
from rlhf.seeding import derive
from rlhf.signals import Interruption, interruptible
from rlhf.state import SupervisedState, TrainState
from rlhf.stream import Stream
from rlhf.tasks.completions import encode_completions
from rlhf.tasks.task import Task
from rlhf.validate import describe

M = TypeVar("M", bound=OverRollouts)
E = TypeVar("E", bound=Engine)

THREADS = torch.get_num_threads()  # a run before this one, in a sweep, may have set others
TOLERANCE = {
    Dtype.float32: 1e-4,
    Dtype.bfloat16: 5e-2,
    Dtype.float16: 1e-2,
}  # of the first update's invariants


def run(cfg: Config, folder: RunFolder, ranks: Ranks | None = None) -> float | None:
    """Carry out the run `cfg` in `folder`; returns the final value of its objective metric.

    `ranks` are those that the environment names where none are given.

    Raises:
        UserError: something that the config names is not as the run needs it.
        RunError: the run had to stop, for example at a loss that is not finite.
        Interrupted: a signal asked to stop; the same call goes on.
    """
    with interruptible() as interruption, explained(folder):
        ranks = ranks or Ranks.join(build_device(cfg), cfg.backend.timeout_s)
        return carry_out(cfg, folder, ranks, interruption)


def carry_out(cfg: Config, folder: RunFolder, ranks: Ranks, interruption: Interruption) -> float | None:
    """`run`, between signals."""
    quieten(ranks)
    if (finished := ranks.from_first(folder.finished)) is not None:
        say(f"finished already: {folder.path}")
        return finished["result"].get(cfg.metric)
    last = ranks.from_first(lambda: open_folder(cfg, folder))
    cfg.backend.prepare(cfg, ranks, last)
    cfg = ranks.from_first(lambda: prepare(cfg))
    setup_logging(folder)
    interruption.check()  # a signal may have come while a stage wrote its model
    torch.set_num_threads(threads(cfg)[0] or THREADS)
    keep_freed()
    torch.manual_seed(derive(cfg.seed, "torch"))

    tokenizer = build_tokenizer(cfg)
    task = build_task(cfg, tokenizer, cfg.data, cfg.schedule.prompts_per_update)
    data = task.fingerprint()
    if last is not None:
        compare(last, data)
    state = build_state(cfg, task)
    say(f"{cfg.algo.name} of {cfg.model.name} on {cfg.task.name}")
    for name, value in describe(cfg, len(task)):
        say(f"  {name + ':':24}{value}")
    engine = build_engine(cfg, tokenizer, ranks, state)
    with ExitStack() as ends:
        generator = build_generator(cfg, engine, tokenizer, folder, ranks)
        ends.callback(generator.close)
        scorer = cfg.scorer.build(cfg, tokenizer, ranks)
        assert scorer is not None, "validated: training needs a scorer"
        sampling = Sampling(
            samples=cfg.algo.samples_per_prompt,
            temperature=cfg.generator.temperature,
            response_length=cfg.generator.response_length,
            purpose="train",
        )
        evaluator = build_evaluator(cfg, task, engine, generator, scorer, tokenizer, ranks)
        objective = cfg.algo.build()
        recorder = Recorder(cfg.schedule.log_every, cfg.metric, TOLERANCE[cfg.model.dtype], expected(cfg))
        checkpoints = Checkpoints(folder.path, cfg.save_total_limit, objective, data, ranks)
        if cfg.save_generations and ranks.first:
            scorer = Saved(scorer, folder.generations, tokenizer, sampling, state)

        in_flight = []
        if last is not None:
            in_flight = checkpoints.load(last, state, engine, recorder)
            say(f"going on at update {state.update} of {state.num_updates}, from {last}")
        recorder.open(build_loggers(cfg, folder, state) if ranks.first else [], generator)
        ends.callback(recorder.close)
        generator.load(engine.weights(), state.version)

        first = state.update + len(in_flight)
        stream = Stream(
            generator,
            itertools.islice(task.prompts(first), state.num_updates - first),
            replace(sampling, request=first),
            cfg.schedule.max_lag,
            recorder.timer,
            in_flight,
        )
        interruption.defer(ranks.any)
        try:
            train(
                stream,
                generator,
                scorer,
                engine,
                objective,
                state,
                cfg.schedule,
                recorder,
                evaluator,
                checkpoints,
                interruption,
                cfg.seed,
            )
        except NonFinite as error:
            raise not_finite(error, state, folder) from error
    if not state.done:
        raise interrupted(interruption, state, cfg, folder)
    if cfg.algo.trains is Trains.reward:
        centre(cfg, engine, tokenizer)
    write_model(engine, folder, ranks)
    result = recorder.evaluated
    if ranks.first:
        folder.write_state({**state.state_dict(), "finished": True, "result": result})
    say(f"model: {folder.model}   {gains(recorder.first, result, cfg)}")
    return result.get(cfg.metric)


def open_folder(cfg: Config, folder: RunFolder) -> Path | None:
    """Write down what is run, where it is no other run's folder; returns the checkpoint to go on from."""
    refuse_another_run(cfg, folder)
    setup_logging(folder)
    folder.write_config(cfg)
    folder.write_environment([torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())])
    last = last_good(folder.path)
    if last is None and cfg.resume is Resume.must:
        raise nothing_to_go_on_from(folder)
    return last


def nothing_to_go_on_from(folder: RunFolder) -> UserError:
    """What to tell of a folder whose checkpoints are all damaged, where one has to be good."""
    return UserError(
        "resume=must needs a checkpoint that is as it was written (what is wrong with each is said above), "
        f"got {folder.path} with none; set resume=auto to start from nothing"
    )


def quieten(ranks: Ranks) -> None:
    """Keep libraries from drawing bars over the progress display, and all but the first rank from speaking;
    what matters of loading is checked and said here.
    """
    console.quiet = not ranks.first
    # DeepSpeed, which transformers imports to save where it is installed, else tells what it looked for.
    os.environ.setdefault("DS_ACCELERATOR", ranks.device.type)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    if not console.is_terminal:
        datasets.disable_progress_bars()


def build_task(cfg: Config, tokenizer: PreTrainedTokenizerFast, data: Data, prompts_per_update: int) -> Task:
    """The data of the run, tokenized."""
    return Task(
        cfg.task.source(),
        tokenizer,
        data=data,
        prompts_per_update=prompts_per_update,
        max_prompt_tokens=cfg.task.max_prompt_tokens,
        seed=cfg.seed,
    )


def build_state(cfg: Config, task: Task) -> TrainState:
    """The counters that match the objective."""
    num_updates = cfg.num_updates(len(task))
    if cfg.algo.supervised:
        return SupervisedState(num_updates=num_updates, data_size=len(task))
    return TrainState(num_updates=num_updates)


def build_engine(cfg: Config, tokenizer: PreTrainedTokenizerFast, ranks: Ranks, state: TrainState) -> Engine:
    """Module, reference and optimizer on the backend."""
    module = build_module(cfg, tokenizer)
    check_vocabulary(module.model, tokenizer)
    problem = check_context(module.model.config, cfg.task.max_prompt_tokens, cfg.generator.response_length)
    if problem:
        raise UserError(problem)
    for name, value in trained_parts(module):
        say(f"  {name + ':':24}{value}")
    steps = cfg.schedule.minibatches * cfg.schedule.epochs
    engine = cfg.backend.build(
        module=module,
        reference=build_second(cfg, ranks),
        tokenizer=tokenizer,
        optim=cfg.optim,
        total_steps=state.num_updates * steps,
        steps_per_batch=steps,
        stale=cfg.schedule.max_lag > 0 or not cfg.generator.samples,
        ranks=ranks,
        dtype=cfg.model.dtype,
        value_lr=cfg.algo.value_lr if isinstance(cfg.algo, PPOConfig) else None,
    )
    return with_reference(engine, cfg)


def build_frozen(cfg: Config, tokenizer: PreTrainedTokenizerFast, ranks: Ranks) -> FrozenEngine:
    """What the run trains, and its reference, to be measured: without optimizer or value model."""
    engine = FrozenEngine(
        build_model(cfg, tokenizer),
        build_second(cfg, ranks),
        tokenizer,
        micro_batch=cfg.backend.micro_batch,
        ranks=ranks,
        dtype=cfg.model.dtype,
    )
    return with_reference(engine, cfg)


def build_second(cfg: Config, ranks: Ranks) -> Policy | None:
    """The reference where it is a second model; None: there is none, or it is within the policy."""
    compares = cfg.algo.trains is Trains.policy
    return build_reference(cfg, ranks) if compares and not reference_within(cfg) else None


def with_reference(engine: E, cfg: Config) -> E:
    """`engine` with its reference, also where that is another view of the policy that the backend placed."""
    if reference_within(cfg):
        engine.reference = engine.policy.before_adapters()
    return engine


def reference_within(cfg: Config) -> bool:
    """Whether the reference is the policy without its adapters: the policy as it starts."""
    return cfg.algo.trains is Trains.policy and bool(cfg.model.lora.rank) and cfg.model.starts_as_reference


def build_module(cfg: Config, tokenizer: PreTrainedTokenizerFast) -> Policy | RewardModel | ActorCritic:
    """What the run trains, from where it starts; what is trained of its weights in float32."""
    module = build_model(cfg, tokenizer)
    if not isinstance(cfg.algo, PPOConfig):
        return module
    assert isinstance(module, Policy)
    return ActorCritic(module, for_training(build_value_model(cfg, cfg.algo, tokenizer), cfg, "value"))


def loading(cfg: Config) -> dict[str, Any]:
    """How models that are trained are loaded."""
    model = cfg.model
    return {
        "dtype": getattr(torch, model.dtype.value) if model.lora.rank else torch.float32,
        "attention": model.attention,
        "trust_remote_code": model.trust_remote_code,
    }


def build_model(cfg: Config, tokenizer: PreTrainedTokenizerFast) -> Policy | RewardModel:
    """The policy or reward model that the run leaves behind, from where it starts."""
    model = cfg.model
    options = loading(cfg)
    if cfg.algo.trains is Trains.reward:
        assert model.policy is not None
        rng = torch.Generator().manual_seed(derive(cfg.seed, "reward head"))
        made = new_reward_model(model.policy, tokenizer.pad_token_id, rng, **options)
        return for_training(RewardModel(made, model.shared_prefix), cfg, "reward")
    if cfg.algo.trains is Trains.base and model.base is None:
        assert isinstance(model, NanoConfig), "validated: only the embedded model starts from nothing"
        nano = Policy(new_nano(model, tokenizer), cfg.generator.temperature, model.shared_prefix)
        return for_training(nano, cfg, "policy")
    assert cfg.start is not None
    key = f"model.{cfg.algo.trains.value}"
    policy = Policy(
        load_causal_lm(cfg.start, key=key, **options), cfg.generator.temperature, model.shared_prefix
    )
    return for_training(policy, cfg, "policy")


def for_training(module: M, cfg: Config, name: str) -> M:
    """`module` with the adapters, and the checkpoints of blocks, that the config wants."""
    if cfg.model.lora.rank:
        adapt(module.model, cfg.model.lora, derive(cfg.seed, "adapters", name))
    if cfg.model.gradient_checkpointing:
        checkpoint_blocks(module.model)
    return module


def trained_parts(module: torch.nn.Module) -> Iterator[tuple[str, str]]:
    """How much of `module` is trained, in words, where that is not all."""
    every = sum(parameter.numel() for parameter in module.parameters())
    ours = sum(parameter.numel() for parameter in trained(module))
    if ours < every:
        yield "trained parameters", f"{ours:,} of {every:,}, in adapters and modules trained whole"


def build_value_model(cfg: Config, algo: PPOConfig, tokenizer: PreTrainedTokenizerFast) -> ValueModel:
    """The value model as it starts: the reward model, or the policy with values of 0."""
    model = cfg.model
    options = loading(cfg)
    if algo.starts_value(cfg) is ValueFrom.policy:
        assert model.policy is not None
        made = new_reward_model(model.policy, tokenizer.pad_token_id, None, **options)
        torch.nn.init.zeros_(score_head(made).weight)
        return ValueModel(made, model.shared_prefix)
    path = algo.reward_model(cfg)
    assert path is not None, "validated: a reward model is named or made"
    own = load_tokenizer(path, model.pad_token, model.trust_remote_code, "model.reward")
    if not same_tokens(own, tokenizer):
        raise UserError(
            "algo.value_from must be policy where the reward model has another tokenizer (the value model "
            f"reads the policy's tokens), got reward with {path!r}; set algo.value_from=policy"
        )
    return ValueModel(load_reward_model(path, **options), model.shared_prefix)


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
    """What measures the run on held-out examples; `scorer` is what training sees, where it samples."""
    if cfg.algo.trains is Trains.reward:
        pairs = task.held_out(cfg.eval.prompts, split)
        assert pairs.completions is not None
        length = cfg.generator.response_length
        return RewardEvaluator(encode_completions(pairs, pairs.completions, tokenizer, length), engine)
    if not cfg.generator.samples:  # stored completions are no answer to a held-out prompt
        sampler = HFGenerator(engine.borrow_policy, tokenizer, cfg.eval.batch_size, cfg.seed)
        generator = OneForEach(sampler, ranks) if ranks.size > 1 else sampler
    return PolicyEvaluator(
        task.held_out(cfg.eval.prompts, split, Data.prompts),
        generator,
        cfg.gold.build(cfg, tokenizer, ranks),
        None if cfg.algo.supervised else scorer,
        engine,
        tokenizer,
        Sampling(
            samples=1,
            temperature=cfg.eval.temperature,
            response_length=cfg.generator.response_length,
            purpose="eval",
        ),
        cfg.generator.temperature,
    )


def build_loggers(cfg: Config, folder: RunFolder, state: TrainState) -> list[Logger]:
    """The files of the run folder, the terminal, and what the config turns on."""
    title = f"{cfg.algo.name} {cfg.task.name}"
    loggers: list[Logger] = [
        JsonlLogger(folder, state),
        Display(title, state, cfg.progress, cfg.eval.samples),
    ]
    if cfg.logger.tensorboard is not None:
        from rlhf.loggers.tensorboard import TensorboardLogger

        loggers.append(TensorboardLogger(cfg.logger.tensorboard, folder.path, state))
    if cfg.logger.wandb is not None:
        from rlhf.loggers.wandb import WandbLogger

        loggers.append(WandbLogger(cfg.logger.wandb, folder, state))
    return loggers


def centre(cfg: Config, engine: Engine, tokenizer: PreTrainedTokenizerFast) -> None:
    """Shift the reward model so that held-out references score 0 on average (Huang et al., 2403.17031)."""
    prompts = build_task(cfg, tokenizer, Data.references, 1).held_out(cfg.eval.prompts)
    assert prompts.completions is not None
    references = encode_completions(prompts, prompts.completions, tokenizer, None)
    assert isinstance(engine.module, RewardModel)
    offset = engine.infer(engine.module, references, "rewards").double().mean().item()
    config = engine.module.model.config
    config.reward_offset = getattr(config, "reward_offset", 0.0) + offset


def write_model(engine: Engine, folder: RunFolder, ranks: Ranks) -> None:
    """Write the final model, and its adapter where it has one, each whole or not at all."""
    parts = [(engine.save_model, folder.model)]
    if is_adapted(engine.module.model):
        parts.append((engine.save_adapter, folder.adapter))
    for write, final in parts:
        scratch = folder.path / f"{SCRATCH}{final.name}"
        why = ranks.first_of(no_room_to(partial(write, scratch), folder.path))
        if why is not None:
            shutil.rmtree(scratch, ignore_errors=True)
            raise no_room(folder, final, why)
        if ranks.first:
            for file in scratch.iterdir():
                sync(file)
            shutil.rmtree(final, ignore_errors=True)
            scratch.rename(final)


def gains(first: Row, last: Row, cfg: Config) -> str:
    """What the run won, in words: figures before and after."""
    told = {
        "eval/win_rate": f"win-rate against the references ({cfg.gold.name})",
        "eval/gold_score": "gold score",
        "eval/accuracy": "accuracy on held-out pairs",
        "eval/loss": "held-out loss",
        "eval/kl": "KL",
    }
    changes = [
        f"{text} {first[name]:.3f} -> {last[name]:.3f}"
        for name, text in told.items()
        if name in first and name in last
    ]
    return ", ".join(changes) or "(not evaluated: schedule.eval_every=0)"


def interrupted(interruption: Interruption, state: TrainState, cfg: Config, folder: RunFolder) -> Interrupted:
    """What to tell of a run that was asked to stop."""
    last = folder.last_checkpoint()
    command = "the same command" + (" without resume=never" if cfg.resume is Resume.never else "")
    text = (
        f"interrupted by {interruption.cause} after update {state.update} of {state.num_updates} "
        f"({cfg.algo.name} of {cfg.model.name} on {cfg.task.name}); "
        + (
            f"checkpoint: {last}; {command} goes on from it"
            if last
            else f"no checkpoint; {command} starts anew"
        )
    )
    transcript.info(text)
    return Interrupted(text, interruption.received)


def not_finite(error: NonFinite, state: TrainState, folder: RunFolder) -> RunError:
    """What to tell of a loss that is not finite; the batch's rows are kept for replay."""
    file = folder.path / "failed_batch.json"
    file.write_text(json.dumps({"update": state.update, "what": error.what, "index": error.index}))
    last = folder.last_checkpoint()
    told = RunError(
        f"update {state.update} (from 0) gave {error.what}; no weight was changed. The rows of the data set "
        f"are in {file}; the last good checkpoint is {last or 'not there yet: none was written'}"
    )
    told.everywhere = True
    return told
