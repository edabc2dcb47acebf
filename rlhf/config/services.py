"""Addresses of services, and environment variables with their tokens, in the config."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from rlhf.core.formatting import secret_in
from rlhf.core.machine import refusal, refused_key

_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]*|[a-z_]+")  # the usual form of a name of an environment variable
_VISIBLE = re.compile(r"[!-~]+")  # ASCII characters without spaces and line breaks


def url_problems(key: str, url: str | None, token_key: str, use: str, example: str) -> Iterator[str]:
    """Yield an error if the address of a service is invalid or contains a secret.

    Args:
        key: the config key of the address.
        url: the address.
        token_key: the config key of the environment variable with the token; the message recommends this key.
        use: what is done with the address, for the message.
        example: a valid address.
    """
    path = "/<path>" if example.count("/") > 2 else ":<port>"
    form = f"{key} must be http://<host>{path} or https://<host>{path} ({use})"
    try:
        parsed = urlsplit(url or "")
        whole = parsed.scheme in ("http", "https") and parsed.hostname is not None and parsed.port != 0
    except ValueError:
        whole = False
    if not whole:
        got = "null" if url is None else repr(url)
        yield f"{form}, got {got}; set {key}={example}"
    elif (secret := secret_in(url or "")) is not None:
        yield (
            f"{key} must not contain {secret} (config.yaml would show it), got one; set "
            f"{token_key}=<environment variable that contains a token>, which is sent as "
            "`Authorization: Bearer <token>`"
        )


def token_problems(key: str, variable: str) -> Iterator[str]:
    """Yield an error if the environment variable with a token is not set, or cannot be sent.

    Args:
        key: the config key with the name of the variable.
        variable: the name of the variable; not shown if it may be the token itself.
    """
    token = os.environ.get(variable)
    rule = f"{key} must name an environment variable that contains the token (it is sent to the service)"
    if not _VARIABLE.fullmatch(variable):
        yield (
            f"{rule}, got text that is no name of a variable and may be the token itself; "
            f"run: export SCORE_TOKEN=<token>, and set {key}=SCORE_TOKEN"
        )
    elif not token:
        yield (f"{rule}, got {variable}, which is not set; run: export {variable}=<token>, or set {key}=null")
    elif not _VISIBLE.fullmatch(token):
        yield (
            f"{key} must name a variable with a token of visible ASCII characters (it is sent in a header), "
            f"got {variable}, which contains others, such as a line break; run: export {variable}=<token>"
        )


def service_problems(
    key: str, url: str, start: str, token_key: str, variable: str | None, route: str = "", body: Any = None
) -> Iterator[str]:
    """Yield an error if a service accepts no connections, or refuses the key that the run would send.

    Args:
        key: the config key of the address.
        url: the address.
        start: how to start the service, for the message.
        token_key: the config key of the environment variable with the key.
        variable: the name of the variable; None: no key is sent.
        route: what is asked at the address.
        body: the body of the question in JSON, which is then a POST.
    """
    if reason := refusal(url):
        rule = f"{key} must be the address of a service that accepts connections ({reason})"
        yield f"{rule}, got {url}; {start}, or correct {key}"
    elif status := refused_key(url + route, os.environ.get(variable or ""), body):
        named = variable or "SERVICE_KEY"
        yield (
            f"{token_key} must name an environment variable with the key of the service (it answers with "
            f"status {status}), got {variable or 'null'} for {url}; run: export {named}=<key>, and set "
            f"{token_key}={named}"
        )
