"""The terminal display of a run: a live progress bar, or plain lines if the output is not a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rlhf.config.run import Progress
from rlhf.core import formatting
from rlhf.core.formatting import GAP, figure, fitting, shortened
from rlhf.loggers.logger import Logger
from rlhf.terminal.console import WIDTH_OF_LINES, console, say, say_items, transcript
from rlhf.terminal.progress import Phases, ProgressDisplay, left

if TYPE_CHECKING:
    from rlhf.core.metrics import Evaluation, Metrics, Row
    from rlhf.core.state import TrainState

EVALUATION_METRICS = {  # metrics of an evaluation in the terminal, and their short names
    "eval/win_rate": "win rate",
    "eval/win_rate_vs_initial": "win rate vs initial",
    "eval/accuracy": "held-out accuracy",
    "eval/score": "reward",
    "eval/gold_score": "judge",
    "eval/norm_reward": "judge vs reference",
    "eval/kl": "KL",
    "eval/ppl": "perplexity",
    "eval/loss": "loss",
    "eval/response_tokens": "tokens",
}
SCORES = {"score": "reward", "gold_score": "judge", "reference_gold_score": "judge of reference"}
_DIALOGUE_LINES = 8  # of an episode in the terminal
_OF_REFERENCES = ("eval/win_rate", "eval/norm_reward")  # and names that begin with these
_RESULTS = ("eval/win_rate", "eval/win_rate_vs_initial", "eval/accuracy")  # the first is in the progress line


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

    def __init__(
        self,
        title: str,
        state: TrainState,
        mode: Progress,
        samples: int,
        figures: Mapping[str, str],
        phases: Phases | None = None,
    ) -> None:
        self.mode = mode
        self.title = title
        self.samples = samples
        self.figures = figures
        self.evaluated: list[str] = []  # the result of the last evaluation, for the progress display
        self.progress = ProgressDisplay(
            title, state.num_updates, mode.value, unit="update", done=state.update, phases=phases
        )

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
            head = [self.title, self.progress.count, *left(self.progress.left_s)]
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
    width = min(console.width, WIDTH_OF_LINES)
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
