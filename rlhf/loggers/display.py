"""Progress in the terminal: a live line, or plain lines where there is no terminal."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from rlhf.config.run import Progress as Mode
from rlhf.core.console import console, say, transcript
from rlhf.loggers.logger import Logger

if TYPE_CHECKING:
    from rlhf.core.metrics import Evaluation, Row
    from rlhf.core.state import TrainState


FIGURES = {  # what is shown of a row, under which short name
    "loss/policy": "loss",
    "objective/scores": "score",
    "objective/kl": "kl",
    "rewards/accuracies": "acc",
    "throughput/episodes_per_s": "ep/s",
}


JUDGED = {
    "eval/win_rate": "win-rate",
    "eval/gold_score": "gold",
    "eval/norm_reward": "gold vs reference",
    "eval/accuracy": "accuracy",
    "eval/kl": "kl",
    "eval/ppl": "ppl",
    "eval/loss": "loss",
    "eval/response_tokens": "tokens",
}


PLAIN_EVERY_S = 5.0


class Display(Logger):
    """Update, episodes (or epochs), score, KL, win-rate, episodes a second and time left; evaluations as a
    small table.

    Args:
        title: what is running.
        state: where the run starts.
        mode: live, plain, off; auto is live in a terminal.
        samples: completions shown at the first and the last evaluation; in between it is one.
    """

    def __init__(self, title: str, state: TrainState, mode: Mode, samples: int) -> None:
        self.mode = (Mode.live if console.is_terminal else Mode.plain) if mode is Mode.auto else mode
        self.title = title
        self.samples = samples
        self.started = time.monotonic()
        self.first = state.update
        self.shown = 0.0
        self.judged: Row = {}
        self.bar: Progress | None = None
        if self.mode is Mode.live:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(bar_width=20),
                TextColumn("{task.fields[line]}"),
            )
            self.bar = Progress(*columns, console=console)
            self.task = self.bar.add_task(title, total=state.num_updates, completed=state.update, line="")
            self.bar.start()

    def log(self, row: Row, state: TrainState) -> None:
        """Show where the run is."""
        line = self.line(row, state)
        if self.bar is not None:
            self.bar.update(self.task, completed=state.update, line=line)
            transcript.info("%s  %s", self.title, line)
        elif self.mode is Mode.plain:
            now = time.monotonic()
            if now - self.shown >= PLAIN_EVERY_S or state.done:
                self.shown = now
                say(f"{self.title}  {line}")

    def line(self, row: Row, state: TrainState) -> str:
        """One line: counters, figures, time left."""
        figures = [f"{short} {row[name]:.3g}" for name, short in FIGURES.items() if name in row]
        if "eval/win_rate" in self.judged:
            figures.insert(2, f"win-rate {self.judged['eval/win_rate']:.2f}")
        return "  ".join(
            [
                f"update {state.update}/{state.num_updates}",
                state.progress(),
                *figures,
                f"{self.left(state)} left",
            ]
        )

    def left(self, state: TrainState) -> str:
        """Time left at the pace of this session, evaluations included, as m:ss."""
        pace = (time.monotonic() - self.started) / max(1, state.update - self.first)
        minutes, seconds = divmod(round(pace * (state.num_updates - state.update)), 60)
        return f"{minutes}:{seconds:02d}"

    def evaluation(self, row: Row, evaluation: Evaluation, state: TrainState) -> None:
        """Show the figures; at the end a few completions too."""
        self.judged = evaluation.figures
        if self.mode is Mode.off:
            return
        figures = [
            f"{short} {evaluation.figures[name]:.3g}"
            for name, short in JUDGED.items()
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
        """Leave the last line standing."""
        if self.bar is not None:
            self.bar.stop()


def samples_table(evaluation: Evaluation, count: int, state: TrainState) -> Table:
    """The first `count` completions beside their references."""
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
