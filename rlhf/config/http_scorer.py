"""Section of the scorer that asks a service over HTTP."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass

from rlhf.config.schema import Affects, entry, number, option
from rlhf.config.scorer import ScorerConfig
from rlhf.config.services import service_problems, token_problems, url_problems

_URL = "http://127.0.0.1:8000/score"


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
        yield from url_problems(f"{at}.url", self.url, f"{at}.token_variable", "texts are posted there", _URL)
        if self.token_variable is not None:
            yield from token_problems(f"{at}.token_variable", self.token_variable)

    def job_problems(self, at: str) -> Iterator[str]:
        """Yield an error if the service accepts no connections, or the token of an empty request."""
        about = self.url or "", "start the service", f"{at}.token_variable", self.token_variable
        nothing = dict.fromkeys(("prompts", "responses", "references"), ())
        yield from service_problems(f"{at}.url", *about, body=nothing)
