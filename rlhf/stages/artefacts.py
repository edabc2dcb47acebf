"""Artefacts of stages, the final model of a run, and uploads to the hub. This module imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf.checks.machine import TOKEN
from rlhf.core import formatting
from rlhf.core.errors import RunError, UserError
from rlhf.core.files import delete_command, whole
from rlhf.loggers.logger import EVALUATION_METRICS, shown
from rlhf.models.folder import ADAPTER
from rlhf.models.headers import DamagedFile, opened, read_header, read_object
from rlhf.runs.folder import COMPLETE, RunFolder
from rlhf.runs.lock import made_by_one
from rlhf.terminal.console import say

if TYPE_CHECKING:
    from datasets import DatasetDict


# Artefacts: folders that are complete or absent, made by one process, and skipped once they are finished.
#
# The stages before a run (`rlhf.stages.prerequisites`) and the stages of `rlhf.pipeline`
# (`rlhf.stages.pipeline`) are lists of artefacts, in the order in which they are made.


# Metrics that the summary of the stages shows.
_FIGURES = ("eval/win_rate", "eval/accuracy", "eval/gold_score", "eval/kl", "eval/loss")


@dataclass(frozen=True, slots=True, kw_only=True)
class Artefact:
    """A model, a data set or an evaluation, and how to make it.

    Attributes:
        name: name for messages.
        folder: where the artefact is written.
        done: returns whether the artefact is finished. Raises UserError if it is damaged.
        make: makes the artefact; resumes if an earlier call was interrupted.
        figures: returns the results of the finished artefact as text.
    """

    name: str
    folder: Path
    done: Callable[[], bool]
    make: Callable[[], object]
    figures: Callable[[], str]


def trained(name: str, folder: RunFolder, make: Callable[[], object]) -> Artefact:
    """Return the final model of the run in `folder`, which `make` carries out."""
    return Artefact(
        name=name,
        folder=folder.path,
        done=lambda: folder.finished() is not None and final_model(folder).is_dir(),
        make=make,
        figures=lambda: result_text((folder.finished() or {"result": {}})["result"]),
    )


def result_text(figures: dict[str, Any]) -> str:
    """Return the main metrics of an evaluation as text."""
    present = [name for name in _FIGURES if name in shown(figures)]
    return ", ".join(f"{EVALUATION_METRICS[name]} {formatting.text(figures, name)}" for name in present)


def made_once(folder: Path, write: Callable[[Path], object]) -> Path:
    """Return `folder`; if it does not exist, make it first, or wait for another process that makes it.

    Args:
        folder: the folder; it is either complete or absent.
        write: function that writes the content into the folder in its argument.
    """
    if not (folder / COMPLETE).exists():
        with made_by_one(folder):
            if not (folder / COMPLETE).exists():
                with whole(folder) as scratch:
                    write(scratch)
                    (scratch / COMPLETE).touch()
    return folder


# The final model of a finished run: whether its files are complete, and how to write them again.
#
# Only JSON files and the headers of weights are read.


def final_model(folder: RunFolder) -> Path:
    """Return the folder of the final model of a finished run.

    Raises:
        UserError: the model is missing or damaged.
    """
    if (problem := model_problem(folder)) is not None:
        raise UserError(f"{folder.path} must have a complete model, got: {problem}; {again(folder)}")
    return folder.model


def model_problem(folder: RunFolder) -> str | None:
    """Return what is missing or damaged in the final model of a run; None if no file shows a defect."""
    if not folder.model.is_dir():
        return f"{folder.model} is missing"
    defect = opened(folder.model).defect
    return defect and f"{folder.model} is damaged: {defect}"


def adapter_problem(folder: RunFolder) -> str | None:
    """Return what is missing or damaged in the final adapter of a run; None if no file shows a defect."""
    if not folder.adapter.is_dir():
        return f"{folder.adapter} is missing"
    try:
        read_object(folder.adapter / ADAPTER)
        read_header(folder.adapter / "adapter_model.safetensors")
    except DamagedFile as defect:
        return f"{folder.adapter} is damaged: {defect}"
    return None


def again(folder: RunFolder) -> str:
    """Return how to write the final model of a finished run again."""
    last = folder.last_checkpoint()
    start = "train it again" if last is None else f"write it again from {last.name}"
    return f"to {start}: {delete_command(folder.state)}, then the same command"


# Uploads to the Hugging Face hub, for commands with `push_to=<owner>/<name>`.
#
# Without `push_to`, nothing is uploaded. A new repository is private; the visibility of an existing
# repository does not change. The token is that of the variable HF_TOKEN or of `hf auth login`, so that it is
# in no config, no command line and no log.


MEANS = (
    "hub repository <owner>/<name> to push to; a new repository is private; the token is HF_TOKEN or that of "
    "hf auth login (default: nothing is pushed)"
)


def push_run(folder: RunFolder, repository: str) -> None:
    """Upload the final model of a finished run, and print the address of the repository.

    Raises:
        UserError: the model is missing or damaged.
        RunError: the upload failed.
    """
    say(f"pushed to {_push_model(final_model(folder), repository)}")


def _push_model(folder: Path, repository: str) -> str:
    """Upload a model folder, and return the address of the repository.

    Files that the repository already has are not uploaded again.

    Raises:
        RunError: the upload failed.
    """
    from huggingface_hub import HfApi, get_token

    api = HfApi(token=get_token())  # also if HF_HUB_DISABLE_IMPLICIT_TOKEN is set
    with _uploading(folder, repository):
        address = api.create_repo(repository, private=True, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=str(folder))
    return str(address)


def push_data(data: DatasetDict, folder: Path, repository: str) -> str:
    """Upload the data set stored in `folder`, and return the address of the repository.

    Raises:
        RunError: the upload failed.
    """
    from huggingface_hub import get_token

    with _uploading(folder, repository):
        data.push_to_hub(repository, private=True, token=get_token())
    return f"https://huggingface.co/datasets/{repository}"


@contextmanager
def _uploading(folder: Path, repository: str) -> Iterator[None]:
    """Raise RunError with the first line of the cause if the upload of `folder` in the block fails."""
    try:
        yield
    except Exception as error:  # the exception depends on the HTTP library
        first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise RunError(
            f"push_to={repository} must be a reachable repository that the token ({TOKEN} or hf auth login) "
            f"may write to, got: {first}; {folder} is complete, and the same command pushes it again"
        ) from error
