"""Replay of a bundle: the update is computed again, without data set, generator, reference and judge.

A bundle comes from others, so nothing in it is executed or fetched. Only the config sections that an update
reads are kept, models come from the file as safetensors, and the answers of judges, too. A setting that names
code, a file or an address that the replay would use is refused, unless the caller trusts the file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import safe_open
from transformers import PreTrainedTokenizerFast

from rlhf.assembly.models import build_device, quieten_libraries
from rlhf.assembly.parts import make
from rlhf.assembly.training import build_engine, build_scorer
from rlhf.config.algorithms import DistillConfig, PPOConfig, ValueFrom
from rlhf.config.environments import EnvironmentConfig
from rlhf.config.generators import HFConfig
from rlhf.config.models import Device
from rlhf.config.root import Config
from rlhf.config.run import LoggersConfig
from rlhf.config.schema import sections
from rlhf.config.scorers import NoScorerConfig, judges, scorers
from rlhf.config.tasks import TaskConfig, TLDRMiniConfig
from rlhf.core.batch import Batch, Rollouts, batch_of, tensors_of
from rlhf.core.errors import UserError
from rlhf.core.state import TrainState
from rlhf.engines.engine import OPTIMIZER_FILE
from rlhf.models.loading import read_tokenizer
from rlhf.models.modules import ActorCritic
from rlhf.processes.ranks import ALONE, Ranks
from rlhf.referee.bundle import Tape, digest, machine
from rlhf.referee.file import BatchFile, read
from rlhf.scorers.scorer import Scorer
from rlhf.words.compose import load_config

SUFFIXES = (
    ".json",
    ".safetensors",
    ".txt",
    ".model",
    ".jinja",
    ".jsonl",
    ".template",
    ".rubric",
)  # none that is executed
SCORERS = ("answer", "facts", "labels", "environment", "judge", "weighted", "mixture")  # no code of the file
ATTENTION = ("auto", "sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention")


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


@dataclass
class Opened:
    """A bundle in a folder: its config for a replay, and its batch."""

    file: BatchFile
    folder: Path
    config: Config
    batch: Batch
    scores: bool  # whether the rewards can be computed again


def opened(file: BatchFile, folder: Path, trust: bool = False, scores: bool = True) -> Opened:
    """Unpack the files of a bundle into an empty folder, and read its config and its batch.

    Args:
        file: the bundle.
        folder: the folder.
        trust: whether settings may name code, files and addresses.
        scores: whether rewards are to be computed again.

    Raises:
        UserError: the bundle is malformed, or names what must be trusted.
    """
    head, problems = file.header, list[str]()
    for name, kind in {"config": str, "threads": int, "state": dict, "batch": dict, "limits": dict}.items():
        if not isinstance(head.get(name), kind):
            problems.append(f"{name} of the header must be of type {kind.__name__}, got {head.get(name)!r}")
    for name, x in file.tensors.items():
        if not name.startswith("file/"):
            continue
        place = PurePosixPath(name.removeprefix("file/"))
        known = place.suffix in SUFFIXES or str(place) == OPTIMIZER_FILE
        inside = not place.is_absolute() and ".." not in place.parts and "\\" not in name and "\0" not in name
        if x.dtype != torch.uint8 or x.dim() != 1 or not known or not inside:
            problems.append(f"{name!r} must be the bytes of a file that a bundle may contain")
    if "${" in str(head.get("config")):
        problems.append("config must have values only, got an interpolation ${...}")
    if problems:
        raise UserError(*problems)
    for name, x in file.tensors.items():
        if name.startswith("file/"):
            path = folder / name.removeprefix("file/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(x.numpy().tobytes())
    (folder / "config.yaml").write_text(head["config"], encoding="utf-8")
    cfg = load_config(folder / "config.yaml")
    tensors = {n.removeprefix("batch/"): x for n, x in file.tensors.items() if n.startswith("batch/")}
    missing = dict.fromkeys(("texts", "references"), [""] * len(tensors.get("index", ())))
    batch = batch_of(tensors, {**missing, **head["batch"]})
    names = {each.name for at, each in scorers(cfg) if at.startswith("scorer")}
    scores = scores and "texts" in head["batch"] and not names & {"reward_model", "none"}
    if not trust and (found := [*refused(cfg, scores)]):
        raise UserError(*(f"{each}; add --trust if you trust the file" for each in found))
    return Opened(file, folder, kept(cfg, folder, scores, head["limits"]), batch, scores)


def refused(cfg: Config, scores: bool) -> Iterator[str]:
    """Yield a message for each setting of a bundle that names code or an address which the replay would use."""
    if cfg.backend.name != "torch":
        yield f"backend must be torch to repeat an update in one process, got {cfg.backend.name}"
    if cfg.loop is not None:
        yield f"loop must be null (it names code), got {cfg.loop}"
    if cfg.model.trust_remote_code:
        yield "model.trust_remote_code must be false (it runs code of the file), got true"
    if cfg.model.attention not in ATTENTION:
        yield f"model.attention must be one of {', '.join(ATTENTION)} (others name code), got {cfg.model.attention}"
    for at, each in scorers(cfg):
        if scores and at.startswith("scorer") and each.name not in SCORERS:
            yield (
                f"{at} must be one of {', '.join(SCORERS)} (others name code or an address), got {each.name}: "
                f"{each.described}; add --only update, which takes the rewards from the file"
            )


def kept(cfg: Config, folder: Path, scores: bool, limits: dict[str, Any]) -> Config:
    """Return the config of a replay: models in `folder`, and no setting that an update does not read."""
    model, reference, critic = (str(folder / name) for name in ("model", "reference", "critic"))
    changes: dict[str, Any] = {f"model.{name}": model for name in ("base", "policy", "reference")}
    changes |= {
        "model.tokenizer": str(folder / "tokenizer"),
        "model.chat_template": None,
        "model.reward": None,
    }
    if Path(reference).is_dir():
        changes["model.reference"] = reference
    if isinstance(cfg.algo, PPOConfig):
        changes |= {"model.reward": critic, "algo.value_from": ValueFrom.reward}
    if isinstance(cfg.algo, DistillConfig):
        changes["algo.teacher.token_variable"] = None
    changes |= {"task": without_data(cfg.task), "gold": NoScorerConfig(), "environment": EnvironmentConfig()}
    changes |= {
        "generator": HFConfig(),
        "logger": LoggersConfig(),
        "loop": None,
        "hooks": [],
        "push_to": None,
    }
    changes |= {
        f"generator.{name}": getattr(cfg.generator, name) for name in ("temperature", "response_length")
    }
    changes |= {"backend.micro_batch": limits.get("sequences"), "backend.tokens": limits.get("tokens")}
    changes |= {"backend.device": Device.auto}
    if not scores:
        changes["scorer"] = NoScorerConfig()
    for at, judge in judges(cfg).items() if scores else ():
        own = [name for name in ("template", "rubric") if getattr(judge, name) is not None]
        changes |= {f"{at}.{name}": str(folder / "judgements" / f"{at}.{name}") for name in own}
        changes[f"{at}.token_variable"] = None
    made = cfg.with_(changes)
    if problems := [text for at, each in sections(made) for text in each.problems(at)]:
        raise UserError(*problems)
    return made


def without_data(task: TaskConfig) -> TaskConfig:
    """Return a task that reads nothing, with the parts of `task` if it is a mixture."""
    parts = {name: TLDRMiniConfig() for name in task.shares}
    return task.with_({"parts": parts, "weights": {}}) if parts else TLDRMiniConfig()


def rescored(
    given: Opened, tokenizer: PreTrainedTokenizerFast, prompt: int | None = None
) -> tuple[Batch, Scorer]:
    """Return the batch, or its row `prompt`, with rewards that are computed again; and what computed them."""
    judgements = given.folder / "judgements" / "*.jsonl"
    scorer = build_scorer(given.config, "scorer", tokenizer, ALONE, judgements, asks=False)
    assert scorer is not None
    rollouts = Rollouts(**{each.name: getattr(given.batch, each.name) for each in fields(Rollouts)})
    return scorer(rollouts if prompt is None else rollouts.select(torch.tensor([prompt]))), scorer


def replay(file: BatchFile, only: str = "", prompt: int | None = None, trust: bool = False) -> BatchFile:
    """Return what the update of a bundle computes in this process, in the form of a bundle.

    Args:
        file: the bundle.
        only: "rewards" or "update"; empty: both.
        prompt: the row of the only prompt whose rewards are computed; None: all.
        trust: whether settings of the bundle may name code, files and addresses.

    Raises:
        UserError: the bundle is malformed, has no weights, or names what must be trusted.
    """
    quieten_libraries()
    tape, head = Tape(), file.header
    with TemporaryDirectory() as scratch:
        given = opened(file, Path(scratch), trust, scores=only != "update")
        if only == "rewards" and not given.scores:
            raise UserError("--only rewards needs texts and a scorer other than reward_model in the bundle")
        torch.set_num_threads(head["threads"])
        tokenizer = read_tokenizer(str(given.folder / "tokenizer"), key="tokenizer")
        if only != "rewards":
            repeat(given, tokenizer, tape)
        if given.scores:
            batch, _ = rescored(given, tokenizer, prompt)
            tape.tensors |= {
                f"batch/{name}": x
                for name, x in tensors_of(batch).items()
                if name.startswith(("scores", "parts"))
            }
    return BatchFile(
        tape.tensors,
        {
            **tape.header,
            "machine": machine(build_device(given.config).type),
            "threads": torch.get_num_threads(),
        },
    )


def repeat(given: Opened, tokenizer: PreTrainedTokenizerFast, tape: Tape) -> None:
    """Make the optimizer steps of a bundle again, and note on `tape` what they compute."""
    cfg, head, batch = given.config, given.file.header, given.batch
    if not (given.folder / OPTIMIZER_FILE).exists():
        raise UserError(
            "the bundle must have weights to repeat the update, got none; bundle without --no-weights"
        )
    state = TrainState(num_updates=0)
    for name, value in head["state"].items():
        setattr(state, name, value)
    ranks = Ranks(build_device(cfg))
    engine = build_engine(cfg, tokenizer, ranks, state)
    engine.load(given.folder)
    tape.header["before"] = digest(engine)
    objective = make(cfg.algo)
    objective.load_state_dict(head["objective"])
    credited = tape.credit(objective, batch)
    if batch.old_logprobs is not None:
        tape.tensors["batch/old_logprobs"] = engine.infer(engine.policy, batch, "logprobs")
    if isinstance(engine.module, ActorCritic):
        tape.tensors["batch/values"] = engine.infer(engine.module.critic, batch, "values")
    schedule, engine.watch = cfg.schedule, tape.watch
    for minibatch in credited.minibatches(schedule.minibatches, schedule.epochs, cfg.seed, state.update):
        tape.step(minibatch)
        tape.stepped(engine.step(minibatch, objective))
    if engine.moving is not None:
        engine.moving(state.version + 1)
    tape.header["after"] = digest(engine)
