"""What can be known of a local model folder before torch is imported. Only pathlib and json."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len")  # as model configs spell it


def is_local(path: str) -> bool:
    """Whether `path` means a folder: there is one, or it cannot be the name of a model on the hub."""
    return Path(path).expanduser().is_dir() or HUB_NAME.fullmatch(path) is None


def folder_problem(key: str, path: str) -> str | None:
    """What is wrong with the local model folder `path` that `key` names, or None. Hub names have none
    here.
    """
    if not is_local(path):
        return None
    folder = Path(path).expanduser()
    if not folder.is_dir():
        missing = f"no folder {path!r} here"
    elif not (folder / "config.json").is_file():
        missing = f"no config.json in {path!r}"
    elif not any(folder.glob("*.safetensors")):
        missing = f"no *.safetensors in {path!r}; other formats run code when they are read"
    elif read_config(path) is None:
        missing = f"config.json in {path!r} is not a JSON object"
    else:
        return None
    return (
        f"{key} must name a model on the hub or a folder with config.json and safetensors weights "
        f"({missing}), got {path!r}; set {key}=<hub name or folder>"
    )


def read_config(path: str) -> dict[str, Any] | None:
    """The config.json of a model folder; None where there is none, or it is not a JSON object."""
    file = Path(path).expanduser() / "config.json"
    if not file.is_file():
        return None
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError:
        return None
    return config if isinstance(config, dict) else None


def context_length(path: str) -> int | None:
    """Positions of the model in the folder `path`; None where its config does not say, or `path` is not a
    folder.
    """
    return context_of(read_config(path) or {})


def context_of(config: dict[str, Any]) -> int | None:
    """Positions that a model config, as a dictionary, allows; None where it does not say."""
    nested = config.get("text_config")
    for part in (config, nested if isinstance(nested, dict) else {}):
        for name in CONTEXT_KEYS:
            if isinstance(part.get(name), int):
                return int(part[name])
    return None


def context_problem(context: int | None, prompt_length: int, response_length: int) -> str | None:
    """What is wrong when prompts and responses of so many tokens do not fit `context` positions, or None."""
    if context is None or prompt_length + response_length <= context:
        return None
    room = context - prompt_length
    remedy = (
        f"set generator.response_length={room}"
        if room > 0
        else f"set task.max_prompt_tokens={max(1, context - response_length)}"
    )
    return (
        f"task.max_prompt_tokens + generator.response_length must be <= {context} (the model has no more "
        f"positions), got {prompt_length} + {response_length} = {prompt_length + response_length}; {remedy}"
    )
