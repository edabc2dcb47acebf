"""Jobs of a sweep: their overrides, run folders and results."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hydra.core.utils import JobReturn, JobStatus

from rlhf.core.errors import RunError, UserError
from rlhf.core.launched import is_first_rank
from rlhf.runs.resuming import twice_as_long
from rlhf.stages.final_model import again, model_problem

if TYPE_CHECKING:
    from rlhf.runs.folder import RunFolder


def distinct_overrides(jobs: Sequence[Sequence[str]], shared: Collection[str] | None = None) -> list[str]:
    """Return, for each job, the overrides that not all jobs share, joined by spaces; "" if all are shared.

    Args:
        jobs: the overrides of each job.
        shared: the overrides that all jobs share; None: those of two or more `jobs` with the same text.
    """
    if shared is None:
        shared = set(jobs[0]).intersection(*jobs[1:]) if len(jobs) > 1 else set()
    return [" ".join(override for override in job if override not in shared) for job in jobs]


def announce(folder: RunFolder, state: dict[str, Any], metric: str) -> None:
    """Print on rank 0 that a run is finished, with the value of `metric`, the model and possible commands.

    Args:
        folder: the run folder.
        state: the content of trainer_state.json.
        metric: name of the metric.
    """
    if not is_first_rank():
        return
    print(finished_message(folder, state["result"].get(metric), metric))
    if problem := model_problem(folder):
        print(f"warning: {problem}; {again(folder)}")
    else:
        print(f"model: {folder.model}")
    print("to run again: add resume=never")
    if folder.last_checkpoint() is not None and (command := twice_as_long(folder)):
        print(f"to train longer: {command}")


def finished_message(folder: RunFolder, value: float | None, metric: str) -> str:
    """Return the message about a run that is already finished; `value` is the value of `metric`."""
    return f"finished already: {folder.path}" + ("" if value is None else f" ({metric} {value:.4g})")


@dataclass(frozen=True, slots=True)
class Job:
    """One run of a sweep.

    Attributes:
        overrides: the overrides of the job.
        folder: the run folder.
        metric: name of the metric that a sweeper optimises.
        label: the overrides that not all jobs of the sweep share.
    """

    overrides: list[str]
    folder: RunFolder
    metric: str
    label: str

    @property
    def done(self) -> JobReturn | None:
        """The result of the run if it is finished, else None."""
        state = self.folder.finished()
        return None if state is None else completed(state["result"].get(self.metric))


def completed(value: float | None) -> JobReturn:
    """Return the result of a completed job; `value` is the metric that a sweeper optimises."""
    return JobReturn(_return_value=value, status=JobStatus.COMPLETED)


def failed(error: BaseException) -> JobReturn:
    """Return the result of a failed job."""
    return JobReturn(_return_value=error, status=JobStatus.FAILED)


def failure_message(error: BaseException) -> str:
    """Return the message of an error that ended a job, with the class name of an unexpected error."""
    if isinstance(error, UserError | RunError):
        return str(error).removeprefix("error: ")
    return f"{type(error).__name__}: {error}"
