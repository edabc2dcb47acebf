"""Stages of `rlhf.pipeline`: SFT model, preference pairs, reward model, RLHF and evaluation.

Each stage writes to a folder whose name contains a digest of its settings. A finished stage is therefore
skipped, and an interrupted stage is resumed.

| stage        | embedded tasks (`rlhf.stages.prerequisites`)     | other tasks                              |
|--------------|--------------------------------------------------|------------------------------------------|
| SFT model    | from random weights, or from `model.base`        | from `model.base`                        |
| pairs        | sampled from the SFT model, ordered by the judge | those of the task, relabelled by the     |
|              |                                                  | judge; unchanged with `scorer@gold=none` |
| reward model | from the SFT model                               | from the SFT model                       |

The SFT stage is skipped if `model.policy` is set, and the reward stage if `model.reward` is set. Pairs and
reward model are skipped if the RLHF run needs neither (for example with `scorer=answer`).
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rich import box
from rich.table import Table

from rlhf.checks.check import problems, warn, warnings
from rlhf.checks.composing import composed
from rlhf.checks.machine import check_memory
from rlhf.checks.names import recipes_of_other_commands
from rlhf.config.algo import Data, Trains
from rlhf.config.run import Resume
from rlhf.core import confidence
from rlhf.core.console import console, say_loading
from rlhf.core.errors import UserError
from rlhf.core.files import component
from rlhf.core.formatting import clock
from rlhf.core.launched import world_size
from rlhf.core.stages import Stages
from rlhf.loggers.display import EVALUATION_METRICS
from rlhf.runs import naming
from rlhf.runs.folder import COMPLETE, RunFolder
from rlhf.runs.lock import Claim, waiting_claim
from rlhf.stages import evaluation as evaluating
from rlhf.stages import relabelling
from rlhf.stages.candidates import candidates
from rlhf.stages.evaluation_config import changed
from rlhf.stages.evaluation_table import table
from rlhf.stages.final_model import final_model
from rlhf.stages.stage_config import checked, model_folder, pairs_folder, stage

if TYPE_CHECKING:
    from rlhf.config.root import Config

T = TypeVar("T")

# Metrics of a stage that the summary shows.
FIGURES = ("eval/win_rate", "eval/accuracy", "eval/gold_score", "eval/kl", "eval/loss")


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A stage of the chain.

    Attributes:
        name: name for messages.
        folder: where the stage writes.
        done: returns whether the stage is finished.
        make: runs the stage; resumes it if it was interrupted.
        figures: returns the results of the finished stage as text.
    """

    name: str
    folder: Path
    done: Callable[[], bool]
    make: Callable[[], object]
    figures: Callable[[], str]


def config_of(overrides: list[str]) -> tuple[Config, frozenset[str]]:
    """Return the checked config of the RLHF run, and which of `policy` and `reward` the overrides set.

    For a task that is not embedded, the path of a model that a stage will make is set to the model that the
    stage starts from. So checks find a model of the same shape.

    Raises:
        UserError: an override is invalid, or there is no model to start from.
    """
    if refused := [*recipes_of_other_commands(overrides)]:
        raise UserError(*refused)
    cfg = composed(overrides)
    arguments = (override.partition("=") for override in overrides)
    values = {key.lstrip("+"): value for key, _, value in arguments}
    named = frozenset(name for name in ("policy", "reward") if values.get(f"model.{name}", "null") != "null")
    made: list[str] = []  # models that the stages make
    if not cfg.task.embedded:
        start = cfg.model.policy if "policy" in named else cfg.model.base
        if start is None:
            raise UserError(
                "model.base must name the model that the SFT stage starts from (only embedded tasks start "
                "from random weights), got null; set model.base=<hub name or folder>, or "
                "model.policy=<SFT model>"
            )
        made = [name for name in ("policy", "reward") if name not in named]
        cfg = composed([*overrides, *(f"model.{name}={json.dumps(start)}" for name in made)])
    found = problems(cfg)
    if "reward" in made:  # the reward stage makes the reward model from the model that this path names
        found = [text for text in found if not text.startswith("model.reward must name a reward model")]
    if found:
        raise UserError(*found)
    if cfg.algo.trains is not Trains.policy:
        raise UserError(
            f"algo must be one that trains a policy (the chain makes the SFT and the reward model), got "
            f"{cfg.algo.name}; set algo=dpo, or use rlhf.train"
        )
    if cfg.resume is not Resume.auto:
        raise UserError(
            f"resume must be auto (the chain resumes interrupted stages), got {cfg.resume.name}; leave it "
            "out, or use rlhf.train for one stage"
        )
    check_memory(cfg)
    # Without the path of the pairs: if only the reward stage reads the pairs, the RLHF run would warn.
    warn(warnings(cfg.with_({"task.preferences_path": None})))
    return cfg, named


def embedded_chain(cfg: Config) -> tuple[Config, list[Link]]:
    """Return the stages before the RLHF run of an embedded task.

    Returns:
        `cfg` unchanged (the RLHF run finds the models of the stages in `cache_dir`), and the stages in order.
    """
    links = []
    own = cfg
    if cfg.model.policy is None:
        sft = checked(stage(cfg, "sft"))
        folder = model_folder(sft)
        links.append(training("SFT model", folder, _by_first(cfg, partial(make_model, sft))))
        checked(stage(cfg, "reward"))
        own = cfg.with_({"model.policy": str(folder.model)})
    reward = stage(own, "reward") if cfg.scorer.reads_reward and cfg.model.reward is None else None
    reader = reward or (own if cfg.data is Data.preferences else None)
    if reader is not None and reader.task.preferences_path is None:
        links.append(_sampled_pairs(reader))
    if reward is not None:
        make = _by_first(cfg, partial(make_model, reward))
        links.append(training("reward model", model_folder(reward), make))
    return cfg, links


def stored_chain(cfg: Config, named: frozenset[str]) -> tuple[Config, list[Link]]:
    """Return the stages before the RLHF run of a task that is not embedded.

    Args:
        cfg: the config of the RLHF run.
        named: models that the overrides set, of `policy` and `reward`; no stage makes these models.

    Returns:
        `cfg` with the models and pairs that the stages make, and the stages in order.
    """
    wants_reward = cfg.scorer.reads_reward and "reward" not in named
    if not (wants_reward or "reward" in named):
        cfg = cfg.with_({"model.reward": None})  # `config_of` has set the path only for its checks
    links = []
    if "policy" not in named:
        sft = checked(stage(cfg.with_({"model.policy": None}), "sft"))
        folder = folder_of(sft)
        links.append(training("SFT model", folder, partial(train, sft, folder)))
    if wants_reward:
        checked(stage(cfg, "reward"))
    if "policy" not in named:
        cfg = cfg.with_({"model.policy": str(folder.model)})
    own = cfg
    if (wants_reward or cfg.data is Data.preferences) and cfg.gold.name != "none":
        links.append(pairs := _relabelled_pairs(cfg))
        own = cfg.with_({"task.preferences_path": str(pairs.folder)})
    if wants_reward:
        reward = stage(own, "reward")
        folder = folder_of(reward)
        links.append(training("reward model", folder, partial(train, reward, folder)))
        own = own.with_({"model.reward": str(folder.model)})
    reads_pairs = cfg.data is Data.preferences
    return own if reads_pairs else own.with_({"task": cfg.task}), links


def folder_of(cfg: Config) -> RunFolder:
    """Return the run folder of `cfg`."""
    return RunFolder(naming.folder_of(cfg))


def training(name: str, folder: RunFolder, make: Callable[[], object]) -> Link:
    """Return a stage that trains a model in `folder`."""
    return Link(
        name=name,
        folder=folder.path,
        done=lambda: folder.finished() is not None and final_model(folder).is_dir(),
        make=make,
        figures=lambda: _result_text((folder.finished() or {"result": {}})["result"]),
    )


def _sampled_pairs(reader: Config) -> Link:
    """Return the stage that samples the preference pairs that the config `reader` reads."""
    folder = pairs_folder(reader)
    return Link(
        name="preference pairs",
        folder=folder,
        done=(folder / COMPLETE).exists,
        make=_by_first(reader, partial(make_pairs, reader)),
        figures=lambda: f"ordered by {reader.gold.described}",
    )


def _relabelled_pairs(cfg: Config) -> Link:
    """Return the stage that relabels the pairs of the task by the judge."""
    output = Path(cfg.output_dir) / component(f"{cfg.task.name}-pairs-{relabelling.fingerprint(cfg)}")
    return Link(
        name="preference pairs",
        folder=output,
        done=lambda: relabelling.finished(cfg, output),
        make=partial(relabelling.relabel, cfg, output),
        figures=lambda: f"{cfg.gold.described} agrees with {relabelling.agreement_text(output)}",
    )


def evaluation(folder: RunFolder, split: str) -> Link:
    """Return the stage that evaluates the checkpoints and the model of the run in `folder`."""

    def done() -> bool:
        cfg = changed(folder)
        names = {candidate.name for candidate in candidates(folder, cfg)}
        return names <= evaluating.known(cfg, folder, split).keys()

    def make() -> None:
        rows = evaluating.evaluate(changed(folder), folder, split)
        console.print(table(rows))

    def figures() -> str:
        rows = evaluating.known(changed(folder), folder, split)
        return _result_text(rows[folder.model.name])

    return Link(
        name=f"evaluation ({split})", folder=folder.evaluations, done=done, make=make, figures=figures
    )


def carry_out(chain: list[Link], cfg: Config) -> None:
    """Run the unfinished stages in order, and print a summary of all stages."""
    times = []
    stages = Stages([link.name for link in chain])
    for number, link in enumerate(chain, 1):
        done = link.done() if world_size() == 1 else _by_first(cfg, link.done)()
        started = time.monotonic()
        if done:
            stages.skip(number, link.folder)
        else:
            say_loading()
            with stages.run(number, link.folder):
                link.make()
            _free_memory()
        times.append((link, "" if done else clock(time.monotonic() - started)))
    console.print(summary(times))


def train(cfg: Config, folder: RunFolder, claim: Claim = waiting_claim) -> None:
    """Carry out a training run; resume from its last checkpoint, if any.

    Args:
        cfg: the config of the run.
        folder: the run folder.
        claim: locks the folder. By default, another process that makes the same model is waited for.
    """
    from rlhf.stages.run import run

    run(cfg, folder, check=False, claim=claim)  # `config_of` has checked it


def make_model(cfg: Config) -> Path:
    """Return the folder of the model of the stage `cfg`; run the stage first if it is not finished."""
    from rlhf.stages.prerequisites import make_model as make
    from rlhf.stages.run import run

    return make(cfg, run)


def make_pairs(cfg: Config) -> Path:
    """Return the folder of the preference pairs that `cfg` reads; sample them first if it does not exist."""
    from rlhf.stages.prerequisites import make_pairs as make

    return make(cfg)


def _by_first(cfg: Config, make: Callable[[], T]) -> Callable[[], T]:
    """Return a function that calls `make` on rank 0, and returns the result on every rank."""

    def call() -> T:
        from rlhf.assembly.device import build_device
        from rlhf.processes.ranks import Ranks
        from rlhf.stages.run import quieten

        ranks = Ranks.join(build_device(cfg), cfg.backend.timeout_s)
        quieten(ranks)
        return ranks.from_first(make)

    return call


def _free_memory() -> None:
    """Free the GPU memory of a stage's models before the next stage loads its own models."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def summary(times: list[tuple[Link, str]]) -> Table:
    """Return a table of the stages with time, result and folder; the time of a skipped stage is empty."""
    made = Table(box=box.SIMPLE)
    for name in ("stage", "time", "result", "folder"):
        made.add_column(name, justify="right" if name == "time" else "left", overflow="fold")
    for link, took in times:
        made.add_row(link.name, took or "skipped", link.figures(), str(link.folder))
    return made


def _result_text(figures: dict[str, Any]) -> str:
    """Return the main metrics of an evaluation as text."""
    present = [name for name in FIGURES if name in figures]
    return ", ".join(f"{EVALUATION_METRICS[name]} {confidence.text(figures, name)}" for name in present)
