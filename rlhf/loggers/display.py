"""The terminal display of a run: a live progress bar, or plain lines if the output is not a terminal."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from rlhf.config.run import Progress
from rlhf.core.console import ProgressDisplay, console, say, transcript
from rlhf.loggers.logger import Logger

if TYPE_CHECKING:
    from rlhf.core.metrics import Evaluation, Row
    from rlhf.core.state import TrainState

FIGURES = {  # metrics of an update in the progress line, and their short names
    "loss/policy": "loss",
    "objective/scores": "score",
    "objective/kl": "kl",
    "rewards/accuracies": "acc",
    "throughput/episodes_per_s": "ep/s",
}

EVALUATION_METRICS = {  # metrics of an evaluation in the terminal, and their short names
    "eval/win_rate": "win rate",
    "eval/gold_score": "gold",
    "eval/norm_reward": "gold vs reference",
    "eval/accuracy": "accuracy",
    "eval/kl": "kl",
    "eval/ppl": "ppl",
    "eval/loss": "loss",
    "eval/response_tokens": "tokens",
}


class Display(Logger):
    """A logger that shows progress and evaluations in the terminal.

    The progress line has the update, episodes (or epochs), the metrics in `FIGURES`, the last win rate and
    the time left. For an evaluation, the logger prints a line of metrics and a table of completions.

    Args:
        title: name of the run in the progress line.
        state: counters at the start of the session.
        mode: live, plain or off; auto: live in a terminal, otherwise plain.
        samples: number of completions at the first and the last evaluation; other evaluations show one
            completion.
    """

    def __init__(self, title: str, state: TrainState, mode: Progress, samples: int) -> None:
        self.mode = mode
        self.title = title
        self.samples = samples
        self.started = time.monotonic()
        self.first = state.update  # update at the start of the session
        self.judged: Row = {}  # metrics of the last evaluation
        self.progress = ProgressDisplay(title, state.num_updates, mode.value, done=state.update)

    def log(self, row: Row, state: TrainState) -> None:
        """Show the progress of the run with the metrics in `row`."""
        line = self.line(row, state)
        self.progress.update(state.update, line)
        if self.progress.mode == "live":  # in other modes, the line is in train.log already
            transcript.info("%s  %s", self.title, line)

    def line(self, row: Row, state: TrainState) -> str:
        """Return the progress line: counters, metrics, time left."""
        figures = [f"{short} {row[name]:.3g}" for name, short in FIGURES.items() if name in row]
        if "eval/win_rate" in self.judged:
            figures.insert(2, f"win rate {self.judged['eval/win_rate']:.2f}")
        return "  ".join(
            [
                f"update {state.update}/{state.num_updates}",
                state.progress(),
                *figures,
                f"{self.left(state)} left",
            ]
        )

    def left(self, state: TrainState) -> str:
        """Return the time left as m:ss, at the pace of this session, evaluations included."""
        pace = (time.monotonic() - self.started) / max(1, state.update - self.first)
        minutes, seconds = divmod(round(pace * (state.num_updates - state.update)), 60)
        return f"{minutes}:{seconds:02d}"

    def evaluation(self, row: Row, evaluation: Evaluation, state: TrainState) -> None:
        """Print the metrics of an evaluation and some completions."""
        self.judged = evaluation.figures
        if self.mode is Progress.off:
            return
        figures = [
            f"{short} {evaluation.figures[name]:.3g}"
            for name, short in EVALUATION_METRICS.items()
            if name in evaluation.figures
        ]
        say(f"{self.title}  evaluated at update {state.update}:  {'  '.join(figures)}")
        if evaluation.samples and self.samples:
            rows = self.samples if state.update == 0 or state.done else 1
            console.print(samples_table(evaluation, rows, state))

    def warn(self, text: str) -> None:
        """Print a warning above the progress line."""
        say(f"warning: {text}", style="yellow")

    def close(self) -> None:
        """Stop the live progress bar; the last state of the bar stays visible."""
        self.progress.close()


def samples_table(evaluation: Evaluation, count: int, state: TrainState) -> Table:
    """Return a table of the first `count` completions with their references and scores."""
    table = Table(title=f"completions of held-out prompts at update {state.update}", show_lines=True)
    table.add_column("prompt (end)", ratio=3)
    table.add_column("response", ratio=3)
    table.add_column("reference", ratio=3)
    for name in ("score", "gold", "gold of reference"):
        table.add_column(name, justify="right", no_wrap=True)
    for sample in evaluation.samples[:count]:
        table.add_row(
            escape("…" + sample["prompt"][-160:]),
            escape(sample["response"]),
            escape(sample["reference"]),
            *(
                f"{sample[key]:.2f}" if key in sample else ""
                for key in ("score", "gold_score", "reference_gold_score")
            ),
        )
    return table
