"""Secrets must not be in the config: config.yaml, environment.json, logs and loggers would show them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from rlhf.checks.rules import rule
from rlhf.config.overrides import read_overrides
from rlhf.config.root import Config
from rlhf.core.errors import UserError
from rlhf.core.secrets import NO_SECRET_VALUE, is_secret_key, secret_in

_REMEDY = "leave it out, and set it as an environment variable or log in to the service"


@rule
def secrets(cfg: Config) -> Iterator[str]:
    """Yield an error for each value that is or contains a secret, without the value.

    `HttpScorerConfig.problems` reports the addresses of scoring services, with another remedy.
    """
    for key, value in leaves(cfg):
        if key.endswith(".url"):
            continue
        if (secret := secret_in(value)) is not None:
            yield f"{key} must not contain {secret} (config.yaml would show it), got one; {_REMEDY}"


def check_arguments(arguments: Sequence[str]) -> None:
    """Check that no argument of a command sets a key that names a secret.

    Raises:
        UserError: an argument is like `+logger.wandb.api_key=...`; the error does not contain the value.
    """
    found = []
    for each in read_overrides(arguments):
        if is_secret_key(each.key) and not NO_SECRET_VALUE.fullmatch(each.value):
            found.append(
                f"{each.key} must not be set on the command line (files of the run and the list of processes "
                f"show the command line), got a value; {_REMEDY}"
            )
    if found:
        raise UserError(*found)


def leaves(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted key and the value of every text in a section, a dictionary or a list."""
    if isinstance(value, str):
        yield key, value
    elif is_dataclass(value):
        for field in fields(value):
            yield from leaves(getattr(value, field.name), f"{key}.{field.name}".lstrip("."))
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from leaves(inner, f"{key}.{name}".lstrip("."))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from leaves(inner, key)
