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
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rich import box
from rich.table import Table

from rlhf.checks.algorithms import recipes_of_other_commands
from rlhf.checks.check import problems, warn, warnings
from rlhf.checks.machine import check_memory, composed
from rlhf.config.algorithms import Trains
from rlhf.config.run import Resume
from rlhf.core.errors import UserError
from rlhf.core.files import component
from rlhf.core.formatting import clock
from rlhf.core.launched import world_size
from rlhf.runs.folder import RunFolder
from rlhf.runs.lock import Claim, waiting_claim
from rlhf.runs.resuming import folder_of
from rlhf.stages import evaluation as evaluating
from rlhf.stages import relabelling
from rlhf.stages.artefacts import Artefact, result_text, trained
from rlhf.stages.evaluation import candidates, changed, table
from rlhf.stages.prerequisites import PAIRS, REWARD, SFT, checked, prerequisites, stage
from rlhf.terminal.console import Stages, console, say_loading

if TYPE_CHECKING:
    from rlhf.config.root import Config


_T = TypeVar("_T")


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


def embedded_chain(cfg: Config) -> tuple[Config, list[Artefact]]:
    """Return the stages before the RLHF run of an embedded task; rank 0 alone makes them.

    Returns:
        `cfg` unchanged (the RLHF run finds the models of the stages in `cache_dir`), and the stages in order.
    """
    _, found = prerequisites(cfg, _run)
    return cfg, [replace(each, make=_by_first(cfg, each.make)) for each in found]


def stored_chain(cfg: Config, named: frozenset[str]) -> tuple[Config, list[Artefact]]:
    """Return the stages before the RLHF run of a task that is not embedded.

    Args:
        cfg: the config of the RLHF run.
        named: models that the overrides set, of `policy` and `reward`; no stage makes these models.

    Returns:
        `cfg` with the models and pairs that the stages make, and the stages in order.
    """
    makes_reward = cfg.scorer.reads_reward and "reward" not in named
    if not (makes_reward or "reward" in named):
        cfg = cfg.with_({"model.reward": None})  # `config_of` has set the path only for its checks
    found: list[Artefact] = []
    paths: dict[str, str] = {}
    if "policy" not in named:
        sft = checked(stage(cfg.with_({"model.policy": None}), "sft"))
        found.append(_model(SFT, sft))
        paths["model.policy"] = str(RunFolder(found[-1].folder).model)
    reward = checked(stage(cfg, "reward")) if makes_reward else None
    if (makes_reward or cfg.reads_pairs) and cfg.gold.name != "none":
        found.append(_relabelled_pairs(cfg.with_(paths)))
        paths["task.preferences_path"] = str(found[-1].folder)
    if reward is not None:
        found.append(_model(REWARD, reward.with_(paths)))
        paths["model.reward"] = str(RunFolder(found[-1].folder).model)
    if not cfg.reads_pairs:
        paths.pop("task.preferences_path", None)
    return cfg.with_(paths), found


def _model(name: str, cfg: Config) -> Artefact:
    """Return the model that the run `cfg` trains on all ranks."""
    folder = RunFolder(folder_of(cfg))
    return trained(name, folder, partial(train, cfg, folder))


def _relabelled_pairs(cfg: Config) -> Artefact:
    """Return the stage that relabels the pairs of the task by the judge."""
    output = Path(cfg.output_dir) / component(f"{cfg.task.name}-pairs-{relabelling.fingerprint(cfg)}")
    return Artefact(
        name=PAIRS,
        folder=output,
        done=lambda: relabelling.finished(cfg, output),
        make=partial(relabelling.relabel, cfg, output),
        figures=lambda: f"{cfg.gold.described} agrees with {relabelling.agreement_text(output)}",
    )


def evaluation(folder: RunFolder, split: str) -> Artefact:
    """Return the stage that evaluates the checkpoints and the model of the run in `folder`."""

    def done() -> bool:
        cfg = changed(folder)
        names = {candidate.name for candidate in candidates(folder, cfg)}
        return names <= evaluating.known(cfg, folder, split).keys()

    def make() -> None:
        rows = evaluating.evaluate(changed(folder), folder, split)
        console.print(table(rows), markup=False, soft_wrap=True)

    def figures() -> str:
        rows = evaluating.known(changed(folder), folder, split)
        return result_text(rows[folder.model.name])

    name = f"evaluation ({split})"
    return Artefact(name=name, folder=folder.evaluations, done=done, make=make, figures=figures)


def carry_out(chain: list[Artefact], cfg: Config) -> None:
    """Run the unfinished stages in order, and print a summary of all stages."""
    times = []
    stages = Stages([artefact.name for artefact in chain])
    for number, artefact in enumerate(chain, 1):
        done = artefact.done() if world_size() == 1 else _by_first(cfg, artefact.done)()
        started = time.monotonic()
        if done:
            stages.skip(number, artefact.folder)
        else:
            say_loading()
            with stages.run(number, artefact.folder):
                artefact.make()
            import torch

            gc.collect()  # before the next stage loads its own models
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        times.append((artefact, "skipped" if done else clock(time.monotonic() - started)))
    summary = Table(box=box.SIMPLE)
    for name in ("stage", "time", "result", "folder"):
        summary.add_column(name, justify="right" if name == "time" else "left", overflow="fold")
    for artefact, took in times:
        summary.add_row(artefact.name, took, artefact.figures(), str(artefact.folder))
    console.print(summary)


def train(cfg: Config, folder: RunFolder, claim: Claim = waiting_claim) -> None:
    """Carry out a training run that `config_of` has checked; resume from its last checkpoint, if any.

    Args:
        cfg: the config of the run.
        folder: the run folder.
        claim: locks the folder. By default, another process that makes the same model is waited for.
    """
    _run(cfg, folder, check=False, claim=claim)


def _run(*given: Any, **settings: Any) -> None:
    """Call `rlhf.stages.run.run`, which imports torch."""
    from rlhf.stages.run import run

    run(*given, **settings)


def _by_first(cfg: Config, make: Callable[[], _T]) -> Callable[[], _T]:
    """Return a function that calls `make` on rank 0, and returns the result on every rank."""

    def call() -> _T:
        from rlhf.assembly.models import joined

        return joined(cfg).from_first(make)

    return call
