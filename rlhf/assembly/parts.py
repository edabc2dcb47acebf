"""Construction of a part from the address in the option of its section, and of the loggers."""

from __future__ import annotations

from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf.config.algorithms import Trains
from rlhf.config.root import Config
from rlhf.config.schema import PARTS, Section
from rlhf.config.scorers import scorers
from rlhf.core.state import TrainState
from rlhf.loggers.logger import Display, JsonlLogger, Logger, LoggerContext, ScoreDoubts
from rlhf.runs.folder import RunFolder
from rlhf.terminal import console
from rlhf.terminal.console import Phases

if TYPE_CHECKING:
    from rlhf.tasks.source import Source


# Construction of the part that a config section configures, from the address in the section's `option`.


def part(section: Section) -> Any:
    """Import and return the class or function at the address of the option of `section`.

    Raises:
        KeyError: the option declares no address. A section does not inherit the address of its base class.
    """
    module, _, name = PARTS[type(section)].partition(":")
    return getattr(import_module(module), name)


def make(section: Section, *context: object) -> Any:
    """Return the part that `section` configures, by calling its factory with `section` and `context`."""
    return part(section)(section, *context)


def build_source(cfg: Config) -> Source:
    """Return the source of the data of a run. With an environment, prompts that are texts become messages."""
    from rlhf.tasks.source import DialogueSource

    source: Source = make(cfg.task)
    return DialogueSource(source) if cfg.environment.answers and not source.conversational else source


# Construction of the loggers of a run.


def build_loggers(
    cfg: Config, folder: RunFolder, state: TrainState, last: Path | None = None, phases: Phases | None = None
) -> list[Logger]:
    """Return the loggers of the run folder and the terminal, and each logger that the config turns on.

    Args:
        cfg: the config of the run.
        folder: the run folder.
        state: the counters of the run.
        last: the checkpoint from which the run resumes; None: the run starts.
        phases: the phases that the run is in, for the progress display.
    """
    from rlhf.report.figures import run_figures  # here, because mistakes need no report

    title = console.title(f"{cfg.algo.name} {cfg.task.name}")
    display = Display(title, state, cfg.progress, cfg.eval.samples, shown_figures(cfg), phases)
    doubts = ScoreDoubts(cfg, faster_scoring(cfg), state.update)
    loggers = [JsonlLogger(folder, state, last), display, doubts]
    context = LoggerContext(folder=folder, state=state, figures=lambda: run_figures(folder.path))
    chosen = (getattr(cfg.logger, each.name) for each in fields(cfg.logger))
    return [*loggers, *(make(section, context) for section in chosen if section is not None)]


def shown_figures(cfg: Config) -> dict[str, str]:
    """Return the metrics of an update that the terminal shows, and their short names, in order of importance.

    A metric that is always 0 in this run, or constant, is not shown: the lag of a synchronous run, the scores
    of stored pairs, and the policy loss of an algorithm whose loss is near 0 by construction.
    """
    samples = cfg.algo.trains is Trains.policy and cfg.generator.rollouts
    names = {
        "objective/scores": "reward" if samples else None,
        "loss/policy": "loss" if part(cfg.algo).shows_loss else None,
        "objective/kl": "KL" if samples else None,
        "rewards/accuracies": "train accuracy",
        "lag": "lag" if cfg.schedule.max_lag > 0 else None,
    }
    return {metric: name for metric, name in names.items() if name is not None}


def faster_scoring(cfg: Config) -> str | None:
    """Return how to make the training scorer faster, for a warning; None if no setting does so."""
    remedies = {
        "function": "score all responses of a batch in parallel inside the function ({}.batched=true)",
        "http": "raise {0}.concurrency or {0}.batch_size",
        "judge": "raise {}.concurrency",
    }
    training = (pair for pair in scorers(cfg) if pair[0].startswith("scorer"))
    return next((remedies[each.name].format(at) for at, each in training if each.name in remedies), None)
