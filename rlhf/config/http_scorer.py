"""Section of the scorer that asks a service over HTTP."""

from __future__ import annotations

import os
import re
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

from rlhf.config.schema import Affects, entry, number, option
from rlhf.config.scorer import ScorerConfig
from rlhf.core.network import refusal
from rlhf.core.secrets import secret_in

_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]*|[a-z_]+")  # the usual form of a name of an environment variable
_VISIBLE = re.compile(r"[!-~]+")  # ASCII characters without spaces and line breaks


@option("scorer", "http", part="rlhf.scorers.http:HttpScorer")
@dataclass(kw_only=True, slots=True)
class HttpScorerConfig(ScorerConfig):
    """A service that returns scores over HTTP; docs/rewards.md describes the protocol."""

    name: str = "http"
    url: str | None = entry(None, means="address of the service; texts are posted there")
    batch_size: int = number(32, least=1, means="responses per request")
    concurrency: int = number(4, least=1, means="requests in parallel", affects=Affects.speed)
    timeout_s: float = number(
        60.0,
        above=0,
        means="seconds until a try without a complete answer fails; longest Retry-After",
        affects=Affects.speed,
    )
    retries: int = number(
        5,
        least=0,
        means="retries of a failed request: the first immediately, then after 1, 2, 4, ... s",
        affects=Affects.speed,
    )
    token_variable: str | None = entry(
        None, means="environment variable with the bearer token; null: none is sent", affects=Affects.speed
    )

    @property
    def asks_service(self) -> bool:
        """Whether this scorer waits for the answers of a service: always."""
        return True

    def source(self, reward: str | None) -> Hashable:
        """Return an identifier of the scorer: its service."""
        return self.name, self.url

    def problems(self, at: str) -> Iterator[str]:
        """Yield an error if the address is invalid, or if the variable with the token is not set."""
        yield from ScorerConfig.problems(self, at)
        yield from _url_problems(f"{at}.url", self.url, f"{at}.token_variable")
        if self.token_variable is not None:
            yield from _token_problems(f"{at}.token_variable", self.token_variable)

    def job_problems(self, at: str) -> Iterator[str]:
        """Yield an error if the service accepts no connections."""
        if reason := refusal(self.url or ""):
            yield (
                f"{at}.url must be the address of a service that accepts connections ({reason}), got "
                f"{self.url}; start the service, or correct {at}.url"
            )


def _url_problems(key: str, url: str | None, token_key: str) -> Iterator[str]:
    """Yield an error if the address of a service is invalid or contains a secret.

    Args:
        key: the config key of the address.
        url: the address.
        token_key: the config key of the environment variable with the token; the message recommends this key.
    """
    form = f"{key} must be http://<host>/<path> or https://<host>/<path> (texts are posted there)"
    try:
        parsed = urlsplit(url or "")
        whole = parsed.scheme in ("http", "https") and parsed.hostname is not None and parsed.port != 0
    except ValueError:
        whole = False
    if not whole:
        got = "null" if url is None else repr(url)
        yield f"{form}, got {got}; set {key}=http://127.0.0.1:8000/score"
    elif (secret := secret_in(url or "")) is not None:
        yield (
            f"{key} must not contain {secret} (config.yaml would show it), got one; set "
            f"{token_key}=<environment variable that contains a token>, which is sent as "
            "`Authorization: Bearer <token>`"
        )


def _token_problems(key: str, variable: str) -> Iterator[str]:
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
