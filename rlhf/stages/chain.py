"""All stages of a run as one command: `python -m rlhf.pipeline task=... model=... [algo=...] [word ...]`.

    SFT model -> preference pairs, in the order of the judge -> reward model -> RLHF -> evaluation

The words are those of the RLHF run; `stages.sft=[...]` and `stages.reward=[...]` are overrides of the stages
before it. Each stage is kept in a folder whose name is made of its settings, so that what is there is not
made again, and the same command goes on where it was ended, in the middle of a stage too. Exit codes are
those of `rlhf.train`.

| stage        | embedded tasks (`rlhf/artefacts.py`)  | other tasks                                       |
|--------------|---------------------------------------|---------------------------------------------------|
| SFT model    | from nothing, or `model.base`         | from `model.base`; not where `model.policy=` is   |
|              |                                       | among the words                                   |
| pairs        | sampled from it, ordered by the judge | those of the task, relabelled by the judge        |
| reward model | from the SFT model                    | the same; not where `model.reward=` is among them |

Pairs and reward model are left out where nothing reads them (`scorer=answer`, say).
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from omegaconf import OmegaConf
from rich import box
from rich.table import Table

from rlhf.checks.check import typed, warn, warnings
from rlhf.checks.machine import check_memory
from rlhf.config.algo import Data, Trains
from rlhf.config.compose import composed
from rlhf.config.identity import run_name
from rlhf.config.run import Resume
from rlhf.core.console import console, say
from rlhf.core.errors import UserError
from rlhf.core.launched import rank_count
from rlhf.loggers.display import JUDGED
from rlhf.runs.folder import COMPLETE, RunFolder
from rlhf.stages.evaluation import candidates as evaluate_candidates
from rlhf.stages.evaluation import changed as evaluate_changed
from rlhf.stages.evaluation import evaluate as evaluate_evaluate
from rlhf.stages.evaluation import figure as evaluate_figure
from rlhf.stages.evaluation import known as evaluate_known
from rlhf.stages.evaluation import table as evaluate_table
from rlhf.stages.prerequisites import checked, make_model, make_pairs, model_folder, pairs_folder, stage
from rlhf.stages.relabelling import fingerprint as relabel_fingerprint
from rlhf.stages.relabelling import finished as relabel_finished
from rlhf.stages.relabelling import relabel as relabel_relabel
from rlhf.stages.relabelling import told_of as relabel_told_of

if TYPE_CHECKING:
    from rlhf.config.root import Config


T = TypeVar("T")


FIGURES = ("eval/win_rate", "eval/accuracy", "eval/gold_score", "eval/kl", "eval/loss")  # of a stage's result


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A stage of the chain."""

    name: str
    folder: Path
    done: Callable[[], bool]
    make: Callable[[], object]  # goes on where it was ended
    figures: Callable[[], str]  # what came out of it, in words


def config_of(words: list[str]) -> tuple[Config, frozenset[str]]:
    """The checked config of the RLHF run, and which of its models the words name.

    Models that a stage will make stand as `model.base` in it, which has their shape.

    Raises:
        UserError: a word is wrong, or there is nothing to start from.
    """
    node = composed(words)
    values = {key.lstrip("+"): value for key, _, value in (word.partition("=") for word in words)}
    named = frozenset(name for name in ("policy", "reward") if values.get(f"model.{name}", "null") != "null")
    task = OmegaConf.get_type(node, "task")
    if not getattr(task, "embedded", False):
        start = node.model.policy if "policy" in named else node.model.base
        if start is None:
            raise UserError(
                "model.base must name the model that the SFT stage starts from (only embedded tasks start "
                "from nothing), got null; set model.base=<hub name or folder>, or model.policy=<SFT model>"
            )
        made = [name for name in ("policy", "reward") if name not in named]
        words = [*words, *(f"model.{name}={json.dumps(start)}" for name in made)]
    cfg = typed(composed(words), words)
    if cfg.algo.trains is not Trains.policy:
        raise UserError(
            f"algo must be one that trains a policy (SFT and reward model are made on the way), got "
            f"{cfg.algo.name}; set algo=dpo, or use rlhf.train"
        )
    if cfg.resume is not Resume.auto:
        raise UserError(
            f"resume must be auto (the chain goes on where it was ended), got {cfg.resume.name}; leave it "
            "out, or use rlhf.train for one stage"
        )
    check_memory(cfg)
    warn(warnings(replace(cfg, task=replace(cfg.task, preferences_path=None))))  # a stage reads them
    return cfg, named


def embedded_chain(cfg: Config) -> tuple[Config, list[Link]]:
    """`cfg` as it is, and the stages of an embedded task, as the run would make them itself."""
    links = []
    own = cfg
    if cfg.model.policy is None:
        sft = checked(stage(cfg, "sft"))
        folder = model_folder(sft)
        links.append(training("SFT model", folder, by_first(cfg, partial(make_model, sft, "the SFT model"))))
        checked(stage(cfg, "reward"))
        own = with_models(cfg, policy=folder.model)
    reward = stage(own, "reward") if cfg.scorer.reads_reward and cfg.model.reward is None else None
    reader = reward or (own if cfg.data is Data.preferences else None)
    if reader is not None and reader.task.preferences_path is None:
        links.append(sampled_pairs(reader))
    if reward is not None:
        make = by_first(cfg, partial(make_model, reward, "the reward model"))
        links.append(training("reward model", model_folder(reward), make))
    return cfg, links


def stored_chain(cfg: Config, named: frozenset[str]) -> tuple[Config, list[Link]]:
    """`cfg` with the models and pairs that its stages make, and these, for a task whose data are stored."""
    wants_reward = cfg.scorer.reads_reward and "reward" not in named
    links = []
    if "policy" not in named:
        sft = checked(stage(with_models(cfg, policy=None), "sft"))
        folder = folder_of(sft)
        links.append(training("SFT model", folder, partial(train, sft, folder)))
    if wants_reward:
        checked(stage(cfg, "reward"))
    if "policy" not in named:
        cfg = with_models(cfg, policy=folder.model)
    own = cfg
    if (wants_reward or cfg.data is Data.preferences) and cfg.gold.name != "none":
        links.append(pairs := relabelled_pairs(cfg))
        own = replace(cfg, task=replace(cfg.task, preferences_path=str(pairs.folder)))
    if wants_reward:
        reward = stage(own, "reward")
        folder = folder_of(reward)
        links.append(training("reward model", folder, partial(train, reward, folder)))
        own = with_models(own, reward=folder.model)
    reads_pairs = cfg.data is Data.preferences
    return own if reads_pairs else replace(own, task=cfg.task), links


def with_models(cfg: Config, **paths: Path | None) -> Config:
    """`cfg` with other models."""
    named: dict[str, Any] = {name: None if path is None else str(path) for name, path in paths.items()}
    return replace(cfg, model=replace(cfg.model, **named))


def folder_of(cfg: Config) -> RunFolder:
    """Where the run `cfg` is kept."""
    return RunFolder(Path(cfg.output_dir) / run_name(cfg))


def training(name: str, folder: RunFolder, make: Callable[[], object]) -> Link:
    """A stage that trains a model."""
    return Link(
        name=name,
        folder=folder.path,
        done=lambda: folder.finished() is not None,
        make=make,
        figures=lambda: in_words((folder.finished() or {"result": {}})["result"]),
    )


def sampled_pairs(reader: Config) -> Link:
    """The stage that samples preference pairs for `reader`."""
    folder = pairs_folder(reader)
    return Link(
        name="preference pairs",
        folder=folder,
        done=(folder / COMPLETE).exists,
        make=by_first(reader, partial(make_pairs, reader)),
        figures=lambda: f"ordered by {reader.gold.described}",
    )


def relabelled_pairs(cfg: Config) -> Link:
    """The stage that brings the pairs of the task into the order of the judge."""
    output = Path(cfg.output_dir) / f"{cfg.task.name}-pairs-{relabel_fingerprint(cfg)}"
    return Link(
        name="preference pairs",
        folder=output,
        done=lambda: relabel_finished(cfg, output),
        make=partial(relabel_relabel, cfg, output),
        figures=lambda: f"{cfg.gold.described} agrees with {relabel_told_of(output)}",
    )


def evaluation(folder: RunFolder, split: str) -> Link:
    """The stage that evaluates checkpoints and model of the run in `folder`."""

    def done() -> bool:
        cfg = evaluate_changed(folder)
        names = {candidate.name for candidate in evaluate_candidates(folder, cfg)}
        return names <= evaluate_known(cfg, folder, split).keys()

    def make() -> None:
        rows = evaluate_evaluate(evaluate_changed(folder), folder, split)
        console.print(evaluate_table(rows))

    def figures() -> str:
        rows = evaluate_known(evaluate_changed(folder), folder, split)
        return in_words(rows[folder.model.name])

    return Link(
        name=f"evaluation ({split})", folder=folder.evaluations, done=done, make=make, figures=figures
    )


def carry_out(chain: list[Link], cfg: Config) -> None:
    """Make what is not there, stage by stage, and show what came of each."""
    told = []
    for number, link in enumerate(chain, 1):
        title = f"[{number}/{len(chain)}] {link.name}"
        there = link.done() if rank_count() == 1 else by_first(cfg, link.done)()
        started = time.monotonic()
        if there:
            say(f"{title}: there already, in {link.folder}", style="bold")
        else:
            say(f"{title}: {link.folder}", style="bold")
            link.make()
            free_memory()
        seconds = round(time.monotonic() - started)
        took = "" if there else f"{seconds // 60}:{seconds % 60:02d}"
        if not there:
            say(f"{title}: done in {took}", style="bold")
        told.append((link, took))
    console.print(summary(told))


def train(cfg: Config, folder: RunFolder) -> None:
    """Carry out a run, from its last checkpoint on where there is one."""
    from rlhf.stages.run import run

    run(cfg, folder)


def by_first(cfg: Config, make: Callable[[], T]) -> Callable[[], T]:
    """`make` for the first rank to call, while the others wait for what it gives."""

    def call() -> T:
        from rlhf.assembly.device import build_device
        from rlhf.processes.ranks import Ranks

        return Ranks.join(build_device(cfg), cfg.backend.timeout_s).from_first(make)

    return call


def free_memory() -> None:
    """Give back what the models of a stage took on a GPU, before the next stage loads its own."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def summary(told: list[tuple[Link, str]]) -> Table:
    """The stages, each with its folder, its time in this call, and what came of it."""
    made = Table(box=box.SIMPLE)
    for name in ("stage", "time", "result", "folder"):
        made.add_column(name, justify="right" if name == "time" else "left", overflow="fold")
    for link, took in told:
        made.add_row(link.name, took or "was there", link.figures(), str(link.folder))
    return made


def in_words(figures: dict[str, Any]) -> str:
    """The main figures of an evaluation, in words."""
    shown = [name for name in FIGURES if name in figures]
    return ", ".join(f"{JUDGED[name]} {evaluate_figure(figures, name)}" for name in shown)
