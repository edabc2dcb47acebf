"""A training run: build the parts that the config names, resume from a checkpoint, train, save the model."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from rlhf.assembly.models import build_tokenizer, full_gpu, joined
from rlhf.assembly.parts import build_loggers, make, part
from rlhf.assembly.training import assemble, build_state, build_task, training_sampling
from rlhf.checks.check import problems
from rlhf.config.algorithms import Data, Trains
from rlhf.config.root import Config, threads
from rlhf.config.run import Resume
from rlhf.core.errors import CommonError, Interrupted, UserError, explained
from rlhf.core.files import whole
from rlhf.core.formatting import short_path
from rlhf.core.launched import derive
from rlhf.core.machine import keep_freed
from rlhf.core.state import TrainState
from rlhf.engines.engine import Engine, NonFinite
from rlhf.loggers.logger import Hook, Hooks
from rlhf.models.folder import CARD
from rlhf.models.modules import RewardModel, is_adapted
from rlhf.processes.ranks import Ranks, lost_rank
from rlhf.processes.signals import Interruption, interruptible
from rlhf.runs.folder import COMPLETE, RunFolder, run_log, setup_logging
from rlhf.runs.lock import Claim, claimed, deleted_folder, full_disk, no_room, unusable_file
from rlhf.runs.resuming import refuse_another_run, saved_length
from rlhf.scorers.judge import Spent
from rlhf.stages.inspection import rehearse
from rlhf.stages.prerequisites import complete, names
from rlhf.stages.words import model_card, print_closing, print_opening
from rlhf.terminal.console import Stages, say, transcript
from rlhf.text.encoding import encode_completions
from rlhf.training.checkpoint import compare, full_disk_reason, last_good
from rlhf.training.loop import train
from rlhf.training.session import Parts, Session
from rlhf.training.stream import RolloutStream, StreamContext
from rlhf.usercode.address import load_function
from rlhf.words.compose import model_label

log = logging.getLogger(__name__)

Opener = Callable[..., Session]  # opens a session, given the arguments of `Session`
THREADS = torch.get_num_threads()  # the default of torch; an earlier run in this process may change it


def run(
    cfg: Config,
    folder: RunFolder,
    ranks: Ranks | None = None,
    *,
    check: bool = True,
    claim: Claim = claimed,
    hooks: Sequence[Hook] = (),
    session: Opener = Session,
) -> float | None:
    """Carry out the run `cfg` in `folder`, and return the final value of its objective metric.

    If a hook raises `StopRun`, the run is not finished, and the value is that of the last evaluation.

    Args:
        cfg: the config of the run.
        folder: the run folder; a run that has a checkpoint there is resumed.
        ranks: the ranks of the run; None: the ranks that the launcher started.
        check: check the config first; False: the caller has checked the config.
        claim: locks the folder on the first rank; `nullcontext`: the caller has locked the folder.
        hooks: the user's code that the first rank calls during training.
        session: makes the verbs that the loop calls, from the arguments of `Session`.

    Raises:
        UserError: the config is invalid, a model, a data set or another item that the config names cannot be
            used, or another process runs in the folder. A new folder without results is removed.
        RunError: the run had to stop, for example because a loss is not finite.
        Interrupted: a signal asked to stop; the same call resumes the run.
    """
    if check and (found := problems(cfg)):
        raise UserError(*found)
    with interruptible() as interruption, ExitStack() as ends:
        ranks = joined(cfg, ranks)
        ranks.from_first(lambda: ends.enter_context(claim(folder.path)))
        with (
            run_log(),
            explained(
                lost_rank,
                partial(full_gpu, cfg, folder),
                partial(deleted_folder, folder.path),
                partial(full_disk, folder),
                partial(unusable_file, folder.path),
            ),
        ):
            return carry_out(cfg, folder, ranks, interruption, Hooks(hooks, interruption.request), session)


def carry_out(
    cfg: Config, folder: RunFolder, ranks: Ranks, interruption: Interruption, hooks: Hooks, session: Opener
) -> float | None:
    """Carry out the run `cfg` with installed signal handlers; see `run`."""
    if (finished := ranks.from_first(folder.finished)) is not None:
        say(f"finished already: {folder.path}")
        return finished["result"].get(cfg.metric)
    last = ranks.from_first(lambda: _open_folder(cfg, folder))
    part(cfg.backend).prepare(cfg.backend, cfg.model.dtype, ranks)
    stages = Stages([*names(cfg), f"{cfg.algo.name} {cfg.task.name}"])
    if cfg.task.embedded and not cfg.stand_ins:  # before the stages that make its models
        ranks.from_first(lambda: rehearse(cfg, judgements=folder.judgements))
    typed, cfg = cfg, ranks.from_first(lambda: complete(cfg, run, stages=stages))
    started = time.monotonic()
    interruption.check()  # a signal may have come while a stage wrote its model
    torch.set_num_threads(threads(cfg)[0] or THREADS)
    keep_freed()
    torch.manual_seed(derive(cfg.seed, "torch"))

    cfg = at_start(cfg, ranks.from_first(folder.started))
    notes: dict[str, str] = {}
    tokenizer = build_tokenizer(cfg, notes)
    task = build_task(cfg, tokenizer, cfg.data, cfg.schedule.prompts_per_update)
    data = task.fingerprint()
    if last is not None:
        compare(last, data)
    state = build_state(cfg, task)

    with ExitStack() as ends:
        ends.enter_context(stages.enter(len(stages.names)))
        print_opening(cfg, folder, stages, task, notes, ranks)
        parts = assemble(cfg, task, data, state, folder, ranks, ends)
        saved = None
        if last is not None:
            saved = parts.checkpoints.load(last, state, parts.engine, parts.recorder)
            say(f"resumed from update {state.update} of {state.num_updates}: {last}")
        loggers = [*build_loggers(cfg, folder, state, last, parts.phases), hooks] if ranks.first else []
        parts.recorder.open(loggers, parts.generator)
        ends.callback(parts.recorder.close)
        parts.generator.load(parts.engine.weights(), state.version)
        stream = _stream(cfg, parts, saved, state)
        interruption.defer(ranks.any if ranks.size > 1 else bool)
        _train(session(parts, stream, state, cfg.schedule, interruption, cfg.seed), cfg, folder)
    failure, stopped = ranks.from_first(lambda: (hooks.failure, hooks.stopped))

    if state.done:
        if cfg.algo.trains is Trains.reward:
            centre(cfg, parts.engine, tokenizer)
        card = model_card(cfg, typed, folder.path, len(task), parts.recorder, state) if ranks.first else ""
        write_model(parts.engine, folder, ranks, card)
        if ranks.first:
            done = {"finished": True, "result": parts.recorder.evaluated}
            folder.write_state({**state.state_dict(), **done})
        session_s = time.monotonic() - started
        print_closing(cfg, typed, folder, parts.recorder, state, session_s, resumed=last is not None)
    if failure is not None:
        result, last = "the run is finished, and its model is complete", folder.last_checkpoint()
        if not state.done:
            result = f"the run stopped after update {state.update} of {state.num_updates}, and " + (
                f"the same command resumes it from {short_path(last)}" if last else "has no checkpoint"
            )
        raise CommonError(f"{failure} (traceback above); {result}")
    if not state.done:
        if stopped is None:
            raise interrupted(interruption, state, cfg, folder)
        if ranks.first:
            folder.write_state({**state.state_dict(), "finished": False, "stopped": stopped})
            last = folder.path / f"checkpoint-{state.update}"
            after = f"stopped after update {state.update} of {state.num_updates}"
            say(f"{after}: {stopped}; checkpoint: {short_path(last)}")
    return parts.recorder.evaluated.get(cfg.metric)


def _stream(cfg: Config, parts: Parts, saved: Any, state: TrainState) -> RolloutStream:
    """Return the rollouts of all remaining updates, given their state in a checkpoint (None: none)."""
    context = StreamContext(
        generator=parts.generator,
        prompts=parts.prompts,
        sampling=training_sampling(cfg),
        schedule=cfg.schedule,
        state=state,
        seed=cfg.seed,
        pad_id=parts.replay.pad_id,
        recorder=parts.recorder,
        phases=parts.phases,
        refill=parts.refill,
        saved=saved,
    )
    return make(cfg.clock, context)


def _train(session: Session, cfg: Config, folder: RunFolder) -> None:
    """Train until the run is done or asked to stop.

    Raises:
        RunError: a loss or a gradient is not finite.
        Spent: the budget of a judge is spent.
        Interrupted: a signal arrived before training, or while a scorer waited for its service.
    """
    parts, state, stream, ranks = session.parts, session.state, session.stream, session.parts.engine.ranks
    try:
        loop = train if cfg.loop is None else load_function("loop", cfg.loop, ("session",))
        session.run(loop)
    except NonFinite as error:
        file = folder.path / "failed_batch.json"
        batch = {"what": error.what, "index": error.index, "places": error.places}
        file.write_text(json.dumps({"update": state.update, **batch}))
        last = folder.last_checkpoint()
        raise CommonError(
            f"update {state.update} (from 0) gave {error.what}; no weight was changed. The rows of the data "
            f"set are in {file}; the last checkpoint is {last or 'none: no checkpoint was written yet'}"
        ) from error
    except (Interrupted, Spent) as error:  # the next session begins where scores were awaited
        if stream.taken > state.update:
            stream.put_back()
        done = ranks.from_first(lambda: (folder.path / f"checkpoint-{state.update}" / COMPLETE).exists())
        if state.update and stream.resumable and not done:
            parts.checkpoints.save(state, parts.engine, stream, parts.recorder)
        if isinstance(error, Spent):
            raise
        raise interrupted(session.interruption, state, cfg, folder) from None


def _open_folder(cfg: Config, folder: RunFolder) -> Path | None:
    """Write config.yaml and environment.json, and return the checkpoint to resume from, if any.

    Raises:
        UserError: the folder belongs to another run, has a folder in place of a file, or `resume=must` finds
            no valid checkpoint.
    """
    folder.check_files()
    refuse_another_run(cfg, folder)
    setup_logging(folder)
    if folder.config.exists() and saved_length(folder) is None:
        log.warning(f"{folder.config} was damaged; it is written again")
    folder.write_config(cfg)
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    folder.write_environment(devices, torch.backends.cpu.get_cpu_capability())
    last = last_good(folder.path)
    if last is None and cfg.resume is Resume.must:
        raise UserError(
            "resume=must needs a valid checkpoint (the messages above say what is wrong with each), "
            f"got {folder.path} with none; set resume=auto to start from the beginning"
        )
    return last


def at_start(cfg: Config, started: str) -> Config:
    """Return the config with the time that chat templates read, by default the time of the run's start."""
    if cfg.task.embedded or cfg.model.clock is not None:
        return cfg
    return cfg.with_({"model.clock": started})


def centre(cfg: Config, engine: Engine, tokenizer: PreTrainedTokenizerFast) -> None:
    """Shift the reward model so that held-out references score 0 on average (Huang et al., 2403.17031)."""
    prompts = build_task(cfg, tokenizer, Data.references, 1).held_out(cfg.eval.prompts)
    assert prompts.completions is not None
    references = encode_completions(prompts, prompts.completions, tokenizer, None)
    assert isinstance(engine.module, RewardModel)
    offset = engine.infer(engine.module, references, "rewards").double().mean().item()
    config = engine.module.model.config
    config.reward_offset = getattr(config, "reward_offset", 0.0) + offset


def write_model(engine: Engine, folder: RunFolder, ranks: Ranks, card: str) -> None:
    """Write the final model with its model card, and its adapter if any, each completely or not at all.

    Raises:
        RunError: the disk is full.
    """

    def save_model(scratch: Path) -> None:
        engine.save_model(scratch)
        if ranks.first:
            (scratch / CARD).write_text(card, encoding="utf-8")

    writers: list[tuple[Callable[[Path], None], Path]] = [(save_model, folder.model)]
    if is_adapted(engine.module.model):
        writers.append((engine.save_adapter, folder.adapter))
    for write, final in writers:
        with whole(final, durable=True, publish=ranks.first) as scratch:
            reason = ranks.first_of(full_disk_reason(lambda: write(scratch), folder.path))  # noqa: B023
            if reason is not None:
                raise no_room(folder, final, reason)


def interrupted(interruption: Interruption, state: TrainState, cfg: Config, folder: RunFolder) -> Interrupted:
    """Return the exception of a run that a signal stopped; its message says how to resume."""
    last = folder.last_checkpoint()
    command = "the same command" + (" without resume=never" if cfg.resume is Resume.never else "")
    text = (
        f"interrupted by {interruption.cause} after update {state.update} of {state.num_updates} "
        f"({cfg.algo.name} of {model_label(cfg)} on {cfg.task.name}); "
        + (
            f"checkpoint: {short_path(last)}; {command} resumes from it"
            if last
            else f"no checkpoint; {command} starts from the beginning"
        )
    )
    transcript.info(text)
    return Interrupted(text, interruption.received)
