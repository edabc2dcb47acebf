"""A scorer that asks a service over HTTP. docs/rewards.md describes the protocol."""

from __future__ import annotations

import ipaddress
import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import requests
import torch
from requests.adapters import HTTPAdapter
from torch import Tensor
from urllib3.util import Retry

from rlhf.core.errors import RunError, UserError
from rlhf.scorers.scorer import Scorer, as_score, flat_texts

if TYPE_CHECKING:
    from rlhf.config.scorer import HttpScorerConfig
    from rlhf.core.batch import Rollouts
    from rlhf.scorers.scorer import ScorerContext

BACKOFF_S = 0.5  # doubled before each further try, from the third try on
TRY_AGAIN = (429, *range(500, 600))


class HttpScorer(Scorer):
    """Posts prompts, responses and references in batches, several in parallel, and keeps their order.

    Rank 0 asks for all ranks. Nothing is sent before the first call of `score`.

    Args:
        config: the section of the scorer.
        context: what the run provides.

    Raises:
        UserError: the environment variable with the token is not set.
    """

    config: HttpScorerConfig

    def __init__(self, config: HttpScorerConfig, context: ScorerContext) -> None:
        super().__init__(config, context)
        assert config.url is not None, "validated: a service is named"
        self.url = config.url
        self.session = new_session(config, context.at)

    def score(self, rollouts: Rollouts) -> Tensor:
        """Return the scores [N, K] of the service.

        Raises:
            RunError: the service cannot be reached, refuses the request, or does not answer with scores.
        """
        return self.ranks.from_first(lambda: self.answers(rollouts))

    def answers(self, rollouts: Rollouts) -> Tensor:
        """Ask the service from this process and return the scores [N, K]."""
        prompts, responses, references = flat_texts(rollouts, self.tokenizer)

        def ask(start: int) -> list[float]:
            part = slice(start, start + self.config.batch_size)
            return self.ask(prompts[part], responses[part], references[part])

        with ThreadPoolExecutor(self.config.concurrency) as pool:  # map keeps the order of the requests
            answers = list(pool.map(ask, range(0, len(responses), self.config.batch_size)))
        N, K, _ = rollouts.response_ids.shape
        scores = [score for answer in answers for score in answer]
        return torch.tensor(scores, dtype=torch.float32).view(N, K)

    def ask(self, prompts: list[str], responses: list[str], references: list[str]) -> list[float]:
        """Return the scores of one batch of texts."""
        question = {"prompts": prompts, "responses": responses, "references": references}
        try:
            # A redirected POST would become a GET, and its token would go to another address.
            answer = self.session.post(
                self.url, json=question, timeout=self.config.timeout_s, allow_redirects=False
            )
        except requests.RequestException as error:
            raise RunError(
                f"{self.at}.url={self.url} did not answer in {self.config.retries + 1} tries of "
                f"{self.config.timeout_s:g} s ({error}); check that the service runs there, or raise "
                f"{self.at}.timeout_s"
            ) from error
        if answer.status_code != 200:
            raise RunError(
                f"{self.at}.url={self.url} answered with status {answer.status_code} "
                f"({answer.text!r:.200}); {self.remedy(answer.status_code)}"
            )
        return self.read(answer, len(responses))

    def read(self, answer: requests.Response, count: int) -> list[float]:
        """Return the `count` scores of an answer."""
        try:
            body: Any = answer.json()
        except requests.JSONDecodeError:
            body = None
        given = body.get("scores") if isinstance(body, dict) else None
        if not isinstance(given, list):
            problem = f"{answer.text!r:.200}"
        elif len(given) != count:
            problem = f"{len(given)} scores for {count} responses"
        else:
            scores = [as_score(value) for value in given]
            found = [score for score in scores if score is not None]
            if len(found) == count:
                return found
            wrong = scores.index(None)
            problem = f"{given[wrong]!r:.80} as score {wrong} of {count}"
        raise RunError(
            f"{self.at}.url={self.url} answered with status 200 and {problem}; the answer must be "
            '{"scores": [...]} with one finite number per response; correct the service'
        )

    def remedy(self, status: int) -> str:
        """Return what the user can do about an HTTP status that is not 200."""
        if status in TRY_AGAIN:
            tried = f"{self.config.retries + 1} tries were made"
            return (
                f"{tried}: see the log of the service, lower {self.at}.concurrency or raise {self.at}.retries"
            )
        if status in (401, 403):
            return (
                f"set {self.at}.token_variable=<environment variable with a token that the service accepts>"
            )
        if status == 413:
            return f"lower {self.at}.batch_size"
        return f"correct {self.at}.url, or see the log of the service"


def new_session(config: HttpScorerConfig, key: str) -> requests.Session:
    """Return a session that retries, sends the token, and connects to this machine without a proxy."""
    session = requests.Session()
    retry = Retry(
        total=config.retries,
        backoff_factor=BACKOFF_S,
        status_forcelist=TRY_AGAIN,
        allowed_methods={"POST"},  # the same texts get the same scores, so a repeated request is safe
        raise_on_status=False,
    )
    for scheme in ("http://", "https://"):
        session.mount(scheme, HTTPAdapter(max_retries=retry, pool_maxsize=config.concurrency))
    session.trust_env = not is_loopback(config.url or "")
    if config.token_variable is not None:
        token = os.environ.get(config.token_variable)
        if not token:
            raise UserError(
                f"{key}.token_variable must name an environment variable that contains the token, got "
                f"{config.token_variable!r}, which is not set; run: export {config.token_variable}=<token>"
            )

        def bearer(request: requests.PreparedRequest) -> requests.PreparedRequest:
            request.headers["Authorization"] = f"Bearer {token}"
            return request

        session.auth = bearer  # unlike a header, ~/.netrc does not replace it
    return session


def is_loopback(url: str) -> bool:
    """Return whether a URL names this machine."""
    host = urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
