"""A scorer that requests scores from a service over HTTP. docs/rewards.md describes the protocol."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import requests
import torch
from requests.adapters import HTTPAdapter
from torch import Tensor
from urllib3.util import Retry

from rlhf.core.errors import RunError, UserError
from rlhf.core.formatting import shortened
from rlhf.core.network import is_loopback, refusal
from rlhf.scorers.scorer import Scorer, as_score, flat_texts

if TYPE_CHECKING:
    from rlhf.config.scorer import HttpScorerConfig
    from rlhf.core.batch import Rollouts
    from rlhf.scorers.scorer import ScorerContext

BACKOFF_S = 0.5  # urllib3 backoff factor: the first retry is immediate, later retries wait 1, 2, 4, ... s
TRY_AGAIN = (429, *range(500, 600))


class HttpScorer(Scorer):
    """A scorer that posts texts to a service in parallel requests, and returns scores in response order.

    Rank 0 sends the requests for all ranks. Nothing is sent before the first call of `score`.

    Args:
        config: config section of the scorer.
        context: the objects of the run that a scorer needs.

    Raises:
        UserError: the environment variable with the token is not set.
    """

    config: HttpScorerConfig

    def __init__(self, config: HttpScorerConfig, context: ScorerContext) -> None:
        super().__init__(config, context)
        assert config.url is not None, "validated: a service is named"
        self.url = config.url
        self.session = new_session(config, context.at)
        self.answered = False  # True after the first answer: from then on, a refused connection is retried

    def score(self, rollouts: Rollouts) -> Tensor:
        """Return the scores [N, K] that the service returns.

        Raises:
            RunError: the service cannot be reached, refuses the request, or does not answer with scores.
        """
        return self.ranks.from_first(lambda: self.answers(rollouts))

    def answers(self, rollouts: Rollouts) -> Tensor:
        """Send the requests from this process, and return the scores [N, K].

        Raises:
            RunError: the service cannot be reached, refuses a request, or does not answer with scores.
        """
        if not self.answered and (reason := refusal(self.url)):
            raise RunError(
                f"{self.at}.url={self.url} does not accept connections ({reason}); start the service, or "
                f"correct {self.at}.url"
            )
        prompts, responses, references = flat_texts(rollouts, self.tokenizer)

        def ask(start: int) -> list[float]:
            part = slice(start, start + self.config.batch_size)
            return self.ask(prompts[part], responses[part], references[part])

        with ThreadPoolExecutor(self.config.concurrency) as pool:  # map returns results in request order
            answers = list(pool.map(ask, range(0, len(responses), self.config.batch_size)))
        self.answered = True
        N, K, _ = rollouts.response_ids.shape
        scores = [score for answer in answers for score in answer]
        return torch.tensor(scores, dtype=torch.float32).view(N, K)

    def ask(self, prompts: list[str], responses: list[str], references: list[str]) -> list[float]:
        """Return the service's scores of one batch of texts.

        Raises:
            RunError: the service cannot be reached, refuses the request, or does not answer with scores.
        """
        question = {"prompts": prompts, "responses": responses, "references": references}
        try:
            # Do not follow redirects: the POST would become a GET and the token would go to another address.
            answer = self.session.post(
                self.url, json=question, timeout=self.config.timeout_s, allow_redirects=False
            )
        except requests.RequestException as error:
            tries = self.config.retries + 1
            raise RunError(
                f"{self.at}.url={self.url} did not answer in {tries} {'try' if tries == 1 else 'tries'} of "
                f"{self.config.timeout_s:g} s ({cause_of(error)}); check that the service runs there, or "
                f"raise {self.at}.timeout_s"
            ) from error
        if answer.status_code != 200:
            raise RunError(
                f"{self.at}.url={self.url} answered with status {answer.status_code} "
                f"({shortened(repr(answer.text), 200)}); {self.remedy(answer.status_code)}"
            )
        return self.read(answer, len(responses))

    def read(self, answer: requests.Response, count: int) -> list[float]:
        """Return the `count` scores in an answer of the service.

        Raises:
            RunError: the answer does not contain `count` scores.
        """
        try:
            body: Any = answer.json()
        except requests.JSONDecodeError:
            body = None
        given = body.get("scores") if isinstance(body, dict) else None
        if not isinstance(given, list):
            problem = shortened(repr(answer.text), 200)
        elif len(given) != count:
            problem = f"{len(given)} scores for {count} responses"
        else:
            scores = [as_score(value) for value in given]
            found = [score for score in scores if score is not None]
            if len(found) == count:
                return found
            wrong = scores.index(None)
            problem = f"{shortened(repr(given[wrong]), 80)} as score {wrong} of {count}"
        raise RunError(
            f"{self.at}.url={self.url} answered with status 200 and {problem}; the answer must be "
            '{"scores": [...]} with one finite number per response; correct the service'
        )

    def remedy(self, status: int) -> str:
        """Return the remedy for an HTTP status that is not 200, for an error message."""
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
    """Return a session that retries, sends the token, and bypasses proxies for a service on this machine.

    Args:
        config: config section of the scorer.
        key: config key of this section, for error messages.

    Raises:
        UserError: the environment variable with the token is not set.
    """
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

        session.auth = bearer  # ~/.netrc overrides an Authorization header, but not session.auth
    return session


def cause_of(error: BaseException) -> str:
    """Return why a request failed, in one phrase: the system's error message, or a time limit."""
    if isinstance(error, requests.Timeout) or "timed out" in str(error):
        return "timed out"
    causes = [error]
    while inner := [each for each in inner_errors(causes[-1]) if each not in causes]:
        causes.append(inner[0])
    messages = [cause.strerror for cause in causes if isinstance(cause, OSError) and cause.strerror]
    return messages[-1] if messages else type(causes[-1]).__name__


def inner_errors(error: BaseException) -> list[BaseException]:
    """Return the errors inside an error of requests or urllib3."""
    inner = [getattr(error, "reason", None), error.__cause__, *error.args]
    return [each for each in inner if isinstance(each, BaseException)]
