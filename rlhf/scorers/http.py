"""A client of services over HTTP, and a scorer that requests scores; protocol: docs/data-model-reward.md."""

from __future__ import annotations

import json
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

import requests
import urllib3
from requests.adapters import HTTPAdapter
from torch import Tensor

from rlhf.config.scorers import HttpScorerConfig, ServedTeacherConfig, ServiceScorerConfig
from rlhf.core.batch import Rollouts
from rlhf.core.errors import RunError, UserError
from rlhf.core.formatting import as_score, shortened
from rlhf.core.machine import is_loopback, refusal
from rlhf.environments.environment import Calls
from rlhf.processes.signals import end_wait
from rlhf.scorers.scorer import Scorer, ScorerContext, distinct_texts

T = TypeVar("T")
_Limits = ServiceScorerConfig | ServedTeacherConfig

_TRY_AGAIN = (429, *range(500, 600))
_LARGEST_KIB = 1024  # size limit of an answer in KiB, in addition to one KiB for each score
_PIECE = 1 << 16  # maximum number of bytes that are read at once


class HttpClient:
    """A client that posts questions to a service in parallel requests.

    Every request is bounded: each try by `timeout_s`, the wait that a service asks for (Retry-After) by
    `timeout_s` too, and the size of an answer. A signal ends all waits.

    Args:
        at: the config key of the section.
        config: the section, with the limits and the variable of the token.
        url: where questions are posted.

    Raises:
        UserError: the environment variable with the token is not set.
    """

    remedies: Mapping[int, str] = {}  # by the status of a refusal, with {at}, the key of the section

    def __init__(self, at: str, config: _Limits, url: str) -> None:
        self.key, self.limits, self.url = at, config, url
        self.answered = False  # True after the first answer: from then on, a refused connection is retried
        self.session = requests.Session()
        for scheme in ("http://", "https://"):
            self.session.mount(scheme, HTTPAdapter(pool_maxsize=config.concurrency))
        self.session.trust_env = not is_loopback(url)  # no proxy on the way to this machine
        if config.token_variable is not None:
            token = os.environ.get(config.token_variable)
            if not token:
                raise UserError(
                    f"{self.key}.token_variable must name an environment variable with the token, got "
                    f"{config.token_variable!r}, which is not set; run: export "
                    f"{config.token_variable}=<token>"
                )
            self.authorize(token)

    def authorize(self, token: str) -> None:
        """Send a token with every request."""

        def bearer(request: requests.PreparedRequest) -> requests.PreparedRequest:
            request.headers["Authorization"] = f"Bearer {token}"
            return request

        self.session.auth = bearer  # ~/.netrc overrides an Authorization header, but not session.auth

    def all(self, ask: Callable[[int, float], T], count: int) -> list[T]:
        """Return `ask(i, deadline)` of each i below `count`, in order.

        Raises:
            RunError: the service cannot be reached, refuses a request, or does not answer as it must.
            Interrupted: a signal was received.
        """
        if not self.answered and (reason := refusal(self.url)):
            remedy = f"start the service, or correct {self.key}.url"
            raise self.error(f"does not accept connections ({reason})", remedy)
        answers = in_parallel(ask, count, self.limits, lambda: self.no_answer("timed out"))
        self.answered = True
        return answers

    def post(self, question: Any, expected: str, kib: int, deadline: float) -> tuple[Any, str]:
        """Return an answer, in one try: the content of its JSON, and the beginning of its text.

        Args:
            question: the body of the request, for JSON.
            expected: what the service must answer, for messages.
            kib: largest size of the answer, in addition to `_LARGEST_KIB`.
            deadline: `time.monotonic` at which the try ends.

        Raises:
            Again: the try may be repeated.
            RunError: the service refuses the request, or its answer is too long.
        """
        limit, body = (_LARGEST_KIB + kib) * 1024, bytearray()
        try:
            # Do not follow redirects: the POST would become a GET and the token would go to another address.
            with self.session.post(
                self.url, json=question, timeout=self.limits.timeout_s, allow_redirects=False, stream=True
            ) as answer:
                while len(body) <= limit and (piece := answer.raw.read1(_PIECE, decode_content=True)):
                    body += piece
                    if time.monotonic() > deadline:
                        raise requests.Timeout
        except ValueError as error:  # requests refuses to send the request, so a retry is useless
            reason = f"cannot be requested ({type(error).__name__})"
            raise self.error(reason, f"correct {self.key}.url") from None
        except (requests.RequestException, urllib3.exceptions.HTTPError, OSError) as error:
            raise Again(self.no_answer(_cause_of(error))) from None
        if answer.status_code != 200:
            raise self.refused(answer, body)
        if len(body) > limit:
            raise self.error(f"answered with more than {limit:,} bytes", expected)
        content: Any = None
        with suppress(ValueError, RecursionError):  # RecursionError: brackets inside of brackets
            content = json.loads(body)
        return content, shortened(repr(body.decode(errors="replace")), 200)

    def error(self, problem: str, remedy: str) -> RunError:
        """Return the error of a request."""
        return RunError(f"{self.key}.url={self.url} {problem}; {remedy}")

    def no_answer(self, cause: str) -> RunError:
        """Return the error of a request that got no answer in its last try."""
        tries = "1 try" if self.limits.retries == 0 else f"{self.limits.retries + 1} tries"
        return self.error(
            f"did not answer in {tries} of {self.limits.timeout_s:g} s ({cause})",
            f"check that the service runs there, or raise {self.key}.timeout_s",
        )

    def refused(self, answer: requests.Response, body: bytes | bytearray) -> Exception:
        """Return the error of a try that was answered with another status than 200."""
        status, at, limit_s = answer.status_code, self.key, self.limits.timeout_s
        problem = f"answered with status {status} ({shortened(repr(body.decode(errors='replace')), 200)})"
        if status not in _TRY_AGAIN:
            token = f"set {at}.token_variable=<environment variable with a token that the service accepts>"
            remedies = {401: token, 403: token, **self.remedies}
            remedy = remedies.get(status, "correct {at}.url, or see the log of the service")
            return self.error(problem, remedy.replace("{at}", at))
        wait_s = _retry_after(answer.headers.get("Retry-After", ""))
        if wait_s is not None and wait_s > limit_s:
            return self.error(
                f"{problem} and asked to wait for {wait_s:,.0f} seconds (Retry-After), more than "
                f"{at}.timeout_s={limit_s:g}",
                f"run the same command later, or set {at}.timeout_s={wait_s:.0f}",
            )
        made = f"{self.limits.retries + 1} tries were made: see the log of the service"
        error = self.error(problem, f"{made}, lower {at}.concurrency or raise {at}.retries")
        return Again(error, wait_s or None)


class HttpScorer(HttpClient, Scorer):
    """A scorer that posts texts to a service, and returns scores in response order.

    Rank 0 sends the requests for all ranks. Nothing is sent before the first call of `score`.

    Args:
        config: config section of the scorer.
        context: the objects of the run that a scorer needs.

    Raises:
        UserError: the environment variable with the token is not set.
    """

    config: HttpScorerConfig
    remedies: Mapping[int, str] = {413: "lower {at}.batch_size"}

    def __init__(self, config: HttpScorerConfig, context: ScorerContext) -> None:
        Scorer.__init__(self, config, context)
        assert config.url is not None, "validated: a service is named"
        HttpClient.__init__(self, context.at, config, config.url)

    def score(self, rollouts: Rollouts) -> Tensor:
        """Return the scores [N, K] that the service returns.

        Raises:
            RunError: the service cannot be reached, refuses a request, or does not answer with scores.
            Interrupted: a signal was received.
        """
        return self.ranks.from_first(lambda: self.answers(rollouts))

    def answers(self, rollouts: Rollouts) -> Tensor:
        """Send the requests from this process, and return the scores [N, K]; raises as `score`."""
        texts, size = distinct_texts(rollouts, self.tokenizer), self.config.batch_size

        def ask(number: int, deadline: float) -> list[float]:
            part = slice(number * size, (number + 1) * size)
            return self.ask(texts.prompts[part], texts.responses[part], texts.references[part], deadline)

        answers = self.all(ask, math.ceil(len(texts.responses) / size))
        return texts.spread([score for answer in answers for score in answer])

    def ask(
        self, prompts: list[str], responses: list[str], references: list[str], deadline: float
    ) -> list[float]:
        """Return the service's scores of one batch of texts, in one try.

        Raises:
            Again: the try may be repeated.
            RunError: the service refuses the request, or does not answer with scores.
        """
        question = {"prompts": prompts, "responses": responses, "references": references}
        content, problem = self.post(question, _EXPECTED, len(responses), deadline)
        given = content.get("scores") if isinstance(content, dict) else None
        if isinstance(given, list):
            scores = [as_score(value) for value in given]
            found = [score for score in scores if score is not None]
            if len(found) == len(given) == len(responses):
                return found
            problem = f"{len(given)} scores for {len(responses)} responses"
            if len(given) == len(responses):
                wrong = scores.index(None)
                problem = f"{shortened(repr(given[wrong]), 80)} as score {wrong} of {len(given)}"
        raise self.error(f"answered with status 200 and {problem}", _EXPECTED)


_EXPECTED = 'the answer must be {"scores": [...]} with one finite number per response; correct the service'


def _retry_after(header: str) -> float | None:
    """Return the seconds in a header Retry-After (a number or a date); None if it is empty or invalid."""
    if header.strip().isdecimal():
        return float(header)
    try:
        return max(parsedate_to_datetime(header).timestamp() - time.time(), 0.0)
    except ValueError:
        return None


def _cause_of(error: BaseException) -> str:
    """Return why a request failed, in one phrase: the system's error message, or a time limit."""
    if isinstance(error, requests.Timeout) or "timed out" in str(error):
        return "timed out"
    causes, message = [error], ""
    for cause in causes:  # grows by the errors inside of errors of requests and urllib3
        message = (cause.strerror if isinstance(cause, OSError) else None) or message
        inner = (getattr(cause, "reason", None), cause.__cause__, *cause.args)
        new = (each for each in inner if isinstance(each, BaseException) and each not in causes)
        causes += [*new][:1]
    return message or type(causes[-1]).__name__


# Calls in parallel daemon threads, each with a time limit and retries, while the calling thread waits.
#
# `Calls` gives up a try at its deadline: a thread that is blocked in a system call, for example in a
# connection to a host that does not answer, cannot be stopped, and ends when the call returns. Only the
# calling thread waits between tries, in steps of `_POLL_S`. Therefore a signal ends every wait.


_POLL_S = 0.2  # seconds between checks for a signal
_LONGEST_WAIT_S = 120.0  # longest wait before a retry, unless the error has another `wait_s`


class Again(Exception):
    """A failed try that may be repeated.

    Args:
        error: the error to raise if no try is left.
        wait_s: seconds until the next try; None: `backoff`.
    """

    def __init__(self, error: Exception, wait_s: float | None = None) -> None:
        super().__init__(str(error))
        self.error = error
        self.wait_s = wait_s


def in_parallel(
    do: Callable[[int, float], T], count: int, limits: _Limits, late: Callable[[], Exception]
) -> list[T]:
    """Return `do(i, deadline)` of each i below `count`, in order; the first error ends all calls.

    A call with a failed try keeps its place among the parallel calls while it waits for its next try.

    Args:
        do: the function that a thread calls; it raises `Again` if the call may be repeated, and should not
            continue after `deadline` (`time.monotonic`).
        count: number of calls.
        limits: maximum number of parallel calls, time limit of each try in seconds, and maximum number of
            repeated tries of each call.
        late: returns the error of a try that exceeded its time limit.

    Raises:
        Interrupted: a signal was received.
        Exception: an error of `do`, or of `late`, if no try is left.
    """
    answers: dict[int, T] = {}
    tries = Counter[int]()
    due: dict[int, float] = {}  # when the next try of a call begins that has none now
    calls = Calls(limits.concurrency, limits.timeout_s, abandoned=[])
    try:
        while len(answers) < count:
            end_wait()
            while len(due) + len(calls.open) < limits.concurrency and len(tries) < count:
                i = len(tries)
                tries[i], due[i] = 0, 0.0
            now = time.monotonic()
            for i in [i for i, begin in due.items() if begin <= now]:
                del due[i]
                tries[i] += 1
                calls.ask(i, lambda i=i: do(i, time.monotonic() + limits.timeout_s))
            wait_s = min([_POLL_S, *(begin - now for begin in due.values())])
            if not calls.open:
                time.sleep(wait_s)
            for call in calls.ended(wait_s):
                error = Again(late()) if call.late else call.error
                if error is None:
                    answers[call.key] = call.result
                elif isinstance(error, Again) and tries[call.key] <= limits.retries:
                    wait_s = backoff(tries[call.key]) if error.wait_s is None else error.wait_s
                    due[call.key] = time.monotonic() + wait_s
                else:
                    raise error.error if isinstance(error, Again) else error
    finally:
        calls.close(0.0, ())
    return [answers[i] for i in range(count)]


def backoff(tries: int) -> float:
    """Return the seconds between try number `tries` and the next try: 0, 1, 2, 4, ..."""
    return 0.0 if tries == 1 else min(2.0 ** (tries - 2), _LONGEST_WAIT_S)
