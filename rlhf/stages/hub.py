"""Uploads to the Hugging Face hub, for commands with `push_to=<owner>/<name>`.

Without `push_to`, nothing is uploaded. A new repository is private; the visibility of an existing repository
does not change. The token is that of the variable HF_TOKEN or of `hf auth login`, so that it is in no config,
no command line and no log.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rlhf.checks.machine import TOKEN
from rlhf.core.console import say
from rlhf.core.errors import RunError
from rlhf.stages.final_model import final_model

if TYPE_CHECKING:
    from datasets import DatasetDict

    from rlhf.runs.folder import RunFolder

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
    say(f"pushed to {push_model(final_model(folder), repository)}")


def push_model(folder: Path, repository: str) -> str:
    """Upload a model folder, and return the address of the repository.

    Files that the repository already has are not uploaded again.

    Raises:
        RunError: the upload failed.
    """
    from huggingface_hub import HfApi, get_token

    api = HfApi(token=get_token())  # also if HF_HUB_DISABLE_IMPLICIT_TOKEN is set
    try:
        address = api.create_repo(repository, private=True, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=str(folder))
    except Exception as error:  # the exception depends on the HTTP library
        raise refused(repository, folder, error) from error
    return str(address)


def push_data(data: DatasetDict, folder: Path, repository: str) -> str:
    """Upload the data set stored in `folder`, and return the address of the repository.

    Raises:
        RunError: the upload failed.
    """
    from huggingface_hub import get_token

    try:
        data.push_to_hub(repository, private=True, token=get_token())
    except Exception as error:
        raise refused(repository, folder, error) from error
    return f"https://huggingface.co/datasets/{repository}"


def refused(repository: str, folder: Path, error: Exception) -> RunError:
    """Return the error for a failed upload of `folder`, with the first line of the cause."""
    first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return RunError(
        f"push_to={repository} must be a reachable repository that the token ({TOKEN} or hf auth login) "
        f"may write to, got: {first}; {folder} is complete, and the same command pushes it again"
    )
