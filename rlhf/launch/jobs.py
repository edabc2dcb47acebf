"""Jobs of a sweep: their overrides, configs, run folders and results."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import DictConfig, OmegaConf, open_dict

from rlhf.config.mistakes import explained
from rlhf.core.errors import RunError, UserError
from rlhf.core.launched import is_first_rank
from rlhf.experiment import Experiment
from rlhf.runs.folder import RunFolder
from rlhf.runs.naming import folder_of
from rlhf.runs.resuming import twice_as_long
from rlhf.stages.artefacts import again, model_problem

OmegaConf.register_new_resolver("run_name", lambda *, _root_: folder_of(_root_).name, replace=True)  # conf/


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """One run of a sweep.

    Attributes:
        number: number of the job, from 1.
        label: the overrides that not all jobs share.
        overrides: the overrides of the job.
        folder: the run folder; None if the config of the job is invalid.
        metric: name of the metric that a sweeper optimises.
        status: why the job does not run: "finished before", or "same run as job <number>".
        error: the error of a failed job.
    """

    number: int
    label: str
    overrides: list[str] = field(default_factory=list)
    folder: RunFolder | None = None
    metric: str = ""
    status: str | None = None
    error: BaseException | None = None

    @property
    def path(self) -> Path:
        """The path of the run folder, for a job with a valid config."""
        assert self.folder is not None
        return self.folder.path

    @property
    def state(self) -> str:
        """The state of the job: failed, finished, unfinished, or why a hook stopped it, such as pruned."""
        if self.error is not None:
            return "failed"
        if self.status is not None:
            return self.status
        state = None if self.folder is None else self.folder.read_state()
        if state is None or not state.get("finished"):
            return "unfinished" if state is None else state.get("stopped", "unfinished")
        return "finished"

    @property
    def done(self) -> JobReturn | None:
        """The result of the run if it is finished, else None."""
        state = None if self.folder is None or self.error is not None else self.folder.finished()
        return None if state is None else completed(state["result"].get(self.metric))

    @property
    def result(self) -> float | None:
        """The final value of the metric; None if the run is not finished."""
        return None if (done := self.done) is None else done.return_value


def experiment_of(config: DictConfig, overrides: Sequence[str], number: int) -> Experiment:
    """Return the run of a job of a sweep. Hydra must be initialized.

    Args:
        config: the config of the sweep.
        overrides: the overrides of the job.
        number: number of the job, from 1.

    Raises:
        UserError: the config does not compose, or a key is unknown or has a value of the wrong type.
    """
    with explained(overrides):
        node = GlobalHydra.instance().config_loader().load_sweep_config(config, list(overrides))
        with open_dict(node):
            node.hydra.job.id = node.hydra.job.num = number - 1
        experiment = Experiment.composed(node, overrides)
        experiment.files = RunFolder(Path(node.hydra.sweep.dir) / node.hydra.sweep.subdir)
    return experiment


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
    print(finished_message(folder.path, state["result"].get(metric), metric))
    if problem := model_problem(folder):
        print(f"warning: {problem}; {again(folder)}")
    else:
        print(f"model: {folder.model}")
    print("to run again: add resume=never")
    if folder.last_checkpoint() is not None and (command := twice_as_long(folder)):
        print(f"to train longer: {command}")


def finished_message(folder: Path, value: float | None, metric: str) -> str:
    """Return the message about a run that is already finished; `value` is the value of `metric`."""
    return f"finished already: {folder}" + ("" if value is None else f" ({metric} {value:.4g})")


def completed(value: float | None) -> JobReturn:
    """Return the result of a completed job; `value` is the metric that a sweeper optimises."""
    return JobReturn(_return_value=value, status=JobStatus.COMPLETED)


def failed(error: BaseException) -> JobReturn:
    """Return the result of a failed job."""
    return JobReturn(_return_value=error, status=JobStatus.FAILED)


def failure_message(error: BaseException | None) -> str:
    """Return the message of an error that ended a job, with the class name of an unexpected error."""
    if isinstance(error, UserError | RunError):
        return str(error).removeprefix("error: ")
    return f"{type(error).__name__}: {error}"
