"""Whether a service can be reached. This module imports no torch."""

from __future__ import annotations

import ipaddress
import socket
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any
from urllib.parse import urlsplit

_CONNECT_S = 3.0  # seconds after which a connection counts as slow, not as refused
STATUS = "/v1/rlhf/status"  # route of the servers of `rlhf.serve` that answers with their state


def refusal(url: str) -> str | None:
    """Return the system's error message if the host of a URL refuses connections, or does not exist.

    The result is None if a connection is accepted, if it takes more than `_CONNECT_S`, or if a proxy is used,
    which makes the connection. Nothing is sent.

    Args:
        url: a valid address that begins with http:// or https://.
    """
    parsed = urlsplit(url)
    host, port = parsed.hostname or "", parsed.port or (443 if parsed.scheme == "https" else 80)
    if _behind_proxy(url):
        return None
    found: SimpleQueue[str | None] = SimpleQueue()

    def connect() -> None:
        reason = None
        try:
            with suppress(TimeoutError):
                socket.create_connection((host, port), _CONNECT_S).close()
        except (OSError, UnicodeError) as error:  # UnicodeError: the name of the host is too long
            reason = getattr(error, "strerror", None) or str(error)
        found.put(reason)

    # A look-up of a name has no time limit, and no signal interrupts it, so another thread waits for it.
    Thread(target=connect, daemon=True).start()
    with suppress(Empty):
        return found.get(timeout=_CONNECT_S)
    return None


def refused_key(url: str, key: str | None, body: Any = None) -> int | None:
    """Return the HTTP status with which a service refuses a key, 401 or 403; None: any other answer.

    The result is None as well without an answer within `_CONNECT_S`, and if a proxy is used.

    Args:
        url: the address.
        key: the key; None: no key is sent.
        body: the body of a POST in JSON; None: the request is a GET.
    """
    import requests

    if _behind_proxy(url):
        return None
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with requests.Session() as session, suppress(requests.RequestException, ValueError):
        session.trust_env, session.stream = False, True  # ~/.netrc would replace the key
        ask = partial(session.get, url) if body is None else partial(session.post, url, json=body)
        status = ask(headers=headers, timeout=_CONNECT_S, allow_redirects=False).status_code
        return status if status in (401, 403) else None
    return None


def _behind_proxy(url: str) -> bool:
    """Return whether the proxy variables of the environment apply to the host of a URL."""
    from urllib.request import getproxies, proxy_bypass

    parsed, proxies = urlsplit(url), getproxies()
    applies = (parsed.scheme in proxies or "all" in proxies) and not is_loopback(url)
    return applies and not proxy_bypass(parsed.hostname or "")


def is_loopback(url: str) -> bool:
    """Return True if the host of a URL is localhost or a loopback address."""
    host = urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
