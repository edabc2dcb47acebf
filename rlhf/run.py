"""One run: build the parts that the config names, go on where an earlier session stopped, train, leave the
model.
"""

from __future__ import annotations

import itertools
import json
import shutil
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from typing import Any

import datasets
import torch
import transformers
from transformers import PreTrainedTokenizerFast

from rlhf.artefacts import prepare
from rlhf.checkpoint import SCRATCH, Checkpoints
from rlhf.config import Config, Dtype, NanoConfig
from rlhf.console import console, say
from rlhf.engines.config import Device
from rlhf.engines.engine import Engine, NonFinite
from rlhf.errors import RunError, UserError
from rlhf.evaluate import Evaluator, PolicyEvaluator, RewardEvaluator
from rlhf.folder import RunFolder, digest, load_config, setup_logging
from rlhf.generations import Saved
from rlhf.generators.config import threads
from rlhf.generators.generator import Generator, Sampling
from rlhf.generators.hf import HFGenerator
from rlhf.loggers.display import Display
from rlhf.loggers.jsonl import JsonlLogger
from rlhf.loggers.logger import Logger, Row
from rlhf.loop import train
from rlhf.models import (
    ActorCritic,
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
    score_head,
)
from rlhf.objectives.config import Data, PPOConfig, Trains, ValueFrom
from rlhf.recorder import Recorder
from rlhf.scorers.scorer import Scorer
from rlhf.seeding import derive
from rlhf.state import SupervisedState, TrainState
from rlhf.stream import Stream
from rlhf.tasks.completions import encode_completions
from rlhf.tasks.config import EmbeddedTaskConfig
from rlhf.tasks.task import Task
from rlhf.validate import describe

THREADS = torch.get_num_threads()  # a run before this one, in a sweep, may have set others
TOLERANCE = {Dtype.float32: 1e-4, Dtype.bfloat16: 5e-2}  # of the first update's invariants


def run(cfg: Config, folder: RunFolder) -> float | None:
    """Carry out the run `cfg` in `folder`; returns the final value of its objective metric.

    Raises:
        UserError: something that the config names is not as the run needs it.
        RunError: the run had to stop, for example at a loss that is not finite.
    """
    if (finished := folder.finished()) is not None:
        say(f"finished already: {folder.path}")
        return finished["result"].get(cfg.metric)
    refuse_another_run(cfg, folder)
    quieten()
    setup_logging(folder)
    folder.write_config(cfg)
    folder.write_environment([torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())])
    cfg = prepare(cfg)
    setup_logging(folder)  # again: a stage that was made on the way had its own
    torch.set_num_threads(threads(cfg)[0] or THREADS)
    torch.manual_seed(derive(cfg.seed, "torch"))

    device = build_device(cfg)
    tokenizer = build_tokenizer(cfg)
    task = build_task(cfg, tokenizer, cfg.data, cfg.schedule.prompts_per_update)
    state = build_state(cfg, task)
    say(f"{cfg.algo.name} of {cfg.model.name} on {cfg.task.name}")
    for name, value in describe(cfg, len(task)):
        say(f"  {name + ':':24}{value}")
    engine = build_engine(cfg, tokenizer, device, state)
    with ExitStack() as ends:
        generator = cfg.generator.build(cfg, engine, tokenizer, folder.path)
        ends.callback(generator.close)
        scorer = cfg.scorer.build(cfg, tokenizer, device)
        assert scorer is not None, "validated: training needs a scorer"
        sampling = Sampling(
            samples=cfg.algo.samples_per_prompt,
            temperature=cfg.generator.temperature,
            response_length=cfg.generator.response_length,
            purpose="train",
        )
        evaluator = build_evaluator(cfg, task, engine, generator, scorer, tokenizer, device)
        objective = cfg.algo.build()
        recorder = Recorder(cfg.schedule.log_every, cfg.metric, TOLERANCE[cfg.model.dtype])
        checkpoints = Checkpoints(folder.path, cfg.save_total_limit, objective)
        if cfg.save_generations:
            scorer = Saved(scorer, folder.generations, tokenizer, sampling, state)

        in_flight = []
        if last := folder.last_checkpoint():
            in_flight = checkpoints.load(last, state, engine, recorder)
            say(f"going on at update {state.update} of {state.num_updates}, from {last}")
        recorder.open(build_loggers(cfg, folder, state), generator)
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
                cfg.seed,
            )
        except NonFinite as error:
            raise not_finite(error, state, folder) from error
    if cfg.algo.trains is Trains.reward:
        centre(cfg, engine, tokenizer)
    write_model(engine, folder)
    result = recorder.evaluated
    folder.write_state({**state.state_dict(), "finished": True, "result": result})
    say(f"model: {folder.model}   {gains(recorder.first, result, cfg)}")
    return result.get(cfg.metric)


def refuse_another_run(cfg: Config, folder: RunFolder) -> None:
    """Raise UserError where the folder has a checkpoint of a run with other settings."""
    if (
        folder.last_checkpoint()
        and folder.config.exists()
        and digest(load_config(folder.config)) != digest(cfg)
    ):
        raise UserError(
            "hydra.run.dir must be a folder of this run (its checkpoint would go on with other settings), "
            f"got {folder.path}, whose config.yaml differs; set resume=never to move it aside"
        )


def quieten() -> None:
    """Keep libraries from drawing bars over the progress display; what matters of loading is checked and said
    here.
    """
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    if not console.is_terminal:
        datasets.disable_progress_bars()


def build_device(cfg: Config) -> torch.device:
    """The device of the models."""
    name = cfg.backend.device.value
    if cfg.backend.device is Device.auto:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "backend.device=cuda needs a GPU that torch can use, and there is none; set backend.device=auto"
        )
    return torch.device(name)


def build_tokenizer(cfg: Config) -> PreTrainedTokenizerFast:
    """The policy's tokenizer; that of the task's vocabulary where a model is made from nothing."""
    start = cfg.model.base if cfg.algo.trains is Trains.base else cfg.model.policy
    name = cfg.model.tokenizer or start
    if name is None:
        assert isinstance(cfg.task, EmbeddedTaskConfig), "validated: only embedded tasks start from nothing"
        return cfg.task.tokenizer()
    key = "model.tokenizer" if cfg.model.tokenizer else "model.policy"
    return load_tokenizer(name, cfg.model.pad_token, cfg.model.trust_remote_code, key)


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


def build_engine(
    cfg: Config, tokenizer: PreTrainedTokenizerFast, device: torch.device, state: TrainState
) -> Engine:
    """Module, reference and optimizer on the backend."""
    module = build_module(cfg, tokenizer)
    check_vocabulary(module.model, tokenizer)
    problem = check_context(module.model.config, cfg.task.max_prompt_tokens, cfg.generator.response_length)
    if problem:
        raise UserError(problem)
    reference = None
    if cfg.algo.trains is Trains.policy:
        name = cfg.model.reference or cfg.model.policy
        assert name is not None
        dtype = getattr(torch, cfg.model.dtype.value)
        frozen = load_causal_lm(
            name, dtype, cfg.model.attention, cfg.model.trust_remote_code, key="model.reference"
        )
        reference = Policy(frozen, cfg.generator.temperature, cfg.model.shared_prefix)
    steps = cfg.schedule.minibatches * cfg.schedule.epochs
    return cfg.backend.build(
        module=module,
        reference=reference,
        tokenizer=tokenizer,
        optim=cfg.optim,
        total_steps=state.num_updates * steps,
        steps_per_batch=steps,
        stale=cfg.schedule.max_lag > 0 or not cfg.generator.samples,
        device=device,
        dtype=cfg.model.dtype,
        value_lr=cfg.algo.value_lr if isinstance(cfg.algo, PPOConfig) else None,
    )


def build_module(cfg: Config, tokenizer: PreTrainedTokenizerFast) -> Policy | RewardModel | ActorCritic:
    """What the run trains, from where it starts; weights in float32."""
    model = cfg.model
    options: dict[str, Any] = {"attention": model.attention, "trust_remote_code": model.trust_remote_code}
    if cfg.algo.trains is Trains.reward:
        assert model.policy is not None
        rng = torch.Generator().manual_seed(derive(cfg.seed, "reward head"))
        made = new_reward_model(model.policy, tokenizer.pad_token_id, rng, **options)
        return RewardModel(made, model.shared_prefix)
    if cfg.algo.trains is Trains.base and model.base is None:
        assert isinstance(model, NanoConfig), "validated: only the embedded model starts from nothing"
        return Policy(new_nano(model, tokenizer), cfg.generator.temperature, model.shared_prefix)
    start = model.base if cfg.algo.trains is Trains.base else model.policy
    assert start is not None
    key = f"model.{cfg.algo.trains.value}"
    policy = Policy(load_causal_lm(start, key=key, **options), cfg.generator.temperature, model.shared_prefix)
    if not isinstance(cfg.algo, PPOConfig):
        return policy
    return ActorCritic(policy, build_value_model(cfg, cfg.algo, tokenizer))


def build_value_model(cfg: Config, algo: PPOConfig, tokenizer: PreTrainedTokenizerFast) -> ValueModel:
    """The value model as it starts, weights in float32: the reward model, or the policy with values of 0."""
    model = cfg.model
    options: dict[str, Any] = {"attention": model.attention, "trust_remote_code": model.trust_remote_code}
    if algo.starts_value(cfg) is ValueFrom.policy:
        assert model.policy is not None
        made = new_reward_model(model.policy, tokenizer.pad_token_id, None, **options)
        torch.nn.init.zeros_(score_head(made).weight)
        return ValueModel(made, model.shared_prefix)
    path = algo.reward_model(cfg)
    assert path is not None, "validated: a reward model is named or made"
    own = load_tokenizer(path, model.pad_token, model.trust_remote_code, "model.reward")
    if own.get_vocab() != tokenizer.get_vocab():
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


def build_evaluator(
    cfg: Config,
    task: Task,
    engine: Engine,
    generator: Generator,
    scorer: Scorer,
    tokenizer: PreTrainedTokenizerFast,
    device: torch.device,
) -> Evaluator:
    """What measures the run on held-out examples."""
    if cfg.algo.trains is Trains.reward:
        pairs = task.held_out(cfg.eval.prompts)
        assert pairs.completions is not None
        length = cfg.generator.response_length
        return RewardEvaluator(encode_completions(pairs, pairs.completions, tokenizer, length), engine)
    if not cfg.generator.samples:  # stored completions are no answer to a held-out prompt
        generator = HFGenerator(engine.borrow_policy, tokenizer, batch_size=256, seed=cfg.seed)
    return PolicyEvaluator(
        task.held_out(cfg.eval.prompts, data=Data.prompts),
        generator,
        cfg.gold.build(cfg, tokenizer, device),
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

        loggers.append(WandbLogger(cfg.logger.wandb, folder))
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


def write_model(engine: Engine, folder: RunFolder) -> None:
    """Write the final model, whole or not at all."""
    scratch = folder.path / f"{SCRATCH}model"
    shutil.rmtree(folder.model, ignore_errors=True)
    engine.save_model(scratch)
    scratch.rename(folder.model)


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
        if {name} <= first.keys() & last.keys()
    ]
    return ", ".join(changes) or "(not evaluated: schedule.eval_every=0)"


def not_finite(error: NonFinite, state: TrainState, folder: RunFolder) -> RunError:
    """What to tell of a loss that is not finite; the batch's rows are kept for replay."""
    file = folder.path / "failed_batch.json"
    file.write_text(json.dumps({"update": state.update, "what": error.what, "index": error.index}))
    last = folder.last_checkpoint()
    return RunError(
        f"update {state.update} (from 0) gave {error.what}; no weight was changed. The rows of the data set "
        f"are in {file}; the last good checkpoint is {last or 'not there yet: none was written'}"
    )
