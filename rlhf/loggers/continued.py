"""The base of loggers that continue a run in a store, such as MLflow and trackio."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from rlhf.core.console import say
from rlhf.core.files import read_lines
from rlhf.core.secrets import hide
from rlhf.loggers.logger import Logger

if TYPE_CHECKING:
    from pathlib import Path

    from rlhf.core.metrics import Evaluation, Row
    from rlhf.core.state import TrainState
    from rlhf.runs.folder import RunFolder

COMPLETIONS = "completions"  # name of the tables of completions, beside the names of metrics

Samples = list[dict[str, Any]]  # completions of an evaluation, with the keys of completions.jsonl


class ContinuedLogger(Logger):
    """A logger that sends each metric of an update once to a store, over all sessions of a run.

    A resumed run repeats the updates after its checkpoint; the values that the store has are not sent again.
    Rows that the store lacks are read from metrics.jsonl and completions.jsonl when the run resumes.

    If the store refuses a row, the run continues with a warning. The logger sends the row again at the next
    checkpoint, at the end of the run, or when the run resumes.

    Args:
        name: the option of the config group `logger`.
        folder: the run folder.
        last: the last update of each metric in the store, and of the tables of completions (`COMPLETIONS`).
        refusals: the exceptions of a store that refuses a row.
    """

    def __init__(
        self,
        name: str,
        folder: RunFolder,
        last: dict[str, int],
        refusals: tuple[type[Exception], ...] = (),
    ) -> None:
        self.name = name
        self.folder = folder
        self.last = last
        self.refusals = refusals
        self.refused = False  # the store refused a row, and nothing was sent after that

    def send(self, row: Row, update: int) -> None:
        """Send metrics of an update to the store."""
        raise NotImplementedError

    def send_completions(self, samples: Samples, update: int) -> None:
        """Send the completions of the evaluation at an update to the store, as a table."""
        raise NotImplementedError

    def log(self, row: Row, state: TrainState) -> None:
        """Send the metrics of an update."""
        self.send_new(row, [], state.update)

    def evaluation(self, row: Row, evaluation: Evaluation, state: TrainState) -> None:
        """Send the metrics of an evaluation, and a table of its completions."""
        self.send_new(row, evaluation.samples, state.update)

    def save(self, checkpoint: Path) -> None:
        """Send the rows that the store refused, if any, again."""
        if self.refused:
            self.send_missing()

    def send_missing(self) -> None:
        """Send the rows of metrics.jsonl and completions.jsonl that the store does not have."""
        self.refused = False
        for row in read_lines(self.folder.metrics, ["update"]):
            self.send_new(row, [], row["update"])
        evaluated: dict[int, Samples] = {}
        for sample in read_lines(self.folder.completions, ["update"]):
            evaluated.setdefault(sample.pop("update"), []).append(sample)
        for update, samples in evaluated.items():
            self.send_new({}, samples, update)

    def send_new(self, row: Row, samples: Samples, update: int) -> None:
        """Send the metrics and the completions that the store does not have."""
        new = {name: value for name, value in row.items() if update > self.last.get(name, -1)}
        if new:
            self.attempt(lambda: self.send(new, update), new, update)
        if samples and update > self.last.get(COMPLETIONS, -1):
            self.attempt(lambda: self.send_completions(samples, update), [COMPLETIONS], update)

    def attempt(self, send: Callable[[], None], names: Iterable[str], update: int) -> None:
        """Send the values `names` of an update, unless the store refused an earlier row."""
        if self.refused:
            return
        try:
            send()
        except self.refusals as error:
            self.refused = True
            reason = hide(str(error).partition("\n")[0])
            say(
                f"warning: logger={self.name} did not accept the metrics of update {update} ({reason}); the "
                "run continues, and sends them again at its next checkpoint and at its end",
                style="yellow",
            )
        else:
            self.last |= dict.fromkeys(names, update)
