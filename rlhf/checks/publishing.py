"""Check of a repository on the Hugging Face hub to which a model or a data set is uploaded. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf.core.errors import UserError

VARIABLE = "HF_TOKEN"


def check_push(repository: str | None) -> None:
    """Check the name of the repository, the token and the access to the hub, before anything is computed.

    Args:
        repository: the value of `push_to`; None: nothing is uploaded.

    Raises:
        UserError: a check failed.
    """
    if found := list(push_problems(repository)):
        raise UserError(*found)


def push_problems(repository: str | None) -> Iterator[str]:
    """Yield an error for an invalid name, a missing token, and a hub that is turned off; see `check_push`."""
    if repository is None:
        return
    from huggingface_hub import constants, get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repository)
        reason = None if "/" in repository else "no owner"
    except HFValidationError as error:
        reason = str(error).partition(": ")[0].rstrip(".")
    if reason is not None:
        yield (
            f"push_to= must be <owner>/<name> (a repository on the hub; {reason}), got {repository}; "
            "set push_to=<owner>/<name>"
        )
    if get_token() is None:
        yield (
            f"push_to= needs a token that may write to {repository} ({VARIABLE}, or a login), got none; run: "
            f"hf auth login, or: export {VARIABLE}=<token>, or leave push_to out (rlhf.extend: push_to=null)"
        )
    if constants.is_offline_mode():
        yield (
            f"push_to= needs access to the hub, got HF_HUB_OFFLINE=1 and push_to={repository}; run: unset "
            "HF_HUB_OFFLINE TRANSFORMERS_OFFLINE, or leave push_to out and upload later: the same command "
            "with push_to uploads the model of a finished run"
        )
