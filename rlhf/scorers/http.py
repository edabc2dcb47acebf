"""A service as scorer: texts are posted to it, scores come back. docs/rewards.md has the protocol."""

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
from transformers import PreTrainedTokenizerBase
from urllib3.util import Retry

from rlhf.core.errors import RunError, UserError
from rlhf.processes.ranks import ALONE
from rlhf.scorers.scorer import Scorer, as_score, flat_texts

if TYPE_CHECKING:
    from rlhf.config.scorer import HttpScorerConfig
    from rlhf.core.batch import Rollouts
    from rlhf.processes.ranks import Ranks


BACKOFF_S = 0.5  # doubled before each further try, from the third try on


TRY_AGAIN = (429, *range(500, 600))


class HttpScorer(Scorer):
    """Posts prompts, responses and references in batches, several at once, and keeps their order.

    Args:
        config: its settings.
        key: where they are in the config.
        tokenizer: the policy's.
        ranks: of which the first asks for all.
    """

    def __init__(
        self,
        config: HttpScorerConfig,
        key: str,
        tokenizer: PreTrainedTokenizerBase,
        ranks: Ranks = ALONE,
    ) -> None:
        super().__init__(config)
        assert config.url is not None, "validated: a service is named"
        self.url = config.url
        self.key = key
        self.batch_size = config.batch_size
        self.concurrency = config.concurrency
        self.timeout_s = config.timeout_s
        self.retries = config.retries
        self.tokenizer = tokenizer
        self.ranks = ranks
        self.session = new_session(config, key)

    def score(self, rollouts: Rollouts) -> Tensor:
        """What the service answers [N, K].

        Raises:
            RunError: it cannot be reached, refuses, or answers something else than scores.
        """
        return self.ranks.from_first(lambda: self.answers(rollouts))

    def answers(self, rollouts: Rollouts) -> Tensor:
        """The same, asked for here."""
        prompts, responses, references = flat_texts(rollouts, self.tokenizer)

        def ask(start: int) -> list[float]:
            part = slice(start, start + self.batch_size)
            return self.ask(prompts[part], responses[part], references[part])

        with ThreadPoolExecutor(self.concurrency) as pool:  # map gives answers in the order of the questions
            answers = list(pool.map(ask, range(0, len(responses), self.batch_size)))
        N, K, _ = rollouts.response_ids.shape
        scores = [score for answer in answers for score in answer]
        return torch.tensor(scores, dtype=torch.float32).view(N, K)

    def ask(self, prompts: list[str], responses: list[str], references: list[str]) -> list[float]:
        """The scores of one batch of texts."""
        question = {"prompts": prompts, "responses": responses, "references": references}
        try:
            # A redirected POST would arrive as a GET, and its token at another place.
            answer = self.session.post(self.url, json=question, timeout=self.timeout_s, allow_redirects=False)
        except requests.RequestException as error:
            raise RunError(
                f"{self.key}.url={self.url} gave no status in {self.retries + 1} tries of "
                f"{self.timeout_s:g} s ({error}); see that the service runs there, or raise "
                f"{self.key}.timeout_s"
            ) from error
        if answer.status_code != 200:
            raise RunError(
                f"{self.key}.url={self.url} answered with status {answer.status_code} "
                f"({answer.text!r:.200}); {self.remedy(answer.status_code)}"
            )
        return self.read(answer, len(responses))

    def read(self, answer: requests.Response, count: int) -> list[float]:
        """The `count` scores of an answer."""
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
            f"{self.key}.url={self.url} answered with status 200 and {problem}; the answer must be "
            '{"scores": [...]} with one finite number a response: mend the service'
        )

    def remedy(self, status: int) -> str:
        """What a person can do about a status that is no answer."""
        if status in TRY_AGAIN:
            tried = f"{self.retries + 1} tries were made"
            return f"{tried}: see the service's log, lower {self.key}.concurrency or raise {self.key}.retries"
        if status in (401, 403):
            return f"set {self.key}.token_variable=<environment variable that holds a token it accepts>"
        if status == 413:
            return f"lower {self.key}.batch_size"
        return f"mend {self.key}.url, or see the service's log"


def new_session(config: HttpScorerConfig, key: str) -> requests.Session:
    """What requests go through: it tries again, sends the token, and reaches this machine without a proxy."""
    session = requests.Session()
    retry = Retry(
        total=config.retries,
        backoff_factor=BACKOFF_S,
        status_forcelist=TRY_AGAIN,
        allowed_methods={"POST"},  # the same texts get the same scores, so asking twice does no harm
        raise_on_status=False,
    )
    for scheme in ("http://", "https://"):
        session.mount(scheme, HTTPAdapter(max_retries=retry, pool_maxsize=config.concurrency))
    session.trust_env = not is_loopback(config.url or "")
    if config.token_variable is not None:
        token = os.environ.get(config.token_variable)
        if not token:
            raise UserError(
                f"{key}.token_variable must name an environment variable that holds the token, got "
                f"{config.token_variable!r}, which is not set; run: export {config.token_variable}=<token>"
            )

        def bearer(request: requests.PreparedRequest) -> requests.PreparedRequest:
            request.headers["Authorization"] = f"Bearer {token}"
            return request

        session.auth = bearer  # unlike a header, nothing in ~/.netrc replaces it
    return session


def is_loopback(url: str) -> bool:
    """Whether a URL means this machine."""
    host = urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
