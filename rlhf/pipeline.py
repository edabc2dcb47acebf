"""Command `python -m rlhf.pipeline`: run all stages of RLHF, from an SFT model to an evaluation.

    python -m rlhf.pipeline [split=test] [push_to=<owner>/<name>] [group=option ...] [key=value ...]

    SFT model -> preference pairs -> reward model -> RLHF -> evaluation

Overrides apply to the RLHF run; `stages.sft=[...]` and `stages.reward=[...]` are overrides of the SFT and
reward-model stages. All stages are checked before the first stage starts. Each stage writes to a folder whose
name contains a digest of its settings. A finished stage is therefore skipped, and the same command resumes an
interrupted stage.

| stage        | embedded tasks (`rlhf.stages.prerequisites`)     | other tasks                              |
|--------------|--------------------------------------------------|------------------------------------------|
| SFT model    | from random weights, or from `model.base`        | from `model.base`                        |
| pairs        | sampled from the SFT model, ordered by the judge | those of the task, relabelled by the     |
|              |                                                  | judge; unchanged with `scorer@gold=none` |
| reward model | from the SFT model                               | from the SFT model                       |

The SFT stage is skipped if `model.policy` is set, and the reward stage if `model.reward` is set. Pairs and
reward model are skipped if the RLHF run needs neither (for example with `scorer=answer`).

The exit codes are the exit codes of `rlhf.train`.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from rich import box
from rich.table import Table

from rlhf import relabel as relabelling
from rlhf.checks.check import check_memory, check_push, composed, problems, warn, warnings
from rlhf.checks.settings import recipes_of_other_commands
from rlhf.config.algorithms import Trains
from rlhf.config.root import Config
from rlhf.config.run import Resume
from rlhf.core.errors import UserError
from rlhf.core.files import component, digest
from rlhf.core.formatting import clock
from rlhf.core.launched import is_first_rank, world_size
from rlhf.launch.command_line import Command
from rlhf.runs.folder import RunFolder
from rlhf.runs.lock import Claim, claimed, waiting_claim
from rlhf.runs.resuming import folder_of
from rlhf.stages import evaluation as evaluating
from rlhf.stages import prerequisites
from rlhf.stages.prerequisites import MEANS, Artefact, chain, push_run, trained
from rlhf.terminal.console import Stages, console, say_loading

if TYPE_CHECKING:
    from rlhf.processes.ranks import Ranks


_T = TypeVar("_T")
COMMAND = Command(
    name="rlhf.pipeline",
    usage="[split=test] [push_to=<owner>/<name>] [group=option ...] [key=value ...]",
    does=(
        "Trains the SFT model, makes preference pairs, trains the reward model and the\n"
        "policy, and evaluates the policy. Finished stages are skipped; the same command\n"
        "resumes an interrupted stage. Overrides are those of the RLHF run;\n"
        "stages.sft=[...] and stages.reward=[...] are overrides of the stages before it."
    ),
    own={"split": "held-out split of the final evaluation: validation (default) or test", "push_to": MEANS},
)


def main() -> None:
    """Run the command line."""
    COMMAND.run(_command)


def _command(own: dict[str, str], overrides: list[str]) -> None:
    """Run all stages.

    Args:
        own: the command's own arguments, by name.
        overrides: overrides of the config of the RLHF run.

    Raises:
        UserError: an argument or the config of a stage is invalid; no stage was started.
    """
    console.quiet = not is_first_rank()
    split = own.get("split", "validation")
    evaluating.check_split(split)
    check_push(own.get("push_to"))
    cfg, named = config_of(overrides)
    cfg, before = stages_before(cfg, named)
    folder = RunFolder(folder_of(cfg))
    every = [
        *before,
        trained(f"RLHF ({cfg.algo.name})", folder, partial(train, cfg, folder, claim=nullcontext)),
        evaluation(folder, split),
    ]
    with claimed(folder.path) if is_first_rank() else nullcontext():
        carry_out(every, cfg)
    if (repository := own.get("push_to")) and is_first_rank():
        push_run(folder, repository)


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
                "model.base must name the model that the SFT stage starts from (only embedded tasks need "
                "none), got null; set model.base=<hub name or folder>, or model.policy=<SFT model>"
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


def stages_before(cfg: Config, named: frozenset[str]) -> tuple[Config, list[Artefact]]:
    """Return the stages before the RLHF run, in order.

    Args:
        cfg: the config of the RLHF run.
        named: models that the overrides set, of `policy` and `reward`; no stage makes these models.

    Returns:
        `cfg` with the models and pairs that the stages make, and the stages. For an embedded task, `cfg` is
        unchanged: rank 0 alone makes the models, and the RLHF run finds them in `cache_dir`.
    """
    if cfg.task.embedded:
        _, found = prerequisites.prerequisites(cfg, train)
        return cfg, [replace(each, make=partial(_on_first, cfg, each.make)) for each in found]
    makes_reward = cfg.scorer.reads_reward and "reward" not in named
    if not (makes_reward or "reward" in named):
        cfg = cfg.with_({"model.reward": None})  # `config_of` has set the path only for its checks
    due = {
        prerequisites.SFT: None if "policy" in named else cfg.with_({"model.policy": None}),
        prerequisites.PAIRS: cfg if (makes_reward or cfg.reads_pairs) and cfg.gold.name != "none" else None,
        prerequisites.REWARD: cfg if makes_reward else None,
    }
    return chain(cfg, {name: run for name, run in due.items() if run is not None}, _model, _relabelled_pairs)


def _model(name: str, cfg: Config) -> Artefact:
    """Return the model that the run `cfg` trains on all ranks."""
    folder = RunFolder(folder_of(cfg))
    return trained(name, folder, partial(train, cfg, folder))


def _relabelled_pairs(cfg: Config) -> Artefact:
    """Return the stage that relabels the pairs of the task by the judge."""
    output = Path(cfg.output_dir) / component(f"{cfg.task.name}-pairs-{digest(relabelling.settings(cfg))}")
    return Artefact(
        name=prerequisites.PAIRS,
        folder=output,
        done=lambda: relabelling.finished(cfg, output),
        make=partial(relabelling.relabel, cfg, output),
        figures=lambda: f"{cfg.gold.described} agrees with {relabelling.agreement_text(output)}",
    )


def evaluation(folder: RunFolder, split: str) -> Artefact:
    """Return the stage that evaluates the checkpoints and the model of the run in `folder`."""

    def done() -> bool:
        cfg = evaluating.changed(folder)
        names = {candidate.name for candidate in evaluating.candidates(folder, cfg)}
        return names <= evaluating.known(cfg, folder, split).keys()

    def make() -> None:
        rows = evaluating.evaluate(evaluating.changed(folder), folder, split)
        console.print(evaluating.table(rows), markup=False, soft_wrap=True)

    def figures() -> str:
        rows = evaluating.known(evaluating.changed(folder), folder, split)
        return prerequisites.result_text(rows[folder.model.name])

    name = f"evaluation ({split})"
    return Artefact(name=name, folder=folder.evaluations, done=done, make=make, figures=figures)


def carry_out(artefacts: list[Artefact], cfg: Config) -> None:
    """Run the unfinished stages in order, and print a summary of all stages."""
    times = []
    stages = Stages([artefact.name for artefact in artefacts])
    for number, artefact in enumerate(artefacts, 1):
        done = artefact.done() if world_size() == 1 else _on_first(cfg, artefact.done)
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


def train(cfg: Config, folder: RunFolder, ranks: Ranks | None = None, claim: Claim = waiting_claim) -> None:
    """Carry out a training run that is checked already; resume from its last checkpoint, if any.

    Args:
        cfg: the config of the run.
        folder: the run folder.
        ranks: the ranks of the run; None: the ranks that the launcher started.
        claim: locks the folder. By default, another process that makes the same model is waited for.
    """
    from rlhf.stages.run import run  # imports torch

    run(cfg, folder, ranks, check=False, claim=claim)


def _on_first(cfg: Config, make: Callable[[], _T]) -> _T:
    """Call `make` on rank 0, and return the result on every rank."""
    from rlhf.assembly.models import joined

    return joined(cfg).from_first(make)


if __name__ == "__main__":
    main()
