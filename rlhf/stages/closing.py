"""The lines at the end of a run: what changed, how long it took, where the files are, what to do next."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf.config.algo import Trains
from rlhf.core import confidence, stages
from rlhf.core.console import console, transcript
from rlhf.core.formatting import clock, short_path
from rlhf.core.launched import local_world_size
from rlhf.core.pasting import lines, setting
from rlhf.core.state import SupervisedState
from rlhf.loggers.display import shown
from rlhf.stages.next_stage import next_stage

if TYPE_CHECKING:
    from rlhf.config.root import Config
    from rlhf.core.state import TrainState
    from rlhf.runs.folder import RunFolder
    from rlhf.training.recorder import Recorder

_VALUE_WIDTH = 21  # columns of a value with its interval


def print_closing(
    cfg: Config,
    typed: Config,
    folder: RunFolder,
    recorder: Recorder,
    state: TrainState,
    session_s: float,
    resumed: bool,
) -> None:
    """Print the closing lines of a finished run, and write them to train.log.

    A run that is a stage before other stages of the same command prints no commands.

    Args:
        cfg: the config of the run, with the models that the run made first.
        typed: the config before the run made these models.
        folder: the run folder.
        recorder: the recorder, which has the first and the last evaluation.
        state: the counters of the run.
        session_s: seconds since the start of this session.
        resumed: whether updates of earlier sessions belong to the run.
    """
    stage = stages.current
    last = stage is None or stage.number == stage.count
    lines = [*length(state, session_s, resumed), *_changes(cfg, recorder), *files(folder)]
    for line in [*lines, *_next_steps(cfg, typed, folder)] if last else lines:
        console.print(line, markup=False, soft_wrap=True)  # commands and paths can be copied
        transcript.info(line)


def length(state: TrainState, session_s: float, resumed: bool) -> Iterator[str]:
    """Yield the length and the duration of a finished run."""
    yield f"finished: {trained(state)}, in {clock(session_s)}"
    if resumed:
        yield f"  in this session; the updates of all sessions took {clock(state.wall_s)}"


def trained(state: TrainState) -> str:
    """Return the number of updates, and of episodes or examples, that a run trained on."""
    if isinstance(state, SupervisedState):
        return f"{state.update:,} updates, {state.examples:,} examples ({state.epoch:.2f} epochs)"
    return f"{state.update:,} updates, {state.episode:,} episodes"


def _changes(cfg: Config, recorder: Recorder) -> Iterator[str]:
    """Yield the lines of a table: metrics of the first and of the last evaluation, with 95 % intervals."""
    first, last = recorder.first, shown(recorder.evaluated)
    if not last:
        yield "  not evaluated (schedule.eval_every=0; 1000000: before and after training)"
        return
    named = titles(cfg)
    rows = [(held_out(cfg, recorder), "before", "after")]
    rows += [
        (text, confidence.text(first, name), confidence.text(last, name))
        for name, text in named.items()
        if name in last
    ]
    wide = max(len(text) for text, _, _ in rows)
    for text, before, after in rows:
        yield f"  {text:{wide}}  {before:{_VALUE_WIDTH}} {after}".rstrip()
    if any(name in last and confidence.bounds(last, name) for name in named):
        yield "  ([low, high]: 95 % interval over these examples)"


def titles(cfg: Config) -> dict[str, str]:
    """Return the names and the titles of the metrics of an evaluation that a run reports at its end."""
    return {
        "eval/win_rate": f"win rate vs. references ({cfg.gold.name})",
        "eval/accuracy": "accuracy of answers" if cfg.checks_answers else "accuracy on held-out pairs",
        "eval/gold_score": f"judge ({cfg.gold.name})",
        "eval/score": f"reward ({cfg.scorer.name})",
        "eval/win_rate_vs_initial": "win rate vs. initial policy",
        "eval/loss": "held-out loss",
        "eval/kl": "KL to the reference",
    }


def held_out(cfg: Config, recorder: Recorder) -> str:
    """Return the number of held-out examples of the last evaluation, as text."""
    return f"{recorder.evaluated_on:,} held-out {'pairs' if cfg.algo.trains is Trains.reward else 'prompts'}"


def files(folder: RunFolder) -> Iterator[str]:
    """Yield the paths of the files that a user looks at."""
    yield "files:"
    for path in (folder.model, folder.adapter, folder.completions, folder.metrics):
        if path.is_dir() or (path.is_file() and path.stat().st_size):
            yield f"  {short_path(path)}"


def _next_steps(cfg: Config, typed: Config, folder: RunFolder) -> Iterator[str]:
    """Yield commands for a finished run, which can be pasted into a shell.

    Args:
        cfg: the config of the run, with the models that the run made first.
        typed: the config before the run made these models.
        folder: the run folder.
    """
    rewards = cfg.algo.trains is Trains.reward
    run = short_path(folder.path)
    evaluate = ["python -m rlhf.evaluate", setting("run", run)]
    if cfg.start is not None and not rewards:
        evaluate += ["only=model", setting("models", short_path(Path(cfg.start)))]
    yield "next:"
    if (stage := next_stage(typed, folder, cfg.start)) is not None:
        ranks = local_world_size()
        launcher = "python" if ranks == 1 else f"torchrun --nproc-per-node {ranks}"
        yield from lines(f"{launcher} -m rlhf.train", *(setting(key, value) for key, value in stage.items()))
    yield from lines("python -m rlhf.report", shlex.quote(run))
    yield from lines(*evaluate)
    if folder.completions.is_file() and folder.completions.stat().st_size:
        yield from lines("python -m rlhf.sample", setting("run", run), "show=4")
    if not rewards:
        yield from lines("python -m rlhf.sample", setting("run", run))
