"""The interface of a logger, the loggers of run folder and terminal, warnings during training, hooks."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf.config.run import Progress
from rlhf.config.schema import data_file
from rlhf.core import formatting
from rlhf.core.errors import UserError, one_line
from rlhf.core.files import append, as_line, split_lines, sync, write_atomically
from rlhf.core.formatting import GAP, figure, fitting, shortened
from rlhf.core.state import TrainState
from rlhf.runs import folder as run_folder
from rlhf.runs.folder import History, RunFolder
from rlhf.terminal import console as terminal
from rlhf.terminal.console import Phases, ProgressDisplay, console, say, say_items, transcript
from rlhf.usercode.address import load_class

if TYPE_CHECKING:
    from rlhf.config.root import Config
    from rlhf.core.metrics import Evaluation, Metrics, Row


# The interface of a logger.


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggerContext:
    """The parts of a run that a logger is built from, besides its config section.

    Args:
        folder: the run folder.
        state: the counters of the run; they change during training.
        figures: draws the figures of a run whose updates are complete: name -> PNG file.
    """

    folder: RunFolder
    state: TrainState
    figures: Callable[[], dict[str, bytes]]


class Logger:
    """A receiver of rows of metrics. By default every method does nothing; subclasses override methods."""

    def log(self, row: Row, state: TrainState) -> None:
        """Log the metrics of an update."""

    def evaluation(self, row: Row, evaluation: Evaluation, state: TrainState) -> None:
        """Log the metrics of an evaluation, and the completions that were evaluated."""

    def groups(self, rows: list[dict[str, Any]]) -> None:
        """Log when the groups of an update were sampled, how long they are, and what became of them."""

    def updated(self, figures: Metrics, state: TrainState) -> None:
        """Handle the end of an update; `figures` are the metrics since the last row."""

    def save(self, checkpoint: Path) -> None:
        """Write what a resumed run needs from this logger into the folder of a checkpoint."""

    def saved(self, checkpoint: Path, state: TrainState) -> None:
        """Handle a checkpoint that is complete."""

    def warn(self, text: str) -> None:
        """Show a warning to the user."""

    def close(self) -> None:
        """Write buffered rows and release resources at the end of a run."""


# The logger of metrics.jsonl, completions.jsonl, groups.jsonl and trainer_state.json, used by every run.


class JsonlLogger(Logger):
    """A logger that appends rows to the files of the run folder.

    When a run resumes, the logger restores missing and damaged rows until the checkpoint, and removes later
    rows, because these updates are repeated. Without a checkpoint, the logger removes all rows.

    Args:
        folder: the run folder.
        state: the counters of the run at its start or at its checkpoint. A file whose rows are lost is added
            to `lost_rows`.
        checkpoint: the checkpoint from which the run resumes; None: the run starts.
    """

    def __init__(self, folder: RunFolder, state: TrainState, checkpoint: Path | None) -> None:
        self.folder = folder
        self.state = state
        self.metrics = History(folder.metrics)
        self.completions = History(folder.completions)
        for rows in (self.metrics, self.completions):
            damage = None
            if checkpoint is None:
                write_atomically(rows.file, "")  # removes the rows of an earlier run
            elif (checkpoint / run_folder.COPIES).is_dir():
                damage = rows.resume(checkpoint)
            elif damage := rows.resume_without_copy(state.update):
                state.lost_rows = [*state.lost_rows, rows.file.name]
            if damage:
                say(f"warning: {rows.file} {damage}", style="yellow")
        if folder.groups.exists():
            kept = [] if checkpoint is None else split_lines(folder.groups, ["update"])[0]
            lines = "".join(as_line(row) for row in kept if row["update"] <= state.update)
            write_atomically(folder.groups, lines)

    def log(self, row: Row, state: TrainState) -> None:
        """Append the row to metrics.jsonl, and write the progress of the run to trainer_state.json."""
        self.metrics.append([row])
        self.folder.write_state({**state.state_dict(), "finished": False})

    def groups(self, rows: list[dict[str, Any]]) -> None:
        """Append the rows to groups.jsonl, which has no copy in checkpoints: it may have many rows."""
        append(self.folder.groups, rows)

    def evaluation(self, row: Row, evaluation: Evaluation, state: TrainState) -> None:
        """Append the row to metrics.jsonl, and the completions to completions.jsonl."""
        self.metrics.append([row])
        self.completions.append({"update": state.update, **sample} for sample in evaluation.samples)

    def save(self, checkpoint: Path) -> None:
        """Write a copy of all rows into a checkpoint, after the rows in the run folder are on disk."""
        self.restore()
        run_folder.save((self.metrics, self.completions), checkpoint)

    def close(self) -> None:
        """Restore rows that were damaged since the last checkpoint, if the run is finished."""
        if self.state.done:
            self.restore()

    def restore(self) -> None:
        """Write damaged files again, and wait until all rows are on disk (fsync)."""
        for rows in (self.metrics, self.completions):
            if damage := rows.restore():
                again = f"it was written again with {rows.count} rows"
                say(f"warning: {rows.file} {damage}; {again}", style="yellow")
        if self.folder.groups.exists():
            sync(self.folder.groups)
        sync(self.folder.path)


# Warnings during training: empty responses, replies that are all cut, equal scores, slow scoring.


_EQUAL_ROWS = 3  # rows with the same mean score after which scores count as equal, with one sample a prompt
_SHARE = 0.5  # share of an update's time from which scoring counts as slow
_ENDS = ("environment/out_of_turns", "environment/cut", "environment/no_room")
_SLOW_S = 1.0  # seconds of scoring an update, below which scoring is not slow


class ScoreDoubts(Logger):
    """A logger that warns, once each, of scores and times that show a fault of the settings.

    It warns if all responses are empty, no reply to an environment ended, all scores are equal, or scoring is
    slow.

    Args:
        cfg: the config of the run.
        remedy: how to make scoring faster; None: no warning that scoring is slow.
        update: updates before this session.
    """

    def __init__(self, cfg: Config, remedy: str | None, update: int) -> None:
        self.cfg = cfg
        self.remedy = remedy
        self.update = update
        self.skipped = False  # the first row of a session has the time of the first calls
        self.warned: set[str] = set()
        self.means: list[float] = []  # mean scores of the last rows

    def log(self, row: Row, state: TrainState) -> None:
        """Check the row of an update."""
        scored = "objective/scores" in row
        if scored and row["objective/response_tokens"] == row["objective/eos_rate"] == 1:
            said = f"all responses of update {row['update']:.0f} are empty (the end token alone)"
            self._warn("empty", f"{said}; the reward may favour short responses, or optim.lr is too high")
        self._warn("cut", no_reply_ended(row, self.cfg))
        several, all_equal = self.cfg.algo.samples_per_prompt > 1, False
        if scored and "cut" not in self.warned:
            self.means = [*self.means, row["objective/scores"]][-_EQUAL_ROWS:]
            all_equal = len(self.means) == _EQUAL_ROWS and len(set(self.means)) == 1
            all_equal = row["objective/tie_rate"] == 1 if several else all_equal
        if all_equal:
            which = "all samples of each prompt have the same score" if several else "all scores are equal"
            ends = "".join(f"; {name} {row[name]:.2g}" for name in _ENDS if row.get(name))
            share = f"{row['objective/eos_rate']:.0%} of the responses have an end token{ends}"
            said = f"{which} (mean {row['objective/scores']:.4g}; {share}), so there is nothing to learn"
            remedy = "check the scorer, its missing_eos settings, and generator.response_length"
            self._warn("equal", f"{said}; {remedy}")
        updates, self.update = state.update - self.update, state.update
        if self.skipped and self.remedy is not None:
            whole, seconds = row["time/update_s"], row.get("time/score_s", 0.0)
            if row.get("time/wait_s", 0.0) > _SHARE * whole:  # else the annotator delays no update
                seconds = max(seconds, row.get("time/annotate_ahead_s", 0.0))
            if seconds > max(_SHARE * whole, _SLOW_S * updates):
                said = f"scoring takes {seconds / updates:.1f} s of the {whole / updates:.1f} s of an update"
                self._warn("slow", f"{said}; to make it faster, {self.remedy}")
        self.skipped = True

    def evaluation(self, row: Row, evaluation: Evaluation, state: TrainState) -> None:
        """Check the row of an evaluation."""
        self._warn("cut", no_reply_ended(row, self.cfg))

    def _warn(self, kind: str, text: str | None) -> None:
        if text is not None and kind not in self.warned:
            self.warned.add(kind)
            say(f"warning: {text}", style="yellow")


def no_reply_ended(row: Row, cfg: Config) -> str | None:
    """Return a warning if no reply of an update or an evaluation was given to the environment; else None."""
    at, tokens = ("eval/", "eval") if "eval/environment/cut" in row else ("", "objective")
    if row.get(f"{at}environment/cut") != 1 or row[f"{at}environment/turns"] != 1:
        return None
    key, length = "environment.reply_tokens", cfg.generator.response_length
    most = getattr(cfg.environment, "reply_tokens", None) or length
    longer = min(2 * most, length)
    if most >= length:
        key, most, longer = "generator.response_length", length, 2 * length
    if row[f"{tokens}/response_tokens"] != most:  # an end token behind which the template writes no message
        return None
    said = f"no reply of the {'evaluation' if at else 'update'} ended: all were cut at {key}={most}"
    return f"{said}, so step of the environment was not called; set {key}={longer}"


# User code that a run calls after an update, an evaluation or a checkpoint, on the first rank only:
#
#     # my_hooks.py
#     from rlhf import Hook
#
#     class Announce(Hook):
#         def after_evaluation(self, state, metrics, completions):
#             print(state.update, metrics["eval/score"])
#
#     python -m rlhf.train algo=dpo 'hooks=[my_hooks:Announce]'


class StopRun(Exception):
    """A hook raises this exception to stop its run before the last update. The run does not fail.

    The run stops after the current or the next update, with a checkpoint. The same command resumes the run.

    Args:
        reason: the reason in a word or two, for tables, such as "pruned".
    """


class Hook:
    """The base class of hooks. Every method does nothing; subclasses override methods.

    A hook must not change its arguments. If a method raises an exception other than `StopRun`, the run ends
    with an error that names the hook, after the current or the next update and with a checkpoint.
    """

    def after_update(self, state: TrainState, metrics: Row) -> None:
        """Handle the end of an update.

        Args:
            state: the counters of the run: `update`, `num_updates`, `episode`, `version`, `lag`.
            metrics: the training metrics, as means since the last row of metrics.jsonl.
        """

    def after_evaluation(self, state: TrainState, metrics: Row, completions: list[dict[str, Any]]) -> None:
        """Handle an evaluation, including the evaluation before training (`state.update` is 0).

        Args:
            state: the counters of the run.
            metrics: the metrics of the evaluation (`eval/...`).
            completions: one dictionary per held-out example, with the keys of completions.jsonl.
        """

    def after_checkpoint(self, state: TrainState, folder: Path) -> None:
        """Handle a checkpoint, which is complete, in its `folder`."""


_METHODS = sorted(name for name in vars(Hook) if name.startswith("after_"))


class Hooks(Logger):
    """A logger that calls hooks, and asks the run to stop if a hook raises an exception.

    After an exception, no hook is called again.

    Args:
        hooks: the hooks, called in this order.
        stop: asks the run to stop after the current update.
    """

    def __init__(self, hooks: Sequence[Hook], stop: Callable[[], None]) -> None:
        self.hooks = hooks
        self.stop = stop
        self.failure: str | None = None  # the hook, its method and its exception
        self.stopped: str | None = None  # the reason of a `StopRun`

    def updated(self, figures: Metrics, state: TrainState) -> None:
        """Call `after_update` of every hook."""
        if self.hooks:
            values = {name: stat.value() for name, stat in figures.items()}
            self.call("after_update", state, {name: x for name, x in values.items() if x is not None})

    def evaluation(self, row: Row, evaluation: Evaluation, state: TrainState) -> None:
        """Call `after_evaluation` of every hook."""
        self.call("after_evaluation", state, evaluation.figures, evaluation.samples)

    def saved(self, checkpoint: Path, state: TrainState) -> None:
        """Call `after_checkpoint` of every hook."""
        self.call("after_checkpoint", state, checkpoint)

    def call(self, method: str, state: TrainState, *arguments: Any) -> None:
        """Call a method of every hook; print the traceback of an exception and ask the run to stop."""
        for hook in self.hooks:
            if self.failure is not None or self.stopped is not None:
                return
            try:
                getattr(hook, method)(state, *arguments)
            except StopRun as reason:
                self.stopped = str(reason)
                self.stop()
            except Exception as error:  # the user's code may raise any exception
                traceback.print_exc()
                name = type(hook).__qualname__
                self.failure = f"hook {name}.{method} raised {one_line(error)}"
                say(f"{self.failure}; the run stops after an update, with a checkpoint", style="red")
                self.stop()


def load_hooks(paths: Sequence[str]) -> list[Hook]:
    """Import and build hooks, in the process of the job.

    Args:
        paths: the addresses of their classes.

    Raises:
        UserError: a class cannot be imported or built without arguments, is not a hook, or has an unknown
            method `after_...`.
    """
    hooks: list[Hook] = []
    found: list[str] = []
    for path in paths:
        try:
            hooks.append(_hook(path))
        except UserError as error:
            found += error.problems
    if found:
        raise UserError(*found)
    return hooks


def _hook(path: str) -> Hook:
    """Import and build one hook (see `load_hooks`)."""
    cls = load_class("hooks", path)
    if not issubclass(cls, Hook):
        rule = "hooks must name subclasses of rlhf.Hook (the run calls their methods)"
        raise UserError(f"{rule}, got {path!r}; write class {cls.__name__}(rlhf.Hook)")
    for name in sorted(name for name in dir(cls) if name.startswith("after_") and name not in _METHODS):
        close, known = get_close_matches(name, _METHODS, n=1) or _METHODS, ", ".join(_METHODS)
        rule = f"hooks must have only the methods {known} that begin with after_ (no other is called)"
        raise UserError(f"{rule}, got {path!r} with {name}; rename it {close[0]}")
    try:
        return cls()
    except Exception as error:  # the user's code may raise any exception
        rule = f"hooks must name classes that can be built without arguments ({one_line(error)})"
        raise UserError(f"{rule}, got {path!r}; correct {cls.__name__}.__init__") from None


# The terminal display of a run: a live progress bar, or plain lines if the output is not a terminal.


_NAMES = data_file("rlhf.loggers", "metrics.yaml")
EVALUATION_METRICS: dict[str, str] = _NAMES["evaluation"]
SCORES: dict[str, str] = _NAMES["scores"]
_DIALOGUE_LINES = 8  # of an episode in the terminal
_OF_REFERENCES = ("eval/win_rate", "eval/norm_reward")  # and names that begin with these
_RESULTS = ("eval/win_rate", "eval/win_rate_vs_initial", "eval/accuracy")  # the first is in the progress line


@dataclass(eq=False)
class Display(Logger):
    """A logger that shows progress and evaluations in the terminal.

    The progress display has the update, the time left, the phase of the current update, metrics of the last
    update, episodes or epochs, and the result of the last evaluation. For an evaluation, the logger prints
    its metrics. The first and the last evaluation of a run also show completions.

    Args:
        title: name of the run in the progress display.
        state: counters at the start of the session.
        mode: live, plain or off; auto: live in a terminal, otherwise plain.
        samples: number of completions after the last evaluation; the first evaluation shows one completion.
        figures: metrics of an update and their short names, the most important first.
        phases: the phases that the run is in.
    """

    title: str
    state: InitVar[TrainState]
    mode: Progress
    samples: int
    figures: Mapping[str, str]
    phases: InitVar[Phases | None] = None

    def __post_init__(self, state: TrainState, phases: Phases | None) -> None:
        self.evaluated: list[str] = []  # the result of the last evaluation, for the progress display
        total, mode, done = state.num_updates, self.mode.value, state.update
        self.progress = ProgressDisplay(self.title, total, mode, unit="update", done=done, phases=phases)

    def updated(self, figures: Metrics, state: TrainState) -> None:
        """Count the update; its metrics may be part of a later row."""
        self.progress.reach(state.update)

    def log(self, row: Row, state: TrainState) -> None:
        """Show the progress of the run with the metrics in `row`."""
        items = [f"{short} {figure(row[name])}" for name, short in self.figures.items() if name in row]
        items += [*self.evaluated, state.progress()]
        if "throughput/episodes_per_s" in row:
            items.append(f"{figure(row['throughput/episodes_per_s'])} episodes/s")
        self.progress.update(state.update, items)
        if self.progress.mode == "live":  # in other modes, the line is in train.log already
            head = [self.title, self.progress.count, *terminal.left(self.progress.left_s)]
            transcript.info(GAP.join([*head, *items]))

    def evaluation(self, row: Row, evaluation: Evaluation, state: TrainState) -> None:
        """Print the metrics of an evaluation and some completions."""
        if state.update == self.progress.first:
            self.progress.begin()
        figures = shown(evaluation.figures)
        result = next((name for name in _RESULTS if name in figures), None)
        if result is not None:
            value = figure(figures[result])
            self.evaluated = [f"{EVALUATION_METRICS[result]} {value} at update {state.update}"]
        if self.mode is Progress.off:
            return
        say_items(f"{self.title}  evaluated at update {state.update}:", metric_texts(evaluation.figures))
        if self.samples and (state.update == 0 or state.done):
            print_samples(evaluation.shown[: self.samples if state.done else 1])

    def warn(self, text: str) -> None:
        """Print a warning above the progress bar."""
        say(f"warning: {text}", style="yellow")

    def close(self) -> None:
        """Remove the live progress bar."""
        self.progress.close()


def shown(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics of an evaluation without win rates if they contain the accuracy of answers.

    No response is better than a reference whose answer is correct, so `eval/win_rate` is always 0, and the
    win rate against the initial policy follows from the accuracies. `eval/accuracy` is the accuracy of pairs
    if there is `eval/margin`, unless it equals the score of the judge.
    """
    accuracy = figures.get("eval/accuracy")
    if accuracy is None or ("eval/margin" in figures and accuracy != figures.get("eval/gold_score")):
        return dict(figures)
    return {name: value for name, value in figures.items() if not name.startswith(_OF_REFERENCES)}


def metric_texts(figures: Mapping[str, Any]) -> list[str]:
    """Return the metrics of an evaluation as texts, with their 95 % intervals if known."""
    figures = shown(figures)
    return [
        f"{short} {formatting.text(figures, name)}"
        for name, short in EVALUATION_METRICS.items()
        if name in figures
    ]


def print_samples(samples: list[dict[str, Any]]) -> None:
    """Print completions in the terminal, each in a few lines: prompt, response or dialogue, scores."""
    width = min(console.width, terminal.WIDTH_OF_LINES)
    for sample in samples:
        for line in sample_lines(sample, width):
            console.print(line, markup=False, style="dim")


def sample_lines(sample: dict[str, Any], width: int) -> list[str]:
    """Return a completion as lines of at most `width` columns.

    Args:
        sample: a row of completions.jsonl.
        width: number of columns.
    """
    room = width - len("  response  ")
    lines = [f"  prompt    {shortened(sample['prompt'], room, end=True)}"]
    if "messages" in sample:
        lines += dialogue_lines(sample["messages"], room)
    else:
        lines.append(f"  response  {shortened(sample['response'], room) or '(empty)'}")
    if sample.get("reference"):
        lines.append(f"  reference {shortened(sample['reference'], room)}")
    scores = [f"{short} {figure(sample[name])}" for name, short in SCORES.items() if name in sample]
    if scores:
        lines.append(f"  scores    {fitting(scores, room)}")
    return lines


def dialogue_lines(messages: list[dict[str, Any]], room: int) -> list[str]:
    """Return the replies and messages of an episode, a line for each; of more than eight, the first and last.

    Args:
        messages: `messages` of a row of completions.jsonl.
        room: columns of a text.
    """
    lines = []
    for turn in messages:
        notes = "  [cut]" if turn.get("cut") else ""
        notes += f"  (reward {figure(turn['reward'])})" if "reward" in turn else ""
        text = shortened(turn["content"], room - len(notes)) or "(empty)"
        lines.append(f"  {turn['role'][:9]:9} {text}{notes}")
    half = _DIALOGUE_LINES // 2
    if left_out := max(0, len(lines) - _DIALOGUE_LINES):
        lines[half - 1 : -half] = [f"  ...       {left_out + 1} lines left out"]
    return lines
