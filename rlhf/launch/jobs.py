"""The jobs of a sweep: their arguments, folders and results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hydra.core.utils import JobReturn, JobStatus

from rlhf.core.errors import RunError, UserError
from rlhf.core.launched import is_first_rank

if TYPE_CHECKING:
    from rlhf.runs.folder import RunFolder


BASIC_SWEEPER = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"


def own_words(batch: Sequence[Sequence[str]]) -> list[str]:
    """What each job of a sweep has of its own among its words; empty where that is nothing."""
    shared = set(batch[0]).intersection(*batch[1:]) if len(batch) > 1 else set()
    return [" ".join(word for word in words if word not in shared) for words in batch]


def announce(folder: RunFolder, state: dict[str, Any], metric: str) -> None:
    """Say that a run is finished, with its result and where its model is."""
    if not is_first_rank():
        return
    print(found_finished(folder, state["result"].get(metric), metric))
    if folder.model.is_dir():
        print(f"model: {folder.model}")
    print("to run it again: resume=never")


def found_finished(folder: RunFolder, value: float | None, metric: str) -> str:
    """What to say of a run that is finished."""
    return f"finished already: {folder.path}" + ("" if value is None else f" ({metric} {value:.4g})")


@dataclass(frozen=True, slots=True)
class Job:
    """One run of a sweep."""

    overrides: list[str]
    folder: RunFolder
    metric: str
    label: str  # what it has of its own among the jobs of the sweep

    @property
    def done(self) -> JobReturn | None:
        """What a finished run gave; None where it is not finished."""
        state = self.folder.finished()
        return None if state is None else gave(state["result"].get(self.metric))


def gave(value: float | None) -> JobReturn:
    """A job that came to its end."""
    return JobReturn(_return_value=value, status=JobStatus.COMPLETED)


def raised(error: BaseException) -> JobReturn:
    """A job that did not."""
    return JobReturn(_return_value=error, status=JobStatus.FAILED)


def in_words(error: BaseException) -> str:
    """What a job failed with."""
    if isinstance(error, UserError | RunError):
        return str(error).removeprefix("error: ")
    return f"{type(error).__name__}: {error}"
