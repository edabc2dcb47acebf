"""Loading from a local folder, the hub's cache or the hub, with errors that name the config key."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

from rlhf.core import hub
from rlhf.core.errors import UserError
from rlhf.models.folders import is_local, offline_problem

# What transformers raises for files with invalid content. RuntimeError is not in the list: too little memory.
_INVALID = (
    OSError, ValueError, LookupError, ArithmeticError, AttributeError, TypeError, ImportError,
    SafetensorError, StrictDataclassError,
)  # fmt: skip


def fetch(auto: Any, path: str, key: str, **settings: Any) -> Any:
    """Return `auto.from_pretrained(path)`: from a local folder or the local cache, else from the hub.

    The hub is contacted only if the model is not cached, because cluster nodes often have no network. If the
    hub does not answer, the error comes within seconds.

    Args:
        auto: auto class of transformers.
        path: hub name or local folder.
        key: config key that names `path`, for error messages.
        settings: further arguments of `from_pretrained`.

    Raises:
        UserError: the local folder is missing or cannot be read, or the hub name is not cached and cannot be
            loaded from the hub.
    """
    path = os.path.expanduser(path)
    try:
        return auto.from_pretrained(path, local_files_only=True, **settings)
    except _INVALID as error:
        if is_local(path):
            folder = Path(path).is_dir()
            reason = f"{path!r} could not be read: {cause(error)}" if folder else f"no folder {path!r}"
            remedy = "correct or copy its files, or set {}=<hub name or another folder>" if folder else None
            raise UserError(_not_loaded(key, path, reason, remedy)) from None
    if (offline := hub.unreachable()) is not None:
        raise UserError(offline_problem(key, path, offline))
    try:
        return auto.from_pretrained(path, **settings)
    except _INVALID as error:
        reason = f"no folder {path!r}, and not found on the hub or hub not reachable: {cause(error)}"
        raise UserError(_not_loaded(key, path, reason)) from None


def _not_loaded(key: str, path: str, reason: str, remedy: str | None = None) -> str:
    """Return the error message for a model that cannot be loaded.

    Args:
        key: config key that names the model.
        path: hub name or local folder.
        reason: why the model cannot be loaded.
        remedy: what to do, with `{}` for the key; None: name or download a model.
    """
    remedy = remedy or "set {}=<hub name or folder>, or download the model once on a machine with a network"
    return (
        f"{key} must name a model on the hub or a folder with model and tokenizer ({reason}), got {path!r}; "
        f"{remedy.format(key)}"
    )


def cause(error: Exception) -> str:
    """Return why files cannot be read, on one line: the text of an exception, after its class if needed."""
    if isinstance(error, StrictDataclassError):  # its first line does not name the value
        return " ".join(str(error).split())
    plain = isinstance(error, OSError | ValueError | SafetensorError)
    return first_line(error) if plain else f"{type(error).__name__}: {first_line(error)}"


def first_line(error: Exception) -> str:
    """Return the first line of an exception's text, or the name of its class if the text is empty."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
