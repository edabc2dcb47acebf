"""One run: build the parts that the config names, go on where an earlier session stopped, train, leave the
model.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import datasets
import torch
import transformers
from transformers import PreTrainedTokenizerFast

from rlhf.assembly.data import build_state, build_task
from rlhf.assembly.device import build_device
from rlhf.assembly.engine import build_engine
from rlhf.assembly.evaluator import build_evaluator
from rlhf.assembly.generator import build_generator
from rlhf.assembly.loggers import build_loggers
from rlhf.assembly.models import build_tokenizer
from rlhf.checks.sizes import describe
from rlhf.config.algo import Data, Trains
from rlhf.config.generator import threads
from rlhf.config.model import Dtype
from rlhf.config.run import Resume
from rlhf.core.batch import Sampling
from rlhf.core.console import console, say, transcript
from rlhf.core.encoding import encode_completions
from rlhf.core.errors import Interrupted, RunError, UserError
from rlhf.core.files import sync
from rlhf.core.heap import keep_freed
from rlhf.core.seeding import derive
from rlhf.engines.engine import NonFinite
from rlhf.models.lora import is_adapted
from rlhf.models.modules import RewardModel
from rlhf.processes.ranks import Ranks
from rlhf.processes.signals import interruptible
from rlhf.runs.disk import explained, no_room
from rlhf.runs.resuming import refuse_another_run
from rlhf.runs.transcript import setup_logging
from rlhf.scorers.saved import Saved
from rlhf.stages.prerequisites import prepare
from rlhf.training.checkpoint import SCRATCH, Checkpoints, compare, last_good, no_room_to
from rlhf.training.invariants import expected
from rlhf.training.loop import train
from rlhf.training.recorder import Recorder
from rlhf.training.stream import Stream

if TYPE_CHECKING:
    from rlhf.config.root import Config
    from rlhf.core.metrics import Row
    from rlhf.core.state import TrainState
    from rlhf.engines.engine import Engine
    from rlhf.processes.signals import Interruption
    from rlhf.runs.folder import RunFolder


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
