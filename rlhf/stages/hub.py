"""Pushing results to the hub of Hugging Face: only where a command is told to (`push_to=<repository>`).

A repository that is made is private; one that is there stays as it is. The token comes from the environment
variable HF_TOKEN alone, so that it is in no config, no command line and no log.
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
    "<owner>/<name> on the hub to push to, made private where it is new, with the token in HF_TOKEN "
    "(default: nothing is pushed)"
)


def check(repository: str | None) -> None:
    """Look whether there is what a push needs, before anything is made to be pushed.

    Raises:
        UserError: the name is none of a repository, or there is no token.
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
            f"push_to= needs a token in the environment variable {VARIABLE} (it is read from nowhere else), "
            f"got none; run: export {VARIABLE}=<token>, or leave push_to out"
        )


def push_model(folder: Path, repository: str) -> str:
    """Push a model folder as it is; returns its address.

    Raises:
        RunError: the hub did not take it.
    """
    from huggingface_hub import HfApi

    try:
        api = HfApi(token=os.environ[VARIABLE])
        api.create_repo(repository, private=True, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=str(folder))
    except Exception as error:  # refused, unreachable, offline: each library of the net has its own
        raise refused(repository, folder, error) from error
    return f"https://huggingface.co/{repository}"


def push_data(data: DatasetDict, folder: Path, repository: str) -> str:
    """Push the data set that is in `folder`; returns its address.

    Raises:
        RunError: the hub did not take it.
    """
    try:
        data.push_to_hub(repository, private=True, token=os.environ[VARIABLE])
    except Exception as error:
        raise refused(repository, folder, error) from error
    return f"https://huggingface.co/datasets/{repository}"


def refused(repository: str, folder: Path, error: Exception) -> RunError:
    """What to tell of a push that failed; nothing that was made is lost."""
    first = (str(error).splitlines() or [type(error).__name__])[0]
    return RunError(
        f"push_to={repository} must be a repository that the token in {VARIABLE} may write to, and that can "
        f"be reached, got: {first}; {folder} is complete, and the same command pushes it again"
    )
