"""Uploads to the Hugging Face hub, for commands with `push_to=<owner>/<name>`.

Without `push_to`, nothing is uploaded. A new repository is private; the visibility of an existing repository
does not change. The token is read only from the environment variable HF_TOKEN, so that it is in no config, no
command line and no log.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf.core.errors import RunError, UserError
from rlhf.models.folders import HUB_NAME

if TYPE_CHECKING:
    from datasets import DatasetDict

VARIABLE = "HF_TOKEN"

MEANS = (
    "hub repository <owner>/<name> to push to; a new repository is private; the token is read from HF_TOKEN "
    "(default: nothing is pushed)"
)


def check(repository: str | None) -> None:
    """Check the repository name and the token, before the command writes its result.

    Args:
        repository: the value of `push_to=`; None: nothing is pushed.

    Raises:
        UserError: the repository name is invalid, or there is no token.
    """
    if repository is None:
        return
    if HUB_NAME.fullmatch(repository) is None or "/" not in repository:
        raise UserError(
            f"push_to= must be <owner>/<name> (a repository on the hub), got {repository}; "
            "set push_to=<owner>/<name>"
        )
    if not os.environ.get(VARIABLE):
        raise UserError(
            f"push_to= needs a token in the environment variable {VARIABLE} (no other place is read), got no "
            f"{VARIABLE}; run: export {VARIABLE}=<token>, or leave push_to out"
        )


def push_model(folder: Path, repository: str) -> str:
    """Upload a model folder, and return the address of the repository.

    Raises:
        RunError: the upload failed.
    """
    from huggingface_hub import HfApi

    try:
        api = HfApi(token=os.environ[VARIABLE])
        api.create_repo(repository, private=True, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=str(folder))
    except Exception as error:  # the exception depends on the HTTP library
        raise refused(repository, folder, error) from error
    return f"https://huggingface.co/{repository}"


def push_data(data: DatasetDict, folder: Path, repository: str) -> str:
    """Upload the data set stored in `folder`, and return the address of the repository.

    Raises:
        RunError: the upload failed.
    """
    try:
        data.push_to_hub(repository, private=True, token=os.environ[VARIABLE])
    except Exception as error:
        raise refused(repository, folder, error) from error
    return f"https://huggingface.co/datasets/{repository}"


def refused(repository: str, folder: Path, error: Exception) -> RunError:
    """Return the error for a failed upload of `folder`, with the first line of the cause."""
    first = (str(error).splitlines() or [type(error).__name__])[0]
    return RunError(
        f"push_to={repository} must be a reachable repository that the token in {VARIABLE} may write to, "
        f"got: {first}; {folder} is complete, and the same command pushes it again"
    )
