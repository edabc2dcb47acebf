"""Replay of a bundle: the update is computed again, without data set, generator, reference and judge.

A bundle comes from others, so nothing in it is executed or fetched. Only settings that an update reads
are kept, models are read from safetensors, and the answers of judges come from the file. A setting that names
code or an address which the replay would use is refused, unless the caller trusts the file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from pickle import UnpicklingError
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedTokenizerFast

from rlhf.assembly.models import build_device, quieten_libraries
from rlhf.assembly.parts import make
from rlhf.assembly.training import build_engine
from rlhf.config.algorithms import DistillConfig, PPOConfig, ValueFrom
from rlhf.config.environments import EnvironmentConfig
from rlhf.config.generators import HFConfig
from rlhf.config.models import Device
from rlhf.config.root import Config
from rlhf.config.run import LoggersConfig
from rlhf.config.schema import sections
from rlhf.config.scorers import NoScorerConfig, judges, scorers
from rlhf.config.tasks import TaskConfig, TLDRMiniConfig
from rlhf.core.batch import Batch, batch_of, tensors_of
from rlhf.core.errors import RunError, UserError, explained, one_line
from rlhf.core.formatting import shortened
from rlhf.core.state import TrainState
from rlhf.engines.engine import OPTIMIZER_FILE
from rlhf.models.loading import read_tokenizer
from rlhf.models.modules import ActorCritic
from rlhf.processes.ranks import Ranks
from rlhf.referee.bundle import Tape, digest, permitted, rescored
from rlhf.referee.file import BatchFile, read
from rlhf.trials.trials import choose_head, compile_blocks
from rlhf.words.compose import load_config

# Scorers that execute nothing of a file; reasoning_gym, for example, evaluates expressions.
SCORERS = ("answer", "facts", "labels", "environment", "judge", "weighted", "mixture")
_THREADS = 512  # most threads of a replay, whatever the file says
ATTENTION = ("auto", "sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention")
# Any number or text of a bundle of others may be malformed, and no check knows all of them.
MALFORMED = (
    *(ArithmeticError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError),
    *(UnpicklingError, SafetensorError),
)


def load(path: Path) -> BatchFile:
    """Read a bundle with all its tensors as they were written.

    Raises:
        UserError: the file is no bundle.
    """
    file = read(path)
    if file.header.get("kind") != "bundle":
        raise UserError(f"{path} must be a bundle, got a batch file; write one with: rlhf bundle <run>")
    with safe_open(path, "pt") as opened:
        return replace(file, tensors={name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118


def row_of(file: BatchFile, prompt: int | None) -> int | None:
    """Return the row of a prompt, from 1, of the batch of a bundle.

    Raises:
        UserError: the batch has no such prompt.
    """
    count = len(file.tensors.get("batch/index", ()))
    if prompt is not None and not 1 <= prompt <= count:
        raise UserError(f"--prompt must be from 1 to {count}, got {prompt}")
    return None if prompt is None else prompt - 1


def malformed(error: Exception) -> UserError | None:
    """Explain an error of the content of a bundle."""
    if isinstance(error, UserError | RunError) or not isinstance(error, MALFORMED):
        return None
    got = shortened(one_line(error), 200)
    return UserError(f"the bundle must be one that rlhf.bundle of this version wrote, got {got}")


def unpack(file: BatchFile, folder: Path) -> None:
    """Write the files in a bundle below a folder.

    Raises:
        UserError: one would be outside of the folder, or is of a kind that could be executed.
    """
    for name in [name for name in file.tensors if name.startswith("file/")]:
        path = folder / name.removeprefix("file/")
        if not permitted(name.removeprefix("file/")):
            raise UserError(f"a bundle must contain files of models and judgements only, got {name!r}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(file.tensors[name].numpy().tobytes())


def config_of(file: BatchFile, folder: Path) -> Config:
    """Return the config of a bundle, written to a folder; no interpolation is resolved."""
    if "${" in (text := file.header["config"]):
        raise UserError("the config of a bundle must have values only, got an interpolation ${...}")
    (folder / "config.yaml").write_text(text, encoding="utf-8")
    return load_config(folder / "config.yaml")


def batch_in(file: BatchFile, *stages: str) -> Batch:
    """Return the batch whose tensors begin with a stage and `/`; those of later stages replace others."""
    found = ((f"{stage}/", name, x) for stage in stages for name, x in file.tensors.items())
    tensors = {name.removeprefix(stage): x for stage, name, x in found if name.startswith(stage)}
    missing = dict.fromkeys(("texts", "references"), [""] * len(tensors.get("index", ())))
    return batch_of(tensors, {**missing, **file.header["batch"]})


def refused(cfg: Config, scores: bool) -> Iterator[str]:
    """Yield a message for each setting that names code, or an address, which a replay would use."""
    if cfg.loop is not None:
        yield f"loop must be null (it names code), got {cfg.loop}"
    if cfg.model.trust_remote_code:
        yield "model.trust_remote_code must be false (it runs code of the file), got true"
    if cfg.model.attention not in ATTENTION:
        yield f"model.attention must be {', '.join(ATTENTION)} (others name code), got {cfg.model.attention}"
    for at, each in scorers(cfg):
        if scores and at.startswith("scorer") and each.name not in SCORERS:
            rule = f"{at} must be {', '.join(SCORERS)} (others run code or ask a service)"
            yield f"{rule}, got {each.name}: {each.described}; add --only update"


def kept(cfg: Config, folder: Path, limits: list[int | None], scores: bool) -> Config:
    """Return the config of a replay: models in `folder`, and no setting that an update does not read."""
    if cfg.backend.name != "torch":
        raise UserError(f"backend must be torch, whose state one process can load, got {cfg.backend.name}")
    start = str(folder / ("start" if cfg.model.lora.rank else "model"))
    reference = folder / "reference"
    changes: dict[str, Any] = {
        **{"model.base": start, "model.policy": start, "model.tokenizer": str(folder / "tokenizer")},
        **{"model.reference": str(reference) if reference.is_dir() else start, "model.reward": None},
        **{"model.chat_template": None, "backend.micro_batch": limits[0], "backend.tokens": limits[1]},
        **{"backend.device": Device.auto, "gold": NoScorerConfig(), "environment": EnvironmentConfig()},
        **{"logger": LoggersConfig(), "loop": None, "hooks": [], "push_to": None, "generator": HFConfig()},
        **{f"generator.{each}": getattr(cfg.generator, each) for each in ("temperature", "response_length")},
        "task": TLDRMiniConfig(),
    }
    if names := cfg.task.shares:
        parts: dict[str, TaskConfig] = {name: TLDRMiniConfig() for name in names}
        changes["task"] = cfg.task.with_({"parts": parts, "weights": {}})
    if isinstance(cfg.algo, PPOConfig):
        changes |= {"model.reward": str(folder / "critic"), "algo.value_from": ValueFrom.reward}
    if isinstance(cfg.algo, DistillConfig):
        changes["algo.teacher.token_variable"] = None
    if not scores:
        changes["scorer"] = NoScorerConfig()
    for at, judge in judges(cfg).items() if scores else ():
        own = [name for name in ("template", "rubric") if getattr(judge, name) is not None]
        changes |= {f"{at}.{name}": str(folder / "judgements" / f"{at}.{name}") for name in own}
        changes[f"{at}.token_variable"] = None
    made = cfg.with_({key: value for key, value in changes.items() if not key.startswith("gold.")})
    if problems := [text for at, each in sections(made) for text in each.problems(at)]:
        raise UserError(*problems)
    return made


def replay(file: BatchFile, only: str = "", prompt: int | None = None, trust: bool = False) -> BatchFile:
    """Return what the update of a bundle computes in this process, in the form of a bundle.

    Args:
        file: the bundle.
        only: "rewards" or "update"; empty: both.
        prompt: the row of the only prompt whose rewards are computed; None: all.
        trust: whether settings of the bundle may name code and addresses.

    Raises:
        UserError: the bundle is malformed, lacks weights or texts, or names what must be trusted.
    """
    quieten_libraries()
    head = file.header
    with TemporaryDirectory() as scratch, explained(malformed):
        folder = Path(scratch)
        unpack(file, folder)
        cfg, batch, tape = config_of(file, folder), batch_in(file, "batch"), Tape(folder)
        kinds = {each.name for at, each in scorers(cfg) if at.startswith("scorer")}
        scores = only != "update" and "texts" in head["batch"] and not kinds & {"reward_model", "none"}
        if only == "rewards" and not scores:
            raise UserError("--only rewards needs texts and a scorer other than a reward model in the bundle")
        if not trust and (found := [*refused(cfg, scores)]):
            raise UserError(*(f"{each}; or add --trust if you trust the file" for each in found))
        cfg = kept(cfg, folder, head["limits"], scores)
        torch.set_num_threads(min(int(head["machine"][-1]), _THREADS))
        tokenizer = read_tokenizer(str(folder / "tokenizer"), key="tokenizer")
        if only != "rewards":
            repeat(cfg, head, batch, tokenizer, tape)
        if scores:
            rows = batch if prompt is None else batch.select(torch.tensor([prompt]))
            again, _ = rescored(cfg, rows, tokenizer, folder / "judgements" / "*.jsonl")
            new = {name: x for name, x in tensors_of(again).items() if name.startswith(("scores", "parts"))}
            tape.tensors |= {f"batch/{name}": x for name, x in new.items()}
        return BatchFile(tape.tensors, {"machine": head["machine"], **tape.header, "rewards": scores})


def repeat(
    cfg: Config, head: dict[str, Any], batch: Batch, tokenizer: PreTrainedTokenizerFast, tape: Tape
) -> None:
    """Compute the log-probs before the update, credit and optimizer steps again, and note them on `tape`."""
    if not (tape.folder / OPTIMIZER_FILE).exists():
        raise UserError("the bundle must have weights to repeat the update, got none; add --only rewards")
    num_updates, version = head["counters"]
    state = TrainState(num_updates=num_updates, update=head["step"] - 1)
    engine = build_engine(cfg, tokenizer, Ranks(build_device(cfg)), state)
    choose_head(engine, cfg)
    compile_blocks(engine, cfg, num_updates)
    engine.load(tape.folder)
    tape.before(engine)
    objective = make(cfg.algo)
    objective.load_state_dict(head["objective"])
    credited = tape.credit(objective, batch)
    if batch.old_logprobs is not None:
        tape.tensors["batch/old_logprobs"] = engine.infer(engine.policy, batch, "logprobs")
    if isinstance(engine.module, ActorCritic):
        tape.tensors["batch/values"] = engine.infer(engine.module.critic, batch, "values")
    for minibatch in credited.minibatches(
        cfg.schedule.minibatches, cfg.schedule.epochs, cfg.seed, state.update
    ):
        tape.step(minibatch)
        tape.stepped(engine.step(minibatch, objective))
    if engine.moving is not None:
        engine.moving(version + 1)
    tape.header["after"] = digest(engine)
