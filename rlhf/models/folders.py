"""Checks of local model folders and of context lengths. This module imports no torch."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len")  # context length in config.json


def is_local(path: str) -> bool:
    """Return True if `path` is an existing folder, or cannot be the name of a model on the hub."""
    return Path(path).expanduser().is_dir() or HUB_NAME.fullmatch(path) is None


def folder_problem(key: str, path: str) -> str | None:
    """Return the error message for the local model folder `path`, or None if the folder can be loaded.

    A hub name is not checked: the result is None. The message names the config key `key`.
    """
    if not is_local(path):
        return None
    folder = Path(path).expanduser()
    if not folder.is_dir():
        missing = f"no folder {path!r}"
    elif not (folder / "config.json").is_file():
        missing = f"no config.json in {path!r}"
    elif not any(folder.glob("*.safetensors")):
        missing = f"no *.safetensors in {path!r}; reading other formats can execute code"
    elif read_config(path) is None:
        missing = f"config.json in {path!r} is not a JSON object"
    else:
        return None
    return (
        f"{key} must name a model on the hub or a folder with config.json and safetensors weights "
        f"({missing}), got {path!r}; set {key}=<hub name or folder>"
    )


def read_config(path: str) -> dict[str, Any] | None:
    """Return the config.json of a model folder; None if the file is missing or is not a JSON object."""
    file = Path(path).expanduser() / "config.json"
    if not file.is_file():
        return None
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError:
        return None
    return config if isinstance(config, dict) else None


def context_length(path: str) -> int | None:
    """Return the context length, in tokens, of the model in the folder `path`.

    The result is None if `path` is not a model folder, or if config.json does not state the length.
    """
    return context_of(read_config(path) or {})


def context_of(config: dict[str, Any]) -> int | None:
    """Return the context length, in tokens, that a model config (a dictionary) states; None if not stated."""
    nested = config.get("text_config")
    for part in (config, nested if isinstance(nested, dict) else {}):
        for name in CONTEXT_KEYS:
            if isinstance(part.get(name), int):
                return int(part[name])
    return None


def context_problem(context: int | None, prompt_length: int, response_length: int) -> str | None:
    """Return an error message if prompt and response together are longer than the context, else None.

    Args:
        context: context length of the model in tokens; None if unknown, which is no error.
        prompt_length: longest prompt in tokens.
        response_length: longest response in tokens.
    """
    if context is None or prompt_length + response_length <= context:
        return None
    room = context - prompt_length
    remedy = (
        f"set generator.response_length={room}"
        if room > 0
        else f"set task.max_prompt_tokens={max(1, context - response_length)}"
    )
    return (
        f"task.max_prompt_tokens + generator.response_length must be <= {context} (the context length of the "
        f"model), got {prompt_length} + {response_length} = {prompt_length + response_length}; {remedy}"
    )
